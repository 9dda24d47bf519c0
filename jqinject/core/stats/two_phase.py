"""The base of statistics that can be switched off at run time without leaving a gradient behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp

from jqinject.core._protocols import Stat
from jqinject.core.stats.search import SearchedStat


class TwoPhaseStat(ABC):
    """A statistic in two parts: `measure` reduces without gradient, `attach` gives the result its derivative.

    Called as a whole it is an ordinary differentiable statistic in float32. In two parts, only `measure` has
    to run under
    `jax.lax.cond`, and `attach` costs nothing when it is not needed: its gradient is elementwise and gets
    fused.

    The statistic of an empty tensor is that of one zero. nan and inf in the tensor show in the statistic.

    Attributes:
        signed: whether the statistic can be negative; power-of-two and logarithmic scales refuse one that
            can.
        stats_reduce_dim: the axis that is reduced, None for the whole tensor.
    """

    signed: ClassVar[bool] = False
    stats_reduce_dim: int | None

    @abstractmethod
    def measure(self, x: jax.Array) -> Any:
        """The reduction: float32 tensor -> a few small arrays (a pytree)."""

    @abstractmethod
    def attach(self, x: jax.Array, measured: Any) -> jax.Array:
        """The statistic as a differentiable function of `x`; finite for a `measured` that is all zeros."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """The statistic of `x`, float32."""
        x = _something(x, self.stats_reduce_dim)
        return self.attach(x, self.measure(jax.lax.stop_gradient(x)))

    def gated(self, x: jax.Array, active: jax.Array) -> jax.Array:
        """The statistic of `x` where `active`, else a number without meaning, at no cost."""
        x = _something(x, self.stats_reduce_dim)
        detached = jax.lax.stop_gradient(x)
        shapes = jax.eval_shape(self.measure, detached)
        measured = jax.lax.cond(active, self.measure, lambda _: _zeros(shapes), detached)
        return self.attach(x, measured)


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


def finish(stat: jax.Array, axis: int | None, keepdim: bool) -> jax.Array:
    """Drop the reduced axis unless it is to be kept."""
    return stat if axis is None or keepdim else jnp.squeeze(stat, axis)


def _something(x: jax.Array, axis: int | None) -> jax.Array:
    x = jnp.asarray(x).astype(jnp.float32)
    if axis is None:
        return x if x.size else jnp.zeros((1,), jnp.float32)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"stats_reduce_dim={axis} is not an axis of the viewed tensor of shape {x.shape}. Over "
            "the whole tensor "
            "use stats_reduce_dim=None; over channels a view that keeps them, such as OverOutputChannelView."
        )
    if x.shape[axis]:
        return x
    axis %= x.ndim
    return jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), jnp.float32)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
