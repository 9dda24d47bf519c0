"""Reductions over the axes of `shard_map`, `pmap` and `vmap`, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Names = tuple[Any, ...]


def names_of(axis_name: Any) -> Names:
    """An `axis_name` (a name, a tuple of names, or None) as a tuple.

    Example:
        >>> names_of(None), names_of("data"), names_of(("data", "model"))
        ((), ('data',), ('data', 'model'))
    """
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def names_at_hand(axis_name: Any, evaluates: bool) -> Names:
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


def _is_bound(name: Any) -> bool:
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


def check_same_places(statistic: Any, state: jax.Array) -> None:
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
    return tuple(name for name in names if name in varying_axes(x) or not _is_tracked(name))


def _is_tracked(name: Any) -> bool:
    return name in varying_axes(_bound(jax.lax.axis_index, name))


def _bound(ask: Callable[[Any], Any], name: Any) -> Any:
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


def max_over(x: jax.Array, names: Names) -> jax.Array:
    """The largest over named axes; `x` itself without any."""
    differing = _differing(x, names)
    return jax.lax.pmax(x, differing) if differing else x


def min_over(x: jax.Array, names: Names) -> jax.Array:
    """The smallest over named axes; `x` itself without any."""
    differing = _differing(x, names)
    return jax.lax.pmin(x, differing) if differing else x


def sum_over(x: jax.Array, names: Names) -> jax.Array:
    """The sum over named axes; `x` itself without any."""
    differing = _differing(x, names)
    same = places_over(tuple(name for name in names if name not in differing))
    total = jax.lax.psum(x, differing) if differing else x
    return total if same == 1 else total * jnp.asarray(same, x.dtype)


def places_over(names: Names) -> int:
    """The product of the sizes of named axes."""
    size = 1
    for name in names:
        size *= int(_bound(jax.lax.axis_size, name))
    return size


def place_over(names: Names) -> jax.Array:
    """The flat index of this place among them, from 0; int32."""
    place = jnp.zeros((), jnp.int32)
    for name in names:
        place = place * _bound(jax.lax.axis_size, name) + jax.lax.axis_index(name)
    return place
