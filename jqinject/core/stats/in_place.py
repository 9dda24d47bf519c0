"""Which axes of a tensor a statistic of its view reduces."""

from __future__ import annotations

from dataclasses import is_dataclass

import jax

from jqinject.core._protocols import Stat, View
from jqinject.core.stats.means import MeanLearnedSigmaStd
from jqinject.core.stats.two_phase import TwoPhaseStat
from jqinject.core.view import MergingView
from jqinject.ops.devices.over import Axes


def reduced_axes(view: View, reduce_dim: Axes, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of a tensor that an axis of its view is made of.

    Args:
        view: the view.
        reduce_dim: an axis of the view; None for all.
        shape: of the tensor.

    Returns:
        The axes, in the order of the view; None if it does more than put axes together, or leaves the others in
        another order.

    Example:
        >>> from jqinject.core.view import OverOutputChannelView
        >>> reduced_axes(OverOutputChannelView(permute_dims=(3, 2, 0, 1)), 1, (3, 3, 8, 16))
        (2, 0, 1)
    """
    if not isinstance(view, MergingView) or isinstance(reduce_dim, tuple):
        return None
    merged = view.merged(shape)
    if reduce_dim is None:
        return tuple(axis for axes in merged for axis in axes)
    if not -len(merged) <= reduce_dim < len(merged):
        return None
    reduced = merged[reduce_dim]
    kept = [axis for axes in merged for axis in axes if axis not in reduced]
    return reduced if kept == sorted(kept) else None


def in_place(stat: Stat, view: View, x: jax.Array) -> tuple[Stat, jax.Array]:
    """A statistic and a tensor with `stat(view(x))` as result, up to its shape; see `laid_out`.

    Args:
        stat: the statistic.
        view: the view.
        x: the tensor, float32.
    """
    if isinstance(stat, MeanLearnedSigmaStd) or (isinstance(stat, TwoPhaseStat) and is_dataclass(stat)):
        axes = reduced_axes(view, stat.stats_reduce_dim, x.shape)
        if axes is not None:
            return (stat if stat.stats_reduce_dim is None else stat.along(axes)), x
    return stat, view(x)
