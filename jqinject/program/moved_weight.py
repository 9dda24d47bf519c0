"""A quantized weight after an operation that moves its numbers: its payload, its scales and its groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqinject.dot import FrozenForm
from jqinject.program.jaxpr import Equation
from jqinject.program.moves import Function, Move, Shape
from jqinject.quant_tensor import (
    Groups,
    QuantTensor,
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
        unsplit = _with_numbers(
            tensor.as_it_lies, move.full, lambda x: _follow(x, tensor.as_it_lies, move), dtype
        )
        return tensor.moved(unsplit, after)

    def full(x: Any) -> Any:
        return after.split(move.full(groups.join(x)))

    def follow(metadata: jax.Array) -> jax.Array:
        if metadata.ndim == 0:
            return metadata
        # Each group's numbers are moved as those of a weight with one group.
        groups_first = jnp.moveaxis(full_rank(metadata, ndim + 1), cut, 0)
        return jnp.expand_dims(
            jnp.moveaxis(jax.vmap(move.partial)(groups_first).squeeze(place.axis + 1), 0, place.axis),
            place.axis + 1,
        )

    return tensor.moved(_with_numbers(tensor.grouped, full, follow, dtype), after)


def _with_numbers(tensor: Any, full: Function, follow: Function, dtype: Any) -> Any:
    """A tensor without groups, its numbers moved by `full`, its scales and zero points by `follow`."""
    zero = follow(tensor.zero_point) if on_integers(tensor) else None
    if tensor.is_stored:
        return type(tensor).stored(full(tensor.kept_payload), follow(tensor.scale), zero, tensor.grid, dtype)
    if on_integers(tensor):
        scale = follow(tensor.scale)
        tensor_after = tensor.set(value=full(tensor.value).astype(dtype), scale=scale, zero_point=zero)
        return tensor_after if tensor.payload is None else tensor_after.keeping(full(tensor.payload))
    if on_minifloats(tensor) or on_table(tensor):
        return tensor.set(value=full(tensor.value).astype(dtype), scale=follow(tensor.scale))
    return None


class _Place(NamedTuple):
    """An axis of an array of `ndim` axes."""

    axis: int
    ndim: int


def _place_after(move: Move, axis: int, shape: Shape) -> _Place | None:
    """Where an axis is after a move; None if it is picked from, divided, or merged with another."""
    after = jax.eval_shape(move.full, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
    places = move.where(axis)
    if axis in move.picks or len(places) != 1 or after[places[0]] != shape[axis]:
        return None
    return _Place(places[0], len(after))


def _follow(metadata: jax.Array, tensor: QuantTensor, move: Move) -> jax.Array:
    """A scale or zero point after a move; one for all stays one for all."""
    if metadata.size == 1:
        return metadata.reshape(())
    return move.partial(full_rank(metadata, tensor.ndim))


@dataclass(frozen=True, eq=False)
class StoredNumbers:
    """A frozen parameter as it is stored, behind a value of a program.

    Attributes:
        value: whose numbers these are, at most cast and its axes reordered; no others.
        numbers: as stored.
        form: theirs.
        order: for each axis of the value, the axis of the parameter.
    """

    value: Any
    numbers: Mapping[str, Any]
    form: FrozenForm
    order: tuple[int, ...]

    @classmethod
    def of(cls, value: Any, numbers: Mapping[str, Any], form: FrozenForm) -> StoredNumbers:
        """Behind the value that the numbers dequantize to."""
        return cls(value, numbers, form, tuple(range(len(value.shape))))

    def moved(self, eqn: Equation, value: Any, others: Sequence[Any]) -> StoredNumbers | None:
        """Behind the output of an operation; None if that does more than cast, reorder axes, or pick layers of a stack.

        Args:
            eqn: its equation.
            value: the output.
            others: its operands but for the first.
        """
        if eqn.name == "convert_element_type":
            return replace(self, value=value)
        if eqn.name == "transpose":
            order = tuple(self.order[axis] for axis in eqn.params["permutation"])
            return replace(self, value=value, order=order)
        pick = _pick(eqn, tuple(self.value.shape), others)
        if pick is None or not self._is_stack:
            return None
        layers, rest = self._layers
        numbers = {**rest, **{name: pick(array) for name, array in layers.items()}}
        stored = replace(self, value=value, numbers=numbers)
        return stored if len(value.shape) == len(self.order) else stored._only_layer()

    def in_slices(self) -> tuple[Mapping[str, Any], Callable[[Any, Mapping[str, Any]], StoredNumbers]] | None:
        """The numbers that a loop along the first axis takes apart, and what is behind the value of a slice, given its
        numbers; None if that axis is not stored as the first one.
        """
        if not self._is_stack:
            return None
        layers, rest = self._layers

        def behind(value: object, numbers: Mapping[str, Any]) -> StoredNumbers:
            layer = {name: array[None] for name, array in numbers.items()}
            return replace(self, value=value, numbers={**rest, **layer})._only_layer()

        return layers, behind

    @property
    def _is_stack(self) -> bool:
        """Whether the first axis of the value is stored as the first one, so that a layer's numbers lie together."""
        form = self.form.fitted(self.numbers["value"].shape)
        return self.order[:1] == (0,) and form.axis_of_payload(0) == 0

    @property
    def _layers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The numbers of which each layer has its own, and those that all layers share."""
        length = self.value.shape[0]
        own = {name: array for name, array in self.numbers.items() if array.ndim and array.shape[0] == length}
        return own, {name: array for name, array in self.numbers.items() if name not in own}

    def _only_layer(self) -> StoredNumbers:
        """Without the first axis, of size 1."""
        numbers = {name: array[0] if array.ndim else array for name, array in self.numbers.items()}
        return replace(self, numbers=numbers, order=tuple(axis - 1 for axis in self.order[1:]))


def _pick(eqn: Equation, shape: tuple[int, ...], others: Sequence[Any]) -> Callable[[Any], Any] | None:
    """Picks the layers of a stack that an operation picks, or all where it drops an axis of size 1; None for others.

    Args:
        eqn: its equation.
        shape: of the stack.
        others: the operands but for the stack.
    """
    name, params = eqn.name, eqn.params
    if name == "slice" and params["strides"] is None:
        start, limit = params["start_indices"], params["limit_indices"]
        takes_layers = not any(start[1:]) and limit[1:] == shape[1:]
        return (lambda x: x[start[0] : limit[0]]) if takes_layers else None
    if name == "dynamic_slice" and params["slice_sizes"][1:] == shape[1:]:
        return lambda x: jax.lax.dynamic_slice_in_dim(x, others[0], params["slice_sizes"][0])
    dropped = name == "squeeze" and params["dimensions"] == (0,)
    reshaped = name == "reshape" and params["dimensions"] is None and params["new_sizes"] == shape[1:]
    return (lambda x: x) if (dropped or reshaped) and shape[:1] == (1,) else None
