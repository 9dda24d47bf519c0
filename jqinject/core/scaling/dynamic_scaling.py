"""Scales computed from the given tensor at every call, in training and evaluation."""

from __future__ import annotations

from typing import Any

import jax

from jqinject.core._protocols import Restrict, Stat, View
from jqinject.core.clamp import Identity
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.scaling.scale_rule import ScaleRule
from jqinject.core.sources import Dynamic
from jqinject.core.sources.from_tensor import Broadcastable
from jqinject.core.stats.search import Task
from jqinject.ops.groups import block_of


@checked_arguments
class RuntimeDynamicStatsScaling(Dynamic):
    """The statistic of the given tensor: `s = restrict(stat(view(x))) / threshold`. No state.

    Args:
        scaling_stats_impl: the statistic.
        scaling_stats_input_view_shape_impl: its view; None for no view.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.
        dynamic_scaling_broadcastable_fn: function of the statistic and the tensor's shape that returns the statistic in
            a shape that broadcasts; None leaves it unchanged, with trailing axes of size 1 if needed (rows of a
            matrix).

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import AbsMax
        >>> scaling = RuntimeDynamicStatsScaling(AbsMax(stats_reduce_dim=-1, keepdim=True))
        >>> scaling(jnp.array([[1.0, -3.0], [0.5, 0.0]]), 2)
        Array([[1.5 ],
               [0.25]], dtype=float32)
    """

    rule: ScaleRule

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
        view = scaling_stats_input_view_shape_impl or Identity()
        super().__init__(scaling_stats_impl, view, dynamic_scaling_broadcastable_fn)
        restrictions = restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl
        where = type(self).__name__
        assign(self, rule=ScaleRule(*restrictions, scaling_min_val, of=scaling_stats_impl, where=where))

    def __call__(self, x: jax.Array, threshold: Any = None, task: Task = None) -> jax.Array:
        """The scale of `x`, float32."""
        return self.rule.scale(self.number(x, self.rule, task), threshold)


@checked_arguments
class RuntimeDynamicGroupStatsScaling(Dynamic):
    """A scale for each group of the given tensor: `s = restrict(stat(groups(x))) / threshold`. No state.

    Args:
        group_size: elements of a group, or both lengths of a block.
        group_dim: the axis to cut.
        input_view_impl: the grouping view.
        scaling_stats_impl: the statistic of a group, keeping the reduced axis with size 1.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.

    Raises:
        ValueError: a group size below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import AbsMax, DynamicOverSubChannelBlockView
        >>> scaling = RuntimeDynamicGroupStatsScaling(
        ...     2, -1, DynamicOverSubChannelBlockView(2, -1), AbsMax(stats_reduce_dim=-1, keepdim=True))
        >>> scaling(jnp.array([1.0, -3.0, 0.5, 0.0])).tolist()
        [[3.0], [0.5]]
    """

    group_size: int
    group_dim: int
    rule: ScaleRule

    def __init__(
        self,
        group_size: int | tuple[int, int],
        group_dim: int,
        input_view_impl: View,
        scaling_stats_impl: Stat,
        scaling_min_val: float | None = None,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
    ) -> None:
        where = type(self).__name__
        super().__init__(scaling_stats_impl, input_view_impl, in_groups=True)
        restrictions = restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl
        assign(
            self,
            group_size=block_of(group_size, where)[0],
            group_dim=group_dim,
            rule=ScaleRule(*restrictions, scaling_min_val, of=scaling_stats_impl, where=where),
        )

    def __call__(self, x: jax.Array, threshold: Any = None, task: Task = None) -> jax.Array:
        """The scales of `x`, float32, in the grouped shape with 1 along the elements of a group."""
        return self.rule.scale(self.number(x, self.rule, task), threshold)
