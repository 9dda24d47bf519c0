"""Arithmetic that gives the same numbers in every program.

Powers of two and logarithms are exact if the true result is representable, unlike `jnp.exp2`, `jnp.log2`. Quotients are
correctly rounded.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jqinject.ops.devices.explicit_axes import sharded_beside
from jqinject.ops.fake_quant import quotient
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
    mantissa, exponent = (sharded_beside(part, x) for part in jnp.frexp(x))  # JAX may drop explicit axes
    above = exponent.astype(jnp.float32)
    low = mantissa < math.sqrt(0.5)
    mantissa = jnp.where(low, mantissa * 2, mantissa)
    exponent = jnp.where(low, exponent - 1, exponent).astype(jnp.float32)
    log = jnp.where(mantissa == 1, exponent, jnp.log2(mantissa) + exponent)
    return jnp.where((log >= above) & jnp.isfinite(x), jnp.nextafter(above, -jnp.inf), log)


@_log2.defjvp
def _(primals, tangents):
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
    if isinstance(divisor, int | float) and x.size != 1:
        return x * (np.float32(1.0) / np.float32(divisor))
    divisor = _float32(divisor)
    return divide(x, divisor) if divisor.size == x.size else x * divide(jnp.float32(1.0), divisor)
