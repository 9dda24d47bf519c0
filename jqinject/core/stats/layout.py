"""A statistic of a viewed tensor without moving the tensor.

Reducing the axes of the tensor that an axis of the view is made of saves what the view costs: a transposition, and of a
sharded tensor that it is gathered to be reshaped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jqinject.core.facts import searches
from jqinject.core.stats.in_place import as_it_lies, in_place
from jqinject.core.stats.search import Task
from jqinject.core.stats.two_phase import TwoPhaseStat
from jqinject.core.view import MergingView
from jqinject.ops.devices.over import Tensors, parts_of


def statistic_of(stat: Any, view: Any, x: Tensors, task: Task = None, join: int = 0) -> jax.Array:
    """`stat(view(x))`, up to its shape.

    Args:
        stat: the statistic.
        view: the view.
        x: the tensor, float32, or several that have one statistic.
        task: for a statistic that is searched; it tries tensors as they are, and has a view of its own.
        join: the axis along which views of several are side by side.
    """
    if searches(stat):
        return stat.of(parts_of(x), task)
    if isinstance(stat, TwoPhaseStat) and isinstance(view, MergingView) and not isinstance(x, tuple):
        direct = as_it_lies(stat, view, x.shape)
        return stat(view(x)) if direct is None else direct(x)
    stat, x = in_place(stat, view, x, join)
    return stat(x)


def gated_statistic_of(stat: Any, view: Any, x: jax.Array, active: jax.Array, task: Task = None) -> jax.Array:
    """`statistic_of(stat, view, x, task)` where `active`, else some number; computed only where needed.

    Args:
        stat: the statistic; a `TwoPhaseStat` leaves no gradient computation behind, any other works too.
        view: the view.
        x: the tensor, float32.
        active: bool scalar, traced or not.
        task: for a statistic that is searched.
    """
    if not isinstance(active, jax.core.Tracer) and bool(active):
        return statistic_of(stat, view, x, task)
    if searches(stat):
        return stat.gated(x, active, task)
    stat, x = in_place(stat, view, x)
    if isinstance(stat, TwoPhaseStat):
        return stat.gated(x, active)
    shape = jax.eval_shape(stat, x)
    return jax.lax.cond(active, stat, lambda _: jnp.zeros(shape.shape, shape.dtype), x)
