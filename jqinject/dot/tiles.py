"""Contractions cut into tiles: each has scales of its own, and they are summed after multiplying by them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from jqinject.dot.dimensions import Dimensions


@dataclass(frozen=True)
class LocalAqt:
    """Cut the first summed axis of a contraction into pieces.

    For a sharded batch axis, one piece a shard keeps the maximum and the integer sum on its device. Give one of the
    two arguments.

    Args:
        contraction_axis_shard_count: how many pieces.
        contraction_axis_shard_size: how long each piece is.

    Raises:
        ValueError: neither or both are given, or one is below 1.

    Source: AQT's `LocalAqt`; Qwix's `tile_size`.

    Example:
        >>> LocalAqt(contraction_axis_shard_count=4).count(32)
        4
    """

    contraction_axis_shard_count: int | None = None
    contraction_axis_shard_size: int | None = None

    def __post_init__(self) -> None:
        given = [n for n in vars(self).values() if n is not None]
        if len(given) != 1 or given[0] < 1:
            raise ValueError(
                "LocalAqt takes contraction_axis_shard_count or contraction_axis_shard_size, a number from 1; got "
                f"{self.contraction_axis_shard_count!r} and {self.contraction_axis_shard_size!r}"
            )

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
    """Both operands with the first summed axis cut in two: the pieces, which go along in front, and what is summed.

    Returns:
        (left operand, right operand, dimensions whose output has the pieces as its first axis).
    """
    left, right = dims.lhs_contract[0], dims.rhs_contract[0]
    count = local.count(lhs.shape[left])
    return (
        _cut(lhs, left, count),
        _cut(rhs, right, count),
        replace(
            dims,
            lhs_ndim=dims.lhs_ndim + 1,
            rhs_ndim=dims.rhs_ndim + 1,
            lhs_contract=(left + 1, *_moved(dims.lhs_contract[1:], left)),
            rhs_contract=(right + 1, *_moved(dims.rhs_contract[1:], right)),
            lhs_batch=(left, *_moved(dims.lhs_batch, left)),
            rhs_batch=(right, *_moved(dims.rhs_batch, right)),
        ),
    )


def _cut(x: jax.Array, axis: int, count: int) -> jax.Array:
    shape = x.shape
    return x.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])


def _moved(axes: tuple[int, ...], cut: int) -> tuple[int, ...]:
    return tuple(axis + (axis > cut) for axis in axes)
