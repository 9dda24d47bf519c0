"""Operations that move the numbers of a weight: how its payload and its scales follow.

A weight reaches its contraction behind casts, reshapes, transposes, slices and look-ups. `Move` says what one of these
does to the full array (value or payload) and to what varies along some of its axes only (scale, zero point), which has
size 1 along the others and keeps it. Next: `moved_weight` applies it to a QuantTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jqinject.program.jaxpr import Equation
from jqinject.quant_tensor.shaping import matching_blocks, reshape_metadata

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
    order = eqn.params["permutation"]
    places = {axis: place for place, axis in enumerate(order)}

    def permuted(x: jax.Array) -> jax.Array:
        return lax.transpose(x, order)

    return Move(permuted, permuted, where=lambda axis: (places[axis],))


def _reshape(eqn: Equation, values: Sequence[jax.Array]) -> Move | None:
    if eqn.params["dimensions"] is not None:
        return None
    old, new = tuple(values[0].shape), tuple(eqn.params["new_sizes"])
    return Move(
        _bound(eqn), lambda x: reshape_metadata(x, old, new), where=_where_reshaped(old, new).__getitem__
    )


def _where_reshaped(old: Shape, new: Shape) -> list[Shape]:
    """For each axis, the axes of the new shape along which it lies: those of its block, of the same kind if any.

    An axis of size 1 lies along one of size 1, or along the axes that it is merged with.
    """
    if 0 in old:
        return [tuple(range(len(new)))] * len(old)
    places: list[Shape] = []
    for before, after in matching_blocks(old, new):
        single = iter([axis for axis in after if new[axis] == 1])
        several = tuple(axis for axis in after if new[axis] > 1)
        for axis in before:
            own = next(single, None) if old[axis] == 1 else None
            places.append(several if own is None else (own,))
    return places


def _bound(eqn: Equation) -> Function:
    return lambda x: eqn.bind([x])[0]


def _squeeze(eqn: Equation, values: Sequence[jax.Array]) -> Move:
    dims = eqn.params["dimensions"]
    left = [axis for axis in range(len(values[0].shape)) if axis not in dims]

    def squeezed(x: jax.Array) -> jax.Array:
        return lax.squeeze(x, dims)

    return Move(squeezed, squeezed, where=lambda axis: (left.index(axis),) if axis in left else ())


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
    dims = eqn.params["dimensions"]
    return Move(lambda x: lax.rev(x, dims), lambda x: lax.rev(x, dims), picks=frozenset(dims))


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
}
