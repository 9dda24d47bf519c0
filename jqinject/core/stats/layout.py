"""A statistic per channel without moving the tensor."""

from __future__ import annotations

from dataclasses import is_dataclass, replace

import jax

from jqinject.core._protocols import Stat, View
from jqinject.core.stats.search import SearchedStat
from jqinject.core.stats.two_phase import TwoPhaseStat
from jqinject.core.view import OverOutputChannelView
from jqinject.ops.explicit_axes import merge_axes


def laid_out(stat: Stat, view: View, x: jax.Array) -> tuple[Stat, jax.Array]:
    """A statistic and a tensor with `stat(view(x))` as result, up to its shape, at less cost where there is a
    way.

    The channels of an NNX kernel and of an NHWC image come last. `OverOutputChannelView` would transpose
    them to the front, to be reduced over axis 1; the same numbers come from reducing axis 0 of a reshape.

    Args:
        stat: the statistic.
        view: the view.
        x: the tensor, float32.

    Returns:
        The statistic to call, and what to call it with.
    """
    if isinstance(stat, SearchedStat):
        return stat, x  # it tries the tensor as it is, and has a view of its own
    permute_dims, channel_axes = (
        view.layout(x.shape) if isinstance(view, OverOutputChannelView) else (None, 0)
    )
    if permute_dims is None or not channel_axes:
        return stat, view(x)
    first = x.ndim - channel_axes
    channels_last = permute_dims[:channel_axes] == tuple(range(first, x.ndim)) and sorted(
        permute_dims
    ) == list(range(x.ndim))
    if channels_last and isinstance(stat, TwoPhaseStat) and is_dataclass(stat) and stat.stats_reduce_dim == 1:
        return replace(stat, stats_reduce_dim=0), merge_axes(merge_axes(x, first, x.ndim), 0, first)
    return stat, view(x)
