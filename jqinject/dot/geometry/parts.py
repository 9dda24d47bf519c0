"""Sums of more products than an int32 holds: cut into parts that fit and are added without rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

Block = tuple[tuple[int, int], ...]


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
    whole = math.prod(lengths)
    if whole <= longest:
        yield box
        return
    axis = lengths.index(max(lengths))
    step = max(1, longest // (whole // lengths[axis]))
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
    found = blocks(lengths, longest)
    if len(found) == 1:
        return contract(found[0])
    with jax.named_scope(
        f"jqinject_parts({len(found)})"
    ):  # read from the compiled program by `jqinject.report`
        return added([contract(block) for block in found])


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
    for found in sums[1:]:
        high, low = high + (found >> 16), low + (found & 0xFFFF)
    high, low = high + (low >> 16), low & 0xFFFF
    return high.astype(jnp.float32) * 65536.0 + low.astype(jnp.float32)
