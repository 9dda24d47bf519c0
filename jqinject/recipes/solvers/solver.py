"""What a solver is: a pure function from weights, statistics and a grid to numbers of that grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from jqinject.recipes.grid import Measure
from jqinject.recipes.statistics import Statistics


@dataclass(frozen=True)
class Problem:
    """A stack of matrices to put on a grid: those that one contraction contracts side by side, often a single one.

    Attributes:
        weights: of the quantized model so far, float32 `(stack, rows, columns)`: rows are outputs, columns inputs.
        original: of the float model, likewise.
        statistics: of the inputs of each matrix.
        measure: from matrices to the grid that the quantizer chooses for them, some of whose scales the matrices may
            share; for learned or stored scales always the same grid.
        group_size: consecutive columns that share a scale; None for no groups.
    """

    weights: jax.Array
    original: jax.Array
    statistics: Statistics
    measure: Measure
    group_size: int | None = None


class Solver(Protocol):
    """An algorithm that chooses the numbers of a stack of matrices.

    Attributes:
        statistics: which sums over the inputs it reads, names of `Statistics`.
    """

    @property
    def statistics(self) -> tuple[str, ...]: ...

    def __call__(self, problem: Problem) -> Solution:
        """Numbers on a grid, and the grid.

        Raises:
            ValueError: the statistics are not usable; the text names no path, which the pass adds.
        """
        ...


@dataclass(frozen=True)
class Solution:
    """What a solver chose.

    Attributes:
        values: numbers on the grid, float32 `(stack, rows, columns)`.
        scale, zero_point: of the grid, broadcasting with the values.
        working: the matrices that were rounded, with what the solver did to them; None if that is not told.
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array
    working: jax.Array | None = None
