"""Cast arrays to 8-bit floats and back, and find the exponent of the power of two that a block of minifloats shares.

| function | exponent |
|---|---|
| `shared_exponent` | `floor(log2 a) - emax` |
| with the carry `FRACTION` | `ceil(log2 a) - emax` |
| with half of a mantissa's last bit | `floor(log2 a') - emax`, `a'` = `a` rounded to that mantissa, halves up |
| `round_up_exponent` | `ceil(log2(a / largest))` |

`a` is the largest magnitude, `largest` the largest number of the format and `emax` its exponent. Exponents are int32
from -127 to 127, and 128 for a nan. Numbers below the smallest normal float32 count as 0, of exponent -127 - emax.
They are read from the bits of floats, so that no program rounds a logarithm.

Source: Open Compute Project, "Microscaling Formats (MX)" 1.0, 6.3 (floor); torchao's `ScaleCalculationMode`; NVIDIA's
cuBLAS, "1D block scaling" (round up).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.ops import float_grid, minifloat, ste
from jqinject.ops.power import divide, integer_power

FLOAT8_DTYPES = tuple(
    map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz))
)
_WITH_INF = np.dtype(jnp.float8_e5m2)


def float8_dtype(dtype: object, where: str, name: str = "q_dtype") -> np.dtype:
    """One of the four 8-bit float dtypes.

    Raises:
        TypeError: for any other dtype; the message names the four.
    """
    same = [candidate for candidate in FLOAT8_DTYPES if candidate == dtype]
    if not same:
        names = ", ".join(f"jnp.{candidate.name}" for candidate in FLOAT8_DTYPES)
        raise TypeError(f"{where}: {name} must be an 8-bit float dtype, one of {names}; got {dtype!r}")
    return same[0]


def to_float8(x: jax.Array, scale: jax.Array, dtype: object) -> jax.Array:
    """`clip(x / scale, -max, max)` in an 8-bit float dtype, rounded to nearest, ties to even.

    The quotient is computed in bfloat16 if `x` is bfloat16 (as in Flax, with the scale rounded to it), else in float32,
    as XLA compiles Flax's: `x * (1 / scale)` where a scale serves several numbers.

    A finite number that is too large saturates. Non-finite numbers stay visible: nan stays nan, and an infinity becomes
    inf in `float8_e5m2` and nan in the others, which have no inf.

    Args:
        x: float array.
        scale: float per step, positive, broadcasts to `x`.
        dtype: the 8-bit float dtype.

    Returns:
        The payload: an array of the shape of `x`; no gradient.

    Differs from Flax's `fp8_ops.quantize`: there an infinity saturates.

    Example:
        >>> to_float8(jnp.array([0.3, 1000.0]), jnp.float32(0.5), jnp.float8_e4m3fn)
        Array([0.625, 448], dtype=float8_e4m3fn)
    """
    # Of a Python float under `grad`, a Python float is left.
    return cast_to_float8(jnp.asarray(jax.lax.stop_gradient(x)), scale, dtype)


def cast_to_float8(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """As `to_float8`, for where the gradient is cut already."""
    # To bfloat16 explicitly: a compiler may remove a cast to it and back.
    to_bfloat16 = partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    rounded: Callable[..., jax.Array] = to_bfloat16 if x.dtype == jnp.bfloat16 else jnp.asarray
    largest = float(jnp.finfo(dtype).max)
    numbers = x.astype(jnp.float32)
    scale = rounded(scale)
    quotient = divide(numbers, scale) if scale.size == x.size else numbers * jax.lax.integer_pow(scale, -1)
    steps = jax.lax.clamp(-largest, rounded(quotient), largest)
    steps = jax.lax.select(jax.lax.is_finite(numbers), steps, numbers)  # of which `dtype` makes inf or nan
    return float_grid.FloatGrid.of_dtype(dtype).cast(steps)


def from_float8(payload: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`payload * scale`, computed in float32; as in `from_float_steps`, finite numbers stay finite.

    Args:
        payload: in an 8-bit float dtype.
        scale: float per step, finite, broadcasts to `payload`.
        dtype: of the value.

    Example:
        >>> from_float8(jnp.array([57344.0, jnp.inf], jnp.float8_e5m2), jnp.float32(2), jnp.float16).tolist()
        [65504.0, inf]
    """
    steps, largest = payload.astype(jnp.float32), float(jnp.finfo(dtype).max)
    product = steps * scale
    value = jax.lax.clamp(-largest, product, largest)
    if payload.dtype == _WITH_INF:
        value = jax.lax.select(jax.lax.is_finite(steps), value, product)
    return value.astype(dtype)


def to_float8_again(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """The payload of an array that `from_float8` made: `x / scale`, which needs no saturation.

    Args:
        x: float array, up to its rounding `payload * scale`; its gradient is not cut.
        scale: float per step, positive, broadcasts to `x`.
        dtype: the 8-bit float dtype.

    Example:
        >>> to_float8_again(jnp.array([0.3125, 224.0]), jnp.float32(0.5), jnp.float8_e4m3fn)
        Array([0.625, 448], dtype=float8_e4m3fn)
    """
    return float_grid.FloatGrid.of_dtype(dtype).cast(x.astype(jnp.float32) / scale)


def float8_factor(amax: jax.Array, largest: float, dtype: DTypeLike, power_of_two: bool) -> jax.Array:
    """`largest / amax`, float32; if that overflows, the largest number of `dtype`; or the power of two below.

    Args:
        amax: float32, above 0.
        largest: of the 8-bit format.
        dtype: of the tensor.
        power_of_two: whether it is rounded down to a power of two.

    Example:
        >>> float8_factor(jnp.float32(3.0), 448.0, jnp.float32, True)
        Array(128., dtype=float32)
    """
    factor = divide(jnp.float32(largest), amax)
    factor = jnp.where(jnp.isinf(factor), float(jnp.finfo(dtype).max), factor)
    if not power_of_two:
        return factor
    exponent = jax.lax.bitcast_convert_type(factor, jnp.int32) & jnp.int32(0x7F800000)
    return jax.lax.bitcast_convert_type(exponent, jnp.float32)


def quantize_by_factor(
    x: jax.Array, factor: jax.Array, q_dtype: Any, dq_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """To an 8-bit float and back, by the inverse of a scale, in float32 for any dtype of `x`; straight through.

    Infinities saturate in the payload and stay what they are in the value.

    Args:
        x: float array.
        factor: steps of the payload per float, positive and normal, broadcasts to `x`; no gradient.
        q_dtype: the 8-bit float dtype.
        dq_dtype: dtype of the value.

    Example:
        >>> quantize_by_factor(jnp.float32(3), jnp.float32(149.5), jnp.float8_e4m3fn, jnp.float32)[1]
        Array(448, dtype=float8_e4m3fn)
    """
    numbers = jax.lax.stop_gradient(x).astype(jnp.float32)
    largest = float(jnp.finfo(q_dtype).max)
    payload = float_grid.FloatGrid.of_dtype(q_dtype).encode(jnp.clip(numbers * factor, -largest, largest))
    value = divide(payload.astype(jnp.float32), jnp.broadcast_to(factor, numbers.shape))
    value = jnp.where(jnp.isinf(numbers), numbers, value)
    return ste.with_gradient_of(jnp.asarray(x).astype(dq_dtype), value.astype(dq_dtype)), payload


LEAST, NAN = -127, 128
#: The bits of the fraction of a float32: added to the bits of a number, they round its exponent up.
FRACTION = (1 << 23) - 1
_SIGN = -(1 << 31)
_SMALLEST_NORMAL = 2.0**-126
_SMALL, _UP = 2.0**-60, 64


def shared_exponent(amax: jax.Array, largest: float, carry: int = 0) -> jax.Array:
    """`floor(log2 amax) - emax`, once `carry` is added to the fraction of `amax`, of 23 bits.

    Args:
        amax: the largest magnitude.
        largest: the largest number of the format.
        carry: 0 for the floor, `FRACTION` for the ceiling, half of a mantissa's last bit to round to that mantissa.

    Example:
        >>> shared_exponent(jnp.array([448.0, 449.0, 0.0]), 448.0)
        Array([   0,    0, -127], dtype=int32)
        >>> shared_exponent(jnp.array([256.0, 257.0]), 448.0, FRACTION)
        Array([0, 1], dtype=int32)
        >>> shared_exponent(jnp.array([495.0, 497.0]), 448.0, 1 << 19)
        Array([0, 1], dtype=int32)
    """
    return _finished(_exponent(_bits(amax) + carry) - (math.frexp(largest)[1] - 1), amax)


def round_up_exponent(amax: jax.Array, largest: float) -> jax.Array:
    """`ceil(log2(amax / largest))`: the least with which nothing is clamped.

    Example:
        >>> round_up_exponent(jnp.array([448.0, 449.0]), 448.0)
        Array([0, 1], dtype=int32)
    """
    small = amax < _SMALL  # the quotient would be flushed to 0 too early
    quotient = divide(jnp.where(small, amax * 2.0**_UP, amax), largest)
    exponent = _exponent(_bits(quotient) + FRACTION) - jnp.where(small, _UP, 0)
    return _finished(jnp.where(quotient > 0, exponent, LEAST), amax)


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
    steps = minifloat.float_steps(x, divisor)
    bits = _bits(jax.lax.stop_gradient(x))
    lifted = (bits & FRACTION).astype(jnp.float32) * 2.0**-23 * (_SMALLEST_NORMAL / divisor)
    exact = jnp.where(bits < 0, -lifted, lifted)
    return ste.with_gradient_of(steps, jnp.where(_exponent(bits & ~_SIGN) == LEAST, exact, steps))


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
    value = minifloat.from_float_steps(steps, scale, dtype)
    exponent = _exponent(_bits(jax.lax.stop_gradient(scale)))
    # 2**126 times the magnitude: below 1 it is a subnormal number's mantissa.
    small = exponent < -_UP
    lifted = jnp.abs(jax.lax.stop_gradient(steps)) * integer_power(jnp.where(small, exponent, LEAST) + 126)
    mantissa = jax.lax.bitcast_convert_type((lifted * 2.0**23).astype(jnp.int32), jnp.float32)
    magnitude = jnp.where(lifted < 1, mantissa, lifted * _SMALLEST_NORMAL)
    signed = _bits(magnitude) | (_bits(jax.lax.stop_gradient(steps)) & _SIGN)
    exact = jax.lax.bitcast_convert_type(signed, jnp.float32).astype(dtype)
    return ste.with_gradient_of(value, jnp.where(small, exact, value))


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _exponent(bits: jax.Array) -> jax.Array:
    return (bits >> 23) - 127


def _finished(exponent: jax.Array, amax: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(amax), NAN, jnp.clip(exponent, LEAST, NAN - 1)).astype(jnp.int32)
