"""Arithmetic that gives the same numbers in every program.

Powers of two and logarithms are exact if the true result is representable, unlike `jnp.exp2`, `jnp.log2`. Quotients are
correctly rounded: those of a tensor by its scale, and of a statistic by the steps that make a scale of it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jqinject.ops.choose import choose
from jqinject.ops.devices.explicit_axes import sharded_beside
from jqinject.ops.one_program import one_program

_LN2 = math.log(2.0)


def _float32(x: ArrayLike) -> jax.Array:
    return jnp.asarray(x, dtype=jnp.float32)


def _integer_power(exponent: jax.Array) -> jax.Array:
    """`2**exponent` for int32 exponents in [-126, 127], by writing the exponent bits."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


@jax.custom_jvp
@one_program()
def _exp2(x: jax.Array) -> jax.Array:
    bounded = jnp.clip(x, -300.0, 300.0)
    whole = jnp.floor(bounded)
    fraction = jnp.exp2(bounded - whole)
    exponent = jnp.clip(whole, -252.0, 254.0).astype(jnp.int32)
    half = exponent // 2
    return fraction * _integer_power(half) * _integer_power(exponent - half)


@_exp2.defjvp
def _(primals, tangents):
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
@one_program()
def _log2(x: jax.Array) -> jax.Array:
    mantissa, exponent = jnp.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = jnp.where(low, mantissa * 2, mantissa)
    exponent = jnp.where(low, exponent - 1, exponent).astype(jnp.float32)
    return jnp.where(mantissa == 1, exponent, jnp.log2(mantissa) + exponent)


@_log2.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return _log2(x), t / (x * _LN2)


def log2(x: ArrayLike) -> jax.Array:
    """`log2(x)` in float32, exact for powers of two.

    Args:
        x: an array; computed in float32.

    Returns:
        float32 array; `log2(0) = -inf`, nan for negative numbers. Gradient `1 / (x * ln(2))`.

    Example:
        >>> log2(jnp.array([0.125, 1.0, 1024.0]))
        Array([-3.,  0., 10.], dtype=float32)
    """
    return _log2(_float32(x))


def quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """The number that `divide` returns, without its derivative: for derivative rules that have their own.

    Args:
        x: a float32 array.
        divisor: a float32 number or array that broadcasts with `x`, not 0.

    Example:
        >>> quotient(jnp.float32(254.0), jnp.float32(127))
        Array(2., dtype=float32)
    """
    # The divisor for every number, nan for nan.
    if divisor.ndim == 0:
        return x / jax.lax.clamp(divisor, x, divisor)
    return x / jnp.maximum(jnp.minimum(x, divisor), divisor)


@jax.custom_jvp
def _divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    return quotient(x, divisor)


def _divide_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
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
        divisor = sharded_beside(divisor, dividend)
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
    divisor = _float32(divisor)
    return divide(x, divisor) if divisor.size == x.size else x * divide(jnp.float32(1.0), divisor)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _to_scale(
    floor: float, of_magnitude: bool, steps: float | None, x: jax.Array, divisor: jax.Array
) -> jax.Array:
    value = jnp.maximum(jnp.abs(x) if of_magnitude else x, floor)
    if steps is None:
        return quotient(value, divisor)
    if steps == 1:
        return value
    # By a power of two, a product with its reciprocal is the same number.
    return value / steps if math.frexp(steps)[0] == 0.5 else quotient(value, jnp.float32(steps))


def _to_scale_jvp(
    floor: float, of_magnitude: bool, steps: float | None, primals: Any, tangents: Any
) -> tuple[jax.Array, Any]:
    (x, divisor), (dx, ddivisor) = primals, tangents
    scale = _to_scale(floor, of_magnitude, steps, *primals)
    known = jnp.float32(steps) if steps is not None else divisor
    changes = []
    if not isinstance(dx, SymbolicZero):
        changes.append(dx * choose(x >= 0, jnp.ones_like(x), -1.0) if of_magnitude else dx)
    if not isinstance(ddivisor, SymbolicZero):
        changes.append(-scale * ddivisor)
    if not changes:
        return scale, jnp.zeros_like(scale)
    change = sum(changes[1:], changes[0])
    return scale, jnp.broadcast_to(change if steps == 1 else change / known, scale.shape)


_to_scale.defjvp(_to_scale_jvp, symbolic_zeros=True)


def to_scale(
    x: jax.Array, floor: float, steps: float | jax.Array | None, *, of_magnitude: bool = False
) -> jax.Array:
    """`max(x, floor) / steps`, correctly rounded in every program (see `divide`); the gradient passes the maximum.

    Args:
        x: float32: a statistic that is at least 0, or with `of_magnitude` any number.
        floor: the least value, above 0.
        steps: how many steps of the scale span it, above 0; None for 1.
        of_magnitude: take `|x|`, with the gradient +1 at 0.

    Returns:
        The scale, float32. nan stays nan.

    Example:
        >>> to_scale(jnp.float32(254.0), 1e-3, 127.0)
        Array(2., dtype=float32)
        >>> jax.grad(to_scale)(jnp.float32(0.0), 1e-3, 4.0)
        Array(0.25, dtype=float32)
    """
    if isinstance(steps, jax.Array):
        return _to_scale(floor, of_magnitude, None, x, steps)
    return _to_scale(floor, of_magnitude, float(steps or 1), x, jnp.float32(1))
