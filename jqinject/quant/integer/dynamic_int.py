"""Activations whose scale is that of the tensor at hand: per tensor, per row (the last axis) and per group.

Nothing is kept, in training or evaluation. Names and numbers are those of Brevitas's examples for language models.
"""

from jqinject.core.rounding import FloorSte
from jqinject.core.scaling.constant import RuntimeDynamicStatsScaling
from jqinject.core.statistics.extremes import NegativeMinOrZero
from jqinject.core.zero_point import RuntimeDynamicGroupZeroPoint, RuntimeDynamicStatsZeroPoint
from jqinject.quant.enums import RestrictValueType, StatsOp
from jqinject.quant.fragments import DynamicPerGroup, DynamicPerRow
from jqinject.quant.integer.scaled_int import Int8ActPerTensorFloat
from jqinject.quant.integer.shifted_scaled_int import ShiftedUint8ActPerTensorFloat


class Int8DynamicActPerTensorFloat(Int8ActPerTensorFloat):
    """8-bit signed activations, scale = max |x| / 128 of the tensor.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=Int8DynamicActPerTensorFloat, return_quant_tensor=True)
        >>> [float(identity(jnp.array([1.0, -x])).scale) for x in (128.0, 2.0)]
        [1.0, 0.015625]
    """

    scaling_impl = RuntimeDynamicStatsScaling
    scaling_stats_op = StatsOp.MAX


class Int8DynamicActPerRowFloat(DynamicPerRow, Int8DynamicActPerTensorFloat):
    """8-bit signed activations, scale = max |x| / 128 of each row (the last axis)."""


class Int8DynamicActPerRowFixedPoint(Int8DynamicActPerRowFloat):
    """8-bit signed activations, a power of two for each row: max |x| rounded down to one, / 128."""

    restrict_scaling_type = RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = FloorSte


class Int8DynamicActPerGroupFloat(DynamicPerGroup, Int8ActPerTensorFloat):
    """8-bit signed activations, scale = max |x| / 128 of each group of `group_size` features, which you declare.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=Int8DynamicActPerGroupFloat, group_size=2, return_quant_tensor=True)
        >>> identity(jnp.array([128.0, -1.0, 0.5, 64.0])).scale_.tolist()
        [[1.0], [0.5]]
    """

    scaling_stats_op = StatsOp.MAX


class ShiftedUint8DynamicActPerTensorFloat(ShiftedUint8ActPerTensorFloat):
    """8-bit unsigned activations between the tensor's minimum and maximum."""

    scaling_impl = RuntimeDynamicStatsScaling
    scaling_stats_op = StatsOp.MIN_MAX
    zero_point_impl = RuntimeDynamicStatsZeroPoint
    zero_point_stats_impl = NegativeMinOrZero


class ShiftedUint8DynamicActPerRowFloat(DynamicPerRow, ShiftedUint8DynamicActPerTensorFloat):
    """8-bit unsigned activations between the minimum and maximum of each row (the last axis)."""


class ShiftedUint8DynamicActPerGroupFloat(DynamicPerGroup, ShiftedUint8ActPerTensorFloat):
    """8-bit unsigned activations between the minimum and maximum of each group of `group_size` features.

    Differs from Brevitas: there, zero points are cut into groups a second time, and the result has another shape.
    """

    scaling_stats_op = StatsOp.MIN_MAX
    zero_point_impl = RuntimeDynamicGroupZeroPoint
    zero_point_stats_impl = NegativeMinOrZero
