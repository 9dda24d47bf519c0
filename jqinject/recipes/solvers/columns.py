"""Rounding column by column, each error spread over the columns that are still to come."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.recipes.grid import MatrixGrid, Measure
from jqinject.recipes.solvers.accumulator import Room, rounded
from jqinject.recipes.solvers.scale_rules import ScaleRule, scales_at

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
