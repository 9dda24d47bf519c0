"""A statistic of a viewed tensor without moving the tensor."""

from __future__ import annotations

import jax
import jax.core
import jax.numpy as jnp

from jqinject.core._protocols import Stat, View
from jqinject.core.stats.in_place import in_place
from jqinject.core.stats.search import SearchedStat
from jqinject.core.stats.two_phase import TwoPhaseStat


def statistic_and_input(stat: Stat, view: View, x: jax.Array) -> tuple[Stat, jax.Array]:
    """A statistic and a tensor with `stat(view(x))` as result, up to its shape, at less cost where there is a way.

    Reducing the axes of the tensor that an axis of the view is made of saves what the view costs: a transposition, and
    of a sharded tensor that it is gathered to be reshaped.

    Args:
        stat: the statistic.
        view: the view.
        x: the tensor, float32.

    Returns:
        The statistic to call, and what to call it with.
    """
    if isinstance(stat, SearchedStat):
        return stat, x  # it tries the tensor as it is, and has a view of its own
    return in_place(stat, view, x)


def gated_statistic(stat: Stat, x: jax.Array, active: jax.Array) -> jax.Array:
    """`stat(x)` where `active` (a bool scalar), else some number; the work is done only where needed.

    Args:
        stat: the statistic; a `TwoPhaseStat` leaves no gradient computation behind, any other works too.
        x: the viewed tensor.
        active: bool scalar, traced or not.

    Returns:
        The statistic, float32.
    """
    if not isinstance(active, jax.core.Tracer) and bool(active):
        return stat(x)
    if isinstance(stat, TwoPhaseStat | SearchedStat):
        return stat.gated(x, active)
    shape = jax.eval_shape(stat, x)
    return jax.lax.cond(active, stat, lambda _: jnp.zeros(shape.shape, shape.dtype), x)
