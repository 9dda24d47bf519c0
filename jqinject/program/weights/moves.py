"""Operations that move the numbers of a weight: how its payload and its scales follow.

A weight reaches its contraction behind casts, reshapes, transposes, slices and look-ups. `Move` says what one of these
does to the full array (value or payload) and to what varies along some of its axes only (scale, zero point), which has
size 1 along the others and keeps it. Next: `moved_weight` applies it to a QuantTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jqinject.quant_tensor.shaping import reshape_metadata

Shape = tuple[int, ...]
Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Move:
    """What an operation does to the arrays of a weight.

    Attributes:
        full: moves an array of the weight's shape.
        partial: moves an array of as many axes, of size 1 where it does not vary.
        dtype: the float dtype that the operation casts to; None if it does not.
        picks: the axes of the weight along which it picks or reorders numbers.
    """

    full: Function
    partial: Function
    dtype: Any = None
    picks: frozenset[int] = frozenset()


def moves_of(eqn: Any, values: Sequence[Any]) -> list[Move] | None:
    """The move of each output of an operation on a weight; None if it does more than move the weight's numbers.

    Args:
        eqn: its equation; the weight is the first operand.
        values: the operands; of the weight only the shape is read.
    """
    found = MOVES.get(eqn.primitive.name)
    made = None if found is None else found(eqn, values)
    return made if made is None or isinstance(made, list) else [made]


def only_moves(name: str) -> bool:
    """Whether an operation moves numbers without changing them, so that a weight can be followed through it."""
    return name in MOVES


@dataclass(frozen=True)
class Axes:
    """Where the axes of a parameter are after some moves.

    Attributes:
        shape: of the parameter.
        marks: for each axis of the parameter, the shape of an array that varies along this axis alone.
        stacked: leading axes of the parameter over which a loop runs.
    """

    shape: Shape
    marks: tuple[Shape, ...]
    stacked: int = 0

    @classmethod
    def of(cls, shape: Shape) -> Axes:
        """Of a parameter that has not been moved."""
        marks = (tuple(n if i == axis else 1 for i, n in enumerate(shape)) for axis in range(len(shape)))
        return cls(shape, tuple(marks))

    def moved(self, move: Move) -> Axes:
        """After a move."""
        marks = (
            jax.eval_shape(move.partial, jax.ShapeDtypeStruct(mark, jnp.float32)).shape for mark in self.marks
        )
        return Axes(self.shape, tuple(tuple(mark) for mark in marks), self.stacked)

    def sliced(self) -> Axes:
        """As the body of a loop over the leading axis sees it."""
        return Axes(self.shape, tuple(mark[1:] for mark in self.marks), self.stacked + 1)

    def along(self, axes: Sequence[int]) -> frozenset[int]:
        """The axes of the parameter that lie along some axes of the moved array."""
        return frozenset(
            number for number, mark in enumerate(self.marks) if any(mark[axis] > 1 for axis in axes)
        )


def _cast(eqn: Any, values: Sequence[Any]) -> Move | None:
    dtype = eqn.params["new_dtype"]
    return Move(_same, _same, dtype) if jnp.issubdtype(dtype, jnp.floating) else None


def _same(x: Any) -> Any:
    return x


def _unchanged(eqn: Any, values: Sequence[Any]) -> Move:
    return Move(_same, _same)


def _placed(eqn: Any, values: Sequence[Any]) -> Move:
    """An operation about where the numbers are, which the scales need not follow."""
    return Move(lambda x: eqn.primitive.bind(x, **eqn.params), _same)


def _reshard(eqn: Any, values: Sequence[Any]) -> Move:
    """A change of an explicit sharding, which scales follow, but for their axes of size 1."""
    wanted = eqn.params["dst_sharding"]

    def follow(x: jax.Array) -> jax.Array:
        names = (*wanted.spec, *(None,) * (x.ndim - len(wanted.spec)))
        kept = (None if size == 1 else name for name, size in zip(names, x.shape, strict=True))
        return jax.sharding.reshard(x, wanted.update(spec=jax.sharding.PartitionSpec(*kept)))

    return Move(_bound(eqn), follow)


def _transpose(eqn: Any, values: Sequence[Any]) -> Move:
    order = eqn.params["permutation"]
    return Move(lambda x: lax.transpose(x, order), lambda x: lax.transpose(x, order))


def _reshape(eqn: Any, values: Sequence[Any]) -> Move | None:
    if eqn.params["dimensions"] is not None:
        return None
    old, new = tuple(values[0].shape), tuple(eqn.params["new_sizes"])
    return Move(_bound(eqn), lambda x: reshape_metadata(x, old, new))


def _bound(eqn: Any) -> Function:
    return lambda x: eqn.primitive.bind(x, **eqn.params)


def _squeeze(eqn: Any, values: Sequence[Any]) -> Move:
    dims = eqn.params["dimensions"]
    return Move(lambda x: lax.squeeze(x, dims), lambda x: lax.squeeze(x, dims))


def _broadcast(eqn: Any, values: Sequence[Any]) -> Move:
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]

    def partial(x: Any) -> Any:
        sizes = dict(zip(places, x.shape, strict=True))
        return lax.broadcast_in_dim(x, [sizes.get(axis, 1) for axis in range(len(shape))], places)

    return Move(_bound(eqn), partial)


def _slice(eqn: Any, values: Sequence[Any]) -> Move:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    return _sliced(start, limit, strides)


def _sliced(start: Sequence[int], limit: Sequence[int], strides: Sequence[int]) -> Move:
    def partial(x: Any) -> Any:
        varies = [n > 1 for n in x.shape]
        return lax.slice(
            x,
            [a if v else 0 for a, v in zip(start, varies, strict=True)],
            [b if v else n for b, v, n in zip(limit, varies, x.shape, strict=True)],
            [s if v else 1 for s, v in zip(strides, varies, strict=True)],
        )

    return Move(lambda x: lax.slice(x, start, limit, strides), partial)


def _split(eqn: Any, values: Sequence[Any]) -> list[Move]:
    shape, axis = values[0].shape, eqn.params["axis"]
    moves, begin = [], 0
    for size in eqn.params["sizes"]:
        start, limit = [0] * len(shape), list(shape)
        start[axis], limit[axis] = begin, begin + size
        moves.append(_sliced(start, limit, (1,) * len(shape)))
        begin += size
    return moves


def _dynamic_slice(eqn: Any, values: Sequence[Any]) -> Move:
    starts, sizes = values[1:], eqn.params["slice_sizes"]

    def partial(x: Any) -> Any:
        varies = [n > 1 for n in x.shape]
        begin = [a if v else jnp.zeros_like(a) for a, v in zip(starts, varies, strict=True)]
        return lax.dynamic_slice(x, begin, [n if v else 1 for n, v in zip(sizes, varies, strict=True)])

    return Move(lambda x: lax.dynamic_slice(x, starts, sizes), partial)


def _reverse(eqn: Any, values: Sequence[Any]) -> Move:
    dims = eqn.params["dimensions"]
    return Move(lambda x: lax.rev(x, dims), lambda x: lax.rev(x, dims), picks=frozenset(dims))


def _gather(eqn: Any, values: Sequence[Any]) -> Move | None:
    numbers, indices = eqn.params["dimension_numbers"], values[1]
    if numbers.operand_batching_dims:
        return None
    indexed = {*numbers.start_index_map, *numbers.collapsed_slice_dims}
    out = eqn.outvars[0].aval.shape

    def gathered(x: Any, sizes: Sequence[int]) -> Any:
        kept = {
            name: eqn.params[name] for name in ("dimension_numbers", "unique_indices", "indices_are_sorted")
        }
        # Integers have no nan: the scale has it, or else a number that is missing is 0.
        fill = eqn.params["fill_value"] if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        return lax.gather(
            x, indices, slice_sizes=tuple(sizes), mode=eqn.params["mode"], fill_value=fill, **kept
        )

    def partial(x: Any) -> Any:
        sizes = [min(n, size) for n, size in zip(eqn.params["slice_sizes"], x.shape, strict=True)]
        if any(x.shape[axis] > 1 for axis in indexed):
            whole = [n if axis in indexed else x.shape[axis] for axis, n in enumerate(values[0].shape)]
            return gathered(jnp.broadcast_to(x, whole), sizes)
        kept = [size for axis, size in enumerate(sizes) if axis not in numbers.collapsed_slice_dims]
        sides = dict(zip(numbers.offset_dims, kept, strict=True))
        return x.reshape([sides.get(axis, 1) for axis in range(len(out))])

    return Move(lambda x: gathered(x, eqn.params["slice_sizes"]), partial, picks=frozenset(indexed))


MOVES: dict[str, Callable[[Any, Sequence[Any]], Move | list[Move] | None]] = {
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
    "copy_p": _unchanged,
    "name": _unchanged,
    **dict.fromkeys(("sharding_constraint", "layout_constraint", "pvary", "mesh_cast"), _placed),
    "reshard": _reshard,
}
