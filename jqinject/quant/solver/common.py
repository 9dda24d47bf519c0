"""Fragments that every solver shares: names given by enum become components."""

from typing import Any

import numpy as np

from jqinject.core.clamp import Identity
from jqinject.core.quant import IntQuant
from jqinject.core.view import OverOutputChannelView, OverTensorView
from jqinject.inject import ExtendedInjector, choices, this, value
from jqinject.inject.enum import (
    BitWidthImplType,
    FloatToIntImplType,
    LearnedRoundImplType,
    QuantType,
    RestrictValueType,
    ScalingImplType,
    ScalingPerOutputType,
    StatsOp,
    as_enum,
)
from jqinject.ops.groups import elements_axis
from jqinject.quant.solver.tables import (
    BIT_WIDTH_IMPL,
    FLOAT_TO_INT_IMPL,
    INT_SCALING_IMPL,
    LEARNED_ROUND_IMPL,
    RESTRICT_VALUE_IMPL,
    STATS_IMPL,
    pick,
)

SCALAR_SHAPE = ()
CHANNEL_REDUCE_DIM = 1  # views put the channels first and everything else in axis 1


class SolveBitWidthImplFromEnum(ExtendedInjector):
    """`bit_width_impl` from `bit_width_impl_type`."""

    @choices(*BIT_WIDTH_IMPL.values())
    def bit_width_impl(bit_width_impl_type):
        return pick(BitWidthImplType, bit_width_impl_type, BIT_WIDTH_IMPL, "bit_width_impl_type")


class SolveLearnedRoundFromEnum(ExtendedInjector):
    """What learned rounding consists of: `learned_round_impl` from `learned_round_impl_type`, zeros to start with."""

    learned_round_impl_type = LearnedRoundImplType.HARD_SIGMOID

    @choices(*LEARNED_ROUND_IMPL.values())
    def learned_round_impl(learned_round_impl_type):
        return pick(
            LearnedRoundImplType, learned_round_impl_type, LEARNED_ROUND_IMPL, "learned_round_impl_type"
        )

    @value
    def learned_round_init(tracked_parameter_list: Any):
        if len(tracked_parameter_list) != 1:
            found = "no weight" if not tracked_parameter_list else f"{len(tracked_parameter_list)} weights"
            raise ValueError(
                "float_to_int_impl_type = 'learned_round' learns how each element of one weight is rounded, and this "
                f"quantizer has {found}.\n  cure: a quantizer of its own for each layer (weight_quant=MyQuantizer), "
                "and 'round' or 'stochastic_round' for activations"
            )
        return np.zeros(tracked_parameter_list[0].shape, np.float32)


class SolveTensorQuantFloatToIntImplFromEnum(SolveLearnedRoundFromEnum):
    """`float_to_int_impl` from `float_to_int_impl_type`."""

    @choices(*FLOAT_TO_INT_IMPL.values())
    def float_to_int_impl(float_to_int_impl_type):
        return pick(FloatToIntImplType, float_to_int_impl_type, FLOAT_TO_INT_IMPL, "float_to_int_impl_type")


class SolveRestrictScalingImplFromEnum(ExtendedInjector):
    """`restrict_scaling_impl` from `restrict_scaling_type`."""

    @choices(*RESTRICT_VALUE_IMPL.values())
    def restrict_scaling_impl(restrict_scaling_type):
        return pick(RestrictValueType, restrict_scaling_type, RESTRICT_VALUE_IMPL, "restrict_scaling_type")


class SolveIntScalingImplFromEnum(ExtendedInjector):
    """`int_scaling_impl` from `restrict_scaling_type`: powers of two span 2^(b-1) steps, others the integers."""

    @choices(*INT_SCALING_IMPL.values())
    def int_scaling_impl(restrict_scaling_type):
        return pick(RestrictValueType, restrict_scaling_type, INT_SCALING_IMPL, "restrict_scaling_type")


class SolveScalingStatsOpFromEnum(ExtendedInjector):
    """`scaling_stats_impl` from `scaling_stats_op`."""

    @choices(*STATS_IMPL.values())
    def scaling_stats_impl(scaling_stats_op=None, restrict_scaling_type=None):
        if scaling_stats_op is None:
            return None
        if scaling_stats_op == StatsOp.SIGNED_MAX and restrict_scaling_type == RestrictValueType.POWER_OF_TWO:
            raise ValueError(
                "scaling_stats_op = 'signed_max' can be negative and a power of two can not: "
                "declare restrict_scaling_type = 'signed_fp', or scaling_stats_op = 'max'"
            )
        return pick(StatsOp, scaling_stats_op, STATS_IMPL, "scaling_stats_op")


class SolveIntQuantFromEnum(ExtendedInjector):
    """`int_quant` from `quant_type`."""

    @choices(IntQuant)
    def int_quant(quant_type):
        return IntQuant if as_enum(QuantType, quant_type, name="quant_type") is QuantType.INT else None


class SolveAffineRescalingFromEnum(ExtendedInjector):
    """`affine_rescaling` from `scaling_impl_type`: a fact to read; `scaling_affine_rescaling_init` switches it on."""

    @value
    def affine_rescaling(scaling_impl_type):
        return {ScalingImplType.STATS: False, ScalingImplType.AFFINE_STATS: True}.get(
            as_enum(ScalingImplType, scaling_impl_type, name="scaling_impl_type")
        )


class SolveStatsReduceDimFromEnum(ExtendedInjector):
    """What shares a scale: `scaling_per_output`, and the axis that statistics reduce."""

    @value
    def scaling_per_output(scaling_per_output_type=None, scaling_per_output_channel=None):
        if scaling_per_output_channel is not None:  # the older flag wins, as in Brevitas
            return ScalingPerOutputType.CHANNEL if scaling_per_output_channel else ScalingPerOutputType.TENSOR
        if scaling_per_output_type is None:
            return None
        return as_enum(ScalingPerOutputType, scaling_per_output_type, name="scaling_per_output_type")

    @value
    def stats_reduce_dim(scaling_stats_op, scaling_per_output):
        if scaling_per_output == ScalingPerOutputType.GROUP:
            return this.group_elements_axis
        per_channel = (
            scaling_per_output == ScalingPerOutputType.CHANNEL or scaling_stats_op == StatsOp.MAX_AVE
        )
        return CHANNEL_REDUCE_DIM if per_channel else None

    @value
    def group_elements_axis(group_dim: Any):
        return elements_axis(group_dim)

    @value
    def keepdim(scaling_per_output):
        return scaling_per_output == ScalingPerOutputType.GROUP


class SolveScalingStatsInputViewShapeImplFromEnum(ExtendedInjector):
    """`scaling_stats_input_view_shape_impl` and the permutation it applies."""

    @choices(OverOutputChannelView, OverTensorView)
    def scaling_stats_input_view_shape_impl(scaling_stats_op, scaling_per_output):
        if scaling_per_output == ScalingPerOutputType.GROUP:
            return this.input_view_impl
        per_channel = (
            scaling_per_output == ScalingPerOutputType.CHANNEL or scaling_stats_op == StatsOp.MAX_AVE
        )
        return OverOutputChannelView if per_channel else OverTensorView

    @value
    def permute_dims(scaling_stats_permute_dims=None):
        return scaling_stats_permute_dims


class SolveInputViewImpl(ExtendedInjector):
    """`input_view_impl`: per tensor and per channel, the tensor is quantized in the shape it has."""

    input_view_impl = Identity


class SolveRestrictScaleSign(ExtendedInjector):
    """Whether scales are positive."""

    @value
    def restrict_scale_positive(restrict_scaling_type=None):
        return restrict_scaling_type in (RestrictValueType.FP, RestrictValueType.POWER_OF_TWO)

    @value
    def bipolar_search(restrict_scale_positive):
        return not restrict_scale_positive
