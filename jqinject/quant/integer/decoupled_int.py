"""Weights that are rounded by one scale and rescaled by another: decoupled, weight-normalized, accumulator-aware.

As in Brevitas, the fragments include a solver: a quantizer only adds a bit width.
"""

from collections.abc import Callable

import jax
from flax import nnx

from jqinject import core
from jqinject.inject import ExtendedInjector, this, value
from jqinject.quant import enums, solver

CHANNEL_AXIS_OF_VIEW = 1  # views put the channels first and everything else in axis 1


class DecoupledWeightQuant(solver.WeightQuantSolver):
    """Narrow signed integers by `DecoupledRescalingIntQuant`."""

    tensor_quant = core.DecoupledRescalingIntQuant
    decoupled_int_quant = core.DecoupledIntQuant
    tensor_clamp_impl = core.TensorClampSte
    pre_scaling_impl = core.StatsFromParameterScaling
    quant_type = enums.QuantType.INT
    bit_width_impl_type = enums.BitWidthImplType.CONST
    float_to_int_impl = core.RoundSte
    zero_point_impl = core.ZeroZeroPoint
    pre_zero_point_impl = core.ZeroZeroPoint
    restrict_scaling_type = enums.RestrictValueType.FP
    scaling_impl_type = enums.ScalingImplType.PARAMETER_FROM_STATS
    scaling_stats_op = enums.StatsOp.MAX
    narrow_range = True
    signed = True


class WeightPerTensorFloatDecoupledL2Param(DecoupledWeightQuant):
    """One scale: before rounding the l2-norm of the channel maxima over sqrt(channels), after it a learned one that
    starts there."""

    scaling_stats_impl = core.AbsMaxL2
    scaling_stats_input_view_shape_impl = core.OverOutputChannelView
    scaling_stats_input_concat_dim = 0
    stats_reduce_dim = CHANNEL_AXIS_OF_VIEW
    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR


class WeightPerChannelFloatDecoupled(DecoupledWeightQuant):
    """A scale for each output channel: before rounding max |w|, after it a learned one that starts there."""

    scaling_stats_impl = core.AbsMax
    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


@value
def own_copy(scale_after_rounding: object) -> object:
    """A parameter of its own that starts at the same value, as in Brevitas."""
    is_module = isinstance(scale_after_rounding, nnx.Module)
    return nnx.clone(scale_after_rounding, graph=True) if is_module else scale_after_rounding


class PerChannelPreNorm(ExtendedInjector):
    """The scale before rounding from the l2-norm of each channel. Nested in `WeightNormPerChannelFloatDecoupled`."""

    pre_scaling_impl = core.ParameterPreScalingWeightNorm
    scaling_stats_input_view_shape_impl = core.OverOutputChannelView
    scale_after_rounding = (this << 1).scaling_impl
    normalize_stats_impl = (this << 1).normalize_stats_impl
    tracked_parameter_list = (this << 1).tracked_parameter_list
    pre_scaling_shape = (this << 1).pre_scaling_shape
    permute_dims = (this << 1).permute_dims
    channel_axes = (this << 1).channel_axes

    scaling_impl = own_copy


class AccumulatorAwarePerChannelPreNorm(PerChannelPreNorm):
    """The same, bounded by the accumulator."""

    pre_scaling_impl = core.AccumulatorAwareParameterPreScaling
    accumulator_bit_width_impl = (this << 1).accumulator_bit_width_impl
    restrict_pre_scaling_impl = (this << 1).restrict_pre_scaling_impl


class AccumulatorAwareZeroCenterPerChannelPreNorm(AccumulatorAwarePerChannelPreNorm):
    """The same, for weights that are centered on 0 first."""

    pre_scaling_impl = core.AccumulatorAwareZeroCenterParameterPreScaling
    pre_zero_point_impl = core.PreZeroCenterZeroPoint
    pre_zero_point_shape = this.pre_scaling_shape
    pre_zero_point_stats_input_view_shape_impl = this.scaling_stats_input_view_shape_impl
    stats_reduce_dim = CHANNEL_AXIS_OF_VIEW


class WeightNormPerChannelFloatDecoupled(DecoupledWeightQuant):
    """Weight normalization: `y = clamp(round((g / s) * w / norm(w))) * s`, with a learned norm g and a learned scale s
    of each output channel; s starts at max |w| / (2**(b-1) - 1) and is learned as its log2."""

    per_channel_pre_norm = PerChannelPreNorm
    tensor_clamp_impl = core.TensorClamp
    force_parameter = True
    scaling_impl = core.ParameterScaling
    scaling_impl_type = enums.ScalingImplType.PARAMETER
    scaling_init_impl = core.StatsFromParameterScaling
    restrict_scaling_impl = core.LogFloatRestrictValue
    restrict_pre_scaling_impl = core.LogFloatRestrictValue
    scaling_stats_impl = core.AbsMax
    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL
    pre_scaling_shape = this.scaling_per_output_channel_shape
    int_scaling_impl = core.SingleArgStatelessBuffer(1.0)
    scaling_min_val = 1e-10
    pre_scaling_min_val = 1e-10

    normalize_stats_impl = core.L2Norm(stats_reduce_dim=CHANNEL_AXIS_OF_VIEW)
    pre_scaling_impl = this.per_channel_pre_norm.pre_scaling_impl

    @value
    def scaling_init(
        scaling_init_impl: Callable[[None], jax.Array], bit_width: int, axis_name: object = None
    ) -> jax.Array:
        """max |w| / (2**(b-1) - 1) of the whole weight."""
        if axis_name is not None:
            raise ValueError(
                "weight normalization takes the norms of a whole weight when the layer is made, outside of mapped "
                f"axes, got axis_name={axis_name!r}.\n  cure: leave axis_name out; a sharded weight in jit, without "
                "shard_map and pmap, has the norms of the whole"
            )
        return scaling_init_impl(None) / (2.0 ** (bit_width - 1) - 1)


class AccumulatorAwareWeightQuant(WeightNormPerChannelFloatDecoupled):
    """A2Q: weight normalization by the l1-norm, bounded so that no accumulator of `accumulator_bit_width` bits can
    overflow, whatever the input. The layer's input has to be quantized; a bias is not counted."""

    tensor_quant = core.DecoupledRescalingIntQuantWithInput
    per_channel_pre_norm = AccumulatorAwarePerChannelPreNorm
    float_to_int_impl = core.RoundToZeroSte
    accumulator_bit_width = 32

    normalize_stats_impl = core.L1Norm(stats_reduce_dim=CHANNEL_AXIS_OF_VIEW)
    accumulator_bit_width_impl = value(
        lambda accumulator_bit_width: core.BitWidthConst(accumulator_bit_width)
    )


class AccumulatorAwareZeroCenterWeightQuant(AccumulatorAwareWeightQuant):
    """A2Q+: the same for weights that are centered on 0 before rounding, which allows about twice the l1-norm where
    the input has no sign."""

    per_channel_pre_norm = AccumulatorAwareZeroCenterPerChannelPreNorm

    pre_zero_point_impl = this.per_channel_pre_norm.pre_zero_point_impl


class Int4WeightPerTensorFloatDecoupled(WeightPerTensorFloatDecoupledL2Param):
    """4-bit narrow signed weights: rounded by the l2-norm of the channel maxima, rescaled by a learned scale.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, weight_quant=Int4WeightPerTensorFloatDecoupled, rngs=nnx.Rngs(0))
        >>> bool(fc.weight_quant.pre_scale() == fc.weight_quant.scale())  # until the scale is trained
        True
    """

    bit_width = 4


class Int4WeightPerTensorFixedPointDecoupled(WeightPerTensorFloatDecoupledL2Param):
    """4-bit narrow signed weights as `Int4WeightPerTensorFloatDecoupled`, with power-of-two scales, rounded up."""

    bit_width = 4
    restrict_scaling_impl = core.PowerOfTwoRestrictValue
    int_scaling_impl = core.PowerOfTwoIntScaling
    restrict_value_float_to_int_impl = core.CeilSte


class Int8WeightPerChannelFloatDecoupled(WeightPerChannelFloatDecoupled):
    """8-bit narrow signed weights: rounded by max |w| of each output channel, rescaled by a learned scale."""

    bit_width = 8


class Int8WeightNormL2PerChannelFixedPoint(WeightNormPerChannelFloatDecoupled):
    """8-bit narrow signed weights, normalized by their l2-norm; learned norm and scale of each output channel.

    Its scales are floats: the name is Brevitas's.
    """

    bit_width = 8


class Int8AccumulatorAwareWeightQuant(AccumulatorAwareWeightQuant):
    """8-bit narrow signed weights so small that no accumulator of `accumulator_bit_width` bits (32) overflows: A2Q.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> fc = QuantLinear(
        ...     64, 4, weight_quant=Int8AccumulatorAwareWeightQuant, weight_accumulator_bit_width=16,
        ...     input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> worst = abs(fc.quant_weight().int()).sum(axis=0) * 128  # inputs are -128 .. 127
        >>> bool((worst <= 2**15 - 1).all())
        True
    """

    bit_width = 8


class Int8AccumulatorAwareZeroCenterWeightQuant(AccumulatorAwareZeroCenterWeightQuant):
    """8-bit narrow signed weights, centered on 0, so small that no accumulator of `accumulator_bit_width` bits (32)
    overflows: A2Q+."""

    bit_width = 8
