"""What a solver is: a pure function from weights, statistics and a grid to numbers of that grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax

from jqinject.recipes.grid import Measure
from jqinject.recipes.statistics import Statistics


@dataclass(frozen=True)
class Problem:
    """One matrix to put on a grid.

    Attributes:
        weights: of the quantized model so far, float32 `(rows, columns)`: rows are outputs, columns inputs.
        original: of the float model, likewise.
        statistics: of the inputs, without the axis of the stack.
        measure: from a matrix to the grid that the quantizer chooses for it; for learned or stored scales the same
            grid for every matrix.
        group_size: consecutive columns that share a scale; None for no groups.
    """

    weights: jax.Array
    original: jax.Array
    statistics: Statistics
    measure: Measure
    group_size: int | None = None


class Solver(Protocol):
    """An algorithm that chooses the numbers of one matrix.

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
        values: numbers on the grid, float32 `(rows, columns)`.
        scale, zero_point: of the grid, broadcasting with the values.
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array
