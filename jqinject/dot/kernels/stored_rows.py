"""Contractions of rows with stored numbers by the compiled kernels: which fit, and how they are laid out."""

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
    float_matmul,
    group_matmul,
    takes_stored,
)
from jqinject.ops.sharding import varying_with
from jqinject.quant_tensor.shaping import full_rank

Axes = tuple[tuple[int, ...], tuple[int, ...]]
#: What integers in 4 bits stand for, by dtype.
TABLES = {"int4": INT4, "uint4": UINT4}


class RowLayout(NamedTuple):
    """How a contraction is a product of rows with stored rows.

    Attributes:
        lhs: the axes of the left operand: rows, and what is summed.
        rhs: those of the right one, likewise.
        groups: the size of a group, 0 without; with groups, the last summed axis is the elements of one, and each index
            of the others a group.
    """

    lhs: Axes
    rhs: Axes
    groups: int


class StoredOperand(NamedTuple):
    """A stored operand.

    Attributes:
        payload: the numbers.
        packed: the same in 4 bits as they are stored; None if they are bytes.
        table: what the 16 numbers in 4 bits stand for.
        scale, zero_point: broadcast against the payload; None for no zero point.
    """

    payload: jax.Array
    packed: jax.Array | None
    table: tuple[float, ...] | None
    scale: jax.Array
    zero_point: jax.Array | None


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
    left, right = (tuple(axes[pair] for pair in pairs) for axes in (dims.lhs_contract, dims.rhs_contract))
    return RowLayout((dims.lhs_free, left), (dims.rhs_free, right), rhs[right[-1]] if grouped else 0)


def merged(x: jax.Array, *parts: tuple[int, ...]) -> jax.Array:
    """An array with one axis for each part of its axes: `(rows, summed)` of two parts.

    Example:
        >>> merged(jnp.zeros((2, 3, 4)), (1,), (0, 2)).shape
        (3, 8)
    """
    sizes = [math.prod(x.shape[axis] for axis in part) for part in parts]
    return x.transpose([axis for part in parts for axis in part]).reshape(sizes)


def packed_rows(packed: jax.Array, shape: tuple[int, ...], rows: RowLayout) -> jax.Array | None:
    """Numbers in 4 bits, as they were stored with the summed axes last, as rows; None if bytes hold several rows.

    Args:
        packed: the bytes.
        shape: of the numbers.
        rows: how they are contracted.
    """
    free, summed = ([shape[axis] for axis in axes] for axes in rows.rhs)
    expected = (*free, *summed[:-1], -(-summed[-1] // 2))
    if packed.shape != expected or (len(summed) > 1 and summed[-1] % 2):
        return None
    return packed.reshape(math.prod(free), -1)


def scales_of(
    scale: jax.Array, zero: jax.Array | None, shape: tuple[int, ...], rows: RowLayout
) -> tuple[Scales, bool]:
    """Scales and zero points as the kernels take them, and whether they lie column by column.

    Args:
        scale, zero: broadcast against the stored numbers.
        shape: of the stored numbers.
        rows: how they are contracted.
    """
    columns, summed = rows.rhs
    groups = summed[:-1] if rows.groups else ()
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


def stored_product(
    x: jax.Array,
    right: StoredOperand,
    dims: Dimensions,
    grouped: tuple[int, ...],
    integers: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array | None:
    """A contraction with stored numbers by the compiled kernels, float32; None if they do not take it.

    Args:
        x: the left operand, float32.
        right: the stored operand.
        dims: of the contraction.
        grouped: as for `rows_of`.
        integers: signed bytes and scales that `x` is, which are contracted instead where a kernel takes them.
    """
    payload, packed, table, scale, zero = right
    rows = rows_of(tuple(x.shape), payload.shape, dims, grouped)
    if rows is None:
        return None
    if packed is not None and table is not None:
        numbers = packed_rows(packed, payload.shape, rows)
    elif payload.dtype == jnp.int8:
        numbers, table = merged(payload, *rows.rhs), None
    else:
        return None
    if numbers is None:
        return None
    scales, by_column = scales_of(scale, zero, payload.shape, rows)
    static = StoredRows(table, rows.groups, by_column)
    depth = math.prod(payload.shape[axis] for axis in rows.rhs[1])

    def fits(left: jax.Array) -> bool:
        return takes_stored(
            static, depth, left.size // max(depth, 1), jnp.issubdtype(left.dtype, jnp.floating)
        )

    if integers is not None and fits(integers[0]):
        left = merged(integers[0].astype(jnp.int8), *rows.lhs)
        y = group_matmul(left, _scale_of_rows(*integers, rows), numbers, scales, static)
    elif fits(x):
        y = float_matmul(merged(x, *rows.lhs), numbers, scales, static)
    else:
        return None
    sizes = [x.shape[axis] for axis in dims.lhs_free] + [payload.shape[axis] for axis in dims.rhs_free]
    return varying_with(y, x, *jax.tree.leaves((payload, packed, scale, zero))).reshape(sizes)


def _scale_of_rows(payload: jax.Array, scale: jax.Array, rows: RowLayout) -> jax.Array:
    """Of the left operand: `(rows, 1)`, or `(rows, groups)`."""
    scale, (free, (*groups, _)) = full_rank(scale, payload.ndim), rows.lhs
    full = (*free, *groups) if any(scale.shape[axis] > 1 for axis in groups) else free
    sizes = [payload.shape[axis] if axis in full else size for axis, size in enumerate(scale.shape)]
    return merged(jnp.broadcast_to(scale, sizes), *rows.lhs)
