"""Rounding column by column, each error spread over the columns that are still to come."""

from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jqinject.recipes.solvers.accumulator import Bounded, Room, room_of, rounded
from jqinject.recipes.solvers.solver import MatrixGrid, Measure, Problem, Solution, as_argument, ordered

ScaleRule = Literal["original", "live", "block"]
"""When a solver asks for scales: once, of the weights that it is given ("original"); of the matrix as it stands, at
every column ("live"); or for the groups that begin in a block, of the matrix as it stands when the block begins
("block", as in Qwix)."""


HIGHEST = jax.lax.Precision.HIGHEST


def round_columns(
    weights: jax.Array,
    factor: jax.Array,
    grid: MatrixGrid,
    measure: Measure,
    *,
    block_size: int,
    scales: ScaleRule = "original",
    group_size: int | None = None,
    room: Room | None = None,
) -> tuple[jax.Array, MatrixGrid, jax.Array]:
    """Numbers of a grid for all columns, in order; and their grid (Frantar et al., GPTQ).

    `q_j` is `w_j` rounded to nearest, `e = (w_j - q_j) / U_jj`, and `w_k -= e U_jk` for `k > j`. Columns of later
    blocks get the errors of a block at its end: that takes less time, and changes a result only where scales are
    measured on the way.

    Args:
        weights: `(stack, rows, columns)`, float32.
        factor: `U`, upper triangular, `(stack, columns, columns)`.
        grid: of the weights, with a scale for each number.
        measure: from matrices to the quantizer's grid, for scales that change.
        block_size: columns in a block.
        scales: when scales are measured.
        group_size: of the quantizer; None for no groups, whose scales are measured with the first block.
        room: what accumulators hold, for scales that do not change; None for no bound.

    Returns:
        Values, the grid that they are on, and the matrices as the last column left them: they differ from the values
        only where scales are measured on the way.
    """
    columns = weights.shape[-1]
    size = min(block_size, columns)
    more = -columns % size
    if scales == "block" and group_size is None:
        scales = "original"
    working, values, padded = _blocks(
        _padded(weights, more),
        _padded_factor(factor, more),
        _padded_grid(grid, more),
        None if room is None else room.padded(more),
        None if scales == "original" else as_argument(measure),
        columns,
        size,
        scales,
        group_size,
    )
    working, values = working[..., :columns], values[..., :columns]
    if scales == "original":
        return values, grid, values
    if scales == "live":
        grid = measure(working).spread(weights.shape)
        return grid.nearest(working), grid, working
    return values, padded.columns(slice(0, columns)), working


_Blocks = tuple[jax.Array, jax.Array, MatrixGrid, Room | None]
_Columns = tuple[jax.Array, jax.Array, jax.Array, Room | None]


@partial(jax.jit, static_argnums=(5, 6, 7, 8))
def _blocks(
    weights: jax.Array,
    factor: jax.Array,
    grid: MatrixGrid,
    room: Room | None,
    measure: Measure | None,
    columns: int,
    size: int,
    scales: ScaleRule,
    group_size: int | None,
) -> tuple[jax.Array, jax.Array, MatrixGrid]:
    """The matrices as the last column left them, their values, and the grid, block by block: see `round_columns`.

    Arrays are padded to blocks of one size; `measure` is None for scales that do not change.
    """
    places = jnp.arange(weights.shape[-1])

    def measured(working: jax.Array) -> MatrixGrid:
        assert measure is not None, "scales change"
        matrices = working[..., :columns]
        return _padded_grid(measure(matrices).spread(matrices.shape), weights.shape[-1] - columns)

    def block(number: jax.Array, state: _Blocks) -> _Blocks:
        working, values, grid, room = state
        start = number * size
        if scales == "block" and group_size is not None:
            first = places // group_size * group_size
            begins = (first >= start) & (first < start + size)
            grid = jax.tree.map(partial(jnp.where, begins), measured(working), grid)
        rows = jax.lax.dynamic_slice_in_dim(factor, start, size, -2)
        within = jax.lax.dynamic_slice_in_dim(rows, start, size, -1)

        def column(place: jax.Array, state: _Columns) -> _Columns:
            block, near, errors, room = state
            own = measured(_written(working, block, start)) if scales == "live" else grid
            now = jax.lax.dynamic_slice_in_dim(block, place, 1, -1)
            value, room = rounded(now, own.from_column(start + place, 1), start + place, room)
            row = jax.lax.dynamic_slice_in_dim(within, place, 1, -2)
            error = (now - value) / jax.lax.dynamic_slice_in_dim(row, place, 1, -1)
            block = block - error * jnp.where(jnp.arange(size) > place, row, 0.0)
            block, near = _written(block, value, place), _written(near, value, place)
            return block, near, _written(errors, error, place), room

        part = jax.lax.dynamic_slice_in_dim(working, start, size, -1)
        empty = jnp.zeros_like(part)
        part, near, errors, room = jax.lax.fori_loop(0, size, column, (part, empty, empty, room))
        later = jnp.where(places >= start + size, rows, 0.0)
        working = _written(working, part, start) - jnp.matmul(errors, later, precision=HIGHEST)
        return working, _written(values, near, start), grid, room

    start = (weights, jnp.zeros_like(weights), grid, room)
    return jax.lax.fori_loop(0, weights.shape[-1] // size, block, start)[:3]


def _written(matrix: jax.Array, part: jax.Array, column: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(matrix, part, column, -1)


def _padded(x: jax.Array, more: int, value: float = 0.0) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, more)), constant_values=value)


def _padded_factor(factor: jax.Array, more: int) -> jax.Array:
    columns = factor.shape[-1]
    padded = jnp.pad(factor, ((0, 0), (0, more), (0, more)))
    return padded + jnp.diag((jnp.arange(columns + more) >= columns).astype(factor.dtype))


def _padded_grid(grid: MatrixGrid, more: int) -> MatrixGrid:
    return replace(grid, scale=_padded(grid.scale, more, 1.0), zero_point=_padded(grid.zero_point, more))


class InOrder:
    """A problem whose columns are rounded in an order.

    Args:
        solver: that rounds them.
        problem: the problem.
        weights: that are to be rounded, in the problem's order.
        order: places of columns, `(stack, columns)`.

    Attributes:
        weights, original: the matrices in this order.
        grid: the quantizer's, of the problem's weights, in this order.
        room: what accumulators hold; None for no bound.
    """

    def __init__(self, solver: Bounded, problem: Problem, weights: jax.Array, order: jax.Array) -> None:
        self.weights, self.original = ordered(weights, order), ordered(problem.original, order)
        self.room = room_of(solver, problem, weights, order)
        self._problem, self._order, self._back = problem, order, jnp.argsort(order, axis=1)
        self._fixed = problem.measure(problem.weights)
        self.grid = self._fixed.spread(weights.shape).ordered(order)

    def measure(self, working: jax.Array) -> MatrixGrid:
        """The quantizer's grid of matrices in this order."""
        grid = self._problem.measure(ordered(working, self._back))
        return grid.spread(working.shape).ordered(self._order)

    def solution(self, values: jax.Array, grid: MatrixGrid, working: jax.Array) -> Solution:
        """The solution in the problem's order, of arrays in this one."""
        # An array for each number is not stored where fewer scales, or the values themselves, say the same.
        grid = self._fixed if grid is self.grid else grid.ordered(self._back)
        last, values = values, ordered(values, self._back)
        working = values if working is last else ordered(working, self._back)
        return Solution(values, grid.scale, grid.zero_point, working, complete=self.room is not None)


def by_importance(hessian: jax.Array, act_order: bool) -> jax.Array:
    """Places of the columns in the order in which they are rounded, `(stack, columns)`.

    Args:
        hessian: `(stack, columns, columns)`.
        act_order: whether the columns with the largest `hessian[j, j]` come first; as they are otherwise.
    """
    diagonal = diagonal_of(hessian)
    if act_order:
        return jnp.argsort(-diagonal, axis=1, stable=True)
    return jnp.broadcast_to(jnp.arange(diagonal.shape[1]), diagonal.shape)


def diagonal_of(matrices: jax.Array) -> jax.Array:
    """The diagonals of a stack of matrices, `(stack, columns)`."""
    return jnp.diagonal(matrices, axis1=-2, axis2=-1)


def on_diagonal(matrices: jax.Array, more: jax.Array) -> jax.Array:
    """Matrices with something added to each diagonal: a number for each matrix, or one for each place."""
    eye = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    return matrices + eye * (more[:, None, None] if more.ndim == 1 else more[:, None])


def both_ordered(matrices: jax.Array, order: jax.Array) -> jax.Array:
    """Matrices with their rows and their columns in another order, `(stack, columns)`."""
    return ordered(jnp.take_along_axis(matrices, order[:, :, None], axis=1), order)


def without_dead_inputs(hessian: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A Hessian with 1 on its diagonal for inputs that were always 0, and weights of 0 for these."""
    dead = diagonal_of(hessian) == 0
    return on_diagonal(hessian, dead.astype(hessian.dtype)), jnp.where(dead[:, None], 0.0, weights)


def inverse_factor(hessian: jax.Array) -> jax.Array:
    """The upper triangular `U` with `U^T U = hessian^-1`; nan if a Hessian is not positive definite."""
    # H = R R^T with R upper triangular is the Cholesky factorization of H with its rows and columns reversed; then
    # H^-1 = (R^-1)^T R^-1. H itself is not inverted.
    reversed_factor = jnp.linalg.cholesky(hessian[..., ::-1, ::-1])
    eye = jnp.broadcast_to(jnp.eye(hessian.shape[-1], dtype=hessian.dtype), hessian.shape)
    return jax.lax.linalg.triangular_solve(reversed_factor[..., ::-1, ::-1], eye, left_side=True, lower=False)


def inverse(matrices: jax.Array) -> jax.Array:
    """The inverses of symmetric matrices; nan for those that are not positive definite."""
    lower = jnp.linalg.cholesky(matrices)
    eye = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)
    half = jax.lax.linalg.triangular_solve(lower, eye, left_side=True, lower=True)
    return jnp.matmul(half.mT, half, precision=jax.lax.Precision.HIGHEST)
