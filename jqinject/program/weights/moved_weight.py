"""A quantized weight after an operation that moves its numbers: its payload, its scales and its groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqinject.program.weights.moves import Function, Move, Shape
from jqinject.quant_tensor import (
    Groups,
    is_grouped,
    on_integers,
    on_minifloats,
    on_table,
)
from jqinject.quant_tensor.shaping import full_rank


def moved(tensor: Any, move: Move) -> Any:
    """A quantized weight after a move; None if its scales cannot follow: the move divides or mixes groups."""
    dtype = tensor.dtype if move.dtype is None else move.dtype
    if not is_grouped(tensor):
        return _with_numbers(tensor, move.full, lambda x: _follow(x, tensor, move), dtype)
    groups, ndim = tensor.groups, tensor.ndim
    cut = groups.dim % ndim
    place = _place_after(move, cut, tensor.shape)
    if place is None:
        return None
    after = Groups(groups.size, place.axis - place.ndim, groups.length)
    if tensor.as_it_lies is not None:
        whole = _with_numbers(
            tensor.as_it_lies, move.full, lambda x: _follow(x, tensor.as_it_lies, move), dtype
        )
        return tensor.moved(whole, after)

    def full(x: Any) -> Any:
        return after.split(move.full(groups.join(x)))

    def follow(metadata: jax.Array) -> jax.Array:
        if metadata.ndim == 0:
            return metadata
        # Each group's numbers are moved as those of a weight with one group.
        each = jnp.moveaxis(full_rank(metadata, ndim + 1), cut, 0)
        return jnp.expand_dims(
            jnp.moveaxis(jax.vmap(move.partial)(each).squeeze(place.axis + 1), 0, place.axis), place.axis + 1
        )

    return tensor.moved(_with_numbers(tensor.grouped, full, follow, dtype), after)


def _with_numbers(tensor: Any, full: Function, follow: Function, dtype: Any) -> Any:
    """A tensor without groups, its numbers moved by `full`, its scales and zero points by `follow`."""
    zero = follow(tensor.zero_point) if on_integers(tensor) else None
    if tensor.is_stored:
        return type(tensor).stored(full(tensor.kept_payload), follow(tensor.scale), zero, tensor.grid, dtype)
    if on_integers(tensor):
        scale = follow(tensor.scale)
        found = tensor.set(value=full(tensor.value).astype(dtype), scale=scale, zero_point=zero)
        return found if tensor.payload is None else found.keeping(full(tensor.payload))
    if on_minifloats(tensor) or on_table(tensor):
        return tensor.set(value=full(tensor.value).astype(dtype), scale=follow(tensor.scale))
    return None


class _Place(NamedTuple):
    """An axis of an array of `ndim` axes."""

    axis: int
    ndim: int


def _place_after(move: Move, axis: int, shape: Shape) -> _Place | None:
    """Where an axis is after a move; None if it is picked from, divided, or merged with another."""
    found = jax.eval_shape(move.full, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
    places = move.where(axis)
    if axis in move.picks or len(places) != 1 or found[places[0]] != shape[axis]:
        return None
    return _Place(places[0], len(found))


def _follow(metadata: jax.Array, tensor: Any, move: Move) -> jax.Array:
    """A scale or zero point after a move; one for all stays one for all."""
    if metadata.size == 1:
        return metadata.reshape(())
    return move.partial(full_rank(metadata, tensor.ndim))
