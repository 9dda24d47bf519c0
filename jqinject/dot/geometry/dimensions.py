"""The axes of a contraction by label, from which dimension numbers and the places of scales follow.

| label | axis |
|---|---|
| `("batch", i)` | batch: of both operands and the output |
| `("lhs", axis)` | of the left operand and the output |
| `("rhs", axis)` | of the right operand and the output |
| `("summed", i)` | of both operands, summed over in the forward contraction |
| `("tile", *label)` | the tiles that another axis was cut into |
| `("group", *label)` | the groups of integers that another axis was cut into |

Labels of both operands are summed, or batch axes if the output has them: forward and backward alike.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import jax

OutSharding: TypeAlias = jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None
Label = tuple[str | int, ...]
Labels = tuple[Label, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Dimensions:
    """The labels of the axes of two operands and of their product.

    Example:
        >>> x, y, k = ("lhs", 0), ("rhs", 1), ("summed", 0)
        >>> dims = Dimensions((x, y), (k, y), (k, x))
        >>> dims.numbers, dims.order
        ((((1,), (1,)), ((), ())), (1, 0))
    """

    lhs: Labels
    rhs: Labels
    out: Labels

    @classmethod
    def of(cls, lhs_ndim: int, rhs_ndim: int, dimension_numbers: Any) -> "Dimensions":
        """From `lax.dot_general`'s `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`.

        Example:
            >>> Dimensions.of(2, 2, (((1,), (0,)), ((), ()))).out
            (('lhs', 0), ('rhs', 1))
        """
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        axes = tuple(lhs_contract), tuple(rhs_contract), tuple(lhs_batch), tuple(rhs_batch)
        return _labelled(lhs_ndim, rhs_ndim, *axes)

    @classmethod
    @lru_cache(maxsize=1024)
    def of_equation(cls, lhs: str, rhs: str, out: str) -> "Dimensions":
        """From the letters of an einsum.

        Example:
            >>> Dimensions.of_equation("df", "bd", "bf").order
            (1, 0)
        """
        batch = [name for name in out if name in lhs and name in rhs]
        summed = [name for name in lhs if name in rhs and name not in out]
        pairs = [[[names.index(name) for name in axes] for names in (lhs, rhs)] for axes in (summed, batch)]
        dims = cls.of(len(lhs), len(rhs), pairs)
        labels = dict(zip(lhs, dims.lhs, strict=True)) | dict(zip(rhs, dims.rhs, strict=True))
        return cls(dims.lhs, dims.rhs, tuple(labels[name] for name in out))

    @cached_property
    def summed(self) -> Labels:
        """The summed axes, in the order of their numbers."""
        both = [label for label in self.lhs if label in self.rhs and label not in self.out]
        return tuple(sorted(both, key=lambda label: label[-1]))

    @cached_property
    def numbers(self) -> Any:
        """As `lax.dot_general` takes them."""
        return (self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch)

    @cached_property
    def lhs_contract(self) -> tuple[int, ...]:
        """Summed axes of the left operand."""
        return tuple(map(self.lhs.index, self.summed))

    @cached_property
    def rhs_contract(self) -> tuple[int, ...]:
        """Summed axes of the right operand, paired with those of the left."""
        return tuple(map(self.rhs.index, self.summed))

    @cached_property
    def lhs_batch(self) -> tuple[int, ...]:
        """Batch axes of the left operand."""
        return tuple(self.lhs.index(label) for label in self.out if label in self.lhs and label in self.rhs)

    @cached_property
    def rhs_batch(self) -> tuple[int, ...]:
        """Batch axes of the right operand, paired with those of the left."""
        return tuple(self.rhs.index(self.lhs[axis]) for axis in self.lhs_batch)

    @cached_property
    def lhs_free(self) -> tuple[int, ...]:
        """Axes of the left operand alone."""
        return tuple(axis for axis, label in enumerate(self.lhs) if label not in self.rhs)

    @cached_property
    def rhs_free(self) -> tuple[int, ...]:
        """Axes of the right operand alone."""
        return tuple(axis for axis, label in enumerate(self.rhs) if label not in self.lhs)

    @cached_property
    def result(self) -> Labels:
        """The axes of `lax.dot_general`'s output: batch, then free ones of the left, then of the right operand."""
        left = (self.lhs[axis] for axis in (*self.lhs_batch, *self.lhs_free))
        return (*left, *(self.rhs[axis] for axis in self.rhs_free))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The permutation of `result` to `out`."""
        return tuple(map(self.result.index, self.out))

    @cached_property
    def plain(self) -> "Dimensions":
        """With the output in the order of `result`."""
        return self if self.is_ordered else Dimensions(self.lhs, self.rhs, self.result)

    @cached_property
    def is_ordered(self) -> bool:
        """Whether `lax.dot_general` has the axes in the order of `out`."""
        return self.result == self.out

    def ordered(self, y: jax.Array) -> jax.Array:
        """An array with the axes of `result` in the order of `out`."""
        return y if self.is_ordered else y.transpose(self.order)

    def out_shape(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the output of operands of these shapes."""
        sizes = dict(zip(self.rhs, rhs, strict=True)) | dict(zip(self.lhs, lhs, strict=True))
        return tuple(map(sizes.__getitem__, self.out))

    def swapped(self) -> "Dimensions":
        """With the operands in the other order, and the same output."""
        return Dimensions(self.rhs, self.lhs, self.out)

    @lru_cache(maxsize=1024)  # noqa: B019 (compared by value and small)
    def with_right(self, places: tuple[int, ...]) -> "Dimensions":
        """With the right operand's axes in another order.

        Args:
            places: where each axis is then.
        """
        labels = dict(zip(places, self.rhs, strict=True))
        return Dimensions(self.lhs, tuple(labels[place] for place in range(len(places))), self.out)

    @lru_cache(maxsize=1024)  # noqa: B019 (compared by value and small)
    def along(self, pairs: tuple[int, ...]) -> "Dimensions":
        """With some summed axes as leading batch axes instead."""
        return Dimensions(self.lhs, self.rhs, (*(self.summed[pair] for pair in pairs), *self.out))

    @lru_cache(maxsize=1024)  # noqa: B019 (compared by value and small)
    def in_groups(self, left: int) -> "Dimensions":
        """Of operands whose summed axis, `left` of the left one, has become two: groups, and their elements."""
        label = self.lhs[left]
        lhs, rhs = (
            tuple(
                part for name in labels for part in ((("group", *name), name) if name == label else (name,))
            )
            for labels in (self.lhs, self.rhs)
        )
        return Dimensions(lhs, rhs, self.out)


@lru_cache(maxsize=1024)
def _labelled(
    lhs_ndim: int,
    rhs_ndim: int,
    lhs_contract: tuple[int, ...],
    rhs_contract: tuple[int, ...],
    lhs_batch: tuple[int, ...],
    rhs_batch: tuple[int, ...],
) -> Dimensions:
    """The same instance for the same axes, so that derived facts are computed once."""
    lhs: list[Label] = [("lhs", axis) for axis in range(lhs_ndim)]
    rhs: list[Label] = [("rhs", axis) for axis in range(rhs_ndim)]
    for kind, left_axes, right_axes in (
        ("batch", lhs_batch, rhs_batch),
        ("summed", lhs_contract, rhs_contract),
    ):
        for number, (left, right) in enumerate(zip(left_axes, right_axes, strict=True)):
            lhs[left] = rhs[right] = (kind, number)
    free = (label for label in (*lhs, *rhs) if label[0] in ("lhs", "rhs"))
    batch = (("batch", number) for number in range(len(lhs_batch)))
    return Dimensions(tuple(lhs), tuple(rhs), (*batch, *free))


def tile_of(label: Label) -> Label:
    """The label of an axis's tiles."""
    return ("tile", *label)


def scale_in_output(scale: jax.Array, axes: Sequence[Hashable], out: Sequence[Hashable]) -> jax.Array | None:
    """A scale laid out to multiply another array; None if it varies along an axis that this lacks.

    Args:
        scale: broadcasts against an array whose axes have the labels `axes`.
        axes: these labels.
        out: those of the other array.

    Example:
        >>> import jax.numpy as jnp
        >>> scale_in_output(jnp.ones((3, 1)), "ab", "ba").shape
        (1, 3)
    """
    if scale.size == 1:
        return scale.reshape(()) if scale.ndim else scale
    layout = _layout(scale.shape, tuple(axes), tuple(out))
    if layout is None:
        return None
    dense, order, shape = layout
    if order != tuple(range(len(order))):
        scale = scale.reshape(dense).transpose(order)
    return scale.reshape(shape) if scale.shape != shape else scale


@lru_cache(maxsize=1024)
def _layout(
    shape: tuple[int, ...], axes: tuple[Hashable, ...], out: tuple[Hashable, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """A scale's shape without ones, its transposition, and its shape in the output."""
    sizes = {
        label: size for label, size in zip(axes[len(axes) - len(shape) :], shape, strict=True) if size != 1
    }
    if not sizes.keys() <= {*out}:
        return None
    varying = list(sizes)
    order = sorted(range(len(varying)), key=lambda axis: out.index(varying[axis]))
    return tuple(sizes.values()), tuple(order), tuple(sizes.get(label, 1) for label in out)


@lru_cache(maxsize=1024)
def varying_pairs(dims: Dimensions, lhs: Shapes, rhs: Shapes) -> tuple[int, ...]:
    """The pairs of summed axes along which a scale or zero point varies, given their shapes."""
    left, right = scaled_axes(lhs, len(dims.lhs)), scaled_axes(rhs, len(dims.rhs))
    pairs = zip(dims.lhs_contract, dims.rhs_contract, strict=True)
    return tuple(pair for pair, (a, b) in enumerate(pairs) if a in left or b in right)


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
