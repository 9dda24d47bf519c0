"""What a solver is: a pure function from weights, statistics and a grid to numbers of that grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops import Grid
from jqinject.recipes.rounding_grid import MatrixGrid, Measure
from jqinject.recipes.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Sharing:
    """Which numbers of a stack of matrices have the same scale, and what scales may be.

    Attributes:
        owners: makes, for each number, `(stack, rows, columns)`, which scale it has; None: each row has its own, cut
            into groups of columns.
        group_size: of these groups; None for no groups.
        restricted: whether scales are numbers of a format themselves, such as powers of two.
        whole_zero_points: whether zero points are integers.
    """

    owners: Callable[[], np.ndarray] | None = None
    group_size: int | None = None
    restricted: bool = False
    whole_zero_points: bool = True

    def places(self, shape: tuple[int, ...]) -> np.ndarray:
        """For each number of matrices of a shape, which scale it has."""
        if self.owners is not None:
            return self.owners()
        columns = np.arange(shape[2]) // (self.group_size or shape[2])
        rows = np.arange(shape[0] * shape[1])[:, None] * (columns[-1] + 1)
        return (rows + columns).reshape(shape)


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
        known_sharing: which numbers share a scale; None: as `measure` and `group_size` say of one row.
        input_integers: bits and sign of the integers that the quantized model contracts the matrices with; None if its
            inputs are no integers.
    """

    weights: jax.Array
    original: jax.Array
    statistics: Statistics
    measure: Measure
    group_size: int | None = None
    known_sharing: Sharing | None = field(default=None, repr=False)
    input_integers: tuple[int, bool] | None = None

    @property
    def sharing(self) -> Sharing:
        """Which numbers share a scale."""
        return Sharing(group_size=self.group_size) if self.known_sharing is None else self.known_sharing


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
        complete: whether matrices that no sample reached are solved too, because the solver keeps a bound for all.
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array
    working: jax.Array | None = None
    complete: bool = False


def integer_grid(problem: Problem, solver: str) -> tuple[MatrixGrid, Grid]:
    """The grid of a problem's weights, with a scale for each, and its integers.

    Args:
        problem: of integers.
        solver: who asks, for the error.

    Raises:
        ValueError: the grid is another one.
    """
    found = problem.measure(problem.weights).spread(problem.weights.shape)
    if not found.grid.is_integer:
        raise ValueError(
            f"{solver} learns how integers are rounded, and the quantizer's grid is a {type(found.grid).__name__}.\n"
            "  cure: GPTQ(), which serves every grid, or an integer quantizer"
        )
    return found, found.grid


def bounded_codes(codes: jax.Array, grid: Grid) -> jax.Array:
    """Codes within the grid; the gradient passes where they are, its ends included."""
    low, high = grid.bounds
    return jnp.where(codes < low, low, jnp.where(codes > high, high, codes))


def squared_errors(wrong: jax.Array, hessian: jax.Array) -> jax.Array:
    """`tr(D H D^T)` of each matrix, `(stack,)`."""
    return jnp.sum(wrong * jnp.matmul(wrong, hessian, precision=jax.lax.Precision.HIGHEST), axis=(1, 2))
