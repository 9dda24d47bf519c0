"""Zero points of the given tensor, computed at every call."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jqinject.core._protocols import IntQuantizer, Stat, View
from jqinject.core.clamp import Identity
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.sources import DISTANCE, Dynamic
from jqinject.core.sources.from_tensor import Broadcastable
from jqinject.core.stats.search import Task
from jqinject.core.zero_point.shift import shift
from jqinject.ops.ste import abs_binary_sign_grad


@checked_arguments
class RuntimeDynamicStatsZeroPoint(Dynamic):
    """The zero point of the given tensor: `z = |stat(view(x))|`, in steps. No state.

    Args:
        zero_point_stats_impl: the statistic, such as `NegativeMinOrZero`.
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.
        zero_point_stats_input_view_shape_impl: its view; None for no view.
        dynamic_scaling_broadcastable_fn: see `RuntimeDynamicStatsScaling`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import IntQuant, NegativeMinOrZero
        >>> int_quant = IntQuant(narrow_range=False, signed=False)
        >>> impl = RuntimeDynamicStatsZeroPoint(NegativeMinOrZero(), int_quant, True)
        >>> float(impl(jnp.array([-1.0, 2.0]), jnp.float32(0.25), 4))
        4.0
    """

    int_quant: IntQuantizer
    quantize: bool

    def __init__(
        self,
        zero_point_stats_impl: Stat,
        int_quant: IntQuantizer,
        quantize_zero_point: bool,
        zero_point_stats_input_view_shape_impl: View | None = None,
        dynamic_scaling_broadcastable_fn: Broadcastable | None = None,
    ) -> None:
        view = zero_point_stats_input_view_shape_impl or Identity()
        super().__init__(zero_point_stats_impl, view, dynamic_scaling_broadcastable_fn)
        assign(self, int_quant=int_quant, quantize=bool(quantize_zero_point))

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any, task: Task = None) -> jax.Array:
        """The zero point of `x`, float32; `task` for a statistic that is searched."""
        z = abs_binary_sign_grad(self.number(x, DISTANCE, task).statistic)
        return shift(z, scale, bit_width, self.int_quant, self.quantize)


class GroupwiseIntQuantizer(IntQuantizer, Protocol):
    """An `int_quant` for tensors that are already in groups."""

    def steps_to_int(
        self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array
    ) -> jax.Array: ...


@checked_arguments
class RuntimeDynamicGroupZeroPoint(Dynamic):
    """A zero point for each group of the given tensor: `z = -stat(groups(x))`, in steps. No state.

    Args:
        input_view_impl: the grouping view.
        zero_point_stats_impl: the statistic of a group, keeping the reduced axis with size 1.
        int_quant: gives the integer range, rounding and clamping.
        quantize_zero_point: make it an integer of the range.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core import DynamicOverSubChannelBlockView, IntQuant, NegativeMinOrZero
        >>> groups = DynamicOverSubChannelBlockView(2, -1)
        >>> impl = RuntimeDynamicGroupZeroPoint(
        ...     groups, NegativeMinOrZero(stats_reduce_dim=-1, keepdim=True), IntQuant(False, False, groups), True)
        >>> impl(jnp.array([-1.0, 2.0, 3.0, 4.0]), jnp.full((2, 1), 0.25), 4).tolist()
        [[4.0], [0.0]]
    """

    int_quant: GroupwiseIntQuantizer
    quantize: bool

    def __init__(
        self,
        input_view_impl: View,
        zero_point_stats_impl: Stat,
        int_quant: GroupwiseIntQuantizer,
        quantize_zero_point: bool,
    ) -> None:
        super().__init__(zero_point_stats_impl, input_view_impl, in_groups=True)
        assign(self, int_quant=int_quant, quantize=bool(quantize_zero_point))

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any, task: Task = None) -> jax.Array:
        """The zero points of `x`, float32, in the grouped shape with 1 along the elements of a group."""
        lowest: Any = self.number(x, DISTANCE, task).statistic
        # `to_int` would group it a second time.
        to_int = self.int_quant.steps_to_int
        return shift(-lowest, scale, bit_width, self.int_quant, self.quantize, to_int)
