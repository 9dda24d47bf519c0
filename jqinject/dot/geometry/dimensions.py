"""Dimension numbers of a contraction, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import jax

from jqinject.quant_tensor import QuantTensor
from jqinject.quant_tensor.group_layout import with_two_axes

Operand: TypeAlias = jax.Array | QuantTensor
OutSharding: TypeAlias = jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None


@dataclass(frozen=True)
class Dimensions:
    """The axes of `lax.dot_general`, as tuples of ints counted from the front.

    Attributes:
        lhs_ndim, rhs_ndim: axes of the operands.
        lhs_contract, rhs_contract: contracted axes, pairwise.
        lhs_batch, rhs_batch: batch axes, pairwise.
    """

    lhs_ndim: int
    rhs_ndim: int
    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    @classmethod
    def of(cls, lhs_ndim: int, rhs_ndim: int, dimension_numbers: Any) -> Dimensions:
        """From `lax.dot_general`'s `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`."""
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        axes = tuple(lhs_contract), tuple(rhs_contract), tuple(lhs_batch), tuple(rhs_batch)
        return _counted_from_front(lhs_ndim, rhs_ndim, *axes)

    @cached_property
    def numbers(self) -> Any:
        """As `lax.dot_general` takes them."""
        return (self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch)

    @cached_property
    def lhs_free(self) -> tuple[int, ...]:
        """Free axes of the left operand."""
        return _without(self.lhs_ndim, self.lhs_contract, self.lhs_batch)

    @cached_property
    def rhs_free(self) -> tuple[int, ...]:
        """Free axes of the right operand."""
        return _without(self.rhs_ndim, self.rhs_contract, self.rhs_batch)

    @cached_property
    def out_ndim(self) -> int:
        """Axes of the output: batch, free axes of the left, then of the right operand."""
        return len(self.lhs_batch) + len(self.lhs_free) + len(self.rhs_free)

    @cached_property
    def lhs_places(self) -> dict[int, int]:
        """Axis of the left operand -> axis of the output."""
        return {axis: place for place, axis in enumerate((*self.lhs_batch, *self.lhs_free))}

    @cached_property
    def rhs_places(self) -> dict[int, int]:
        """Axis of the right operand -> axis of the output."""
        after = len(self.lhs_batch) + len(self.lhs_free)
        places = {axis: place for place, axis in enumerate(self.rhs_batch)}
        return places | {axis: after + place for place, axis in enumerate(self.rhs_free)}

    def out_shape(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output of operands of these shapes."""
        left = (lhs[axis] for axis in (*self.lhs_batch, *self.lhs_free))
        return (*left, *(rhs[axis] for axis in self.rhs_free))

    @property
    def rhs_first(self) -> tuple[int, ...]:
        """The output permutation of `swapped`: the right operand's free axes before the left's."""
        batch, left = len(self.lhs_batch), len(self.lhs_free)
        axes = tuple(range(self.out_ndim))
        return axes[:batch] + axes[batch + left :] + axes[batch : batch + left]

    def swapped(self) -> Dimensions:
        """With the operands in the other order."""
        return Dimensions(
            self.rhs_ndim, self.lhs_ndim, self.rhs_contract, self.lhs_contract, self.rhs_batch, self.lhs_batch
        )

    @lru_cache(maxsize=1024)  # noqa: B019 (compared by value and small)
    def with_right(self, places: tuple[int, ...]) -> Dimensions:
        """With the right operand's axes in another order.

        Args:
            places: where each axis is then.
        """
        moved = (tuple(map(places.__getitem__, axes)) for axes in (self.rhs_contract, self.rhs_batch))
        return Dimensions.of(
            self.lhs_ndim,
            self.rhs_ndim,
            tuple(zip((self.lhs_contract, self.lhs_batch), moved, strict=True)),
        )

    def along(self, pairs: list[int]) -> Dimensions:
        """With some summed axes as leading batch axes instead."""
        rest = [pair for pair in range(len(self.lhs_contract)) if pair not in pairs]
        return replace(
            self,
            lhs_contract=tuple(self.lhs_contract[pair] for pair in rest),
            rhs_contract=tuple(self.rhs_contract[pair] for pair in rest),
            lhs_batch=(*(self.lhs_contract[pair] for pair in pairs), *self.lhs_batch),
            rhs_batch=(*(self.rhs_contract[pair] for pair in pairs), *self.rhs_batch),
        )

    def in_groups(self, left: int, right: int) -> Dimensions:
        """Of operands whose summed axes `left` and `right` have become two: groups, and their elements."""
        return Dimensions(
            self.lhs_ndim + 1,
            self.rhs_ndim + 1,
            with_two_axes(self.lhs_contract, left),
            with_two_axes(self.rhs_contract, right),
            with_two_axes(self.lhs_batch, left),
            with_two_axes(self.rhs_batch, right),
        )


@lru_cache(maxsize=1024)
def _counted_from_front(lhs_ndim: int, rhs_ndim: int, *axes: tuple[int, ...]) -> Dimensions:
    """The same instance for the same axes, so that derived facts are computed once."""
    ndims = lhs_ndim, rhs_ndim, lhs_ndim, rhs_ndim
    counted = (tuple(axis % ndim for axis in part) for part, ndim in zip(axes, ndims, strict=True))
    return Dimensions(lhs_ndim, rhs_ndim, *counted)


def _without(ndim: int, *taken: Sequence[int]) -> tuple[int, ...]:
    excluded = {axis for axes in taken for axis in axes}
    return tuple(axis for axis in range(ndim) if axis not in excluded)


def scale_in_output(
    scale: jax.Array, ndim: int, places: Mapping[int, int], out_ndim: int
) -> jax.Array | None:
    """An operand's scale laid out to multiply the output; None if it varies along a summed axis.

    Args:
        scale: broadcasts against the operand.
        ndim: axes of the operand.
        places: axis of the operand -> axis of the output.
        out_ndim: axes of the output.
    """
    if scale.size == 1:
        return scale.reshape(()) if scale.ndim else scale
    layout = _layout(scale.shape, ndim, tuple(places.items()), out_ndim)
    if layout is None:
        return None
    dense, order, shape = layout
    if order != tuple(range(len(order))):
        scale = scale.reshape(dense).transpose(order)
    return scale.reshape(shape) if scale.shape != shape else scale


Shapes = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def varying_pairs(dims: Dimensions, lhs: Shapes, rhs: Shapes) -> list[int]:
    """The pairs of summed axes along which a scale or zero point varies, given their shapes."""
    left, right = scaled_axes(lhs, dims.lhs_ndim), scaled_axes(rhs, dims.rhs_ndim)
    pairs = zip(dims.lhs_contract, dims.rhs_contract, strict=True)
    return [pair for pair, (a, b) in enumerate(pairs) if a in left or b in right]


@lru_cache(maxsize=1024)
def scaled_axes(shapes: Shapes, ndim: int) -> frozenset[int]:
    """The axes, of `ndim`, along which scales and zero points vary, given their shapes.

    Example:
        >>> sorted(scaled_axes(((3, 1), (4,), ()), 2))
        [0, 1]
    """
    return frozenset(
        axis + ndim - len(shape) for shape in shapes for axis, size in enumerate(shape) if size != 1
    )


@lru_cache(maxsize=1024)
def _layout(
    shape: tuple[int, ...], ndim: int, places: tuple[tuple[int, int], ...], out_ndim: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """A scale's shape without ones, its transposition, and its shape in the output."""
    place = dict(places)
    sizes = (*(1,) * (ndim - len(shape)), *shape)
    varying = [axis for axis, size in enumerate(sizes) if size != 1]
    if any(axis not in place for axis in varying):
        return None
    order = sorted(varying, key=lambda axis: place[axis])
    expanded = [1] * out_ndim
    for axis in varying:
        expanded[place[axis]] = sizes[axis]
    dense = tuple(sizes[axis] for axis in varying)
    return dense, tuple(varying.index(axis) for axis in order), tuple(expanded)


def checked_dimensions(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dimension_numbers: Any
) -> Dimensions:
    """The dimensions of a contraction of these shapes.

    Raises:
        TypeError: the dimension numbers are not of the form `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`.
        ValueError: an axis is out of range or named twice, or paired axes differ in length.
    """
    try:
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        paired = (("summed", lhs_contract, rhs_contract), ("batch", lhs_batch, rhs_batch))
        paired = tuple((kind, tuple(map(int, a)), tuple(map(int, b))) for kind, a, b in paired)
    except (TypeError, ValueError):
        raise TypeError(
            "dimension_numbers must be ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)), each a sequence of "
            f"axes; got {dimension_numbers!r}"
        ) from None
    for kind, left, right in paired:
        _check_pairs(kind, left, right, lhs_shape, rhs_shape)
    for side, shape, axes in (
        ("lhs", lhs_shape, (*lhs_contract, *lhs_batch)),
        ("rhs", rhs_shape, (*rhs_contract, *rhs_batch)),
    ):
        if len({axis % len(shape) for axis in axes}) != len(axes):
            raise ValueError(f"dimension_numbers {dimension_numbers} name an axis of {side} twice")
    return Dimensions.of(len(lhs_shape), len(rhs_shape), dimension_numbers)


def _check_pairs(
    kind: str, left: Any, right: Any, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
) -> None:
    if len(left) != len(right):
        raise ValueError(
            f"lhs has {len(left)} {kind} axes ({left}), rhs has {len(right)} ({right}): they go in pairs"
        )
    for side, axes, shape in (("lhs", left, lhs_shape), ("rhs", right, rhs_shape)):
        for axis in axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(f"{side} has shape {shape} and no axis {axis} to be a {kind} axis")
    for a, b in zip(left, right, strict=True):
        if lhs_shape[a] != rhs_shape[b]:
            raise ValueError(
                f"the {kind} axes differ in length: axis {a} of lhs has {lhs_shape[a]}, axis {b} of rhs has "
                f"{rhs_shape[b]} (shapes {lhs_shape} and {rhs_shape})"
            )
