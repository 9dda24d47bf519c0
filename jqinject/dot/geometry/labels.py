"""Axes of a contraction by name, from which any two operands, forward or backward, find their dimensions.

| label | axis |
|---|---|
| `("batch", i)` | batch: of both operands and the output |
| `("lhs", axis)` | of the left operand and the output |
| `("rhs", axis)` | of the right operand and the output |
| `("summed", i)` | of both operands, summed over in the forward contraction |
| `("tile", *label)` | the tiles that another axis was cut into |
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from jqinject.dot.geometry.dimensions import Dimensions

Label = tuple[str | int, ...]
Labels = tuple[Label, ...]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Labelling:
    """The labels of the axes of both operands and of the output."""

    lhs: Labels
    rhs: Labels
    out: Labels

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, dims: Dimensions) -> Labelling:
        """The labels of a contraction.

        Example:
            >>> Labelling.of(Dimensions(2, 2, (1,), (0,), (), ())).out
            (('lhs', 0), ('rhs', 1))
        """
        lhs: list[Label] = [("lhs", axis) for axis in range(dims.lhs_ndim)]
        rhs: list[Label] = [("rhs", axis) for axis in range(dims.rhs_ndim)]
        for kind, pairs in (
            ("batch", zip(dims.lhs_batch, dims.rhs_batch, strict=True)),
            ("summed", zip(dims.lhs_contract, dims.rhs_contract, strict=True)),
        ):
            for number, (left, right) in enumerate(pairs):
                lhs[left] = rhs[right] = (kind, number)
        batch = tuple(("batch", number) for number in range(len(dims.lhs_batch)))
        out = (*batch, *(n for n in lhs if n[0] == "lhs"), *(n for n in rhs if n[0] == "rhs"))
        return cls(tuple(lhs), tuple(rhs), out)


def summed_labels(
    first: tuple[Name, ...], second: tuple[Name, ...], out: tuple[Name, ...]
) -> tuple[Name, ...]:
    """The summed axes of two operands, in the order of the first."""
    return tuple(label for label in first if label in second and label not in out)


@lru_cache(maxsize=1024)
def dimensions_of(
    first: tuple[Hashable, ...], second: tuple[Hashable, ...], out: tuple[Hashable, ...]
) -> tuple[Dimensions, tuple[int, ...]]:
    """The contraction of two operands, and the permutation of its result to the order of `out`.

    Labels of both operands are summed, or batch axes if the output has them.

    Example:
        >>> x, y, k = ("lhs", 0), ("rhs", 1), ("summed", 0)
        >>> dims, permutation = dimensions_of((x, y), (k, y), (k, x))
        >>> dims.numbers, permutation
        ((((1,), (1,)), ((), ())), (1, 0))
    """
    batch = tuple(label for label in out if label in first and label in second)
    summed = summed_labels(first, second, out)
    dims = Dimensions(
        len(first),
        len(second),
        tuple(first.index(label) for label in summed),
        tuple(second.index(label) for label in summed),
        tuple(first.index(label) for label in batch),
        tuple(second.index(label) for label in batch),
    )
    result = (*batch, *(first[axis] for axis in dims.lhs_free), *(second[axis] for axis in dims.rhs_free))
    return dims, tuple(result.index(label) for label in out)


def tile_of(label: Label) -> Label:
    """The label of an axis's tiles."""
    return ("tile", *label)
