"""Arrays sharded along explicit axes of a mesh, whose results JAX leaves to the caller to shard, and reductions over
the axes of `shard_map`, `pmap` and `vmap`, by name.
"""

import math
from collections.abc import Callable, Hashable, Sequence
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
    spec = [None if not axes or place in axes else axis for place, axis in enumerate(sharding.spec)]
    return reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec))) if any(sharding.spec) else x


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
    """`x`, which broadcasts against `like`, sharded like the axes that it shares with `like`, along explicit axes.

    JAX handles the others.

    Args:
        x: an array, of no more axes than `like`.
        like: an array.

    Returns:
        The numbers of `x`; `x` itself where there is nothing to move.

    Example:
        >>> sharded_as(jnp.ones((1, 2)), jnp.zeros((3, 2)))
        Array([[1., 1.]], dtype=float32)
    """
    own, target = jax.typeof(x).sharding, jax.typeof(like).sharding
    if own.mesh.empty and target.mesh.empty:
        return x
    axes = zip(x.shape, like.shape[like.ndim - x.ndim :], target.spec[like.ndim - x.ndim :], strict=True)
    spec = PartitionSpec(*(axis if size == length else None for size, length, axis in axes))
    mesh = own.mesh if target.mesh.empty else target.mesh
    return x if own.spec == spec else reshard(x, NamedSharding(mesh, spec))


def asked(out_sharding: object, *operands: jax.Array) -> Any:
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


def with_sharding(x: jax.Array, out_sharding: object) -> jax.Array:
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
    axes = dict(zip(permutation, spec, strict=False))
    permuted = PartitionSpec(*map(axes.get, range(len(permutation))))
    return NamedSharding(out_sharding.mesh, permuted) if isinstance(out_sharding, NamedSharding) else permuted


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


Names = tuple[Any, ...]


def names_of(axis_name: Hashable) -> Names:
    """An `axis_name` (a name, a tuple of names, or None) as a tuple.

    Example:
        >>> names_of(None), names_of("data"), names_of(("data", "model"))
        ((), ('data',), ('data', 'model'))
    """
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def names_at_hand(axis_name: Hashable, evaluates: bool) -> Names:
    """An `axis_name` as a tuple: in evaluation, without the axes that do not surround the call.

    In training, a tensor is distributed over a mapped axis. In evaluation, outside `shard_map`, `pmap` and `vmap`, it
    is whole, and so is its statistic.

    Args:
        axis_name: a name, a tuple of names, or None.
        evaluates: whether this is evaluation.

    Example:
        >>> names_at_hand("data", evaluates=True), names_at_hand("data", evaluates=False)
        ((), ('data',))
    """
    names = names_of(axis_name)
    return tuple(name for name in names if _is_bound(name)) if evaluates else names


def _is_bound(name: object) -> bool:
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def varying_axes(x: jax.Array) -> frozenset[Any]:
    """The axes of a surrounding `shard_map` on which `x` varies between devices, if JAX keeps track."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def varying_with(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, typed as varying between devices on the axes of `shard_map` on which one of the others varies."""
    extra = frozenset().union(*map(varying_axes, others)) - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(extra, key=str)), to="varying") if extra else x


def check_same_places(statistic: object, state: jax.Array) -> None:
    """Refuse a statistic that varies between devices where the state that takes it does not.

    Args:
        statistic: a pytree of arrays, or their shapes from `jax.eval_shape`.
        state: what takes it, or decides whether to.

    Raises:
        ValueError: names the axes of `shard_map`, and the keyword that covers them.
    """
    types = [leaf.manual_axis_type for leaf in jax.tree.leaves(statistic)]
    varying = {name for kind in types if kind is not None for name in kind.varying}
    extra = sorted(map(str, varying - varying_axes(state)))
    if extra:
        name = repr(extra[0]) if len(extra) == 1 else str(tuple(extra))
        raise ValueError(
            f"within shard_map each device measures its own part of a tensor that is distributed over {name}, and the "
            "state that takes the statistic is the same on all devices.\n"
            f"  cure: axis_name={name} for the quantizer, as a keyword of a layer with the slot in front: "
            f"input_axis_name={name}"
        )


def _differing(x: jax.Array, names: Names) -> Names:
    """The axes on which `x` may vary. If JAX keeps track, a maximum over any other axis is an error."""
    varying = varying_axes(x)
    return tuple(n for n in names if n in varying or n not in varying_axes(_bound(jax.lax.axis_index, n)))


def _bound(ask: Callable[[Any], Any], name: object) -> Any:
    """What JAX says of a mapped axis.

    Raises:
        NameError: no `shard_map`, `pmap` or `vmap` around the call has an axis of this name.
    """
    try:
        return ask(name)
    except NameError as error:
        raise NameError(
            f"a statistic over the mapped axis {name!r} (axis_name) was asked for outside of shard_map, pmap and vmap: "
            "no axis of this name surrounds the call.\n  cure: call it within the map; or a quantizer without "
            "axis_name, for tensors that are whole"
        ) from error


def extreme_over(extreme: Callable[..., jax.Array], x: jax.Array, names: Names) -> jax.Array:
    """The largest (`jax.lax.pmax`) or smallest (`jax.lax.pmin`) over named axes; `x` itself without any."""
    differing = _differing(x, names)
    return extreme(x, differing) if differing else x


def sum_over(x: jax.Array, names: Names) -> jax.Array:
    """The sum over named axes; `x` itself without any."""
    differing = _differing(x, names)
    same = places_over(tuple(name for name in names if name not in differing))
    total = jax.lax.psum(x, differing) if differing else x
    return total if same == 1 else total * jnp.asarray(same, x.dtype)


def places_over(names: Names) -> int:
    """The product of the sizes of named axes."""
    return math.prod(int(_bound(jax.lax.axis_size, name)) for name in names)


def place_over(names: Names) -> jax.Array:
    """The flat index of this place among them, from 0; int32."""
    place = jnp.zeros((), jnp.int32)
    for name in names:
        place = place * _bound(jax.lax.axis_size, name) + jax.lax.axis_index(name)
    return place
