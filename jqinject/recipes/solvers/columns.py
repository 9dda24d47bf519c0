"""Rounding column by column, each error spread over the columns that are still to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jqinject.recipes.solvers.accumulator import Room, rounded
from jqinject.recipes.solvers.solver import MatrixGrid, Measure, ordered

ScaleRule = Literal["original", "live", "block"]
"""When a solver asks for scales: once, of the weights that it is given ("original"); of the matrix as it stands, at
every column ("live"); or for the groups that begin in a block, of the matrix as it stands when the block begins
("block", as in Qwix)."""


HIGHEST = jax.lax.Precision.HIGHEST


def round_columns(
    weights: jax.Array,
    factor: jax.Array,
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
        measure: from matrices to the quantizer's grid.
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
    grid = measure(weights).spread(weights.shape)
    padded = _padded(weights, more), _padded_factor(factor, more), _padded_grid(grid, more)
    if scales == "original" or (scales == "block" and group_size is None):
        values = _round_fixed(*padded, None if room is None else room.padded(more), size)[..., :columns]
        return values, grid, values

    def measured(working: jax.Array) -> MatrixGrid:
        return _padded_grid(measure(working[..., :columns]).spread(weights.shape), more)

    def at_block(grid: MatrixGrid, working: jax.Array, start: jax.Array) -> MatrixGrid:
        new = measured(working)
        first = jnp.arange(columns + more) // (group_size or columns) * (group_size or columns)
        begins = (first >= start) & (first < start + size)
        scale = jnp.where(begins, new.scale, grid.scale)
        return replace(grid, scale=scale, zero_point=jnp.where(begins, new.zero_point, grid.zero_point))

    def at_column(grid: MatrixGrid, working: Callable[[], jax.Array]) -> MatrixGrid:
        return measured(working())

    @jax.jit
    def run(
        weights: jax.Array, factor: jax.Array, grid: MatrixGrid
    ) -> tuple[jax.Array, jax.Array, MatrixGrid]:
        if scales == "live":
            return _blocks(weights, factor, grid, None, size, at_column=at_column)
        return _blocks(weights, factor, grid, None, size, at_block=at_block)

    working, values, grid = run(*padded)
    working, values, grid = working[..., :columns], values[..., :columns], grid.columns(slice(0, columns))
    if scales == "live":
        grid = measure(working).spread(weights.shape)
        values = grid.nearest(working)
    return values, grid, working


@partial(jax.jit, static_argnums=4)
def _round_fixed(
    weights: jax.Array, factor: jax.Array, grid: MatrixGrid, room: Room | None, size: int
) -> jax.Array:
    return _blocks(weights, factor, grid, room, size)[1]


_Blocks = tuple[jax.Array, jax.Array, MatrixGrid, Room | None]
_Columns = tuple[jax.Array, jax.Array, jax.Array, MatrixGrid, Room | None]


def _unchanged(grid: MatrixGrid, *rest: object) -> MatrixGrid:
    return grid


def _blocks(
    weights: jax.Array,
    factor: jax.Array,
    grid: MatrixGrid,
    room: Room | None,
    size: int,
    *,
    at_block: Callable[[MatrixGrid, jax.Array, jax.Array], MatrixGrid] = _unchanged,
    at_column: Callable[[MatrixGrid, Callable[[], jax.Array]], MatrixGrid] = _unchanged,
) -> tuple[jax.Array, jax.Array, MatrixGrid]:
    """The matrices as the last column left them, their values, and the grid, block by block."""
    columns = weights.shape[-1]

    def block(number: jax.Array, state: _Blocks) -> _Blocks:
        working, values, grid, room = state
        start = number * size
        grid = at_block(grid, working, start)
        rows = jax.lax.dynamic_slice_in_dim(factor, start, size, -2)
        within = jax.lax.dynamic_slice_in_dim(rows, start, size, -1)

        def column(place: jax.Array, state: _Columns) -> _Columns:
            block, near, errors, grid, room = state
            grid = at_column(grid, lambda: _written(working, block, start))
            now = jax.lax.dynamic_slice_in_dim(block, place, 1, -1)
            value, room = rounded(now, grid.from_column(start + place, 1), start + place, room)
            row = jax.lax.dynamic_slice_in_dim(within, place, 1, -2)
            error = (now - value) / jax.lax.dynamic_slice_in_dim(row, place, 1, -1)
            block = block - error * jnp.where(jnp.arange(size) > place, row, 0.0)
            block, near = _written(block, value, place), _written(near, value, place)
            return block, near, _written(errors, error, place), grid, room

        part = jax.lax.dynamic_slice_in_dim(working, start, size, -1)
        empty = jnp.zeros_like(part)
        part, near, errors, grid, room = jax.lax.fori_loop(0, size, column, (part, empty, empty, grid, room))
        later = jnp.where(jnp.arange(columns) >= start + size, rows, 0.0)
        working = _written(working, part, start) - jnp.matmul(errors, later, precision=HIGHEST)
        return working, _written(values, near, start), grid, room

    start = (weights, jnp.zeros_like(weights), grid, room)
    return jax.lax.fori_loop(0, columns // size, block, start)[:3]


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
