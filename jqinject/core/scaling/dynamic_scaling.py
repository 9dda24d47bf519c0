"""Scales of the tensor at hand, made anew at every call, in training and evaluation alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Restrict, Stat, View
from jqinject.core.clamp import Identity
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.restrict_val import FloatRestrictValue
from jqinject.core.scaling._restricted import (
    RestrictedScaling,
    scale_of_statistic,
)
from jqinject.core.stats.in_place import in_place
from jqinject.core.view import cut_of
from jqinject.ops.groups import checked_group_size

Broadcastable = Callable[[jax.Array, tuple[int, ...]], jax.Array]


@checked_arguments
class RuntimeDynamicStatsScaling(RestrictedScaling, Component):
    """The statistic of the tensor at hand: `s = restrict(stat(view(x))) / threshold`. No state.

    Args:
        scaling_stats_impl: the statistic.
        scaling_stats_input_view_shape_impl: the view it is taken of; None takes the tensor as it is.
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means as `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        scaling_min_val: the least value before the division; never less than 2**-64.
        dynamic_scaling_broadcastable_fn: function of the statistic and the tensor's shape that returns the statistic in
            a shape that broadcasts; None takes it as it is, or with 1 for the axes at the end that it does not have
            (rows of a matrix).

    Example:
        >>> from jqinject.core import AbsMax
        >>> scaling = RuntimeDynamicStatsScaling(AbsMax(stats_reduce_dim=-1, keepdim=True))
        >>> scaling(jnp.array([[1.0, -3.0], [0.5, 0.0]]), 2)
        Array([[1.5 ],
               [0.25]], dtype=float32)
    """

    is_dynamic = True
    stats: Stat
    view: View = Identity()
    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    scaling_min_val: float | None = None
    broadcastable: Broadcastable | None = None

    def __init__(
        self,
        scaling_stats_impl: Stat,
        scaling_stats_input_view_shape_impl: View | None = None,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_min_val: float | None = None,
        dynamic_scaling_broadcastable_fn: Broadcastable | None = None,
    ) -> None:
        where = "RuntimeDynamicStatsScaling"
        assign(self, stats=scaling_stats_impl)
        set_given(
            self,
            view=scaling_stats_input_view_shape_impl,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            scaling_min_val=check.minimum(scaling_min_val, where, "scaling_min_val"),
            broadcastable=dynamic_scaling_broadcastable_fn,
        )

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        """The scale of `x`, float32."""
        stat = self.stats(self.view(x.astype(jnp.float32)))
        scale = scale_of_statistic(self, stat, threshold, self.stats)
        return broadcastable(scale, x.shape, self.broadcastable)


@checked_arguments
class RuntimeDynamicGroupStatsScaling(RestrictedScaling, Component):
    """A scale for each group of the tensor at hand: `s = restrict(stat(groups(x))) / threshold`. No state.

    Args:
        group_size: elements of a group.
        group_dim: the axis that is cut into groups.
        input_view_impl: the view that cuts it.
        scaling_stats_impl: the statistic of a group, which keeps the axis of its elements with size 1.
        scaling_min_val: the least value before the division; never less than 2**-64.
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means as `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.

    Raises:
        ValueError: a group size below 1.

    Example:
        >>> from jqinject.core import AbsMax, DynamicOverSubChannelBlockView
        >>> scaling = RuntimeDynamicGroupStatsScaling(
        ...     2, -1, DynamicOverSubChannelBlockView(2, -1), AbsMax(stats_reduce_dim=-1, keepdim=True))
        >>> scaling(jnp.array([1.0, -3.0, 0.5, 0.0])).tolist()
        [[3.0], [0.5]]
    """

    is_dynamic = True
    group_size: int
    group_dim: int
    input_view_impl: View
    stats: Stat
    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    scaling_min_val: float | None = None

    def __init__(
        self,
        group_size: int,
        group_dim: int,
        input_view_impl: View,
        scaling_stats_impl: Stat,
        scaling_min_val: float | None = None,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
    ) -> None:
        where = "RuntimeDynamicGroupStatsScaling"
        assign(
            self,
            group_size=checked_group_size(group_size, where),
            group_dim=group_dim,
            input_view_impl=input_view_impl,
            stats=scaling_stats_impl,
        )
        set_given(
            self,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            scaling_min_val=check.minimum(scaling_min_val, where, "scaling_min_val"),
        )

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        """The scales of `x`, float32, in the grouped shape with 1 along the elements of a group."""
        stat = group_statistic(self.stats, self.input_view_impl, x)
        return scale_of_statistic(self, stat, threshold, self.stats)


def group_statistic(stat: Stat, view: View, x: jax.Array) -> jax.Array:
    """`stat(view(x))` of a view that cuts groups, with 1 along the elements of a group.

    Args:
        stat: keeps the axis of the elements.
        view: the view.
        x: the tensor.
    """
    found, laid = in_place(stat, view, x.astype(jnp.float32))
    cut = cut_of(view, x) if laid.ndim == x.ndim else None
    return found(laid) if cut is None else jnp.expand_dims(found(laid), cut.axis + 1)


def broadcastable(stat: jax.Array, shape: tuple[int, ...], given: Broadcastable | None) -> jax.Array:
    """A statistic in a shape that broadcasts against a tensor.

    Args:
        stat: one number, one with the tensor's number of axes, or one number for each row of the tensor (its last axis
            is a row).
        shape: of the tensor.
        given: the user's own function, or None.
    """
    if given is not None:
        return given(stat, shape)
    if stat.ndim == 0 or stat.ndim == len(shape):
        return stat
    return stat.reshape((*shape[:-1], 1))
