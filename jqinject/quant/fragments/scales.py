"""Where a scale comes from, what shares it, and which values it may take."""

from jqinject.core.clamp import ClampBeforeRounding, Identity
from jqinject.core.rounding import CeilSte
from jqinject.core.scaling.constant import RuntimeDynamicGroupStatsScaling
from jqinject.core.scaling.from_statistics import LearnedActStepScaling, LearnedStepScaling
from jqinject.core.scaling.number_range import MaxIntScaling
from jqinject.inject import ExtendedInjector
from jqinject.quant.enums import RestrictValueType, ScalingImplType, ScalingPerOutputType, StatsOp


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


class LearnedStepFromWeight(ExtendedInjector):
    """A learned step that starts at 2 mean |w| / sqrt(largest integer), with LSQ's gradient."""

    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    scaling_impl = LearnedStepScaling
    int_scaling_impl = MaxIntScaling
    tensor_clamp_impl = ClampBeforeRounding
    scaling_stats_op = StatsOp.AVE
    scaling_min_val = 1e-10


class LearnedStepFromInput(ExtendedInjector):
    """A learned step that starts at 2 mean |x| / sqrt(largest integer) of the first batch, with LSQ's gradient."""

    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS
    scaling_impl = LearnedActStepScaling
    int_scaling_impl = MaxIntScaling
    tensor_clamp_impl = ClampBeforeRounding
    scaling_stats_op = StatsOp.AVE
    collect_stats_steps = 1
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


class PerTensorFloatScaling8bit(ExtendedInjector):
    """One float scale for the tensor, 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.TENSOR
    restrict_scaling_type = RestrictValueType.FP
    bit_width = 8


class PerChannelFloatScaling8bit(ExtendedInjector):
    """A float scale for each output channel, 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL
    restrict_scaling_type = RestrictValueType.FP
    bit_width = 8


class PerGroupFloatScaling8bit(ExtendedInjector):
    """A float scale for each group of `group_size` inputs or features, which you declare; 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.GROUP
    restrict_scaling_type = RestrictValueType.FP
    bit_width = 8


class PerTensorPoTScaling8bit(ExtendedInjector):
    """One power-of-two scale for the tensor, rounded up, 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.TENSOR
    restrict_scaling_type = RestrictValueType.POWER_OF_TWO
    bit_width = 8
    restrict_value_float_to_int_impl = CeilSte


class PerChannelPoTScaling8bit(ExtendedInjector):
    """A power-of-two scale for each output channel, rounded up, 8 bits."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL
    restrict_scaling_type = RestrictValueType.POWER_OF_TWO
    bit_width = 8
    restrict_value_float_to_int_impl = CeilSte


class PerTensorConstScaling2bit(ExtendedInjector):
    """One constant scale for the tensor, 2 bits."""

    scaling_impl_type = ScalingImplType.CONST
    restrict_scaling_type = RestrictValueType.FP
    scaling_per_output_type = ScalingPerOutputType.TENSOR
    bit_width = 2


class DynamicPerRow(ExtendedInjector):
    """A scale for each row, the numbers along the last axis."""

    scaling_stats_input_view_shape_impl = Identity
    stats_reduce_dim = -1
    keepdim = True


class DynamicPerGroup(ExtendedInjector):
    """A scale for each group of `group_size` features, which you declare, from the tensor at hand."""

    scaling_impl = RuntimeDynamicGroupStatsScaling
    scaling_per_output_type = ScalingPerOutputType.GROUP
