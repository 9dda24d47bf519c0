"""Contractions of rows with stored numbers by the compiled kernels: which fit, and how they are laid out."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.native.stored_matmul import (
    INT4,
    SCALE_DTYPES,
    UINT4,
    ZERO_DTYPES,
    Scales,
    StoredRows,
    takes_stored,
)

TABLES = {"int4": INT4, "uint4": UINT4}
"""What integers in 4 bits stand for, by dtype."""


class RowLayout(NamedTuple):
    """How a contraction is a product of rows with stored rows.

    Attributes:
        lhs: the axes of the left operand: rows, then what is summed.
        rhs: those of the right one, likewise.
        groups: the size of a group, 0 without; with groups, the last summed axis is the elements of one, and each index
            of the others a group.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    groups: int


def rows_of(
    lhs: tuple[int, ...], rhs: tuple[int, ...], dims: Dimensions, grouped: tuple[int, ...] = ()
) -> RowLayout | None:
    """The contraction as a product of rows with rows stored with the summed axes last; None if it is not one.

    Args:
        lhs, rhs: the shapes of the operands.
        dims: of the contraction.
        grouped: the summed pairs along which scales vary: none, or one, followed by the elements of its groups.
    """
    sized = all(isinstance(size, int) and size > 0 for size in (*lhs, *rhs))
    pairs = sorted(range(len(dims.rhs_contract)), key=dims.rhs_contract.__getitem__)
    if not sized or not pairs or dims.lhs_batch or len(grouped) > 1:
        return None
    if grouped and pairs[-2:-1] != [grouped[0]]:
        return None
    summed = [tuple(axes[pair] for pair in pairs) for axes in (dims.lhs_contract, dims.rhs_contract)]
    size = rhs[summed[1][-1]] if grouped else 0
    return RowLayout((*dims.lhs_free, *summed[0]), (*dims.rhs_free, *summed[1]), size)


def as_rows(x: jax.Array, axes: tuple[int, ...], free: int) -> jax.Array:
    """An array as a matrix: its first `free` of `axes` are the rows."""
    moved = x.transpose(axes)
    return moved.reshape(math.prod(moved.shape[:free]), -1)


def packed_rows(
    packed: jax.Array | None, shape: tuple[int, ...], rows: RowLayout, free: int
) -> jax.Array | None:
    """Numbers in 4 bits, as they were stored with the summed axes last, as rows; None if bytes hold several rows.

    Args:
        packed: the bytes.
        shape: of the numbers.
        rows: how they are contracted.
        free: the number of axes that are not summed.
    """
    if packed is None:
        return None
    order = [shape[axis] for axis in rows.rhs]
    expected = (*order[:-1], -(-order[-1] // 2))
    several = len(order) - free > 1
    if packed.shape != expected or (several and order[-1] % 2):
        return None
    return packed.reshape(math.prod(order[:free]), -1)


def scales_of(
    scale: jax.Array, zero: jax.Array | None, shape: tuple[int, ...], rows: RowLayout, free: int
) -> tuple[Scales, bool]:
    """Scales and zero points as the kernels take them, and whether they lie column by column.

    Args:
        scale, zero: broadcast against the stored numbers.
        shape: of the stored numbers.
        rows: how they are contracted.
        free: the number of axes that are not summed.
    """
    columns, groups = rows.rhs[:free], rows.rhs[free:-1] if rows.groups else ()
    by_column = bool(groups) and bool(columns) and groups[0] > columns[0]
    order = (*columns, *groups) if by_column else (*groups, *columns)
    sizes = [size if axis in order else 1 for axis, size in enumerate(shape)]
    count = math.prod(shape[axis] for axis in groups)

    def laid_out(x: jax.Array, dtypes: tuple[np.dtype, ...]) -> jax.Array:
        full = jnp.broadcast_to(x if x.dtype in dtypes else x.astype(jnp.float32), sizes)
        rest = tuple(axis for axis in range(len(shape)) if axis not in order)
        moved = full.transpose((*order, *rest))
        return moved.reshape((-1, count) if by_column else (count, -1))

    zeros = None if zero is None else laid_out(zero, ZERO_DTYPES)
    return Scales(laid_out(scale, SCALE_DTYPES), zeros), by_column


def stored_rows(
    payload: jax.Array, packed: jax.Array | None, table: tuple[float, ...] | None, rows: RowLayout, free: int
) -> tuple[jax.Array, tuple[float, ...] | None] | None:
    """The right operand as rows that the kernels read, and what their numbers stand for; None if it has none.

    Args:
        payload: the numbers; int8, unless they are packed.
        packed: the same in 4 bits as stored; None if they are bytes.
        table: what the 16 numbers in 4 bits stand for.
        rows: how they are contracted.
        free: the number of axes that are not summed.
    """
    if packed is not None and table is not None:
        in_rows = packed_rows(packed, payload.shape, rows, free)
        return None if in_rows is None else (in_rows, table)
    if payload.dtype != jnp.int8:
        return None
    return as_rows(payload, rows.rhs, free), None


def fitting(rows: RowLayout, lhs: jax.Array, shape: tuple[int, ...], table: object, free: int) -> bool:
    """Whether the kernels are there and take such a product.

    Args:
        rows: how the numbers are contracted.
        lhs: the left operand.
        shape: of the stored numbers.
        table: what numbers in 4 bits stand for; None for bytes.
        free: the number of their axes that are not summed.
    """
    depth = math.prod(shape[axis] for axis in rows.rhs[free:])
    static = StoredRows(None if table is None else (0.0,), rows.groups)
    return takes_stored(static, depth, lhs.size // max(depth, 1), jnp.issubdtype(lhs.dtype, jnp.floating))
