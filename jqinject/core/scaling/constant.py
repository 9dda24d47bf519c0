"""Scales that are constant, learned, or that of the given tensor.

Scales independent of the tensor: constant, or learned from an initial value.

Scales computed from the given tensor at every call, in training and evaluation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Restrict, Stat, View, keeps_sign
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.clamp import Identity
from jqinject.core.component import assign
from jqinject.core.memory.parameter import Broadcastable, Dynamic
from jqinject.core.memory.source import Constant, Learned, initial_number
from jqinject.core.scaling.rule import FloatRestrictValue, ScaleRule
from jqinject.core.statistics.search import Task
from jqinject.ops.groups import block_of


def _restricted(init: np.ndarray, restrict: Restrict, where: str) -> np.ndarray:
    """An initial value in the learned domain, in Python arithmetic."""
    stored = [restrict.restrict_init_float(float(number)) for number in init.reshape(-1)]
    check.positive(np.abs(init) if keeps_sign(restrict) else init, where, "scaling_init")
    return np.asarray(stored, dtype=np.float32).reshape(init.shape)


@checked_arguments
class ConstScaling(Constant):
    """A constant scale: `s = restrict(scaling_init) / threshold`.

    It is static: neither in the state nor in checkpoints.

    Args:
        scaling_init: the value, a number or an array that broadcasts with the tensor.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.

    Raises:
        ValueError: when `scaling_init` is not finite, or not positive (it may be negative with
            `SignedFloatRestrictValue`).

    Example:
        >>> float(ConstScaling(0.5)(jnp.ones(3))), float(ConstScaling(0.5)(jnp.ones(3), 4))
        (0.5, 0.125)
    """

    rule: ScaleRule

    def __init__(
        self,
        scaling_init: Any,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_min_val: float | None = None,
    ) -> None:
        where = "ConstScaling"
        init = check.initial_value(scaling_init, None, where, "scaling_init", "scaling_shape")
        super().__init__(_restricted(init, restrict_scaling_impl or FloatRestrictValue(), where))
        restrictions = restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl
        assign(self, rule=ScaleRule(*restrictions, scaling_min_val, where=where))

    def __call__(self, x: jax.Array | None = None, threshold: Any = None) -> jax.Array:
        """The scale, float32. `x` is unused."""
        return self.rule.scale(self.number(x, self.rule), threshold)


@checked_arguments
class ParameterScaling(Learned):
    """A learned scale: `s = restrict(value) / threshold`, the parameter `value` starting at `scaling_init`.

    The parameter is kept in the domain of the restriction: `log2(scaling_init)` for logarithmic and
    power-of-two scales.

    Differs from Brevitas: without a threshold the scale has the shape of the parameter (there: broadcast with
    `(1,)`).

    Args:
        scaling_init: initial value, a number or an array of `scaling_shape`.
        scaling_shape: shape of the parameter; None means that of `scaling_init`.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.

    Raises:
        ValueError: when the shapes disagree, or `scaling_init` is not finite, or not positive where its
            logarithm is learned.

    Example:
        >>> float(ParameterScaling(6.0)(jnp.ones(3)))
        6.0
        >>> from jqinject.core.scaling.rule import PowerOfTwoRestrictValue
        >>> ParameterScaling(6.0, (3,), PowerOfTwoRestrictValue())(jnp.ones(3))
        Array([8., 8., 8.], dtype=float32)
    """

    rule: ScaleRule

    def __init__(
        self,
        scaling_init: Any,
        scaling_shape: tuple[int, ...] | None = None,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_min_val: float | None = None,
    ) -> None:
        where = "ParameterScaling"
        restrict = restrict_scaling_impl or FloatRestrictValue()
        init = initial_number(scaling_init, scaling_shape, where, ("scaling_init", "scaling_shape"))
        if isinstance(init, jax.core.Tracer):
            super().__init__(restrict.restrict_init_tensor(init))
        else:
            super().__init__(_restricted(init, restrict, where))
        restrictions = restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl
        assign(self, rule=ScaleRule(*restrictions, scaling_min_val, where=where))

    def __call__(self, x: jax.Array | None = None, threshold: Any = None) -> jax.Array:
        """The scale, float32. `x` is unused."""
        return self.rule.scale(self.number(x, self.rule), threshold)

    def complete_state(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint's entries for this component: running statistics become the value.

        Args:
            entries: variable name -> array, as found in the checkpoint.

        Returns:
            The entries to load.
        """
        found = super().complete_state(entries)
        own = {name: entry for name, entry in found.items() if name == "value" or name.startswith("rule.")}
        for name in ("running_stats", "runtime_stats.running_stats"):
            if name in found and "value" not in found:
                stat = jnp.abs(jnp.asarray(found[name]).astype(jnp.float32))
                stored = self.rule.to_stored(self.rule.clamped(stat))
                return {**own, "value": stored.reshape(self.value.get_value().shape)}
        return own or found


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
