"""Fragments that quantizers are composed from: each declares a few related choices, none is a quantizer by itself.

A quantizer lists what integers it has (`IntQuant`, `UintQuant`, ...), where its scale comes from (`MaxStatsScaling`,
...), what shares a scale and which values it may take (`PerTensorFloatScaling8bit`, ...), and a solver last. Names and
numbers are Brevitas's (`brevitas/quant/base.py`).
"""

from jqinject.core.quant import ClampedBinaryQuant
from jqinject.core.rounding import CeilSte
from jqinject.core.stats import NegativeMinOrZero, NegativePercentileOrZero
from jqinject.core.zero_point import ParameterFromRuntimeZeroPoint, StatsFromParameterZeroPoint, ZeroZeroPoint
from jqinject.inject import ExtendedInjector, this
from jqinject.inject.enum import (
    BitWidthImplType,
    FloatToIntImplType,
    QuantType,
    RestrictValueType,
    ScalingImplType,
    ScalingPerOutputType,
    StatsOp,
)


class MaxStatsScaling(ExtendedInjector):
    """scale = max |x| / integer steps, recomputed at every forward."""

    scaling_impl_type = ScalingImplType.STATS
    scaling_stats_op = StatsOp.MAX
    scaling_min_val = 1e-10


class MinMaxStatsScaling(ExtendedInjector):
    """scale = (max x - min(min x, 0)) / integer steps, recomputed at every forward."""

    scaling_impl_type = ScalingImplType.STATS
    scaling_stats_op = StatsOp.MIN_MAX
    scaling_min_val = 1e-10


class ParamFromRuntimePercentileScaling(ExtendedInjector):
    """A learned scale that starts from the 99.999th percentile of |x| over the first 300 training batches."""

    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_op = StatsOp.PERCENTILE
    high_percentile_q = 99.999
    collect_stats_steps = 300
    scaling_min_val = 1e-10


class ParamFromRuntimePercentileIntervalScaling(ExtendedInjector):
    """A learned scale that starts from the width between two percentiles of x over the first 300 training batches."""

    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_op = StatsOp.PERCENTILE_INTERVAL
    high_percentile_q = 99.999
    low_percentile_q = 0.001
    collect_stats_steps = 300
    scaling_min_val = 1e-10


class ParamFromRuntimeMinMaxScaling(ExtendedInjector):
    """A learned scale that starts from the range of x over the first 300 training batches."""

    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_op = StatsOp.MIN_MAX
    collect_stats_steps = 300
    scaling_min_val = 1e-10


class BatchQuantStatsScaling1d(ExtendedInjector):
    """The mean over channels of max |x|, averaged over all training batches; examples are (batch, channels, length).

    The permutation is that of Brevitas's layout; for channels-last data declare
    `scaling_stats_permute_dims = (2, 0, 1)`. A learned factor comes with `scaling_affine_rescaling_init = 1.0`, not
    without (as in Brevitas, against its docstring).
    """

    scaling_impl_type = ScalingImplType.AFFINE_STATS
    scaling_stats_op = StatsOp.MAX_AVE
    scaling_stats_momentum = None
    scaling_stats_permute_dims = (1, 0, 2)
    scaling_min_val = 1e-10


class BatchQuantStatsScaling2d(BatchQuantStatsScaling1d):
    """The same for (batch, channels, height, width); on channels-last data declare (3, 0, 1, 2)."""

    scaling_stats_permute_dims = (1, 0, 2, 3)


class ParamMinMaxInitScaling(ExtendedInjector):
    """A learned scale that starts from max(|min_val|, |max_val|), which the user declares."""

    scaling_impl_type = ScalingImplType.PARAMETER


class IntQuant(ExtendedInjector):
    """Signed integers, all of them."""

    quant_type = QuantType.INT
    bit_width_impl_type = BitWidthImplType.CONST
    float_to_int_impl_type = FloatToIntImplType.ROUND
    narrow_range = False
    signed = True
    zero_point_impl = ZeroZeroPoint


class NarrowIntQuant(IntQuant):
    """Signed integers without the least one, so that they are symmetric about 0."""

    narrow_range = True


class UintQuant(IntQuant):
    """Unsigned integers."""

    signed = False


class ShiftedMinUintQuant(UintQuant):
    """Unsigned integers whose zero point stands at the minimum of a parameter."""

    quantize_zero_point = True
    zero_point_stats_impl = NegativeMinOrZero
    zero_point_shape = this.scaling_shape
    zero_point_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl
    zero_point_stats_input_concat_dim = this.scaling_stats_input_concat_dim
    zero_point_impl = StatsFromParameterZeroPoint


class ShiftedParamFromPercentileUintQuant(UintQuant):
    """Unsigned integers whose learned zero point starts from a low percentile of an activation."""

    quantize_zero_point = True
    zero_point_impl = ParameterFromRuntimeZeroPoint
    zero_point_stats_impl = NegativePercentileOrZero
    low_percentile_q = 0.001
    zero_point_shape = this.scaling_shape
    zero_point_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl


class PerTensorFloatScaling8bit(ExtendedInjector):
    """One float scale for the tensor, 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.TENSOR
    restrict_scaling_type = RestrictValueType.FP
    bit_width = 8


class PerChannelFloatScaling8bit(PerTensorFloatScaling8bit):
    """A float scale for each output channel, 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class PerTensorPoTScaling8bit(ExtendedInjector):
    """One power-of-two scale for the tensor, rounded up, 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.TENSOR
    restrict_scaling_type = RestrictValueType.POWER_OF_TWO
    bit_width = 8
    restrict_value_float_to_int_impl = CeilSte


class PerChannelPoTScaling8bit(PerTensorPoTScaling8bit):
    """A power-of-two scale for each output channel, rounded up, 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class SignedBinaryClampedConst(ExtendedInjector):
    """-scale and scale, with a constant scale; no gradient outside [-scale, scale]."""

    tensor_quant = ClampedBinaryQuant
    scaling_impl_type = ScalingImplType.CONST
    restrict_scaling_type = RestrictValueType.FP
    float_to_int_impl_type = FloatToIntImplType.ROUND
    scaling_per_output_type = ScalingPerOutputType.TENSOR
    narrow_range = True
    signed = True


class PerTensorConstScaling2bit(ExtendedInjector):
    """One constant scale for the tensor, 2 bits."""

    scaling_impl_type = ScalingImplType.CONST
    restrict_scaling_type = RestrictValueType.FP
    scaling_per_output_type = ScalingPerOutputType.TENSOR
    bit_width = 2
