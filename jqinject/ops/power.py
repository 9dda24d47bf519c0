"""Powers of two and logarithms that are exact where the answer is: `jnp.exp2` and `jnp.log2` may not be."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

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


def divide(x: jax.Array, divisor: ArrayLike) -> jax.Array:
    """`x / divisor`, correctly rounded, for small arrays such as scales.

    A compiler may turn the division by a constant, or by one number for many, into a multiplication by its
    reciprocal, which is one unit in the last place off now and then. Here the divisor is hidden from that
    rewrite, at the price of writing it out in the shape of `x`; under `jax.vmap` it may still happen.

    Args:
        x: a float32 array.
        divisor: a number or an array that broadcasts with `x`.

    Returns:
        The quotient, float32.

    Example:
        >>> divide(jnp.float32(254.0), 127)
        Array(2., dtype=float32)
    """
    divisor = _float32(divisor)
    shape = jnp.broadcast_shapes(x.shape, divisor.shape)
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(divisor, shape))


@jax.custom_jvp
def _in_steps(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / scale


@_in_steps.defjvp
def _(primals, tangents):
    (_, scale), (dx, dscale) = primals, tangents
    y = _in_steps(*primals)
    return y, (dx - y * dscale) / scale


def in_steps(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / scale`: how many steps of the scale `x` is.

    The derivative `(dx - y * dscale) / scale` needs no square of the scale, so that it stays finite for
    scales down to the smallest.

    Args:
        x: a float32 array.
        scale: float32, broadcasts with `x`, not 0.

    Returns:
        The quotient, float32.

    Example:
        >>> jax.grad(in_steps, argnums=1)(jnp.float32(0), jnp.float32(1e-30))
        Array(-0., dtype=float32)
    """
    return _in_steps(x, scale)
