"""Checks whether a float array holds the integers that its scale, zero point and bit width promise."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.fake_quant import in_range_of
from jqinject.ops.power import max_int, min_int
from jqinject.quant_tensor.bit_widths import BitWidth

# How far value / scale + zero_point may lie from an integer, due to rounding in earlier float arithmetic.
_TOLERANCE = {"float64": 0.1, "float32": 0.2, "float16": 0.5, "bfloat16": 0.5}


def pre_round_integers(value: jax.Array, scale: jax.Array, zero_point: jax.Array) -> jax.Array:
    """value / scale + zero_point, in float32 (float64 for a float64 value), not yet rounded."""
    work = jnp.float64 if value.dtype == np.dtype("float64") else jnp.float32
    return value.astype(work) / scale.astype(work) + zero_point.astype(work)


def dequantized(integers: jax.Array, scale: jax.Array, zero_point: jax.Array, dtype: Any) -> jax.Array:
    """(integers - zero_point) * scale, computed in float32."""
    return in_range_of((integers.astype(jnp.float32) - zero_point) * scale, scale, dtype)


def integer_bounds(bit_width: BitWidth, signed: bool) -> tuple[jax.Array, jax.Array]:
    """The least and the largest integer of the format, as float32.

    From two bits on: -2^(b-1) to 2^(b-1) - 1 if signed, else 0 to 2^b - 1. One bit is binary: -1 to 1 if
    signed (the two numbers are the signs), else 0 to 1.
    """
    lower = min_int(signed, narrow_range=False, bit_width=bit_width)
    upper = max_int(signed, narrow_range=False, bit_width=bit_width)
    if isinstance(
        bit_width, int
    ):  # the integers of a wide format do not fit int32: convert them to float here
        lower, upper = float(lower), float(upper)
    binary = jnp.asarray(bit_width, jnp.float32) < 2
    return jnp.where(binary, -1.0 if signed else 0.0, lower), jnp.where(binary, 1.0, upper)


def holds_integers(
    value: jax.Array, scale: jax.Array, zero_point: jax.Array, bit_width: BitWidth, signed: bool
) -> jax.Array:
    """Whether the tensor is valid: q = value / scale + zero_point is integer and within its range.

    Integer means at most 0.2 away for float32 (0.1 for float64, 0.5 for float16 and bfloat16); the range is
    that of `integer_bounds`. One bit also means that q takes exactly two different values, one of them
    negative if and only if the tensor is signed. An empty tensor is valid; a nan or inf is not.

    Source: Brevitas's `IntQuantTensor.is_valid`.

    Args:
        value: float array.
        scale: float per integer step; broadcasts against `value`.
        zero_point: the integer that stands for 0.0; broadcasts against `value`.
        bit_width: Python int or scalar array.
        signed: whether the integers are signed.

    Returns:
        A boolean scalar array; usable under `jax.jit`.

    Example:
        >>> import jax.numpy as jnp
        >>> one, zero = jnp.float32(1.0), jnp.float32(0.0)
        >>> bool(holds_integers(jnp.array([-8.0, 7.0]), one, zero, 4, signed=True))
        True
        >>> bool(holds_integers(jnp.array([-8.0, 8.0]), one, zero, 4, signed=True))
        False
    """
    valid, _ = _validity(value, scale, zero_point, bit_width, signed)
    return valid


def _validity(
    value: jax.Array, scale: jax.Array, zero_point: jax.Array, bit_width: BitWidth, signed: bool
) -> tuple[jax.Array, jax.Array]:
    """Whether the tensor is valid; whether it has integers, as a one-bit tensor with a single value also does."""
    if value.size == 0:
        return jnp.array(True), jnp.array(True)
    exact = pre_round_integers(value, scale, zero_point)
    integers = jnp.round(exact)
    near = jnp.abs(exact - integers) < _TOLERANCE.get(value.dtype.name, 0.2)
    lower, upper = integer_bounds(bit_width, signed)
    valid = jnp.all(near & (integers >= lower) & (integers <= upper))
    if isinstance(bit_width, int) and bit_width >= 2:
        return valid, valid
    least, largest = jnp.min(integers), jnp.max(integers)
    two_values = jnp.all((integers == least) | (integers == largest)) & (least != largest)
    one_value = valid & (least == largest) & ((least != 0) | (not signed))
    binary = jnp.all(near) & two_values & ((least < 0) == signed)
    is_binary = jnp.asarray(bit_width, jnp.float32) < 2
    return jnp.where(is_binary, binary, valid), jnp.where(is_binary, binary | one_value, valid)


def checked_integers(
    value: jax.Array, scale: jax.Array, zero_point: jax.Array, bit_width: BitWidth, signed: bool, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The integers of a concrete tensor, and whether it has any: one program without intermediate arrays of its size.

    It has them if it is valid; a one-bit tensor also if it holds a single value everywhere.

    Args:
        value, scale, zero_point, bit_width, signed: as for `holds_integers`.
        dtype: of the integers.

    Returns:
        `round(value / scale + zero_point)` in `dtype`, and a boolean scalar array.
    """
    constant = bit_width if isinstance(bit_width, int) else None
    learned = None if isinstance(bit_width, int) else bit_width
    return _checked_integers(value, scale, zero_point, learned, constant, signed, np.dtype(dtype))


@partial(jax.jit, static_argnums=(4, 5, 6))
def _checked_integers(
    value: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    learned: jax.Array | None,
    constant: int | None,
    signed: bool,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    bit_width = constant if learned is None else learned
    assert bit_width is not None, "either constant or learned"
    integers = jnp.round(pre_round_integers(value, scale, zero_point)).astype(dtype)
    return integers, _validity(value, scale, zero_point, bit_width, signed)[1]
