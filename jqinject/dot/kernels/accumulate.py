"""Accumulators: the dtype in which products are summed, and whether it holds the sum.

Sums of more products than an int32 holds are cut into parts that fit and are added without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Block = tuple[tuple[int, int], ...]


def integer_accumulator(dtype: DTypeLike | None, terms: int, lhs_largest: int, rhs_largest: int) -> np.dtype:
    """The dtype in which `terms` products of integers are summed: `dtype`, or int32 for None.

    `bits = ceil(log2(terms * lhs_largest * rhs_largest + 1)) + 1` are needed. Sums too long for int32 are cut into
    parts of up to `longest_sum` products.

    Args:
        dtype: a signed integer dtype, or None.
        terms: the products summed into one output.
        lhs_largest, rhs_largest: the largest magnitudes of the operands.

    Raises:
        TypeError: `dtype` is not a signed integer.
        ValueError: it has fewer bits than needed, and fewer than int32.

    Differs from AQT: None means int32. In AQT the sum of two int8 operands wraps around in int8.

    Example:
        >>> integer_accumulator(None, 1024, 127, 127)
        dtype('int32')
        >>> integer_accumulator(jnp.int16, 1024, 127, 127)
        Traceback (most recent call last):
        ...
        ValueError: an accumulator of int16 can overflow: 1024 products of up to 127 * 127 need 25 bits...
    """
    accumulator = checked_accumulator(dtype)
    needed = (terms * lhs_largest * rhs_largest).bit_length() + 1
    bits = jnp.iinfo(accumulator).bits
    if needed > bits and (bits < 32 or lhs_largest * rhs_largest > jnp.iinfo(accumulator).max):
        raise ValueError(
            f"an accumulator of {accumulator.name} can overflow: {terms} products of up to {lhs_largest} * "
            f"{rhs_largest} need {needed} bits.\n  cure: " + _cure(bits)
        )
    return accumulator


def checked_accumulator(dtype: DTypeLike | None) -> np.dtype:
    """A dtype in which integers are summed; int32 for None.

    Raises:
        TypeError: it is not a signed integer dtype.

    Example:
        >>> checked_accumulator(jnp.float32)
        Traceback (most recent call last):
        TypeError: accumulator_dtype: integers are summed in a signed integer dtype such as jnp.int32, got float32
    """
    try:
        accumulator = np.dtype(jnp.int32 if dtype is None else dtype)
    except TypeError:
        accumulator = None
    if accumulator is None or not jnp.issubdtype(accumulator, jnp.signedinteger):
        shown = f"{dtype!r:.80}" if accumulator is None else accumulator.name
        raise TypeError(
            f"accumulator_dtype: integers are summed in a signed integer dtype such as jnp.int32, got {shown}"
        )
    return accumulator


def _cure(bits: int) -> str:
    return "accumulator_dtype=jnp.int32" if bits < 32 else "fewer bits an operand"


def largest_magnitude(dtype: DTypeLike, zero_point: object = None) -> int:
    """Of `q - zero_point`, for integers q of a dtype and a zero point among them; None without one.

    Example:
        >>> largest_magnitude(jnp.int8), largest_magnitude(jnp.int8, 3.0), largest_magnitude(jnp.int4)
        (128, 255, 8)
    """
    info = jnp.iinfo(dtype)
    least, largest = int(info.min), int(info.max)
    return max(-least, largest) if zero_point is None else largest - least


def longest_sum(accumulator: np.dtype, lhs_largest: int, rhs_largest: int) -> int:
    """How many products an accumulator can always sum.

    Args:
        accumulator: a signed integer dtype.
        lhs_largest, rhs_largest: the largest magnitudes of the operands.

    Example:
        >>> longest_sum(np.dtype("int32"), 255, 128), longest_sum(np.dtype("int32"), 8, 128)
        (65793, 2097151)
    """
    return int(jnp.iinfo(accumulator).max) // max(lhs_largest * rhs_largest, 1)


@lru_cache(maxsize=1024)
def accumulation(
    lengths: tuple[int, ...],
    lhs: tuple[Any, bool],
    rhs: tuple[Any, bool],
    accumulator_dtype: DTypeLike | None,
) -> tuple[np.dtype, int]:
    """The dtype of the sums, and how many products it holds.

    Args:
        lengths: of the summed axes.
        lhs, rhs: dtype of an operand, and whether it has a zero point.
        accumulator_dtype: None means int32.
    """
    spans = [largest_magnitude(dtype, 0 if has_zero_point else None) for dtype, has_zero_point in (lhs, rhs)]
    accumulator = integer_accumulator(accumulator_dtype, math.prod(lengths), *spans)
    return accumulator, longest_sum(accumulator, *spans)


def blocks(lengths: Sequence[int], longest: int) -> list[Block]:
    """Boxes that tile a box, each of at most `longest` elements: cut along the longest axis, then the next.

    Args:
        lengths: of the axes.
        longest: elements of a part, at least 1.

    Returns:
        (start, stop) along every axis, for each part.

    Example:
        >>> blocks((5, 2), 4)
        [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((4, 5), (0, 2))]
        >>> blocks((5, 2), 10)
        [((0, 5), (0, 2))]
    """
    return list(_blocks(tuple((0, length) for length in lengths), longest))


def _blocks(box: Block, longest: int) -> Iterator[Block]:
    lengths = [stop - start for start, stop in box]
    elements = math.prod(lengths)
    if elements <= longest:
        yield box
        return
    axis = lengths.index(max(lengths))
    step = max(1, longest // (elements // lengths[axis]))
    step = -(-lengths[axis] // -(-lengths[axis] // step))  # as many parts, of similar length
    start, stop = box[axis]
    for first in range(start, stop, step):
        yield from _blocks((*box[:axis], (first, min(first + step, stop)), *box[axis + 1 :]), longest)


def in_parts(lengths: Sequence[int], longest: int, contract: Callable[[Block], jax.Array]) -> jax.Array:
    """A sum over a box by `contract`: in one, or over `blocks`, then float32.

    Args:
        lengths: of the axes that are summed over.
        longest: how many products `contract` can sum.
        contract: the int32 sum over a block.

    Example:
        >>> x = jnp.full(5, 2**29)
        >>> in_parts(x.shape, 3, lambda block: part(x, (0,), block).sum()).tolist() == 5 * 2.0**29
        True
    """
    parts = blocks(lengths, longest)
    if len(parts) == 1:
        return contract(parts[0])
    with jax.named_scope(
        f"jqinject_parts({len(parts)})"
    ):  # read from the compiled program by `jqinject.report`
        return added([contract(block) for block in parts])


def part(x: jax.Array, axes: Sequence[int], block: Block) -> jax.Array:
    """The part of `x` in a block, along some of its axes.

    Example:
        >>> part(jnp.arange(6).reshape(2, 3), (1,), ((1, 3),)).tolist()
        [[1, 2], [4, 5]]
    """
    for axis, (start, stop) in zip(axes, block, strict=True):
        if (start, stop) != (0, x.shape[axis]):
            x = jax.lax.slice_in_dim(x, start, stop, axis=axis)
    return x


def added(sums: Sequence[jax.Array]) -> jax.Array:
    """Integers added, as float32: exact until it is rounded once (up to 512 parts; then up to three times).

    High and low 16 bits are added separately in int32, so the order does not matter and nothing overflows.

    Args:
        sums: int32 arrays of one shape, at most 32768.

    Example:
        >>> added([jnp.array([2**30, -7])] * 3).tolist() == [3.0 * 2**30, -21.0]
        True
    """
    high, low = sums[0] >> 16, sums[0] & 0xFFFF
    for part_sum in sums[1:]:
        high, low = high + (part_sum >> 16), low + (part_sum & 0xFFFF)
    high, low = high + (low >> 16), low & 0xFFFF
    return high.astype(jnp.float32) * 65536.0 + low.astype(jnp.float32)
