"""A quantized weight after an operation that moves its numbers: its payload, its scales and its groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot import FrozenForm
from jqinject.program import jaxpr, moves
from jqinject.quant_tensor import Groups, QuantTensor, is_grouped, on_integers, shaping

METADATA = ("scale", "zero_point")


def arrays_of(tensor: QuantTensor) -> dict[str, jax.Array]:
    """The arrays of a quantized tensor without groups: of its shape ("numbers", "payload"), or that broadcast to it."""
    stored = tensor.is_stored
    arrays = {"numbers": tensor.kept_payload if stored else tensor.value, "scale": tensor.scale}
    if on_integers(tensor):
        arrays["zero_point"] = tensor.zero_point
        if not stored and tensor.payload is not None:
            arrays["payload"] = tensor.payload
    return arrays


def with_arrays(
    like: QuantTensor, arrays: Mapping[str, jax.Array], dtype: np.dtype | None = None
) -> QuantTensor:
    """The tensor of the same format with other arrays; the inverse of `arrays_of`.

    Args:
        like: a tensor without groups.
        arrays: by name.
        dtype: of the value; None for that of `like`.
    """
    numbers, dtype = arrays["numbers"], like.dtype if dtype is None else dtype
    if like.is_stored:
        return type(like).stored(numbers, arrays["scale"], arrays.get("zero_point"), like.grid, dtype)
    metadata = {name: array for name, array in arrays.items() if name in METADATA}
    tensor = like.set(value=numbers.astype(dtype), **metadata)
    return tensor.keeping(arrays["payload"]) if "payload" in arrays else tensor


def moved(tensor: QuantTensor, move: moves.Move) -> QuantTensor | None:
    """A quantized weight after a move; None if its scales cannot follow: the move divides or mixes groups."""
    dtype = tensor.dtype if move.dtype is None else np.dtype(move.dtype)

    def bare(inner: QuantTensor, full: moves.Function, follow: moves.Function) -> QuantTensor:
        arrays = arrays_of(inner)
        return with_arrays(
            inner, {name: (follow if name in METADATA else full)(x) for name, x in arrays.items()}, dtype
        )

    if not is_grouped(tensor):
        return bare(tensor, move.full, lambda x: _follow(x, tensor, move))
    groups, ndim = tensor.groups, tensor.ndim
    cut = groups.dim % ndim
    shape = jax.eval_shape(move.full, jax.ShapeDtypeStruct(tensor.shape, jnp.float32)).shape
    places = move.where(cut)
    if cut in move.picks or len(places) != 1 or shape[places[0]] != tensor.shape[cut]:
        return None  # the axis of the groups is picked from, divided, or merged with another
    (axis,) = places
    after = Groups(groups.size, axis - len(shape), groups.length)
    if tensor.as_it_lies is not None:
        return tensor.moved(
            bare(tensor.as_it_lies, move.full, lambda x: _follow(x, tensor.as_it_lies, move)), after
        )

    def full(x: jax.Array) -> jax.Array:
        return after.split(move.full(groups.join(x)))

    def follow(metadata: jax.Array) -> jax.Array:
        if metadata.ndim == 0:
            return metadata
        # Each group's numbers are moved as those of a weight with one group.
        groups_first = jnp.moveaxis(shaping.full_rank(metadata, ndim + 1), cut, 0)
        return jnp.expand_dims(
            jnp.moveaxis(jax.vmap(move.partial)(groups_first).squeeze(axis + 1), 0, axis),
            axis + 1,
        )

    return tensor.moved(bare(tensor.grouped, full, follow), after)


def _follow(metadata: jax.Array, tensor: QuantTensor, move: moves.Move) -> jax.Array:
    """A scale or zero point after a move; one for all stays one for all."""
    if metadata.size == 1:
        return metadata.reshape(())
    return move.partial(shaping.full_rank(metadata, tensor.ndim))


Value = jax.Array | QuantTensor
Numbers = Mapping[str, jax.Array]


@dataclass(frozen=True, eq=False)
class StoredNumbers:
    """A frozen parameter as it is stored, behind a value of a program.

    Attributes:
        value: whose numbers these are, at most cast and its axes reordered; no others.
        numbers: as stored.
        form: theirs.
        order: for each axis of the value, the axis of the parameter.
    """

    value: Value
    numbers: Numbers
    form: FrozenForm
    order: tuple[int, ...]

    @classmethod
    def of(cls, value: Value, numbers: Numbers, form: FrozenForm) -> StoredNumbers:
        """Behind the value that the numbers dequantize to."""
        return cls(value, numbers, form, tuple(range(len(value.shape))))

    def moved(self, eqn: jaxpr.Equation, value: Value, others: Sequence[jax.Array]) -> StoredNumbers | None:
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

    def in_slices(self) -> tuple[Numbers, Callable[[Value, Numbers], StoredNumbers]] | None:
        """The numbers that a loop along the first axis takes apart, and what is behind the value of a slice, given its
        numbers; None if that axis is not stored as the first one.
        """
        if not self._is_stack:
            return None
        layers, rest = self._layers

        def behind(value: Value, numbers: Numbers) -> StoredNumbers:
            layer = {name: array[None] for name, array in numbers.items()}
            return replace(self, value=value, numbers={**rest, **layer})._only_layer()

        return layers, behind

    @property
    def _is_stack(self) -> bool:
        """Whether the first axis of the value is stored as the first one, so that a layer's numbers lie together."""
        form = self.form.fitted(self.numbers["value"].shape)
        return self.order[:1] == (0,) and form.axis_of_payload(0) == 0

    @property
    def _layers(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """The numbers of which each layer has its own, and those that all layers share."""
        length = self.value.shape[0]
        own = {name: array for name, array in self.numbers.items() if array.ndim and array.shape[0] == length}
        return own, {name: array for name, array in self.numbers.items() if name not in own}

    def _only_layer(self) -> StoredNumbers:
        """Without the first axis, of size 1."""
        numbers = {name: array[0] if array.ndim else array for name, array in self.numbers.items()}
        return replace(self, numbers=numbers, order=tuple(axis - 1 for axis in self.order[1:]))


def _pick(eqn: jaxpr.Equation, shape: tuple[int, ...], others: Sequence[jax.Array]) -> moves.Function | None:
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
