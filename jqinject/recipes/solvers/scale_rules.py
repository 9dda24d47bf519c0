"""When scales are measured while columns are rounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jqinject.recipes.grid import MatrixGrid, Measure

ScaleRule = Literal["original", "live", "block"]
"""When a solver asks for scales: once, of the weights that it is given ("original"); of the matrix as it stands, at
every column ("live"); or for the groups that begin in a block, of the matrix as it stands when the block begins
("block", as in Qwix)."""


@dataclass(frozen=True)
class _Measured:
    """Measures the first columns of padded matrices; the others keep scale 1."""

    measure: Measure
    columns: int

    def _of(self, working: jax.Array) -> MatrixGrid:
        found = self.measure(working[..., : self.columns]).spread((*working.shape[:-1], self.columns))
        more = ((0, 0), (0, 0), (0, working.shape[-1] - self.columns))
        scale = jnp.pad(found.scale, more, constant_values=1.0)
        return replace(found, scale=scale, zero_point=jnp.pad(found.zero_point, more))

    def at_block(self, grid: MatrixGrid, working: jax.Array, start: Any, size: int) -> MatrixGrid:
        """The grid when a block begins."""
        return grid

    def at_column(self, grid: MatrixGrid, working: Callable[[], jax.Array]) -> MatrixGrid:
        """The grid when a column is rounded."""
        return grid


class _Live(_Measured):
    def at_column(self, grid: MatrixGrid, working: Callable[[], jax.Array]) -> MatrixGrid:
        """See `_Measured`."""
        return self._of(working())


@dataclass(frozen=True)
class _AtBlock(_Measured):
    group_size: int

    def at_block(self, grid: MatrixGrid, working: jax.Array, start: Any, size: int) -> MatrixGrid:
        """See `_Measured`."""
        new = self._of(working)
        first = jnp.arange(working.shape[-1]) // self.group_size * self.group_size
        begins = (first >= start) & (first < start + size)
        scale = jnp.where(begins, new.scale, grid.scale)
        return replace(grid, scale=scale, zero_point=jnp.where(begins, new.zero_point, grid.zero_point))


def scales_at(scales: ScaleRule, measure: Measure, group_size: int | None, columns: int) -> Any:
    """What measures scales on the way; None if nothing does.

    Args:
        scales: the rule.
        measure: the quantizer's.
        group_size: of the quantizer; None for no groups, whose scales are measured with the first block.
        columns: of the matrix.
    """
    if scales == "original" or (scales == "block" and group_size is None):
        return None
    return _Live(measure, columns) if scales == "live" else _AtBlock(measure, columns, group_size or columns)
