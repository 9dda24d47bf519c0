"""A statistic of a viewed tensor without moving the tensor.

Reducing the tensor axes behind a view's axis saves the view: a transposition, and for sharded tensors a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jqinject.core._protocols import View
from jqinject.core.facts import takes_axes, takes_cut
from jqinject.core.stats.blocks import OverBlocks
from jqinject.core.stats.two_phase import TwoPhaseStat
from jqinject.core.view import MergingView, blocks_of, cut_of
from jqinject.ops.devices.cut import Cut
from jqinject.ops.devices.gathered import told_if_gathered
from jqinject.ops.devices.mapped import check_same_places
from jqinject.ops.devices.over import Axes, Tensors, each, parts_of

CURE = "a dataclass that derives from jqinject.core.TwoPhaseStat, whose docstring has an example"
JOINS = f"{CURE}, with takes_several = True; or a quantizer for each layer"


def reduced_axes(view: View, reduce_dim: Axes, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of a tensor that make up an axis of its view.

    Args:
        view: the view.
        reduce_dim: an axis of the view; None for all.
        shape: of the tensor.

    Returns:
        The axes, in the order of the view; None if it does more than merge axes, or reorders the others.

    Example:
        >>> from jqinject.core.view import OverOutputChannelView
        >>> reduced_axes(OverOutputChannelView(permute_dims=(3, 2, 0, 1)), 1, (3, 3, 8, 16))
        (2, 0, 1)
    """
    if not isinstance(view, MergingView) or isinstance(reduce_dim, tuple | Cut):
        return None
    merged = view.merged(shape)
    if reduce_dim is None:
        return tuple(axis for axes in merged for axis in axes)
    if not -len(merged) <= reduce_dim < len(merged):
        return None
    reduced = merged[reduce_dim]
    kept = [axis for axes in merged for axis in axes if axis not in reduced]
    return reduced if kept == sorted(kept) else None


@lru_cache(maxsize=1024)
def as_it_lies(stat: Any, view: View, shape: tuple[int, ...]) -> Any:
    """A statistic of the tensor equal to `stat` of its view; None if the view is needed.

    Args:
        stat: the statistic: a value.
        view: the view: a value.
        shape: of the tensor.
    """
    axes = reduced_axes(view, stat.stats_reduce_dim, shape) if takes_axes(stat) else None
    if axes is None:
        return None
    return stat if stat.stats_reduce_dim in (None, axes) else stat.along(axes)


def reduced(view: View, reduce_dim: Axes, x: Tensors) -> tuple[Axes, Tensors]:
    """What to reduce for a statistic of views: axes of the tensors themselves, if possible.

    Args:
        view: the view.
        reduce_dim: an axis of it; None for all.
        x: one tensor, or several with a common statistic.

    Returns:
        The axes to reduce, None for all, and tensors; else `reduce_dim` and views.
    """
    parts = parts_of(x)
    found: set[Any] = {
        _in_groups(view, reduce_dim, part) or reduced_axes(view, reduce_dim, part.shape) for part in parts
    }
    if None in found:
        return reduce_dim, each(view, x)
    if reduce_dim is None:
        return None, x
    like = {part.shape if isinstance(next(iter(found)), Cut) else part.ndim for part in parts}
    same_axes = len(found) == 1 and len(like) == 1
    return (found.pop(), x) if same_axes else (reduce_dim, each(view, x))


def _in_groups(view: View, reduce_dim: Axes, x: jax.Array) -> Cut | None:
    """The groups of a view, if reduced and possibly crossing shards."""
    cut = cut_of(view, x)
    reduces_elements = (
        isinstance(reduce_dim, int) and cut is not None and reduce_dim % (x.ndim + 1) == cut.axis + 1
    )
    return cut if reduces_elements else None


def in_blocks(stat: Any, view: Any, x: Tensors) -> Any:
    """The statistic of the blocks of a view; of its groups, if it has no blocks.

    Raises:
        ValueError: several tensors share blocks.
    """
    if isinstance(stat, OverBlocks):
        return stat
    blocks = blocks_of(view, parts_of(x)[0])
    if blocks is None:
        return stat
    if isinstance(x, tuple):
        raise ValueError(
            f"blocks of {view.group_size} x {blocks.width} belong to one tensor, got {len(x)} that share a quantizer.\n"
            "  cure: a quantizer for each layer, or groups along one axis (group_size = an int)"
        )
    return OverBlocks(stat, blocks)


def in_place(stat: Any, view: View, x: Tensors, join: int = 0, of_parameter: bool = True) -> tuple[Any, Any]:
    """A statistic and its argument for `stat(view(x))`, up to its shape.

    Several tensors are reduced one by one if the statistic can combine them, else joined. A `GatheredWarning` is raised
    if the statistic cannot be taken of sharded tensors where they lie.

    Args:
        stat: the statistic.
        view: the view.
        x: the tensor, float32, or several.
        join: the axis along which several views are joined.
        of_parameter: whether the tensor is a parameter. Activations are sharded along their first axis, as a rule, so
            that merging their axes gathers nothing.
    """
    stat = in_blocks(stat, view, x)
    takes = takes_axes(stat)
    if isinstance(x, tuple) and not (takes and stat.takes_several and stat.stats_reduce_dim in (None, join)):
        whole = each(
            lambda part: _told(stat, part, range(part.ndim), "joins the weights of several layers", JOINS), x
        )
        return stat, jnp.concatenate(each(view, whole), axis=join)
    if takes and not takes_cut(stat) and any(cut_of(view, part) is not None for part in parts_of(x)):
        takes = False
    if not takes:
        return stat, each(lambda part: view(_told_of_view(stat, view, part, of_parameter)), x)
    axes, tensors = reduced(view, stat.stats_reduce_dim, x)
    return (stat if axes == stat.stats_reduce_dim else stat.along(axes)), tensors


def _told_of_view(stat: Any, view: View, x: jax.Array, of_parameter: bool) -> jax.Array:
    """A tensor that is about to be viewed for a statistic that cannot be taken of it where it lies."""
    cut = cut_of(view, x)
    if cut is not None:
        return _told(stat, x, (cut.axis,), f"needs groups of {cut.size}, which cross shards", CURE)
    if not (of_parameter and isinstance(view, MergingView)):
        return x
    merged = [[axis for axis in axes if x.shape[axis] > 1] for axes in view.merged(x.shape)]
    return _told(stat, x, [axis for axes in merged for axis in axes[1:]], "merges axes of the tensor", CURE)


def _told(stat: Any, x: jax.Array, axes: Sequence[int], why: str, cure: str) -> jax.Array:
    along = f"axis {axes[0]}" if len(axes) == 1 else f"one of its axes {tuple(axes)}"
    message = (
        f"{type(stat).__name__} {why}: a tensor of shape {x.shape} is gathered for it if it is sharded along {along}."
        f"\n  cure: {cure}"
    )
    return told_if_gathered(x, axes, message)


def statistic_of(stat: Any, view: Any, x: Tensors, join: int = 0, of_parameter: bool = True) -> jax.Array:
    """`stat(view(x))`, up to its shape.

    Args:
        stat: the statistic; not a searched one.
        view: the view.
        x: the tensor, float32, or several with a common statistic.
        join: the axis along which several views are joined.
        of_parameter: see `in_place`.
    """
    if isinstance(stat, TwoPhaseStat) and isinstance(view, MergingView) and not isinstance(x, tuple):
        direct = as_it_lies(stat, view, x.shape)
        if direct is not None:
            return direct(x)
        return stat(view(x if takes_axes(stat) else _told_of_view(stat, view, x, of_parameter)))
    stat, x = in_place(stat, view, x, join, of_parameter)
    return stat(x)


def gated_statistic_of(stat: Any, view: Any, x: jax.Array, active: jax.Array) -> jax.Array:
    """`statistic_of(stat, view, x)` if `active`, else an arbitrary number; computed only if needed.

    Args:
        stat: the statistic; a `TwoPhaseStat` leaves no gradient computation behind.
        view: the view.
        x: the tensor, float32.
        active: bool scalar, traced or not.
    """
    if not isinstance(active, jax.core.Tracer) and bool(active):
        return statistic_of(stat, view, x, of_parameter=False)
    stat, x = in_place(stat, view, x, of_parameter=False)
    if isinstance(stat, TwoPhaseStat):
        return stat.gated(x, active)
    shape = jax.eval_shape(stat, x)
    check_same_places(shape, active)
    return jax.lax.cond(active, stat, lambda _: jnp.zeros(shape.shape, shape.dtype), x)
