"""Scales that are constant, learned, or that of the given tensor.

Scales independent of the tensor: constant, or learned from an initial value.

Scales computed from the given tensor at every call, in training and evaluation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Restrict, Stat, View, keeps_sign
from jqinject.core.component import component
from jqinject.core.memory.dynamic import Dynamic
from jqinject.core.memory.number import Broadcastable, initial_number, taken
from jqinject.core.scaling.rule import FloatRestrictValue, MemoryScaling
from jqinject.ops.groups import block_of


def _restricted(init: np.ndarray, restrict: Restrict, where: str) -> np.ndarray:
    """An initial value in the learned domain, in Python arithmetic."""
    stored = [restrict.restrict_init_float(float(number)) for number in init.reshape(-1)]
    check.positive(np.abs(init) if keeps_sign(restrict) else init, where, "scaling_init")
    return np.asarray(stored, dtype=np.float32).reshape(init.shape)


class _InitialScaling(MemoryScaling):
    """Abstract: a scale that starts at, or is, a given number."""

    def __post_init__(self) -> None:
        arguments, where = taken(self), type(self).__name__
        restrict = arguments["restrict_scaling_impl"] or FloatRestrictValue()
        names = "scaling_init", "scaling_shape"
        init = initial_number(arguments["scaling_init"], arguments.get("scaling_shape"), where, names)
        traced = isinstance(init, jax.core.Tracer)
        stored = restrict.restrict_init_tensor(init) if traced else _restricted(init, restrict, where)
        self.begin(arguments, stored)


@component
class ConstScaling(_InitialScaling):
    """A constant scale: `s = restrict(scaling_init) / threshold`.

    It is static: neither in the state nor in checkpoints.

    Args:
        scaling_init: the value, a number or an array that broadcasts with the tensor.
        restrict_scaling_impl, restrict_threshold_impl, restrict_scale_threshold_impl, scaling_min_val: see `ScaleRule`.

    Raises:
        ValueError: when `scaling_init` is not finite, or not positive (it may be negative with
            `SignedFloatRestrictValue`).

    Example:
        >>> import jax.numpy as jnp
        >>> float(ConstScaling(0.5)(jnp.ones(3))), float(ConstScaling(0.5)(jnp.ones(3), 4))
        (0.5, 0.125)
    """

    kind = "constant"
    scaling_init: Any
    restrict_scaling_impl: Restrict | None = None
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    scaling_min_val: float | None = None


@component
class ParameterScaling(_InitialScaling):
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
        >>> import jax.numpy as jnp
        >>> float(ParameterScaling(6.0)(jnp.ones(3)))
        6.0
        >>> from jqinject.core.scaling.rule import PowerOfTwoRestrictValue
        >>> ParameterScaling(6.0, (3,), PowerOfTwoRestrictValue())(jnp.ones(3))
        Array([8., 8., 8.], dtype=float32)
    """

    kind = "learned"
    scaling_init: Any
    scaling_shape: tuple[int, ...] | None = None
    restrict_scaling_impl: Restrict | None = None
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    scaling_min_val: float | None = None


@component
class RuntimeDynamicStatsScaling(MemoryScaling, Dynamic):
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

    kind = "now"
    scaling_stats_impl: Stat
    scaling_stats_input_view_shape_impl: View | None = None
    restrict_scaling_impl: Restrict | None = None
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    scaling_min_val: float | None = None
    dynamic_scaling_broadcastable_fn: Broadcastable | None = None


@component
class RuntimeDynamicGroupStatsScaling(MemoryScaling, Dynamic):
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

    kind = "now"
    group_size: int | tuple[int, int]
    group_dim: int
    input_view_impl: View
    scaling_stats_impl: Stat
    scaling_min_val: float | None = None
    restrict_scaling_impl: Restrict | None = None
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None

    def begin(self, arguments: dict[str, Any], stored: Any = None) -> None:
        """Set the groups, and what the base sets."""
        self.group_size = block_of(arguments["group_size"], type(self).__name__)[0]
        self.group_dim = arguments["group_dim"]
        super().begin(arguments, stored)
