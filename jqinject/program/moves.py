"""Operations that move the numbers of a weight: how its payload and its scales follow.

A weight reaches its contraction behind casts, reshapes, transposes, slices and look-ups. `Move` says what one of these
does to the full array (value or payload) and to what varies along some of its axes only (scale, zero point), which has
size 1 along the others and keeps it. `moved` applies it to a QuantTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jqinject.dot import FrozenForm
from jqinject.program.jaxpr import Equation
from jqinject.quant_tensor import Groups, QuantTensor, is_grouped, on_integers, shaping

Shape = tuple[int, ...]
Function = Callable[[jax.Array], jax.Array]


def _itself(axis: int) -> Shape:
    return (axis,)


@dataclass(frozen=True)
class Move:
    """What an operation does to the arrays of a weight.

    Attributes:
        full: moves an array of the weight's shape.
        partial: moves an array of as many axes, of size 1 where it does not vary.
        dtype: the float dtype that the operation casts to; None if it does not.
        picks: the axes of the weight along which it picks or reorders numbers.
        where: an axis of the weight -> the axes of the result along which it lies; of size 1 too.
    """

    full: Function
    partial: Function
    dtype: DTypeLike | None = None
    picks: frozenset[int] = frozenset()
    where: Callable[[int], Shape] = _itself

    def axes_after(self, axes: Shape) -> Shape:
        """The axes of the result along which some axes of the weight lie."""
        return tuple(sorted({place for axis in axes for place in self.where(axis)}))


def moves_of(eqn: Equation, values: Sequence[jax.Array]) -> list[Move] | None:
    """The move of each output of an operation on a weight; None if it does more than move the weight's numbers.

    Args:
        eqn: its equation; the weight is the first operand.
        values: the operands; of the weight only the shape is read.
    """
    move = MOVES.get(eqn.name)
    result = None if move is None else move(eqn, values)
    return result if result is None or isinstance(result, list) else [result]


def only_moves(name: str) -> bool:
    """Whether an operation moves numbers without changing them, so that a weight can be followed through it."""
    return name in MOVES


@dataclass(frozen=True)
class AxesInParameter:
    """Where the axes of a parameter are after some moves.

    Attributes:
        shape: of the parameter.
        places: for each axis of the parameter, the axes of the moved array along which it lies.
        stacked: leading axes of the parameter over which a loop runs.
    """

    shape: Shape
    places: tuple[Shape, ...]
    stacked: int = 0

    @classmethod
    def of(cls, shape: Shape) -> AxesInParameter:
        """Of a parameter that has not been moved."""
        return cls(shape, tuple((axis,) for axis in range(len(shape))))

    def moved(self, move: Move) -> AxesInParameter:
        """After a move."""
        return replace(self, places=tuple(move.axes_after(places) for places in self.places))

    def sliced(self) -> AxesInParameter:
        """As the body of a loop over the leading axis sees it."""
        places = tuple(tuple(place - 1 for place in own if place) for own in self.places)
        return AxesInParameter(self.shape, places, self.stacked + 1)

    def along(self, axes: Sequence[int]) -> frozenset[int]:
        """The axes of the parameter that lie along some axes of the moved array."""
        return frozenset(number for number, own in enumerate(self.places) if not {*own}.isdisjoint(axes))


def _cast(eqn: Equation, values: Sequence[jax.Array]) -> Move | None:
    dtype = eqn.params["new_dtype"]
    return Move(_same, _same, dtype) if jnp.issubdtype(dtype, jnp.floating) else None


def _same(x: jax.Array) -> jax.Array:
    return x


def _unchanged(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    return Move(_same, _same)


def _placed(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    """An operation about where the numbers are, which the scales need not follow."""
    return Move(_bound(eqn), _same)


def _reshard(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    """A change of an explicit sharding, which scales follow, but for their axes of size 1."""
    sharding = eqn.params["dst_sharding"]

    def follow(x: jax.Array) -> jax.Array:
        names = (*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))
        spec = (None if size == 1 else name for name, size in zip(names, x.shape, strict=True))
        return jax.sharding.reshard(x, sharding.update(spec=jax.sharding.PartitionSpec(*spec)))

    return Move(_bound(eqn), follow)


def _transpose(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    places = {axis: place for place, axis in enumerate(eqn.params["permutation"])}
    return Move(_bound(eqn), _bound(eqn), where=lambda axis: (places[axis],))


def _reshape(eqn: Equation, values: Sequence[jax.Array]) -> Move | None:
    if eqn.params["dimensions"] is not None:
        return None
    old, new = tuple(values[0].shape), tuple(eqn.params["new_sizes"])
    return Move(
        _bound(eqn),
        lambda x: shaping.reshape_metadata(x, old, new),
        where=_where_reshaped(old, new).__getitem__,
    )


def _where_reshaped(old: Shape, new: Shape) -> list[Shape]:
    """For each axis, the axes of the new shape along which it lies: those of its block, of the same kind if any.

    An axis of size 1 lies along one of size 1, or along the axes that it is merged with.
    """
    if 0 in old:
        return [tuple(range(len(new)))] * len(old)
    places: list[Shape] = []
    for before, after in shaping.matching_blocks(old, new):
        single = iter([axis for axis in after if new[axis] == 1])
        several = tuple(axis for axis in after if new[axis] > 1)
        for axis in before:
            own = next(single, None) if old[axis] == 1 else None
            places.append(several if own is None else (own,))
    return places


def _bound(eqn: Equation) -> Function:
    return lambda x: eqn.bind([x])[0]


def _squeeze(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    left = [axis for axis in range(len(values[0].shape)) if axis not in eqn.params["dimensions"]]
    return Move(_bound(eqn), _bound(eqn), where=lambda axis: (left.index(axis),) if axis in left else ())


def _broadcast(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]

    def partial(x: jax.Array) -> jax.Array:
        sizes = dict(zip(places, x.shape, strict=True))
        return lax.broadcast_in_dim(x, [sizes.get(axis, 1) for axis in range(len(shape))], places)

    return Move(_bound(eqn), partial, where=lambda axis: (places[axis],))


def _slice(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    return _sliced(values[0].shape, start, limit, strides)


def _sliced(shape: Shape, start: Sequence[int], limit: Sequence[int], strides: Sequence[int]) -> Move:
    def partial(x: jax.Array) -> jax.Array:
        varies = [n > 1 for n in x.shape]
        return lax.slice(
            x,
            [a if v else 0 for a, v in zip(start, varies, strict=True)],
            [b if v else n for b, v, n in zip(limit, varies, x.shape, strict=True)],
            [s if v else 1 for s, v in zip(strides, varies, strict=True)],
        )

    sizes = [-(-(b - a) // s) for a, b, s in zip(start, limit, strides, strict=True)]
    return Move(lambda x: lax.slice(x, start, limit, strides), partial, where=_where_sliced(shape, sizes))


def _where_sliced(shape: Shape, sizes: Sequence[int]) -> Callable[[int], Shape]:
    """Nothing lies along an axis of which one index is left."""
    return lambda axis: () if sizes[axis] == 1 < shape[axis] else (axis,)


def _split(eqn: Equation, values: Sequence[jax.Array]) -> list[Move]:
    shape, axis = values[0].shape, eqn.params["axis"]
    moves, begin = [], 0
    for size in eqn.params["sizes"]:
        start, limit = [0] * len(shape), list(shape)
        start[axis], limit[axis] = begin, begin + size
        moves.append(_sliced(shape, start, limit, (1,) * len(shape)))
        begin += size
    return moves


def _dynamic_slice(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    starts, sizes = values[1:], eqn.params["slice_sizes"]

    def partial(x: jax.Array) -> jax.Array:
        varies = [n > 1 for n in x.shape]
        begin = [a if v else jnp.zeros_like(a) for a, v in zip(starts, varies, strict=True)]
        return lax.dynamic_slice(x, begin, [n if v else 1 for n, v in zip(sizes, varies, strict=True)])

    where = _where_sliced(values[0].shape, sizes)
    return Move(lambda x: lax.dynamic_slice(x, starts, sizes), partial, where=where)


def _reverse(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    return Move(_bound(eqn), _bound(eqn), picks=frozenset(eqn.params["dimensions"]))


def _gather(eqn: Equation, values: Sequence[jax.Array]) -> Move | None:
    numbers, indices = eqn.params["dimension_numbers"], values[1]
    if numbers.operand_batching_dims:
        return None
    indexed = {*numbers.start_index_map, *numbers.collapsed_slice_dims}
    out = eqn.outputs[0].shape

    def gathered(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
        fill = eqn.params["fill_value"]
        if fill is not None and not jnp.issubdtype(x.dtype, jnp.inexact):
            fill = 0  # integers have no nan: the scale has it, or else a number that is missing is 0
        return eqn.replaced(slice_sizes=tuple(sizes), fill_value=fill).bind([x, indices])[0]

    def partial(x: jax.Array) -> jax.Array:
        sizes = [min(n, size) for n, size in zip(eqn.params["slice_sizes"], x.shape, strict=True)]
        if any(x.shape[axis] > 1 for axis in indexed):
            shape = [n if axis in indexed else x.shape[axis] for axis, n in enumerate(values[0].shape)]
            return gathered(jnp.broadcast_to(x, shape), sizes)
        sides = dict(zip(numbers.offset_dims, (sizes[axis] for axis in windows), strict=True))
        return x.reshape([sides.get(axis, 1) for axis in range(len(out))])

    windows = [axis for axis in range(len(values[0].shape)) if axis not in numbers.collapsed_slice_dims]
    looked_up = tuple(axis for axis in range(len(out)) if axis not in numbers.offset_dims)

    def where(axis: int) -> Shape:
        own = (numbers.offset_dims[windows.index(axis)],) if axis in windows else ()
        picked = axis in indexed and values[0].shape[axis] > 1
        return (*own, *looked_up) if picked else own

    return Move(lambda x: gathered(x, eqn.params["slice_sizes"]), partial, None, frozenset(indexed), where)


def _all_gather(eqn: Equation, values: Sequence[jax.Array]) -> Move | None:
    """The shards of all devices, one after the other: scales that vary along the axis are gathered too."""
    params, shape = eqn.params, values[0].shape
    axis = params["all_gather_dimension"]
    if not params["tiled"] or params["axis_index_groups"] is not None:
        return None

    def partial(x: jax.Array) -> jax.Array:
        varies = x.shape[axis] > 1 or shape[axis] == 1
        return lax.all_gather(x, params["axis_name"], axis=axis, tiled=True) if varies else x

    return Move(_bound(eqn), partial, picks=frozenset({axis}))


MOVES: dict[str, Callable[[Equation, Sequence[jax.Array]], Move | list[Move] | None]] = {
    "convert_element_type": _cast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "rev": _reverse,
    "gather": _gather,
    "copy": _unchanged,
    "name": _unchanged,
    **dict.fromkeys(("sharding_constraint", "layout_constraint", "pvary", "mesh_cast"), _placed),
    "reshard": _reshard,
    "all_gather": _all_gather,
}


# --- a quantized weight after a move: its payload, its scales and its groups

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


def moved(tensor: QuantTensor, move: Move) -> QuantTensor | None:
    """A quantized weight after a move; None if its scales cannot follow: the move divides or mixes groups."""
    dtype = tensor.dtype if move.dtype is None else np.dtype(move.dtype)

    def bare(inner: QuantTensor, full: Function, follow: Function) -> QuantTensor:
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


def _follow(metadata: jax.Array, tensor: QuantTensor, move: Move) -> jax.Array:
    """A scale or zero point after a move; one for all stays one for all."""
    if metadata.size == 1:
        return metadata.reshape(())
    return move.partial(shaping.full_rank(metadata, tensor.ndim))


Numbers = Mapping[str, jax.Array]


@dataclass(frozen=True, eq=False)
class StoredNumbers:
    """A frozen parameter as it is stored, behind a value of a program that is at most cast and its axes reordered.

    Attributes:
        numbers: as stored.
        form: theirs.
        order: for each axis of the value, the axis of the parameter.
    """

    numbers: Numbers
    form: FrozenForm
    order: tuple[int, ...]

    def moved(
        self, eqn: Equation, value: jax.Array | QuantTensor, others: Sequence[jax.Array]
    ) -> StoredNumbers | None:
        """After an operation; None if that does more than cast, reorder axes, or pick layers of a stack.

        Args:
            eqn: its equation.
            value: its first operand.
            others: the other ones.
        """
        if eqn.name == "convert_element_type":
            return self
        if eqn.name == "transpose":
            return replace(self, order=tuple(self.order[axis] for axis in eqn.params["permutation"]))
        pick, layers = _pick(eqn, tuple(value.shape), others), self.layers
        if pick is None or layers is None:
            return None
        picked = {name: pick(array) for name, array in layers.items()}
        if len(eqn.outputs[0].shape) < len(self.order):
            return self.layer({name: array[0] for name, array in picked.items()})
        return replace(self, numbers={**self.numbers, **picked})

    @property
    def layers(self) -> Numbers | None:
        """The numbers of which each layer of a stack has its own; None if the value's first axis is not stored so."""
        form = self.form.fitted(self.numbers["value"].shape)
        if self.order[:1] != (0,) or form.axis_of_payload(0) != 0:
            return None
        return {name: x for name, x in self.numbers.items() if x.ndim and x.shape[0] == form.shape[0]}

    def layer(self, own: Numbers) -> StoredNumbers:
        """One layer of a stack, given its own numbers."""
        shared = {name: x[0] if x.ndim else x for name, x in self.numbers.items() if name not in own}
        return replace(self, numbers={**shared, **own}, order=tuple(axis - 1 for axis in self.order[1:]))


def _pick(eqn: Equation, shape: tuple[int, ...], others: Sequence[jax.Array]) -> Function | None:
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
