"""Accumulators: the dtype in which products are summed, and whether it holds the sum.

Sums of more products than an int32 holds are cut into parts that fit and are added without rounding.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Block = tuple[tuple[int, int], ...]


def checked_accumulator(dtype: DTypeLike | None, where: str = "accumulator_dtype") -> np.dtype:
    """A dtype in which integers are summed; int32 for None.

    Raises:
        TypeError: it is not a signed integer dtype.

    Example:
        >>> checked_accumulator(jnp.dtype("float32"))
        Traceback (most recent call last):
        TypeError: accumulator_dtype must be a dtype of integers, such as jnp.int32, or None; got dtype('float32')
    """
    try:
        accumulator = np.dtype(jnp.int32 if dtype is None else dtype)
    except TypeError:
        accumulator = None
    if accumulator is None or not jnp.issubdtype(accumulator, jnp.signedinteger):
        raise TypeError(f"{where} must be a dtype of integers, such as jnp.int32, or None; got {dtype!r:.80}")
    return accumulator


@lru_cache(maxsize=1024)
def accumulation(
    lengths: tuple[int, ...],
    lhs: tuple[Any, bool],
    rhs: tuple[Any, bool],
    accumulator_dtype: DTypeLike | None,
) -> tuple[np.dtype, int]:
    """The dtype in which products of integers are summed, and how many of them it always holds.

    `ceil(log2(terms * largest_l * largest_r + 1)) + 1` bits are needed, of operands with these largest magnitudes.

    Args:
        lengths: of the summed axes.
        lhs, rhs: dtype of an operand, and whether it has a zero point.
        accumulator_dtype: a signed integer dtype; None means int32.

    Raises:
        TypeError: it is not a signed integer.
        ValueError: it has fewer bits than needed, and fewer than int32.

    Differs from AQT: None means int32. In AQT the sum of two int8 operands wraps around in int8.

    Example:
        >>> int8 = np.dtype("int8"), False
        >>> accumulation((1024,), int8, int8, None)
        (dtype('int32'), 131071)
        >>> accumulation((1024,), int8, int8, jnp.int16)
        Traceback (most recent call last):
        ...
        ValueError: an accumulator of int16 can overflow: 1024 products of up to 128 * 128 need 26 bits...
    """
    accumulator, terms = checked_accumulator(accumulator_dtype), math.prod(lengths)
    left, right = (_largest_magnitude(*operand) for operand in (lhs, rhs))
    needed = (terms * left * right).bit_length() + 1
    info = jnp.iinfo(accumulator)
    if needed > info.bits and (info.bits < 32 or left * right > info.max):
        cure = "accumulator_dtype=jnp.int32" if info.bits < 32 else "fewer bits an operand"
        raise ValueError(
            f"an accumulator of {accumulator.name} can overflow: {terms} products of up to {left} * {right} need "
            f"{needed} bits.\n  cure: {cure}"
        )
    return accumulator, int(info.max) // max(left * right, 1)


def _largest_magnitude(dtype: DTypeLike, has_zero_point: bool) -> int:
    """Of `q - zero_point`, for integers q of a dtype and a zero point among them."""
    info = jnp.iinfo(dtype)
    least, largest = int(info.min), int(info.max)
    return largest - least if has_zero_point else max(-least, largest)


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
