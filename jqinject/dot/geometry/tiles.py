"""Contractions cut into tiles with their own scales, summed after scaling."""

from collections.abc import Sequence
from typing import Annotated, Literal

from jqinject.core import check
from jqinject.core.component import frozen_value

_AXES = check.among(("first", "last", "largest"), "'first', 'last' or 'largest'")


@frozen_value
class LocalAqt:
    """Cut a summed axis of a contraction into pieces.

    For a sharded batch axis, one piece per shard keeps the maximum and the integer sum on its device. Give exactly one
    of the first two arguments.

    Args:
        contraction_axis_shard_count: how many pieces.
        contraction_axis_shard_size: how long each piece is.
        contraction_axis: which of several summed axes, in the order of the dimension numbers: the "first", the "last"
            or the "largest" (the first of equals).

    Raises:
        ValueError: neither or both are given, or one is below 1; `contraction_axis` is unknown.

    Source: AQT's `LocalAqt`, whose `tile_largest_shape=True` is "largest"; Qwix's `tile_size`, which is "last".

    Example:
        >>> LocalAqt(contraction_axis_shard_count=4).count(32)
        4
    """

    contraction_axis_shard_count: int | None = None
    contraction_axis_shard_size: int | None = None
    contraction_axis: Annotated[Literal["first", "last", "largest"], _AXES] = "first"

    def __post_init__(self) -> None:
        by = self.contraction_axis_shard_count, self.contraction_axis_shard_size
        numbers = [n for n in by if n is not None]
        if len(numbers) != 1 or numbers[0] < 1:
            raise ValueError(
                "LocalAqt takes contraction_axis_shard_count or contraction_axis_shard_size, a number from 1; got "
                f"{self.contraction_axis_shard_count!r} and {self.contraction_axis_shard_size!r}"
            )

    def pair(self, lengths: Sequence[int]) -> int:
        """Which summed axis is cut, given their lengths.

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
            ValueError: the axis cannot be cut into equal pieces.
        """
        by = self.contraction_axis_shard_count or self.contraction_axis_shard_size or 1
        if length % by:
            what = "pieces" if self.contraction_axis_shard_count else "numbers a piece"
            raise ValueError(
                f"a summed axis of length {length} cannot be cut into equal pieces: {by} {what} asked for"
            )
        return by if self.contraction_axis_shard_count else length // by
