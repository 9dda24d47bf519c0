"""The factors of low-rank updates that stand for a given array."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jqinject.model.lora.adapter_plan import PlannedAdapter
from jqinject.program import Adapter


def nearest_factors(
    dense: jax.Array, plan: PlannedAdapter, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """A and B whose update is nearest to an array, in the sum of squares of each matrix: by singular values.

    A rank above that of the matrix is filled up with zeros.

    Args:
        dense: in the shape of the parameter.
        plan: the axes, and the rank.
        scale: the factor of the update.

    Returns:
        A (*batch, *contracted, rank) and B (*batch, rank, *free), float32.
    """
    batch, contracted, free = plan.batch, plan.contracted, plan.free
    shape = dense.shape
    stack, rows, columns = ([shape[axis] for axis in axes] for axes in (batch, contracted, free))
    moved = jnp.transpose(dense.astype(jnp.float32), (*batch, *contracted, *free))
    matrices = moved.reshape(*stack, math.prod(rows), math.prod(columns))
    left, values, right = jnp.linalg.svd(matrices / scale, full_matrices=False)
    root = jnp.sqrt(values)
    rank = plan.rank
    a = _cut(left * root[..., None, :], rank, -1)
    b = _cut(root[..., None] * right, rank, -2)
    return a.reshape(*stack, *rows, rank), b.reshape(*stack, rank, *columns)


def _cut(factor: jax.Array, rank: int, axis: int) -> jax.Array:
    """The first `rank` along an axis, zeros where there are fewer."""
    missing = max(rank - factor.shape[axis], 0)
    padding = [(0, 0)] * factor.ndim
    padding[axis] = (0, missing)
    return jnp.pad(jax.lax.slice_in_dim(factor, 0, min(rank, factor.shape[axis]), axis=axis), padding)


def dense_update(adapter: Adapter, shape: tuple[int, ...]) -> jax.Array:
    """The update of an adapter as an array in the shape of its parameter, float32."""
    found = adapter.low_rank()
    update = found.scale * (found.a.astype(jnp.float32) * found.b.astype(jnp.float32)).sum(-1)
    return jnp.broadcast_to(update, shape)
