"""8-bit floats: their range, and conversion of arrays to them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.minifloats.float_grid import from_float_steps
from jqinject.ops.power import divide
from jqinject.ops.ste import with_gradient_of

FLOAT8_DTYPES: tuple[Any, ...] = (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float8_e4m3fnuz,
    jnp.float8_e5m2fnuz,
)
_WITH_INF = np.dtype(jnp.float8_e5m2)
_WITHOUT_NEGATIVE_ZERO = (np.dtype(jnp.float8_e4m3fnuz), np.dtype(jnp.float8_e5m2fnuz))


def float8_dtype(dtype: Any, where: str, name: str = "q_dtype") -> np.dtype:
    """One of the four 8-bit float dtypes.

    Raises:
        TypeError: for any other dtype; the message names the four.
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in [np.dtype(known) for known in FLOAT8_DTYPES]:
        names = ", ".join(f"jnp.{np.dtype(known).name}" for known in FLOAT8_DTYPES)
        raise TypeError(f"{where}: {name} must be an 8-bit float dtype, one of {names}; got {dtype!r}")
    return found


def float8_max(dtype: Any) -> float:
    """The largest finite number of an 8-bit float dtype.

    Example:
        >>> float8_max(jnp.float8_e4m3fn), float8_max(jnp.float8_e5m2), float8_max(jnp.float8_e4m3fnuz)
        (448.0, 57344.0, 240.0)
    """
    return float(jnp.finfo(dtype).max)


def to_float8(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
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
    return _payload(x, scale, dtype)[0]


def _payload(x: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The payload, and a mask of the finite elements of `x`."""
    x = jnp.asarray(jax.lax.stop_gradient(x))  # of a Python float under `grad`, a Python float is left
    # To bfloat16 explicitly: a compiler may remove a cast to it and back.
    rounded = _to_bfloat16 if x.dtype == jnp.bfloat16 else jnp.asarray
    largest = float8_max(dtype)
    numbers = x.astype(jnp.float32)
    finite = jax.lax.is_finite(numbers)
    scale = rounded(scale)
    quotient = divide(numbers, scale) if scale.size == x.size else numbers * jax.lax.integer_pow(scale, -1)
    steps = jax.lax.clamp(-largest, rounded(quotient), largest)
    steps = jax.lax.select(finite, steps, numbers)  # of which `dtype` makes inf or nan
    return _converted(steps, dtype), finite


def to_float8_again(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """The payload of an array that `from_float8` made: `x / scale`, which needs no saturation.

    Args:
        x: float array, up to its rounding `payload * scale`.
        scale: float per step, positive, broadcasts to `x`.
        dtype: the 8-bit float dtype.

    Example:
        >>> to_float8_again(jnp.array([0.3125, 224.0]), jnp.float32(0.5), jnp.float8_e4m3fn)
        Array([0.625, 448], dtype=float8_e4m3fn)
    """
    return _converted(x.astype(jnp.float32) / scale, dtype)


def _converted(steps: jax.Array, dtype: Any) -> jax.Array:
    if np.dtype(dtype) in _WITHOUT_NEGATIVE_ZERO:
        # The code of -0 is their nan, which XLA's older loops return for small negative numbers.
        to_zero = jnp.abs(steps) <= float(jnp.finfo(dtype).smallest_subnormal) / 2
        steps = jnp.where(to_zero, jnp.float32(0), steps)
    return steps.astype(dtype)


def _to_bfloat16(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def from_float8(payload: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`payload * scale`, computed in float32; a finite number stays finite in `dtype`.

    Example:
        >>> from_float8(jnp.array([2.0], jnp.float8_e5m2), jnp.float32(0.5), jnp.bfloat16)
        Array([1], dtype=bfloat16)
    """
    return from_float_steps(payload.astype(jnp.float32), scale, dtype)


def quantize_float8(
    x: jax.Array, scale: jax.Array, q_dtype: Any, dq_dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """To an 8-bit float and back, straight through: the gradient of `x` is that of the value everywhere.

    Args:
        x: float array.
        scale: float per step, positive, broadcasts to `x`; no gradient.
        q_dtype: the 8-bit float dtype.
        dq_dtype: dtype of the value.

    Returns:
        (the value, the payload that it comes from, which has no gradient).

    Example:
        >>> quantize_float8(jnp.float32(500), jnp.float32(1), jnp.float8_e4m3fn, jnp.float32)
        (Array(448., dtype=float32), Array(448, dtype=float8_e4m3fn))
    """
    payload, finite = _payload(x, scale, q_dtype)
    product = payload.astype(jnp.float32) * scale
    largest = float(jnp.finfo(dq_dtype).max)
    value = jax.lax.clamp(-largest, product, largest)  # as in `from_float8`: finite numbers stay finite
    if np.dtype(q_dtype) == _WITH_INF:
        value = jax.lax.select(finite, value, product)
    return with_gradient_of(_cast(x, dq_dtype), value.astype(dq_dtype)), payload


def float8_factor(amax: jax.Array, largest: float, dtype: Any, power_of_two: bool) -> jax.Array:
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
    """As `quantize_float8`, where `x` is multiplied by the inverse of a scale, in float32 for any dtype of `x`.

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
    largest = float8_max(q_dtype)
    payload = _converted(jnp.clip(numbers * factor, -largest, largest), q_dtype)
    value = divide(payload.astype(jnp.float32), jnp.broadcast_to(factor, numbers.shape))
    value = jnp.where(jnp.isinf(numbers), numbers, value)
    return with_gradient_of(_cast(x, dq_dtype), value.astype(dq_dtype)), payload


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return jnp.asarray(x).astype(dtype)


def fake_float8(x: jax.Array, scale: jax.Array, q_dtype: Any, dq_dtype: Any) -> jax.Array:
    """The value of `quantize_float8`.

    Example:
        >>> quantize = lambda v: fake_float8(v, jnp.float32(1), jnp.float8_e4m3fn, jnp.float32)
        >>> jax.value_and_grad(quantize)(jnp.float32(500))
        (Array(448., dtype=float32), Array(1., dtype=float32))
    """
    return quantize_float8(x, scale, q_dtype, dq_dtype)[0]
