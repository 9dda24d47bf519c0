"""Contractions of integers of which one has scales for groups along a summed axis: how, on each platform.

On a CPU with the compiled kernels they are contracted group by group in one call. Where these do not take the left
operand (unsigned integers, zero points, more rows), it is dequantized, and the right one in registers. On a CPU without
kernels groups of fewer than 128 are dequantized, because each makes a whole output: (256, 1024) x (1024, 1024) in
groups of 32 takes 224 ms as integers, 10 ms dequantized. Elsewhere, and in a program for several devices, the integers
of each group are one contraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.stored_rows import (
    TABLES,
    RowLayout,
    as_rows,
    fitting,
    rows_of,
    scales_of,
    stored_rows,
)
from jqinject.native.stored_matmul import StoredRows, float_matmul, group_matmul
from jqinject.ops.processes import on_one_device
from jqinject.ops.sharding import varying_with

if TYPE_CHECKING:
    from jqinject.dot.kernels.integer import Affine

LEAST_GROUP = 128
"""Smaller groups are contracted as floats, unless integers are asked for. Qwix uses the same limit."""
Contract = Callable[[Any, Any], jax.Array]


def contract_groups(lhs: Affine, rhs: Affine, dims: Dimensions, pair: int, plain: Contract) -> jax.Array:
    """The contraction in float32 of integers, along one of whose summed axes a scale or zero point varies.

    Args:
        lhs, rhs: the operands, `Affine`.
        dims: of the contraction.
        pair: the summed pair of axes that are groups.
        plain: the contraction as XLA partitions it over devices.
    """
    leaves, tree = jax.tree.flatten((lhs, rhs))
    otherwise = _Otherwise(tree, plain)
    rows = rows_of(lhs.payload.shape, rhs.payload.shape, dims, (pair,))
    return on_one_device(_Alone(tree, dims, pair, rows, plain), otherwise, *leaves)


@dataclass(frozen=True)
class _Otherwise:
    tree: Any
    plain: Contract

    def __call__(self, *leaves: jax.Array) -> jax.Array:
        return self.plain(*jax.tree.unflatten(self.tree, leaves))


@dataclass(frozen=True)
class _Alone:
    """The contraction by the means of the platform."""

    tree: Any
    dims: Dimensions
    pair: int
    rows: RowLayout | None
    plain: Contract

    def __call__(self, *leaves: jax.Array) -> jax.Array:
        otherwise = _Otherwise(self.tree, self.plain)
        return jax.lax.platform_dependent(*leaves, cpu=self._on_cpu, default=otherwise)

    def _on_cpu(self, *leaves: jax.Array) -> jax.Array:
        lhs, rhs = jax.tree.unflatten(self.tree, leaves)
        by_kernel = None if self.rows is None else self._by_kernel(lhs, rhs, self.rows)
        if by_kernel is not None:
            return by_kernel
        sizes = [lhs.payload.shape[axis] for axis in self.dims.lhs_contract]
        sized = all(isinstance(size, int) for size in sizes)  # not in an export for any platform
        if not sized or math.prod(sizes) >= LEAST_GROUP * sizes[self.pair]:
            return self.plain(lhs, rhs)
        return jax.lax.dot_general(lhs.dequantized(), rhs.dequantized(), self.dims.numbers)

    def _by_kernel(self, lhs: Affine, rhs: Affine, rows: RowLayout) -> jax.Array | None:
        free = (len(self.dims.lhs_free), len(self.dims.rhs_free))
        shape = rhs.payload.shape
        stored = stored_rows(rhs.payload, rhs.packed, TABLES.get(rhs.payload.dtype.name), rows, free[1])
        of_rows = [lhs.payload.shape[axis] for axis in rows.lhs[: free[0]]]
        if stored is None:
            return None
        payload, table = stored
        scales, by_column = scales_of(rhs.scale, rhs.zero_point, shape, rows, free[1])
        static = StoredRows(table, rows.groups, by_column)

        def fits(left: jax.Array) -> bool:
            return fitting(rows, left, shape, table, free[1])

        left = lhs.dequantized()
        if _is_signed_bytes(lhs) and fits(lhs.payload):
            integers = as_rows(lhs.payload.astype(jnp.int8), rows.lhs, free[0])
            y = group_matmul(integers, _scale_of_rows(lhs, rows, free[0]), payload, scales, static)
        elif fits(left):
            y = float_matmul(as_rows(left, rows.lhs, free[0]), payload, scales, static)
        else:
            return None
        y = varying_with(y, *jax.tree.leaves((lhs, rhs)))
        return y.reshape(*of_rows, *(shape[axis] for axis in rows.rhs[: free[1]]))


def _is_signed_bytes(x: Affine) -> bool:
    """Whether an operand has signed integers of at most 8 bits and no zero point."""
    dtype = x.payload.dtype
    return x.zero_point is None and dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.signedinteger)


def _scale_of_rows(lhs: Affine, rows: RowLayout, free: int) -> jax.Array:
    """Of the left operand: `(rows, 1)`, or `(rows, groups)`."""
    shape, order = lhs.payload.shape, rows.lhs
    scale = lhs.scale.reshape((1,) * (len(shape) - lhs.scale.ndim) + lhs.scale.shape)
    groups = order[free:-1]
    full = order[:-1] if any(scale.shape[axis] > 1 for axis in groups) else order[:free]
    sizes = [shape[axis] if axis in full else size for axis, size in enumerate(scale.shape)]
    return as_rows(jnp.broadcast_to(scale, sizes), order, free)
