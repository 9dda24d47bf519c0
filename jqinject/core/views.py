"""Views of a tensor for a statistic: merged axes, channels, groups and blocks.

Here is also the one place that applies a view where groups may cross shards: `in_layout` and `beside`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from jqinject.core import _protocols, check, component
from jqinject.ops.cut import Cut, cut_in_place
from jqinject.ops.groups import (
    block_of,
    check_divides,
    checked_group_size,
    elements_axis,
    fitting_size,
    split_groups,
)
from jqinject.ops.sharding import is_split, merge_axes


@component.frozen_value
class MergingView:
    """Abstract: a view that permutes and merges axes, so that each of its axes stands for some of the tensor's."""

    permute_dims: tuple[int, ...] | None = None
    #: Where the axes of the view end, but the last.
    ends: ClassVar[tuple[int, ...]] = (1,)

    def layout(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """The permutation of a tensor of this shape (None if not permuted), and where the view's axes end."""
        return self.permute_dims, self.ends

    def merged(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """For each axis of the view, the tensor axes that it merges, in order.

        Raises:
            ValueError: the shape does not fit the view.
        """
        (order, ends), ndim, where = self.layout(shape), len(shape), type(self).__name__
        least = max(map(abs, ends), default=0)
        if ndim < least:
            some = "one or more axes, got a scalar" if least == 1 else f"{least} or more axes, got {ndim}"
            raise ValueError(f"{where} needs an array of {some}.")
        axes = tuple(range(ndim)) if order is None else order
        if sorted(axes) != list(range(ndim)):
            raise ValueError(
                f"{where}: permute_dims={order} does not permute the {ndim} axes of the array. "
                f"Write a permutation of {tuple(range(ndim))}, the axis of the channels first."
            )
        return tuple(axes[start:end] for start, end in zip((0, *ends), (*ends, None), strict=True))

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        merged = self.merged(x.shape)
        order = [axis for axes in merged for axis in axes]
        viewed = x if order == sorted(order) else jnp.transpose(x, order)
        for place, axes in enumerate(merged):
            viewed = merge_axes(viewed, place, place + len(axes))
        return viewed


@component.frozen_value
class OverTensorView(MergingView):
    """All elements in one axis: `(n,)`.

    Example:
        >>> OverTensorView()(jnp.zeros((16, 6, 5, 5))).shape
        (2400,)
    """

    ends = ()
    permute_dims: tuple[int, ...] | None = field(init=False, repr=False, default=None)


@component.frozen_value
class OverOutputChannelView(MergingView):
    """Channels first, the rest flat: `(channels, n)`, to be reduced over axis 1.

    Args:
        permute_dims: permutation that brings the output channel first, or None if it is first.
        channel_axes: how many axes hold channels; several are merged.
        channel_shape: the shape of a per-channel scale, broadcast against a tensor of any rank: its axes other than 1
            hold channels. It is used instead of the other two if there is no permutation or it has another number of
            axes.

    Example:
        >>> OverOutputChannelView(permute_dims=(1, 0))(jnp.zeros((64, 10))).shape
        (10, 64)
        >>> OverOutputChannelView(permute_dims=(0, 2, 1), channel_axes=2)(jnp.zeros((3, 4, 5))).shape
        (15, 4)
        >>> OverOutputChannelView(channel_shape=(4,))(jnp.zeros((2, 3, 4))).shape
        (4, 6)
    """

    channel_axes: check.Whole = 1
    channel_shape: tuple[int, ...] | None = None

    def layout(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """The permutation of a tensor of this shape (None if not permuted), and how many axes hold channels.

        Raises:
            ValueError: `channel_shape` does not broadcast against the shape.
        """
        fits = self.permute_dims is not None and len(self.permute_dims) == len(shape)
        if fits or self.channel_shape is None:
            return self.permute_dims, (self.channel_axes,)
        ahead = len(shape) - len(self.channel_shape)
        sizes = dict(enumerate(self.channel_shape, ahead))
        if ahead < 0 or any(size not in (1, shape[axis]) for axis, size in sizes.items()):
            raise ValueError(
                f"OverOutputChannelView: a scale of shape {self.channel_shape}, one for each channel, does not "
                f"broadcast against a tensor of shape {shape}.\n  cure: the number of channels on their axis, 1 on the "
                f"axes behind it: {shape[-1:]} for the channels of the last axis"
            )
        channels = tuple(axis for axis, size in sizes.items() if size != 1)
        others = tuple(axis for axis in range(len(shape)) if axis not in channels)
        return (*channels, *others), (len(channels),)


class OverBatchOverTensorView(MergingView):
    """Examples first, the rest flat: `(batch, n)`.

    Args:
        permute_dims: permutation that brings the batch first, or None if it is first.

    Example:
        >>> OverBatchOverTensorView()(jnp.zeros((8, 10, 5, 5))).shape
        (8, 250)
    """


class OverBatchOverOutputChannelView(MergingView):
    """Examples, channels, the rest flat: `(batch, channels, n)`.

    Args:
        permute_dims: permutation that brings batch and channels first, or None if they are.

    Example:
        >>> OverBatchOverOutputChannelView()(jnp.zeros((8, 10, 5, 5))).shape
        (8, 10, 25)
    """

    ends = (1, 2)


class OverOutputFeaturesView(MergingView):
    """The last axis kept, everything before it flat: `(n, features)`.

    Args:
        permute_dims: permutation that brings the features last, or None if they are.

    Example:
        >>> OverOutputFeaturesView()(jnp.zeros((8, 10, 25))).shape
        (80, 25)
    """

    ends = (-1,)


@dataclass(frozen=True)
class Blocks:
    """Blocks of a tensor in groups: neighbouring groups that share their statistic.

    Attributes:
        width: groups of a block; at most all of an axis.
        axis: of the tensor in groups: the one along which they are neighbours.
        elements: its axis of the elements of a group.
        padding: whether zeros fill up the last block; False refuses an axis that needs them.
    """

    width: int
    axis: int
    elements: int
    padding: bool = True


#: How many elements, or groups: as an argument also a pair of both; checked by the view.
GroupSize: TypeAlias = Any


class GroupingView(ABC):
    """Abstract: a view that cuts an axis into groups, `block_width` of which, along `block_dim`, are a block.

    The numbers of a block share their statistics, so its groups have the same scale.
    """

    group_size: GroupSize
    group_dim: int
    block_width: GroupSize
    block_dim: int | None
    group_padding: bool = True

    @property
    def groups(self) -> tuple[int, int]:
        """Group size and grouped axis."""
        return self.group_size, self.group_dim

    def blocks(self, x: jax.Array) -> Blocks | None:
        """The blocks of an unviewed tensor, once viewed; None if each group is one.

        Raises:
            ValueError: the tensor has no second axis for them.
        """
        if self.block_width == 1:
            return None
        ndim = x.ndim - self.is_seen(x)
        cut = self.group_dim % ndim
        along = self.block_dim
        if along is None or not -ndim <= along < ndim or along % ndim == cut:
            raise ValueError(
                f"blocks of {self.group_size} x {self.block_width} need an axis beside axis {self.group_dim}, and an "
                f"array of shape {x.shape} has no axis {along} for it.\n"
                "  cure: group_size = an int, for groups along one axis; or block_dim = the other axis"
            )
        place = along % ndim
        return Blocks(self.block_width, place + (place > cut), elements_axis(cut), self.group_padding)

    def __post_init__(self) -> None:
        """Check the fields; `group_size` may hold both lengths of a block."""
        where = type(self).__name__
        size, width = block_of(self.group_size, where)
        own = checked_group_size(self.block_width, where, "block_width")
        vars(self).update(group_size=size, block_width=max(width, own))

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        if not -x.ndim <= self.group_dim < x.ndim:
            raise self._misfit(x, f"has no axis {self.group_dim}")
        if not self.group_padding:
            check_divides(x.shape[self.group_dim], self.group_size, type(self).__name__)
        return split_groups(x, fitting_size(self.group_size, x.shape[self.group_dim]), self.group_dim)

    @abstractmethod
    def _misfit(self, x: jax.Array, problem: str) -> ValueError:
        """The error for an array that does not fit."""

    def is_seen(self, x: jax.Array) -> bool:
        """Whether a tensor is already in groups; a view of any shape cannot know."""
        return False

    def cut(self, x: jax.Array) -> Cut | None:
        """How to cut a tensor without a reshape, which would gather it; None if not needed."""
        if self.is_seen(x) or not -x.ndim <= self.group_dim < x.ndim:
            return None
        axis = self.group_dim % x.ndim
        return cut_in_place(x, fitting_size(self.group_size, x.shape[axis]), axis)


def cut_of(view: _protocols.View, x: jax.Array) -> Cut | None:
    """The `Cut` of a grouping view; None for any other view or if not needed."""
    return view.cut(x) if isinstance(view, GroupingView) else None


def blocks_of(view: _protocols.View, x: jax.Array) -> Blocks | None:
    """The `Blocks` of a grouping view; None for any other view, or if each group is one."""
    return view.blocks(x) if isinstance(view, GroupingView) else None


def in_layout(view: _protocols.View, quantize: Callable[..., object], x: jax.Array, *numbers: object) -> Any:
    """`quantize(view(x), *numbers)`; if groups may cross shards, `x` is quantized before it is viewed.

    Along explicit axes it is not viewed then, since the view would have to be gathered.

    Args:
        view: the view.
        quantize: an elementwise function that returns one or more arrays.
        x: the tensor.
        numbers: broadcast against the view: scales, zero points; pytrees of them, None included.
    """
    cut = cut_of(view, x)
    if cut is None:
        return quantize(view(x), *numbers)
    results = quantize(x, *jax.tree.map(lambda number: cut.spread(number, x), numbers))
    return results if is_split(x) else jax.tree.map(view, results)


def beside(view: _protocols.View, x: jax.Array, *numbers: object) -> tuple[Any, ...]:
    """Numbers that broadcast against the view, as they broadcast against what `in_layout` returns."""
    cut = cut_of(view, x) if is_split(x) else None
    return numbers if cut is None else jax.tree.map(lambda number: cut.spread(number, x), numbers)


@component.frozen_value
class OverSubChannelBlockView(GroupingView):
    """One axis cut into groups, of a tensor whose shape is known: `(..., groups, group_size, ...)`.

    The last group is padded with zeros. An array that already has the grouped number of axes (a zero point, say) is
    unchanged.

    Args:
        expanded_groupwise_shape: the shape of the view.
        group_size: elements of a group, at most the size of the axis; or both lengths of a block.
        group_dim: the axis to cut; may be negative.
        block_width: groups of a block, if `group_size` does not say it.
        block_dim: the axis along which a block's groups are neighbours.

    Raises:
        ValueError: a group size below 1; (when called) a tensor of another shape.

    Example:
        >>> import jax.numpy as jnp
        >>> OverSubChannelBlockView((2, 32, 3), 32, 0)(jnp.zeros((40, 3))).shape
        (2, 32, 3)
    """

    expanded_groupwise_shape: tuple[int, ...]
    group_size: GroupSize
    group_dim: int
    block_width: GroupSize = 1
    block_dim: int | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        expanded = self.expanded_groupwise_shape
        if self.is_seen(x):
            if any(size not in (1, expected) for size, expected in zip(x.shape, expanded, strict=True)):
                raise self._misfit(x, "has as many axes")
            return x
        viewed = super().__call__(x)
        if viewed.shape != expanded:
            raise self._misfit(x, f"is {viewed.shape} in groups")
        return viewed

    def is_seen(self, x: jax.Array) -> bool:
        """Whether a tensor has the grouped number of axes."""
        return x.ndim == len(self.expanded_groupwise_shape)

    def _misfit(self, x: jax.Array, problem: str) -> ValueError:
        return ValueError(
            f"OverSubChannelBlockView was made for arrays that are {self.expanded_groupwise_shape} in groups of "
            f"{self.group_size}, got one of shape {x.shape}, which {problem}.\n"
            "  cure: DynamicOverSubChannelBlockView, which takes any shape; for a quantizer of scales, nested in that "
            "of a weight, upstream_shape = (this << 1).scaling_shape, and around it restrict_threshold_impl = "
            "FloatRestrictValue, as the threshold (a scalar) has no groups"
        )


@component.frozen_value
class DynamicOverSubChannelBlockView(GroupingView):
    """One axis cut into groups, of a tensor of any shape: `(..., groups, group_size, ...)`.

    Args:
        group_size: elements of a group, at most the size of the axis; or both lengths of a block.
        group_dim: the axis to cut; may be negative.
        group_padding: pad the last group with zeros; False refuses an axis that needs padding.
        block_width: groups of a block, if `group_size` does not say it.
        block_dim: the axis along which a block's groups are neighbours.

    Raises:
        ValueError: a group size below 1; (when called) a tensor without the axis, or one that needs padding.

    Example:
        >>> import jax.numpy as jnp
        >>> DynamicOverSubChannelBlockView(4, -1)(jnp.zeros((8, 10))).shape
        (8, 3, 4)
    """

    group_size: GroupSize
    group_dim: int = -1
    group_padding: bool = True
    block_width: GroupSize = 1
    block_dim: int | None = -2

    def _misfit(self, x: jax.Array, problem: str) -> ValueError:
        return ValueError(
            f"DynamicOverSubChannelBlockView: an array of shape {x.shape} {problem} to cut into groups.\n"
            "  cure: group_dim = -1, the features"
        )
