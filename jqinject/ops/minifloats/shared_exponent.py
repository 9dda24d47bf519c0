"""The exponent of the power of two that a block of minifloats shares, from the block's largest magnitude.

| function | exponent |
|---|---|
| `floor_exponent` | `floor(log2 a) - emax` |
| `ceil_exponent` | `ceil(log2 a) - emax` |
| `even_exponent` | `floor(log2 a') - emax`, `a'` = `a` rounded to the mantissa of the format, halves up |
| `round_up_exponent` | `ceil(log2(a / largest))` |

`a` is the largest magnitude, `largest` the largest number of the format and `emax` its exponent. Exponents are int32
from -127 to 127, and 128 for a nan. Numbers below the smallest normal float32 count as 0, of exponent -127 - emax.
They are read from the bits of floats, so that no program rounds a logarithm.

Source: Open Compute Project, "Microscaling Formats (MX)" 1.0, 6.3 (floor); torchao's `ScaleCalculationMode`; NVIDIA's
cuBLAS, "1D block scaling" (round up).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.ops.minifloats.float_grid import float_steps, from_float_steps
from jqinject.ops.power import divide
from jqinject.ops.ste import with_gradient_of

LEAST, NAN = -127, 128
_MANTISSA = (1 << 23) - 1
_SIGN = -(1 << 31)
_SMALLEST_NORMAL = 2.0**-126
_SMALL, _UP = 2.0**-60, 64


def floor_exponent(amax: jax.Array, largest: float) -> jax.Array:
    """`floor(log2 amax) - emax`.

    Example:
        >>> floor_exponent(jnp.array([448.0, 449.0, 0.0]), 448.0)
        Array([   0,    0, -127], dtype=int32)
    """
    return _finished(_exponent(_bits(amax)) - _emax(largest), amax)


def ceil_exponent(amax: jax.Array, largest: float) -> jax.Array:
    """`ceil(log2 amax) - emax`.

    Example:
        >>> ceil_exponent(jnp.array([256.0, 257.0]), 448.0)
        Array([0, 1], dtype=int32)
    """
    bits = _bits(amax)
    return _finished(_exponent(bits) + _has_fraction(bits) - _emax(largest), amax)


def even_exponent(amax: jax.Array, largest: float, mantissa_bit_width: int) -> jax.Array:
    """`floor(log2 amax') - emax`, `amax'` rounded to a mantissa of so many bits.

    Example:
        >>> even_exponent(jnp.array([495.0, 497.0]), 448.0, 3)
        Array([0, 1], dtype=int32)
    """
    half = 1 << (22 - mantissa_bit_width)
    return _finished(_exponent(_bits(amax) + half) - _emax(largest), amax)


def round_up_exponent(amax: jax.Array, largest: float) -> jax.Array:
    """`ceil(log2(amax / largest))`: the least with which nothing is clamped.

    Example:
        >>> round_up_exponent(jnp.array([448.0, 449.0]), 448.0)
        Array([0, 1], dtype=int32)
    """
    small = amax < _SMALL  # the quotient would be flushed to 0 too early
    quotient = divide(jnp.where(small, amax * 2.0**_UP, amax), largest)
    bits = _bits(quotient)
    found = _exponent(bits) + _has_fraction(bits) - jnp.where(small, _UP, 0)
    return _finished(jnp.where(quotient > 0, found, LEAST), amax)


def scale_of_exponent(exponent: jax.Array) -> jax.Array:
    """`2**exponent`, float32: that of -127 is subnormal, that of 128 is nan.

    Example:
        >>> scale_of_exponent(jnp.array([-1, 3, 128])).tolist()
        [0.5, 8.0, nan]
    """
    bits = jnp.where(exponent == LEAST, 1 << 22, (exponent + 127) << 23)
    bits = jnp.where(exponent == NAN, bits | (1 << 22), bits)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def steps_of_power(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`float_steps(x, divisor)` for powers of two, subnormal `x` included, which a processor may take for 0.

    Args:
        x: a float32 array.
        divisor: powers of two of at least 2**-126, inf or nan; broadcasts with `x`.

    Example:
        >>> steps_of_power(jnp.float32([2.0**-127, -3.0]), jnp.float32(2.0**-126)).tolist()
        [0.5, -2.5521177519070385e+38]
    """
    steps = float_steps(x, divisor)
    bits = _bits(jax.lax.stop_gradient(x))
    lifted = (bits & _MANTISSA).astype(jnp.float32) * 2.0**-23 * (_SMALLEST_NORMAL / divisor)
    exact = jnp.where(bits < 0, -lifted, lifted)
    return with_gradient_of(steps, jnp.where(_exponent(bits & ~_SIGN) == LEAST, exact, steps))


def from_steps_of_power(steps: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`from_float_steps(steps, scale, dtype)` for powers of two, also where the scale or the product is subnormal.

    Args:
        steps: numbers of a minifloat of at most 8 bits, float32.
        scale: powers of two from 2**-127 on, or nan; broadcasts with `steps`.
        dtype: of the result.

    Example:
        >>> from_steps_of_power(jnp.float32([1.0, 3.0]), jnp.float32(2.0**-127), jnp.float32).tolist()
        [5.877471754111438e-39, 1.7632415262334313e-38]
    """
    value = from_float_steps(steps, scale, dtype)
    exponent = _exponent(_bits(jax.lax.stop_gradient(scale)))
    # 2**126 times the magnitude: below 1 it is a subnormal number's mantissa.
    small = exponent < -_UP
    lifted = jnp.abs(jax.lax.stop_gradient(steps)) * _power(jnp.where(small, exponent, LEAST) + 126)
    mantissa = jax.lax.bitcast_convert_type((lifted * 2.0**23).astype(jnp.int32), jnp.float32)
    magnitude = jnp.where(lifted < 1, mantissa, lifted * _SMALLEST_NORMAL)
    signed = _bits(magnitude) | (_bits(jax.lax.stop_gradient(steps)) & _SIGN)
    exact = jax.lax.bitcast_convert_type(signed, jnp.float32).astype(dtype)
    return with_gradient_of(value, jnp.where(small, exact, value))


def _power(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _exponent(bits: jax.Array) -> jax.Array:
    return (bits >> 23) - 127


def _has_fraction(bits: jax.Array) -> jax.Array:
    return ((bits & _MANTISSA) > 0).astype(jnp.int32)


def _emax(largest: float) -> int:
    return math.frexp(largest)[1] - 1


def _finished(exponent: jax.Array, amax: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(amax), NAN, jnp.clip(exponent, LEAST, NAN - 1)).astype(jnp.int32)
