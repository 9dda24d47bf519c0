"""Arrays sharded along explicit axes of a mesh, for which JAX leaves the result's sharding to the caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, auto_axes, reshard


def is_split(x: jax.Array) -> bool:
    """Whether an array is sharded along an explicit axis.

    Example:
        >>> is_split(jnp.zeros(3))
        False
    """
    return any(jax.typeof(x).sharding.spec)


def by_compiler(
    function: Callable[[jax.Array], jax.Array], like: jax.Array, x: jax.Array, *axes: int
) -> jax.Array:
    """`function(x)`, inside of which the compiler chooses shardings; the result is sharded like another array.

    Args:
        function: makes an array of the number of axes of `like`.
        like: the other array.
        x: what it is called with.
        axes: which axes of the result are whole nevertheless, from the front.

    Example:
        >>> by_compiler(jnp.abs, jnp.ones(2), -jnp.ones(2))
        Array([1., 1.], dtype=float32)
    """
    sharding = jax.typeof(like).sharding
    if not any(sharding.spec):
        return function(x)
    spec = PartitionSpec(*(None if place in axes else axis for place, axis in enumerate(sharding.spec)))
    out = NamedSharding(sharding.mesh, spec)
    inside: Callable[..., Any] = auto_axes(axes=sharding.mesh.explicit_axes, out_sharding=out)
    return inside(function)(x)


def shards_along(x: jax.Array, axis: int) -> int:
    """The number of shards along an axis that the type of an array names: 1 without explicit axes.

    Example:
        >>> shards_along(jnp.zeros(3), 0)
        1
    """
    return x.shape[axis] // max(jax.typeof(x).sharding.shard_shape(x.shape)[axis], 1) if is_split(x) else 1


def whole(x: jax.Array, *axes: int) -> jax.Array:
    """An array that is sharded along no explicit axis, with the numbers of `x`.

    Args:
        x: an array.
        axes: which of its axes must be whole, from the front; without any, all.

    Example:
        >>> whole(jnp.ones(2))
        Array([1., 1.], dtype=float32)
    """
    sharding = jax.typeof(x).sharding
    kept = [None if not axes or place in axes else axis for place, axis in enumerate(sharding.spec)]
    return reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*kept))) if any(sharding.spec) else x


def merge_axes(x: jax.Array, first: int, last: int) -> jax.Array:
    """The axes `first` to `last` (exclusive) of `x` as one; without any, a new one of size 1.

    On a mesh with explicit axes, for which JAX does not choose the result's sharding, the merged axis is whole on every
    device if one of the axes after the first was sharded.

    Args:
        x: an array.
        first: the first of the merged axes, from the front.
        last: the axis after them, from the front.

    Returns:
        An array of shape `(*x.shape[:first], n, *x.shape[last:])`.

    Example:
        >>> merge_axes(jnp.zeros((2, 3, 4, 5)), 1, 3).shape
        (2, 12, 5)
    """
    shape = (*x.shape[:first], math.prod(x.shape[first:last]), *x.shape[last:])
    spec = jax.typeof(x).sharding.spec
    if not any(spec[first + 1 : last]):
        return x.reshape(shape)
    return jax.lax.reshape(x, shape, out_sharding=PartitionSpec(*spec[:first], None, *spec[last:]))


def sharded_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, sharded like `like` along explicit axes; JAX handles the others.

    Args:
        x: an array.
        like: an array of the same shape.

    Returns:
        The numbers of `x`; `x` itself where there is nothing to move.

    Example:
        >>> sharded_as(jnp.ones(2), jnp.zeros(2))
        Array([1., 1.], dtype=float32)
    """
    own, wanted = jax.typeof(x).sharding, jax.typeof(like).sharding
    mesh = own.mesh if wanted.mesh.empty else wanted.mesh
    return x if own.spec == wanted.spec else reshard(x, NamedSharding(mesh, wanted.spec))


def sharded_beside(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, which broadcasts against `like`, sharded like the axes that it shares with `like`, along explicit axes.

    Args:
        x: an array, of no more axes than `like`.
        like: an array.

    Returns:
        The numbers of `x`; `x` itself where there is nothing to move.

    Example:
        >>> sharded_beside(jnp.ones((1, 2)), jnp.zeros((3, 2)))
        Array([[1., 1.]], dtype=float32)
    """
    own, other = jax.typeof(x).sharding, jax.typeof(like).sharding
    if own.mesh.empty and other.mesh.empty:
        return x
    specs = other.spec[like.ndim - x.ndim :]
    wanted = PartitionSpec(*(axis if size != 1 else None for size, axis in zip(x.shape, specs, strict=True)))
    return x if own.spec == wanted else reshard(x, NamedSharding(other.mesh, wanted))


def asked(out_sharding: Any, *operands: jax.Array) -> Any:
    """The `out_sharding` to pass to an operation on a mesh with explicit axes; else None.

    Args:
        out_sharding: a `PartitionSpec`, a `NamedSharding` or None, as passed to a layer.
        operands: of the operation.

    Example:
        >>> asked(PartitionSpec("data"), jnp.zeros(3))
    """
    if out_sharding is None:
        return None
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    return out_sharding if any(mesh.explicit_axes for mesh in meshes if not mesh.empty) else None


def with_sharding(x: jax.Array, out_sharding: Any) -> jax.Array:
    """`x` with a sharding: moved along explicit axes, constrained along automatic ones; None changes nothing.

    Args:
        x: an array.
        out_sharding: a `PartitionSpec`, a `NamedSharding` or None.

    Example:
        >>> with_sharding(jnp.ones(2), None)
        Array([1., 1.], dtype=float32)
    """
    if out_sharding is None:
        return x
    return (reshard if asked(out_sharding, x) else jax.lax.with_sharding_constraint)(x, out_sharding)


def before_transpose(out_sharding: Any, permutation: Sequence[int]) -> Any:
    """The sharding before a transpose whose result has `out_sharding`; None for None.

    Args:
        out_sharding: a `PartitionSpec`, a `NamedSharding` or None.
        permutation: of the transpose, as for `jnp.transpose`.

    Example:
        >>> tuple(before_transpose(PartitionSpec("data", None, "model"), (1, 2, 0)))
        ('model', 'data', None)
    """
    if out_sharding is None:
        return None
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    axes: list[Any] = [None] * len(permutation)
    for entry, place in zip(spec, permutation, strict=False):
        axes[place] = entry
    found = PartitionSpec(*axes)
    return NamedSharding(out_sharding.mesh, found) if isinstance(out_sharding, NamedSharding) else found


def taken(table: jax.Array, indices: jax.Array) -> jax.Array:
    """`table[indices]` along the first axis of a table that is whole everywhere; sharded like the indices.

    Args:
        table: an array of one axis.
        indices: integers; those out of bounds are clamped.

    Example:
        >>> taken(jnp.array([0.5, 2.0]), jnp.array([[1, 0, 5]]))
        Array([[2. , 0.5, 2. ]], dtype=float32)
    """
    if not is_split(indices):
        return jnp.take(table, indices, axis=0, mode="clip")
    return table.at[indices].get(mode="clip", out_sharding=jax.typeof(indices).sharding)
