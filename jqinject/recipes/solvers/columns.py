"""Rounding column by column, each error spread over the columns that are still to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jqinject.recipes.solvers.accumulator import Room, rounded
from jqinject.recipes.solvers.solver import MatrixGrid, Measure, ordered

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
        group_size: of the quantizer; None for no groups.
        room: what accumulators hold, for scales that do not change; None for no bound.

    Returns:
        Values, the grid that they are on, and the matrices as the last column left them: they differ from the values
        only where scales are measured on the way.
    """
    columns = weights.shape[-1]
    size = min(block_size, columns)
    grid = measure(weights).spread(weights.shape)
    rule = scales_at(scales, measure, group_size, columns)
    if rule is None:
        more = None if room is None else room.padded(_missing(columns, size))
        padded = _padded(weights, size), _padded_factor(factor, size), _padded_grid(grid, size)
        values = _round_frozen(*padded, more, size)[..., :columns]
        return values, grid, values
    working, values, grid = _round_measured(weights, factor, grid, rule, size)
    if scales == "live":
        grid = measure(working).spread(weights.shape)
        values = grid.nearest(working)
    return values, grid, working


@partial(jax.jit, static_argnums=4)
def _round_frozen(
    weights: jax.Array, factor: jax.Array, grid: MatrixGrid, room: Room | None, size: int
) -> jax.Array:
    return _blocks(weights, factor, grid, None, size, room)[1]


def _round_measured(weights: Any, factor: Any, grid: MatrixGrid, rule: Any, size: int) -> Any:
    columns = weights.shape[-1]

    def run(weights: jax.Array, factor: jax.Array, grid: MatrixGrid) -> Any:
        return _blocks(weights, factor, grid, rule, size)

    padded = _padded(weights, size), _padded_factor(factor, size), _padded_grid(grid, size)
    working, values, grid = jax.jit(run)(*padded)
    return working[..., :columns], values[..., :columns], grid.columns(slice(0, columns))


def _blocks(
    weights: jax.Array, factor: jax.Array, grid: MatrixGrid, rule: Any, size: int, room: Room | None = None
) -> Any:
    columns = weights.shape[-1]

    def block(number: jax.Array, state: Any) -> Any:
        working, values, grid, room = state
        start = number * size
        if rule is not None:
            grid = rule.at_block(grid, working, start, size)
        block, near, errors, grid, room = _round_block(working, factor, grid, rule, start, size, room)
        rows = jax.lax.dynamic_slice_in_dim(factor, start, size, -2)
        later = jnp.where(jnp.arange(columns) >= start + size, rows, 0.0)
        working = _written(working, block, start) - jnp.matmul(errors, later, precision=HIGHEST)
        return working, _written(values, near, start), grid, room

    start = (weights, jnp.zeros_like(weights), grid, room)
    return jax.lax.fori_loop(0, columns // size, block, start)[:3]


def _round_block(
    working: jax.Array,
    factor: jax.Array,
    grid: MatrixGrid,
    rule: Any,
    start: jax.Array,
    size: int,
    room: Room | None,
) -> tuple[jax.Array, jax.Array, jax.Array, MatrixGrid, Room | None]:
    rows = jax.lax.dynamic_slice_in_dim(factor, start, size, -2)
    within = jax.lax.dynamic_slice_in_dim(rows, start, size, -1)

    def column(place: jax.Array, state: Any) -> Any:
        block, done, errors, grid, room = state
        if rule is not None:
            grid = rule.at_column(grid, lambda: _written(working, block, start))
        now = jax.lax.dynamic_slice_in_dim(block, place, 1, -1)
        near, room = rounded(now, grid.from_column(start + place, 1), start + place, room)
        row = jax.lax.dynamic_slice_in_dim(within, place, 1, -2)
        error = (now - near) / jax.lax.dynamic_slice_in_dim(row, place, 1, -1)
        block = block - error * jnp.where(jnp.arange(size) > place, row, 0.0)
        return (
            _written(block, near, place),
            _written(done, near, place),
            _written(errors, error, place),
            grid,
            room,
        )

    block = jax.lax.dynamic_slice_in_dim(working, start, size, -1)
    empty = jnp.zeros_like(block)
    return jax.lax.fori_loop(0, size, column, (block, empty, empty, grid, room))


def _written(whole: jax.Array, part: jax.Array, column: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, column, -1)


def _missing(columns: int, size: int) -> int:
    return -columns % size


def _padded(x: jax.Array, size: int, value: float = 0.0) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, _missing(x.shape[-1], size))), constant_values=value)


def _padded_factor(factor: jax.Array, size: int) -> jax.Array:
    columns = factor.shape[-1]
    more = _missing(columns, size)
    whole = jnp.pad(factor, ((0, 0), (0, more), (0, more)))
    return whole + jnp.diag((jnp.arange(columns + more) >= columns).astype(factor.dtype))


def _padded_grid(grid: MatrixGrid, size: int) -> MatrixGrid:
    return replace(grid, scale=_padded(grid.scale, size, 1.0), zero_point=_padded(grid.zero_point, size))


def check_rounding(name: str, block_size: int, damping: float) -> None:
    """Refuse numbers that no solver can use.

    Args:
        name: the solver's.
        block_size: of columns.
        damping: a share.

    Raises:
        ValueError: a block of no columns; a damping that is negative or not finite.
    """
    if block_size < 1:
        raise ValueError(
            f"{name}: block_size must be at least 1, got {block_size!r}.\n  cure: block_size=128"
        )
    if not 0 <= damping < float("inf"):
        raise ValueError(
            f"{name}: damping must be a number of at least 0, got {damping!r}.\n  cure: damping=0.01"
        )


def positive(name: str, **numbers: float | None) -> None:
    """Refuse numbers that are given and not above 0.

    Args:
        name: the solver's.
        numbers: its choices.

    Raises:
        ValueError: one is not.
    """
    for choice, number in numbers.items():
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(
                f"{name}: {choice} must be a number above 0, got {number!r}.\n  cure: leave it out"
            )


def by_importance(hessian: jax.Array, wanted: bool) -> jax.Array:
    """Places of the columns in the order in which they are rounded, `(stack, columns)`.

    Args:
        hessian: `(stack, columns, columns)`.
        wanted: whether the columns with the largest `hessian[j, j]` come first; as they are otherwise.
    """
    diagonal = diagonal_of(hessian)
    if wanted:
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
