"""Which axes of a tensor share a clipping range."""

from __future__ import annotations

from collections.abc import Sequence

from jqinject.ops.groups import checked_group_size


def axes_that_share(
    ndim: int, shared: tuple[int, ...] | None, channels: tuple[int, ...], cut: int | None
) -> tuple[int, ...]:
    """The axes that share a range.

    Args:
        ndim: axes of the tensor, with groups counted as two.
        shared: the axes that share a range; None means all but `channels`.
        channels: the axes with a range for each index.
        cut: the axis that is cut into groups, if any.

    Example:
        >>> axes_that_share(3, None, (0,), None), axes_that_share(3, None, (0,), 1)
        ((1, 2), (2,))
    """
    if cut is None:
        return others(ndim, channels) if shared is None else _within(ndim, shared)
    cut = cut % (ndim - 1)
    if shared is not None:
        return tuple(axis + (axis >= cut) for axis in _within(ndim - 1, shared))
    channels = _within(ndim - 1, channels)
    check_apart(cut, channels)
    return others(ndim, (cut, *(axis + (axis > cut) for axis in channels)))


def check_axes(
    averaged: bool, channelwise_axes: Sequence[int], group_size: int | None, group_dim: int | None
) -> None:
    """Refuse several ranges where one is averaged, and groups along an axis that has a range for each index."""
    if averaged and (tuple(channelwise_axes) or group_size is not None):
        raise ValueError(
            f"CalibratedQuant: an averaged range is one for the tensor, got channelwise_axes={channelwise_axes!r}, "
            f"group_size={group_size!r}.\n  cure: averaging_impl=None, for a range of the given tensor"
        )
    if group_size is not None:
        checked_group_size(group_size, "CalibratedQuant")
        check_apart(group_dim, channelwise_axes)


def check_apart(group_dim: int | None, channelwise_axes: Sequence[int]) -> None:
    """Refuse to group an axis that has a range for each index."""
    if group_dim is not None and group_dim in channelwise_axes:
        raise ValueError(
            f"CalibratedQuant: axis {group_dim} cannot have a range for each index and be cut into groups that share "
            f"one, got channelwise_axes={tuple(channelwise_axes)}, group_dim={group_dim}.\n"
            "  cure: take the axis out of channelwise_axes"
        )


def _within(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({axis % ndim for axis in axes if -ndim <= axis < ndim}))


def others(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    """All other axes of a tensor."""
    kept = _within(ndim, axes)
    return tuple(axis for axis in range(ndim) if axis not in kept)
