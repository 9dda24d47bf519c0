"""Views that permute and flatten axes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.ops.devices.explicit_axes import merge_axes


class MergingView(ABC):
    """Abstract: a view that permutes and merges axes, so that each of its axes stands for some of the tensor's."""

    @abstractmethod
    def merged(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """For each axis of the view, the tensor axes that it merges, in order.

        Raises:
            ValueError: the shape does not fit the view.
        """

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        viewed = _transposed(x, [axis for axes in self.merged(x.shape) for axis in axes])
        for place, axes in enumerate(self.merged(x.shape)):
            viewed = merge_axes(viewed, place, place + len(axes))
        return viewed


def _transposed(x: jax.Array, order: Sequence[int]) -> jax.Array:
    return x if list(order) == list(range(x.ndim)) else jnp.transpose(x, order)


def _ordered(ndim: int, permute_dims: tuple[int, ...] | None, least: int, where: str) -> tuple[int, ...]:
    """The axes of a tensor in the view's order."""
    if ndim < least:
        some = "one or more axes, got a scalar" if least == 1 else f"{least} or more axes, got {ndim}"
        raise ValueError(f"{where} needs an array of {some}.")
    if permute_dims is None:
        return tuple(range(ndim))
    if sorted(permute_dims) != list(range(ndim)):
        raise ValueError(
            f"{where}: permute_dims={permute_dims} does not permute the {ndim} axes of the array. "
            f"Write a permutation of {tuple(range(ndim))}, the axis of the channels first."
        )
    return permute_dims


def _frozen(permute_dims: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if permute_dims is None else tuple(int(axis) for axis in permute_dims)


@dataclass(frozen=True)
class OverTensorView(MergingView):
    """All elements in one axis: `(n,)`.

    Example:
        >>> OverTensorView()(jnp.zeros((16, 6, 5, 5))).shape
        (2400,)
    """

    def merged(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """All axes merged."""
        return (tuple(range(len(shape))),)


@checked_arguments
@dataclass(frozen=True)
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

    permute_dims: tuple[int, ...] | None = None
    channel_axes: int = 1
    channel_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "permute_dims", _frozen(self.permute_dims))
        object.__setattr__(self, "channel_shape", _frozen(self.channel_shape))

    def merged(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The axes of the channels, and the rest."""
        permute_dims, channel_axes = self.layout(shape)
        order = _ordered(len(shape), permute_dims, channel_axes, type(self).__name__)
        return order[:channel_axes], order[channel_axes:]

    def layout(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, int]:
        """The permutation of a tensor of this shape (None if not permuted), and how many axes hold channels.

        Raises:
            ValueError: `channel_shape` does not broadcast against the shape.
        """
        fits = self.permute_dims is not None and len(self.permute_dims) == len(shape)
        if fits or self.channel_shape is None:
            return self.permute_dims, self.channel_axes
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
        return (*channels, *others), len(channels)


@checked_arguments
@dataclass(frozen=True)
class OverBatchOverTensorView(MergingView):
    """Examples first, the rest flat: `(batch, n)`.

    Args:
        permute_dims: permutation that brings the batch first, or None if it is first.

    Example:
        >>> OverBatchOverTensorView()(jnp.zeros((8, 10, 5, 5))).shape
        (8, 250)
    """

    permute_dims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "permute_dims", _frozen(self.permute_dims))

    def merged(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The batch, and the rest."""
        order = _ordered(len(shape), self.permute_dims, 1, type(self).__name__)
        return order[:1], order[1:]


@checked_arguments
@dataclass(frozen=True)
class OverBatchOverOutputChannelView(MergingView):
    """Examples, channels, the rest flat: `(batch, channels, n)`.

    Args:
        permute_dims: permutation that brings batch and channels first, or None if they are.

    Example:
        >>> OverBatchOverOutputChannelView()(jnp.zeros((8, 10, 5, 5))).shape
        (8, 10, 25)
    """

    permute_dims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "permute_dims", _frozen(self.permute_dims))

    def merged(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The batch, the channels, and the rest."""
        order = _ordered(len(shape), self.permute_dims, 2, type(self).__name__)
        return order[:1], order[1:2], order[2:]


@checked_arguments
@dataclass(frozen=True)
class OverOutputFeaturesView(MergingView):
    """The last axis kept, everything before it flat: `(n, features)`.

    Args:
        permute_dims: permutation that brings the features last, or None if they are.

    Example:
        >>> OverOutputFeaturesView()(jnp.zeros((8, 10, 25))).shape
        (80, 25)
    """

    permute_dims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "permute_dims", _frozen(self.permute_dims))

    def merged(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The rest, and the features."""
        order = _ordered(len(shape), self.permute_dims, 1, type(self).__name__)
        return order[:-1], order[-1:]
