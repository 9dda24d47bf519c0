"""Contractions cut into tiles: each has scales of its own, and they are summed after multiplying by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax

from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.dot.geometry.dimensions import Dimensions


@checked_arguments
@dataclass(frozen=True)
class LocalAqt:
    """Cut a summed axis of a contraction into pieces.

    For a sharded batch axis, one piece a shard keeps the maximum and the integer sum on its device. Give one of the
    first two arguments.

    Args:
        contraction_axis_shard_count: how many pieces.
        contraction_axis_shard_size: how long each piece is.
        contraction_axis: which of several summed axes, in the order of the dimension numbers: the "first", the "last"
            or the "largest" (of axes as long, the first).

    Raises:
        ValueError: neither or both are given, or one is below 1; there is no such choice of an axis.

    Source: AQT's `LocalAqt`, whose `tile_largest_shape=True` is "largest"; Qwix's `tile_size`, which is "last".

    Example:
        >>> LocalAqt(contraction_axis_shard_count=4).count(32)
        4
    """

    contraction_axis_shard_count: int | None = None
    contraction_axis_shard_size: int | None = None
    contraction_axis: Literal["first", "last", "largest"] = "first"

    def __post_init__(self) -> None:
        by = self.contraction_axis_shard_count, self.contraction_axis_shard_size
        given = [n for n in by if n is not None]
        if len(given) != 1 or given[0] < 1:
            raise ValueError(
                "LocalAqt takes contraction_axis_shard_count or contraction_axis_shard_size, a number from 1; got "
                f"{self.contraction_axis_shard_count!r} and {self.contraction_axis_shard_size!r}"
            )
        if self.contraction_axis not in ("first", "last", "largest"):
            raise ValueError(
                f"LocalAqt: contraction_axis must be 'first', 'last' or 'largest', got {self.contraction_axis!r}"
            )

    def pair(self, lengths: Sequence[int]) -> int:
        """Which of the summed axes is cut, by their lengths.

        Example:
            >>> LocalAqt(2, contraction_axis="largest").pair((4, 8, 8))
            1
        """
        if self.contraction_axis == "largest":
            return list(lengths).index(max(lengths))
        return 0 if self.contraction_axis == "first" else len(lengths) - 1

    def count(self, length: int) -> int:
        """The number of pieces of an axis.

        Raises:
            ValueError: the axis can't be cut into equal pieces.
        """
        by = self.contraction_axis_shard_count or self.contraction_axis_shard_size or 1
        if length % by:
            what = "pieces" if self.contraction_axis_shard_count else "numbers a piece"
            raise ValueError(
                f"a summed axis of length {length} can't be cut into equal pieces: {by} {what} asked for"
            )
        return by if self.contraction_axis_shard_count else length // by


def split_contraction(
    lhs: jax.Array, rhs: jax.Array, dims: Dimensions, local: LocalAqt
) -> tuple[jax.Array, jax.Array, Dimensions]:
    """Both operands with one summed axis cut in two: the pieces, which go along in front, and what is summed.

    Returns:
        (left operand, right operand, dimensions whose output has the pieces as its first axis).
    """
    pair = local.pair([lhs.shape[axis] for axis in dims.lhs_contract])
    left, right = dims.lhs_contract[pair], dims.rhs_contract[pair]
    count = local.count(lhs.shape[left])
    return (
        _cut(lhs, left, count),
        _cut(rhs, right, count),
        replace(
            dims,
            lhs_ndim=dims.lhs_ndim + 1,
            rhs_ndim=dims.rhs_ndim + 1,
            lhs_contract=tuple(axis + (axis >= left) for axis in dims.lhs_contract),
            rhs_contract=tuple(axis + (axis >= right) for axis in dims.rhs_contract),
            lhs_batch=(left, *_moved(dims.lhs_batch, left)),
            rhs_batch=(right, *_moved(dims.rhs_batch, right)),
        ),
    )


def _cut(x: jax.Array, axis: int, count: int) -> jax.Array:
    shape = x.shape
    return x.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])


def _moved(axes: tuple[int, ...], cut: int) -> tuple[int, ...]:
    return tuple(axis + (axis > cut) for axis in axes)
