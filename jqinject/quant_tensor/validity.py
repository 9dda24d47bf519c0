"""Integers behind floats: their bit widths, their bounds, and whether an array holds them.

A bit width is a Python int while constant, a float32 array once learned. The functions here keep the kind: Python ints
in, a Python int out, computed exactly; any array in, a float32 array out whose gradient passes straight through the
ceiling. Comparisons need concrete numbers; under tracing they are unknown.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from jqinject.ops import fake_quant, minifloat, power, processes, ste
from jqinject.ops.grid import Grid, IntGrid

BitWidth = int | jax.Array


def is_concrete(*arrays: Any) -> bool:
    """Whether every one of `arrays` holds numbers (Python ints count), rather than a tracer."""
    return True not in [isinstance(array, Tracer) for array in arrays]


def known_different(a: Any, b: Any) -> bool:
    """Whether `a` and `b` are known to differ by more than float noise (1e-5 relative, 1e-8 absolute).

    False under tracing, where this is unknown. Arrays that do not broadcast against each other differ.
    """
    if not is_concrete(a, b):
        return False
    left, right = processes.on_host(a).astype(np.float64), processes.on_host(b).astype(np.float64)
    try:
        return not np.allclose(left, right, rtol=1e-5, atol=1e-8)
    except ValueError:
        return True


def known_nonzero(array: Any) -> bool:
    """Whether `array` is known to hold a nonzero number; False for None and under tracing."""
    return array is not None and is_concrete(array) and bool(np.any(processes.on_host(array) != 0))


def hidden(x: jax.Array) -> str:
    """Why the numbers of an array are not shown; empty if they are. Showing them never waits for other processes."""
    if not is_concrete(x):
        return "traced"
    return "" if processes.lies_here(x) else "spread over processes"


def brief(x: jax.Array) -> str:
    """The text that shows `x` in an error: a number, a short list of numbers, or shape and range."""
    if why := hidden(x):
        return f"{why}, shape {x.shape}"
    array = np.asarray(x)
    if array.size == 1:
        return f"{array.item():.6g}"
    if 0 < array.size <= 4:
        return "[" + ", ".join(f"{number:.6g}" for number in array.ravel()) + f"] (shape {array.shape})"
    if array.size == 0:
        return f"empty, shape {array.shape}"
    return f"{array.min():.6g} to {array.max():.6g} (shape {array.shape})"


def ceil_log2(span: int | jax.Array) -> BitWidth:
    """ceil(log2(span)): the bits needed to distinguish `span` numbers.

    Args:
        span: a count, at least 1. A Python int, or an array for learned bit widths.

    Returns:
        A Python int for an int; else a float32 array, straight-through in the backward pass.

    Example:
        >>> ceil_log2(510)
        9
        >>> ceil_log2(512)
        9
    """
    if isinstance(span, int):
        return (span - 1).bit_length()
    span = jnp.asarray(span, jnp.float32)
    # span = mantissa * 2^exponent with 1/2 <= mantissa < 1: correct even if log2 would round down to an integer.
    mantissa, exponent = jnp.frexp(span)
    exact = exponent.astype(jnp.float32) - (mantissa == 0.5).astype(jnp.float32)
    return ste.with_gradient_of(power.log2(span), exact)


def sum_bit_width(a: BitWidth, a_signed: bool, b: BitWidth, b_signed: bool) -> BitWidth:
    """Bits of the sum of two integers: ceil(log2((max_a + max_b) - (min_a + min_b))).

    Example:
        >>> sum_bit_width(8, True, 8, True)
        9
    """
    a, b = same_kind(a, b)
    largest = power.max_int(a_signed, False, a) + power.max_int(b_signed, False, b)
    smallest = power.min_int(a_signed, False, a) + power.min_int(b_signed, False, b)
    return ceil_log2(largest - smallest)


def product_sum_bit_width(terms: int, *bit_widths: BitWidth) -> BitWidth:
    """Bits of the sum of `terms` products of one integer of every width: ceil(log2(terms * prod(2^b - 1))).

    With one width this is a sum (average pooling), with two a contraction (linear, convolution). The bound
    counts unsigned magnitudes, so it also covers operands that are corrected by a zero point inside their
    range.

    Args:
        terms: how many products are added up, for a convolution the input channels of one group times the
            kernel's area.
        *bit_widths: the width of every factor.

    Returns:
        At least 1; a Python int if every width is one.

    Example:
        >>> product_sum_bit_width(64, 8, 4)
        18
    """
    span: int | jax.Array = terms
    for bits in same_kind(*bit_widths):
        span = span * power.max_int(signed=False, narrow_range=False, bit_width=bits)
    bits = ceil_log2(span)
    return max(1, bits) if isinstance(bits, int) else bits


def same_kind(*bit_widths: BitWidth) -> tuple[BitWidth, ...]:
    """The widths unchanged if all are Python ints, else all as float32 arrays."""
    if all(isinstance(bits, int) for bits in bit_widths):
        return bit_widths
    return tuple(jnp.asarray(bits, jnp.float32) for bits in bit_widths)


def larger(a: BitWidth, b: BitWidth) -> BitWidth:
    """The larger of two widths; `a` (and its gradient) if they are equal.

    Example:
        >>> larger(4, 9)
        9
    """
    left, right = same_kind(a, b)
    return max(left, right) if isinstance(left, int) else jnp.where(right > left, right, left)


# How far value / scale + zero_point may lie from an integer, due to rounding in earlier float arithmetic.
_TOLERANCE = {"float64": 0.1, "float32": 0.2, "float16": 0.5, "bfloat16": 0.5}


def pre_round_integers(value: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    """value / scale + zero_point, in float32 (float64 for a float64 value), not yet rounded."""
    work = jnp.float64 if value.dtype == np.dtype("float64") else jnp.float32
    steps = value.astype(work) / scale.astype(work)
    return steps if zero_point is None else steps + zero_point.astype(work)


def dequantized(
    payload: jax.Array, scale: jax.Array, zero_point: jax.Array | None, grid: Grid, dtype: DTypeLike
) -> jax.Array:
    """(numbers - zero_point) * scale, computed in float32; the numbers are those of a grid that a payload has."""
    steps = payload.astype(jnp.float32) if grid.is_integer else grid.decode(payload)
    if grid.is_minifloat:
        return minifloat.from_float_steps(steps, scale, dtype)
    return fake_quant.in_range_of((steps if zero_point is None else steps - zero_point) * scale, scale, dtype)


def integer_bounds(bit_width: BitWidth, signed: bool) -> tuple[jax.Array, jax.Array]:
    """The least and the largest integer of the format, as float32.

    From two bits on: -2^(b-1) to 2^(b-1) - 1 if signed, else 0 to 2^b - 1. One bit is binary: -1 to 1 if
    signed (the two numbers are the signs), else 0 to 1.
    """
    lower, upper = IntGrid(bit_width, signed).bounds
    # The integers of a wide format do not fit int32: convert them to float here.
    if isinstance(bit_width, int):
        lower, upper = float(lower), float(upper)
    binary = jnp.asarray(bit_width, jnp.float32) < 2
    return jnp.where(binary, -1.0 if signed else 0.0, lower), jnp.where(binary, 1.0, upper)


def validity(
    value: jax.Array, scale: jax.Array, zero_point: jax.Array | None, grid: IntGrid
) -> tuple[jax.Array, jax.Array]:
    """Whether the tensor is valid; whether it has integers, as a one-bit tensor with a single value also does.

    It is valid if q = value / scale + zero_point is integer and within its range. Integer means at most 0.2 away for
    float32 (0.1 for float64, 0.5 for float16 and bfloat16); the range is that of `integer_bounds`. One bit also means
    that q takes exactly two different values, one of them negative if and only if the tensor is signed. An empty tensor
    is valid; a nan or inf is not.

    Source: Brevitas's `IntQuantTensor.is_valid`.

    Args:
        value: float array.
        scale: float per integer step; broadcasts against `value`.
        zero_point: the integer that represents 0.0; broadcasts against `value`. None if absent.
        grid: of the integers.

    Returns:
        Two boolean scalar arrays; usable under `jax.jit`.

    Example:
        >>> import jax.numpy as jnp
        >>> one = jnp.float32(1.0)
        >>> bool(validity(jnp.array([-8.0, 7.0]), one, None, IntGrid(4))[0])
        True
        >>> bool(validity(jnp.array([-8.0, 8.0]), one, None, IntGrid(4))[0])
        False
    """
    bit_width, signed = grid.bit_width, grid.signed
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


@partial(jax.jit, static_argnames="dtype")
def checked_integers(
    value: jax.Array, scale: jax.Array, zero_point: jax.Array | None, grid: IntGrid, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """The integers of a concrete tensor, and whether it has any: one program without intermediate arrays of its size.

    It has them if it is valid; a one-bit tensor also if it holds a single value everywhere.

    Args:
        value, scale, zero_point, grid: as for `validity`.
        dtype: of the integers.

    Returns:
        `round(value / scale + zero_point)` in `dtype`, and a boolean scalar array.
    """
    integers = jnp.round(pre_round_integers(value, scale, zero_point)).astype(dtype)
    return integers, validity(value, scale, zero_point, grid)[1]
