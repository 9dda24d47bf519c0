"""For solvers that learn how integers are rounded."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jqinject.ops import Grid
from jqinject.recipes.grid import MatrixGrid
from jqinject.recipes.solvers.columns import HIGHEST
from jqinject.recipes.solvers.solver import Problem


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
    return jnp.sum(wrong * jnp.matmul(wrong, hessian, precision=HIGHEST), axis=(1, 2))
