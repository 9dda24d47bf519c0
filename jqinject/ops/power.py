"""Arithmetic that gives the same numbers in every program, and the integers of a bit width.

Powers of two and logarithms are exact if the true result is representable, unlike `jnp.exp2`, `jnp.log2`. Quotients are
correctly rounded. A sum has a fixed order of additions.

| signed | narrow_range | min_int        | max_int        | b = 8       | b = 4      |
|--------|--------------|----------------|----------------|-------------|------------|
| yes    | no           | -2**(b-1)      | 2**(b-1) - 1   | -128 .. 127 | -8 .. 7    |
| yes    | yes          | -2**(b-1) + 1  | 2**(b-1) - 1   | -127 .. 127 | -7 .. 7    |
| no     | no           | 0              | 2**b - 1       | 0 .. 255    | 0 .. 15    |
| no     | yes          | 0              | 2**b - 2       | 0 .. 254    | 0 .. 14    |
"""

import math
from functools import reduce
from operator import add
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jqinject.ops import fake_quant, processes, sharding, ste

Width = TypeVar("Width", bound=int | jax.Array)


_LN2 = math.log(2.0)


def _float32(x: ArrayLike) -> jax.Array:
    return jnp.asarray(x, dtype=jnp.float32)


def integer_power(exponent: jax.Array) -> jax.Array:
    """`2**exponent` for int32 exponents in [-126, 127], by writing the exponent bits."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


@jax.custom_jvp
@processes.one_program()
def _exp2(x: jax.Array) -> jax.Array:
    bounded = jnp.clip(x, -300.0, 300.0)
    floor = jnp.floor(bounded)
    fraction = jnp.exp2(bounded - floor)
    exponent = jnp.clip(floor, -252.0, 254.0).astype(jnp.int32)
    half = exponent // 2
    return fraction * integer_power(half) * integer_power(exponent - half)


@_exp2.defjvp
def _(primals: ste.Primals, tangents: ste.Tangents) -> tuple[jax.Array, jax.Array]:
    y = _exp2(*primals)
    return y, y * _LN2 * tangents[0]


def exp2(x: ArrayLike) -> jax.Array:
    """`2**x` in float32, exact for integer `x` with a normal result.

    Args:
        x: an array; computed in float32.

    Returns:
        float32 array; `exp2(-inf) = 0`, `exp2(128) = inf`, nan stays nan. Gradient `ln(2) * 2**x`.

    Example:
        >>> exp2(jnp.array([-3.0, 0.5, 28.0]))
        Array([1.2500000e-01, 1.4142135e+00, 2.6843546e+08], dtype=float32)
    """
    return _exp2(_float32(x))


@jax.custom_jvp
@processes.one_program()
def _log2(x: jax.Array) -> jax.Array:
    mantissa, exponent = (sharding.sharded_as(part, x) for part in jnp.frexp(x))  # JAX may drop explicit axes
    above = exponent.astype(jnp.float32)
    low = mantissa < math.sqrt(0.5)
    mantissa = jnp.where(low, mantissa * 2, mantissa)
    exponent = jnp.where(low, exponent - 1, exponent).astype(jnp.float32)
    log = jnp.where(mantissa == 1, exponent, jnp.log2(mantissa) + exponent)
    return jnp.where((log >= above) & jnp.isfinite(x), jnp.nextafter(above, -jnp.inf), log)


@_log2.defjvp
def _(primals: ste.Primals, tangents: ste.Tangents) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    return _log2(x), t / (x * _LN2)


def log2(x: ArrayLike) -> jax.Array:
    """`log2(x)` in float32, exact for powers of two, and below `n` for numbers below `2**n`.

    Args:
        x: an array; computed in float32.

    Returns:
        float32 array; `log2(0) = -inf`, nan for negative numbers. Gradient `1 / (x * ln(2))`.

    Example:
        >>> log2(jnp.array([0.125, 1.0, 1024.0]))
        Array([-3.,  0., 10.], dtype=float32)
    """
    return _log2(_float32(x))


@jax.custom_jvp
def _divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    return fake_quant.quotient(x, divisor)


def _divide_jvp(primals: ste.Primals, tangents: ste.Tangents) -> tuple[jax.Array, jax.Array]:
    (_, divisor), (dx, ddivisor) = primals, tangents
    y = _divide(*primals)
    if isinstance(ddivisor, SymbolicZero):
        return y, dx / divisor
    change = y * ddivisor
    return y, (-change if isinstance(dx, SymbolicZero) else dx - change) / divisor


_divide.defjvp(_divide_jvp, symbolic_zeros=True)


def divide(x: ArrayLike, divisor: ArrayLike) -> jax.Array:
    """`x / divisor`, correctly rounded in every program: the division of a tensor by its scale, and of a statistic by
    what makes a scale of it.

    A compiler may turn a division by one number for many into a multiplication by its reciprocal, and
    `x / (largest / 127)` into `x * 127 / largest`. Either is one unit in the last place off now and then, which moves
    a number that lies on a rounding tie, so that a tensor would become other integers where its quantizer is compiled
    together with something else. Here what `x` is divided by is `x` clamped between the divisor and itself (the
    divisor, and nan for nan), which no such rewrite sees through; a product that is added to, instead of a quotient,
    could also be fused with the addition and skip a rounding.

    The derivative `(dx - y * ddivisor) / divisor` needs no square of the divisor, so that it stays finite for scales
    down to the smallest.

    Args:
        x: a float32 array.
        divisor: a number or an array that broadcasts with `x`, not 0.

    Returns:
        The quotient, float32.

    Example:
        >>> divide(jnp.float32(254.0), 127)
        Array(2., dtype=float32)
        >>> jax.grad(divide, argnums=1)(jnp.float32(0), jnp.float32(1e-30))
        Array(-0., dtype=float32)
    """
    dividend, divisor = _float32(x), _float32(divisor)
    if divisor.ndim <= dividend.ndim:
        divisor = sharding.sharded_as(divisor, dividend)
    return _divide(dividend, divisor)


def by_reciprocal(x: jax.Array, divisor: ArrayLike) -> jax.Array:
    """`x * (1 / divisor)` where one divisor serves several numbers, else `x / divisor`; both steps rounded to float32.

    XLA compiles `x / divisor` to this on a CPU, so libraries that leave the division to it get these numbers; here it
    is written out, so that every program gets the same ones. With a scale of `largest / 127.5` the extreme lies on a
    rounding tie, and the last bit of the scale decides where it goes.

    Args:
        x: a float32 array.
        divisor: a number or an array that broadcasts with `x`, not 0.

    Returns:
        float32.

    Example:
        >>> x = jnp.array([0.54881352, 0.71518934])
        >>> by_reciprocal(x, 127.5) == divide(x, 127.5)
        Array([False, False], dtype=bool)
    """
    if isinstance(divisor, int | float) and x.size != 1:
        return x * (np.float32(1.0) / np.float32(divisor))
    divisor = _float32(divisor)
    return divide(x, divisor) if divisor.size == x.size else x * divide(jnp.float32(1.0), divisor)


def power(exponent: Any) -> Any:
    """`2**exponent`: a Python number of an int, else float32; see `exp2`.

    Example:
        >>> power(3), power(-1), power(jnp.float32(0))
        (8, 0.5, Array(1., dtype=float32))
    """
    return 2**exponent if isinstance(exponent, int) else exp2(exponent)


def max_int(signed: bool, narrow_range: bool, bit_width: Width) -> Width:
    """Largest integer of `bit_width` bits: `2**(b-1) - 1` signed, `2**b - 1` unsigned, one less if also
    narrow.

    Args:
        signed: whether the integers have a sign.
        narrow_range: leave out one value, the largest when unsigned (the smallest when signed).
        bit_width: b; a Python int gives a Python int, an array a float32 array that is differentiable in b.

    Returns:
        The largest integer.

    Example:
        >>> max_int(True, True, 8), max_int(False, False, 8), max_int(False, True, 8)
        (127, 255, 254)
    """
    if signed:
        return power(bit_width - 1) - 1
    return power(bit_width) - (2 if narrow_range else 1)


def min_int(signed: bool, narrow_range: bool, bit_width: Width) -> Width:
    """Smallest integer of `bit_width` bits: `-2**(b-1)` signed, one more if also narrow, 0 unsigned.

    Args:
        signed: whether the integers have a sign.
        narrow_range: leave out the smallest value, so that the range is symmetric.
        bit_width: b; a Python int gives a Python int, an array a float32 array that is differentiable in b.

    Returns:
        The smallest integer.

    Example:
        >>> min_int(True, True, 8), min_int(True, False, 8), min_int(False, False, 8)
        (-127, -128, 0)
    """
    if signed:
        return -power(bit_width - 1) + (1 if narrow_range else 0)
    return cast(Any, 0 if isinstance(bit_width, int) else jnp.zeros_like(bit_width))


LANES = 8
ROWS = 4
STEP = 16
ORDERED = 2**15  # larger arrays are added in whatever order is fastest


def ordered_sum(x: jax.Array) -> jax.Array:
    """The sum of all elements, in the order in which torch adds a contiguous vector on one core.

    It uses 8 lanes, 4 rows at a time, and adds sixteen of them before each sum moves up a level. So an iteration that
    stops when rounding hides an improvement stops at the same step as in torch. From 32768 elements on, the order is
    XLA's.

    Args:
        x: numbers, float32, any shape.

    Returns:
        A float32 scalar.

    Example:
        >>> float(ordered_sum(jnp.arange(100.0)))
        4950.0
    """
    flat = x.reshape(-1)
    if flat.size >= ORDERED:
        return jnp.sum(flat)
    vectors = flat.size // LANES
    rest = flat[vectors * LANES :]
    lanes = flat[: vectors * LANES].reshape(vectors, LANES)
    in_rows = vectors // ROWS * ROWS
    first, *others = _levels(lanes[:in_rows].reshape(-1, ROWS, LANES))
    by_lane = reduce(add, (*lanes[in_rows:], *others), first)
    return reduce(add, (*rest, *by_lane), jnp.zeros((), x.dtype))


def _levels(rows: jax.Array) -> jax.Array:
    """Add sixteen rows, then sixteen such sums, and so on; the remainder at each level comes last."""
    blocks = rows.shape[0] // STEP
    total = reduce(add, rows[blocks * STEP :], jnp.zeros((ROWS, LANES), rows.dtype))
    if not blocks:
        return total
    steps = jnp.swapaxes(rows[: blocks * STEP].reshape(blocks, STEP, ROWS, LANES), 0, 1)
    return total + _levels(reduce(add, steps, jnp.zeros((blocks, ROWS, LANES), rows.dtype)))
