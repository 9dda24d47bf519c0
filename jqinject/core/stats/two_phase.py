"""The base of statistics that can be switched off at run time without leaving a gradient computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from jqinject.ops.devices.cut import Cut
from jqinject.ops.devices.mapped import check_same_places, names_of
from jqinject.ops.devices.over import Axes, Over, Tensors


class TwoPhaseStat(ABC):
    """A statistic in parts: `measure` reduces, `statistic` continues from the measurement, and `locate` and `change`
    are its derivative with respect to the tensor.

    Called as a whole it is an ordinary differentiable statistic in float32. In parts, only `measure`, and `locate` in
    the derivative, have to run under `jax.lax.cond`; `change` is elementwise and gets fused. Derivative-only parts run
    only under differentiation.

    The statistic of an empty tensor is that of one zero. nan and inf propagate.

    A frozen dataclass that reduces by `over` and ends with `finished` is computed where a sharded tensor lies; any
    other statistic of your own may gather it (`GatheredWarning`).

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class MeanMagnitude(TwoPhaseStat):
        ...     stats_reduce_dim: Any = None
        ...     def measure(self, x):
        ...         return self.over.sum(jnp.abs(x)) / self.over.count(x)
        ...     def change(self, dx, x, measured, located):
        ...         return self.over.sum(jnp.sign(x) * dx) / self.over.count(x)
        ...     def statistic(self, measured):
        ...         return self.finished(measured)
        >>> jax.value_and_grad(MeanMagnitude())(jnp.array([1.0, -3.0]))
        (Array(2., dtype=float32), Array([ 0.5, -0.5], dtype=float32))

    Attributes:
        signed: whether the statistic can be negative; power-of-two and logarithmic scales refuse those.
        takes_several: whether it also takes a tuple of tensors, for one statistic of all; otherwise, tensors of layers
            that share a quantizer are joined first.
        takes_cut: whether `stats_reduce_dim` may be a `Cut`: an axis in groups that cross shards, as `over` takes it.
        stats_reduce_dim: the axis or axes to reduce, None for the whole tensor.
        axis_name: a mapped axis (of `shard_map`, `pmap` or `vmap`) that the tensor is spread over, or a tuple of them;
            the statistic is then that of the whole tensor. Otherwise, each shard has its own.
    """

    signed: ClassVar[bool] = False
    takes_several: ClassVar[bool] = False
    takes_cut: ClassVar[bool] = True
    stats_reduce_dim: Axes
    axis_name: Any = None

    @cached_property
    def over(self) -> Over:
        """What is reduced."""
        return Over(self.stats_reduce_dim, names_of(self.axis_name))

    @property
    def never_negative(self) -> bool:
        """Whether the statistic is never negative."""
        return not self.signed

    @property
    def takes_axes(self) -> bool:
        """Whether it can reduce other axes: a dataclass can be copied with others."""
        return is_dataclass(self)

    @abstractmethod
    def measure(self, x: Any) -> Any:
        """The reduction: float32 tensor -> a few small float arrays (a pytree)."""

    @abstractmethod
    def statistic(self, measured: Any) -> jax.Array:
        """The statistic as a differentiable function of what was measured; finite for zeros."""

    def locate(self, x: Any, measured: Any) -> Any:
        """What else `change` needs: a few small arrays."""
        return ()

    @abstractmethod
    def change(self, dx: Any, x: Any, measured: Any, located: Any) -> Any:
        """How the measurement changes if `x` changes by `dx`: linear in `dx`, structured like `measured`."""

    def finished(self, reduced: jax.Array) -> jax.Array:
        """What `over` reduced, without the reduced axis unless `keepdim`; of groups, one number for each."""
        return finish(reduced, self.stats_reduce_dim, getattr(self, "keepdim", False))

    def along(self, axes: Axes) -> TwoPhaseStat:
        """The statistic over other axes, up to its shape."""
        kept = {"keepdim": True} if any(f.name == "keepdim" for f in fields(cast(Any, self))) else {}
        return replace(cast(Any, self), stats_reduce_dim=axes, **kept)

    def measured(self, x: Tensors) -> Any:
        """The measurement, as a differentiable function of `x`."""
        return _measured(self, not_empty(x, self.stats_reduce_dim))

    def __call__(self, x: Tensors) -> jax.Array:
        """The statistic of `x`, float32."""
        return self.statistic(_measured(self, not_empty(x, self.stats_reduce_dim)))

    def detached(self, x: jax.Array) -> jax.Array:
        """The statistic of `x` without gradient."""
        return self.statistic(self.measure(not_empty(x, self.stats_reduce_dim)))

    def gated(self, x: jax.Array, active: jax.Array) -> jax.Array:
        """The statistic of `x` if `active`, else an arbitrary number, at no cost."""
        return self.statistic(_gated(self, not_empty(x, self.stats_reduce_dim), active))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _measured(stat: TwoPhaseStat, x: Tensors) -> Any:
    return stat.measure(x)


@_measured.defjvp
def _(stat, primals, tangents):
    (x,), (dx,) = primals, tangents
    measured = _measured(stat, x)
    return measured, stat.change(dx, x, measured, stat.locate(x, measured))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gated(stat: TwoPhaseStat, x: jax.Array, active: jax.Array) -> Any:
    return _where_active(active, stat.measure, x)


@_gated.defjvp
def _(stat, primals, tangents):
    (x, active), (dx, _) = primals, tangents
    measured = _gated(stat, x, active)
    return measured, stat.change(dx, x, measured, _where_active(active, stat.locate, x, measured))


def _where_active(active: jax.Array, function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result if `active`, else zeros."""
    shapes = jax.eval_shape(function, *arguments)
    check_same_places(shapes, active)
    return jax.lax.cond(active, function, lambda *_: _zeros(shapes), *arguments)


def finish(stat: jax.Array, axis: Axes, keepdim: bool) -> jax.Array:
    """Drop the reduced axis unless it is to be kept; a grouped axis keeps one number per group."""
    if isinstance(axis, Cut):
        return axis.one_each(stat)
    return stat if axis is None or keepdim else jnp.squeeze(stat, axis)


def not_empty(x: Any, axis: Axes) -> Any:
    """Tensors as float32, padded with a zero where a statistic would have no elements."""
    if isinstance(x, tuple):
        filled = tuple(part for part in x if part.size) or x[:1]
        return tuple(not_empty(part, axis) for part in filled)
    x = jnp.asarray(x).astype(jnp.float32)
    if axis is None:
        return x if x.size else jnp.zeros((1,), jnp.float32)
    if isinstance(axis, Cut):
        return x
    axes = axis if isinstance(axis, tuple) else (axis,)
    if axes and not -x.ndim <= min(axes) <= max(axes) < x.ndim:
        raise ValueError(
            f"stats_reduce_dim={axis} is not an axis of the viewed tensor of shape {x.shape}. Over "
            "the whole tensor "
            "use stats_reduce_dim=None; over channels a view that keeps them, such as OverOutputChannelView."
        )
    if x.size:
        return x
    reduced = {each % x.ndim for each in axes}
    if all(x.shape[each] for each in reduced):
        return x
    return jnp.zeros([1 if place in reduced else size for place, size in enumerate(x.shape)], jnp.float32)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
