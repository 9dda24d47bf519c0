"""The fragments that quantizers are composed of: each declares a few related choices, none is a quantizer by itself.

A quantizer lists its numbers (`FullIntQuant`, `UintQuant`, ..., or the format of a minifloat, see `float_base`), where
its scale comes from (`MaxStatsScaling`, ...), what shares a scale and which values it may take
(`PerTensorFloatScaling8bit`, ...), and its role (`WeightQuantSolver`, ...). Names and numbers are Brevitas's.

Searched scales and zero points have the least squared error (MSE), or are half-quadratic (HQO). List one before the
quantizer that it changes: `class Q(MSESymmetricScale, Int8WeightPerTensorFloat): ...`. The search initializes a learned
scale or zero point, and stops once that is filled.
"""

from typing import Any

from jqinject import core
from jqinject.inject import ExtendedInjector, choices, this
from jqinject.ops.groups import checked_group_size
from jqinject.quant import enums
from jqinject.quant.solver.solve_shapes import by_output


class FullIntQuant(ExtendedInjector):
    """Signed integers, the full range: Brevitas's fragment `IntQuant`, which is also its name here."""

    quant_type = enums.QuantType.INT
    bit_width_impl_type = enums.BitWidthImplType.CONST
    float_to_int_impl_type = enums.FloatToIntImplType.ROUND
    narrow_range = False
    signed = True
    zero_point_impl = core.ZeroZeroPoint


IntQuant = FullIntQuant


class NarrowIntQuant(FullIntQuant):
    """Signed integers without the smallest one, so that the range is symmetric about 0."""

    narrow_range = True


class UintQuant(FullIntQuant):
    """Unsigned integers."""

    signed = False


class ShiftedMinUintQuant(FullIntQuant):
    """Unsigned integers with a zero point at the minimum of a parameter."""

    signed = False
    quantize_zero_point = True
    zero_point_stats_impl = core.NegativeMinOrZero
    zero_point_shape = this.scaling_shape
    zero_point_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl
    zero_point_stats_input_concat_dim = this.scaling_stats_input_concat_dim
    zero_point_impl = core.StatsFromParameterZeroPoint


class ShiftedParamFromPercentileUintQuant(FullIntQuant):
    """Unsigned integers whose learned zero point starts from a low percentile of an activation."""

    signed = False
    quantize_zero_point = True
    zero_point_impl = core.ParameterFromRuntimeZeroPoint
    zero_point_stats_impl = core.NegativePercentileOrZero
    low_percentile_q = 0.001
    zero_point_shape = this.scaling_shape
    zero_point_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl


class SignedBinaryClampedConst(ExtendedInjector):
    """-scale and scale, with a constant scale; no gradient outside [-scale, scale]."""

    tensor_quant = core.ClampedBinaryQuant
    scaling_impl_type = enums.ScalingImplType.CONST
    restrict_scaling_type = enums.RestrictValueType.FP
    float_to_int_impl_type = enums.FloatToIntImplType.ROUND
    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR
    narrow_range = True
    signed = True


class MaxStatsScaling(ExtendedInjector):
    """scale = max |x| / integer steps, recomputed at every forward."""

    scaling_impl_type = enums.ScalingImplType.STATS
    scaling_stats_op = enums.StatsOp.MAX
    scaling_min_val = 1e-10


class MinMaxStatsScaling(ExtendedInjector):
    """scale = (max x - min(min x, 0)) / integer steps, recomputed at every forward."""

    scaling_impl_type = enums.ScalingImplType.STATS
    scaling_stats_op = enums.StatsOp.MIN_MAX
    scaling_min_val = 1e-10


class ParamFromRuntimePercentileScaling(ExtendedInjector):
    """A learned scale that starts from the 99.999th percentile of |x| over the first 300 training batches."""

    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_op = enums.StatsOp.PERCENTILE
    high_percentile_q = 99.999
    collect_stats_steps = 300
    scaling_min_val = 1e-10


class ParamFromRuntimePercentileIntervalScaling(ExtendedInjector):
    """A learned scale that starts from the width between two percentiles of x over the first 300 training batches."""

    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_op = enums.StatsOp.PERCENTILE_INTERVAL
    high_percentile_q = 99.999
    low_percentile_q = 0.001
    collect_stats_steps = 300
    scaling_min_val = 1e-10


class ParamFromRuntimeMinMaxScaling(ExtendedInjector):
    """A learned scale that starts from the range of x over the first 300 training batches."""

    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_op = enums.StatsOp.MIN_MAX
    collect_stats_steps = 300
    scaling_min_val = 1e-10


class LearnedStepFromWeight(ExtendedInjector):
    """A learned step that starts at 2 mean |w| / sqrt(largest integer), with LSQ's gradient."""

    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    scaling_impl = core.LearnedStepScaling
    int_scaling_impl = core.MaxIntScaling
    tensor_clamp_impl = core.ClampBeforeRounding
    scaling_stats_op = enums.StatsOp.AVE
    scaling_min_val = 1e-10


class LearnedStepFromInput(LearnedStepFromWeight):
    """A learned step that starts at 2 mean |x| / sqrt(largest integer) of the first batch, with LSQ's gradient."""

    scaling_impl = core.LearnedActStepScaling
    collect_stats_steps = 1


class BatchQuantStatsScaling1d(ExtendedInjector):
    """The mean over channels of max |x|, averaged over all training batches; examples are (batch, channels, length).

    The permutation is that of Brevitas's layout; for channels-last data declare
    `scaling_stats_permute_dims = (2, 0, 1)`. A learned factor comes with `scaling_affine_rescaling_init = 1.0`, not
    without (as in Brevitas, against its docstring).
    """

    scaling_impl_type = enums.ScalingImplType.AFFINE_STATS
    scaling_stats_op = enums.StatsOp.MAX_AVE
    scaling_stats_momentum = None
    scaling_stats_permute_dims = (1, 0, 2)
    scaling_min_val = 1e-10


class BatchQuantStatsScaling2d(BatchQuantStatsScaling1d):
    """The same for (batch, channels, height, width); on channels-last data declare (3, 0, 1, 2)."""

    scaling_stats_permute_dims = (1, 0, 2, 3)


class ParamMinMaxInitScaling(ExtendedInjector):
    """A learned scale that starts from max(|min_val|, |max_val|), which the user declares."""

    scaling_impl_type = enums.ScalingImplType.PARAMETER


class PerTensorFloatScaling8bit(ExtendedInjector):
    """One float scale for the tensor, 8 bits."""

    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR
    restrict_scaling_type = enums.RestrictValueType.FP
    bit_width = 8


class PerChannelFloatScaling8bit(ExtendedInjector):
    """A float scale for each output channel, 8 bits."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL
    restrict_scaling_type = enums.RestrictValueType.FP
    bit_width = 8


class PerGroupFloatScaling8bit(ExtendedInjector):
    """A float scale for each group of `group_size` inputs or features, which you declare; 8 bits."""

    scaling_per_output_type = enums.ScalingPerOutputType.GROUP
    restrict_scaling_type = enums.RestrictValueType.FP
    bit_width = 8


class PerTensorPoTScaling8bit(ExtendedInjector):
    """One power-of-two scale for the tensor, rounded up, 8 bits."""

    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR
    restrict_scaling_type = enums.RestrictValueType.POWER_OF_TWO
    bit_width = 8
    restrict_value_float_to_int_impl = core.CeilSte


class PerChannelPoTScaling8bit(PerTensorPoTScaling8bit):
    """A power-of-two scale for each output channel, rounded up, 8 bits."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class PerTensorConstScaling2bit(PerTensorFloatScaling8bit):
    """One constant scale for the tensor, 2 bits."""

    scaling_impl_type = enums.ScalingImplType.CONST
    bit_width = 2


class DynamicPerRow(ExtendedInjector):
    """A scale for each row, the numbers along the last axis."""

    scaling_stats_input_view_shape_impl = core.Identity
    stats_reduce_dim = -1
    keepdim = True


class DynamicPerGroup(ExtendedInjector):
    """A scale for each group of `group_size` features, which you declare, from the current tensor."""

    scaling_impl = core.RuntimeDynamicGroupStatsScaling
    scaling_per_output_type = enums.ScalingPerOutputType.GROUP


class _MSESubInjector(ExtendedInjector):
    """A search in a namespace of its own, so that the searches of a scale and of a zero point do not clash."""

    stats_impl = core.MSE
    mse_search_method = "grid"
    scaling_per_output = (this << 1).scaling_per_output
    stats_reduce_dim = (this << 1).stats_reduce_dim
    keepdim = (this << 1).keepdim
    permute_dims = (this << 1).permute_dims
    axis_name = (this << 1).axis_name
    inner_stats_input_view_shape_impl = (this << 1).inner_stats_input_view_shape_impl


class MSESymmetricScaleSubInjector(_MSESubInjector):
    """The search of a symmetric scale, from max |x|."""

    mse_init_op = core.AbsMax
    mse_search_method = (this << 1).mse_search_method
    bipolar_search = (this << 1).bipolar_search


class MSEAsymmetricScaleSubInjector(_MSESubInjector):
    """The search of a scale beside a zero point, from max x - min(min x, 0)."""

    mse_init_op = core.AbsMinMax
    bipolar_search = (this << 1).bipolar_search


class MSEZeroPointSubInjector(_MSESubInjector):
    """The search of a zero point, from min(min x, 0)."""

    mse_init_op = core.NegativeMinOrZero


class MSEActZeroPointSubInjector(MSEZeroPointSubInjector):
    """The same, batch after batch: the scale of the next batch is searched with the last zero point."""

    memory_shape = (this << 1).zero_point_shape


# a search is given tensors without a view
inner_view_impl = by_output(core.OverTensorView, core.OverOutputChannelView, this.input_view_impl)


class MSESymmetricScale(ExtendedInjector):
    """A learned scale that starts where the squared error of quantization is least, among `max |x| * k / 20`; of all
    scales with `mse_search_method = "exact"`.

    Override what the search does within it: `class Mine(MSESymmetricScale, ...): mse_scale = MySearch`, with
    `class MySearch(MSESymmetricScaleSubInjector): mse_iters = 50`.
    """

    mse_scale = MSESymmetricScaleSubInjector
    mse_search_method = "grid"
    axis_name = None
    inner_stats_input_view_shape_impl = inner_view_impl
    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_input_view_shape_impl = core.Identity
    scaling_stats_impl = this.mse_scale.stats_impl


class MSEAsymmetricScale(ExtendedInjector):
    """A learned scale that starts where the squared error is least, from the range of x down to a 20th of it."""

    mse_scale = MSEAsymmetricScaleSubInjector
    axis_name = None
    inner_stats_input_view_shape_impl = inner_view_impl
    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_input_view_shape_impl = core.Identity
    scaling_stats_impl = this.mse_scale.stats_impl


class MSEWeightZeroPoint(ExtendedInjector):
    """A learned zero point of a weight that starts where the squared error of quantization is least."""

    mse_zero_point = MSEZeroPointSubInjector
    axis_name = None
    inner_stats_input_view_shape_impl = inner_view_impl
    zero_point_impl = core.ParameterFromStatsFromParameterZeroPoint
    zero_point_stats_input_view_shape_impl = core.Identity
    zero_point_stats_impl = this.mse_zero_point.stats_impl


class MSEActZeroPoint(ExtendedInjector):
    """A learned zero point of an activation that starts from those with the least squared error in each batch."""

    mse_zero_point = MSEActZeroPointSubInjector
    axis_name = None
    inner_stats_input_view_shape_impl = inner_view_impl
    zero_point_impl = core.ParameterFromRuntimeZeroPoint
    zero_point_stats_input_view_shape_impl = core.Identity
    zero_point_stats_impl = this.mse_zero_point.stats_impl


class HQOSymmetricScale(ExtendedInjector):
    """A learned scale that half-quadratic optimization finds, from max |x| on."""

    hqo_init_op_scale = core.AbsMax
    inner_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl
    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    stats_impl_scale = core.HalfQuadraticOptimizerScale
    scaling_stats_impl = this.stats_impl_scale


class HQOAsymmetricScale(HQOSymmetricScale):
    """A learned scale that half-quadratic optimization finds, from max x - min(min x, 0) on."""

    hqo_init_op_scale = core.AbsMinMax


class HQOWeightZeroPoint(ExtendedInjector):
    """A learned zero point of a weight that half-quadratic optimization finds, from min(min w, 0) on."""

    hqo_init_op_zp = core.NegativeMinOrZero
    inner_stats_input_view_shape_impl = this.zero_point_stats_input_view_shape_impl
    zero_point_impl = core.ParameterFromStatsFromParameterZeroPoint
    stats_impl_zp = core.HalfQuadraticOptimizerZeroPoint
    zero_point_stats_impl = this.stats_impl_zp


class HQOActZeroPoint(HQOWeightZeroPoint):
    """A learned zero point of an activation, from those that half-quadratic optimization finds in each batch."""

    memory_shape = this.zero_point_shape
    zero_point_impl = core.ParameterFromRuntimeZeroPoint


class InRange(ExtendedInjector):
    """Signed integers, or the minifloats of `q_dtype`, in a range that `calibration_impl` finds."""

    scaling_impl = core.RangeScaling
    calibration_impl = core.AbsMaxRange
    averaging_impl = None
    int_quant = core.IntQuant
    int_scaling_impl = core.RangeSteps
    zero_point_impl = core.RangeZeroPoint
    bit_width_impl = core.BitWidthConst
    bit_width = 8
    signed = True
    narrow_range = False
    q_dtype = None
    group_size = None
    group_padding = False

    @choices(core.RescalingIntQuant, core.FloatQuant)
    def tensor_quant(q_dtype: object) -> Any:
        """Integers without a `q_dtype`."""
        return core.RescalingIntQuant if q_dtype is None else core.FloatQuant

    @choices(core.Identity, core.DynamicOverSubChannelBlockView)
    def input_view_impl(group_size: object) -> Any:
        """The view in groups, if there are any."""
        if group_size is None:
            return core.Identity
        checked_group_size(group_size, "a range for each group")
        return core.DynamicOverSubChannelBlockView
