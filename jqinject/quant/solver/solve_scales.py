"""Where a scale comes from, which values it may take, and what shares it."""

from jqinject.core.scaling.constant import ConstScaling, ParameterScaling
from jqinject.core.scaling.from_statistics import (
    ParameterFromRuntimeStatsScaling,
    ParameterFromStatsFromParameterScaling,
    RuntimeStatsScaling,
    StatsFromParameterScaling,
)
from jqinject.core.scaling.number_range import PowerOfTwoIntScaling, TruncMsbScaling, TruncScalingWrapper
from jqinject.core.scaling.powers_of_two import SharedExponentScaling
from jqinject.inject import choices, this, value
from jqinject.quant.enums import (
    RestrictValueType,
    ScaleRounding,
    ScalingImplType,
    ScalingPerOutputType,
    StatsOp,
    TruncScalingImplType,
    as_enum,
    chooses,
)
from jqinject.quant.solver.initial import HeScalingInit, MinMaxScalingInit, ScalingConstInit
from jqinject.quant.solver.tables import (
    EXPONENT_IMPL,
    INT_SCALING_IMPL,
    RESTRICT_VALUE_IMPL,
    STATS_IMPL,
    pick,
    pick_or_none,
)

PARAMETER_SCALING_IMPL = {
    ScalingImplType.PARAMETER: ParameterScaling,
    ScalingImplType.PARAMETER_FROM_STATS: ParameterFromStatsFromParameterScaling,
    ScalingImplType.CONST: ConstScaling,
    ScalingImplType.HE: ConstScaling,
    ScalingImplType.STATS: StatsFromParameterScaling,
    ScalingImplType.AFFINE_STATS: StatsFromParameterScaling,
}
PARAMETER_SCALING_INIT = {
    ScalingImplType.CONST: ScalingConstInit,
    ScalingImplType.PARAMETER: ScalingConstInit,
    ScalingImplType.HE: HeScalingInit,
}
ACT_SCALING_IMPL = {
    ScalingImplType.PARAMETER: ParameterScaling,
    ScalingImplType.PARAMETER_FROM_STATS: ParameterFromRuntimeStatsScaling,
    ScalingImplType.CONST: ConstScaling,
    ScalingImplType.STATS: RuntimeStatsScaling,
    ScalingImplType.AFFINE_STATS: RuntimeStatsScaling,
}
ACT_SCALING_INIT = {
    ScalingImplType.CONST: MinMaxScalingInit,
    ScalingImplType.PARAMETER: MinMaxScalingInit,
}
TRUNC_SCALING_IMPL = {
    TruncScalingImplType.MSB: TruncMsbScaling,
    TruncScalingImplType.WRAPPER: TruncScalingWrapper,
}
TRUNC_INT_SCALING_IMPL = {RestrictValueType.POWER_OF_TWO: PowerOfTwoIntScaling}


@choices(*PARAMETER_SCALING_IMPL.values(), SharedExponentScaling)
def parameter_scaling_impl(scaling_impl_type=None, scale_rounding=None):
    """`scaling_impl` of weights and biases from `scaling_impl_type`."""
    if scaling_impl_type is None:
        return None
    if scale_rounding is not None:
        if not chooses(scaling_impl_type, ScalingImplType.STATS):
            raise ValueError(
                f"scale_rounding = {scale_rounding!r} rounds the power of two of a tensor's own blocks, and "
                f"scaling_impl_type = {str(scaling_impl_type)!r} takes the scale from elsewhere.\n"
                "  cure: scaling_impl_type = 'stats', or no scale_rounding"
            )
        return SharedExponentScaling
    return pick(ScalingImplType, scaling_impl_type, PARAMETER_SCALING_IMPL, "scaling_impl_type")


@choices(*ACT_SCALING_IMPL.values())
def act_scaling_impl(scaling_impl_type=None, scaling_per_output=None):
    """`scaling_impl` of activations from `scaling_impl_type`."""
    if scaling_impl_type is None:
        return None
    if chooses(scaling_per_output, ScalingPerOutputType.GROUP):
        raise ValueError(
            "an activation's groups have no scales of their own to keep (how many there are depends on the "
            "tensor), so scaling_impl_type does not go with scaling_per_output_type = 'group'.\n  cure: "
            "scaling_impl = RuntimeDynamicGroupStatsScaling, as MXInt8Act and Int8DynamicActPerGroupFloat declare"
        )
    return pick(ScalingImplType, scaling_impl_type, ACT_SCALING_IMPL, "scaling_impl_type")


@choices(*TRUNC_SCALING_IMPL.values())
def trunc_scaling_impl(trunc_scaling_impl_type="msb"):
    """`trunc_scaling_impl` from `trunc_scaling_impl_type`."""
    return pick(TruncScalingImplType, trunc_scaling_impl_type, TRUNC_SCALING_IMPL, "trunc_scaling_impl_type")


@choices(*PARAMETER_SCALING_INIT.values())
def parameter_scaling_init_impl(scaling_impl_type):
    """Where a scale of weights or biases starts: a declared constant, or He's."""
    return pick_or_none(ScalingImplType, scaling_impl_type, PARAMETER_SCALING_INIT, "scaling_impl_type")


@choices(*ACT_SCALING_INIT.values())
def act_scaling_init_impl(scaling_impl_type):
    """Where a scale of activations starts: max(|min_val|, |max_val|)."""
    return pick_or_none(ScalingImplType, scaling_impl_type, ACT_SCALING_INIT, "scaling_impl_type")


@value
def scaling_init(scaling_init_impl):
    """`scaling_init`, where the scale is a constant or starts as one."""
    return None if scaling_init_impl is None else scaling_init_impl()


@value
def min_val(signed, max_val):
    """`min_val` unless declared: -max_val has the same magnitude, so the scale is max_val's."""
    return -float(max_val) if signed else 0.0


@value
def affine_rescaling(scaling_impl_type):
    """`affine_rescaling` from `scaling_impl_type`, for information only; `scaling_affine_rescaling_init` enables it."""
    return {ScalingImplType.STATS: False, ScalingImplType.AFFINE_STATS: True}.get(
        as_enum(ScalingImplType, scaling_impl_type, name="scaling_impl_type")
    )


@choices(*RESTRICT_VALUE_IMPL.values())
def restrict_scaling_impl(restrict_scaling_type):
    """`restrict_scaling_impl` from `restrict_scaling_type`."""
    return pick(RestrictValueType, restrict_scaling_type, RESTRICT_VALUE_IMPL, "restrict_scaling_type")


@choices(*INT_SCALING_IMPL.values())
def int_scaling_impl(restrict_scaling_type):
    """`int_scaling_impl` from `restrict_scaling_type`: powers of two span 2^(b-1) steps, others the integers."""
    return pick(RestrictValueType, restrict_scaling_type, INT_SCALING_IMPL, "restrict_scaling_type")


@choices(*TRUNC_INT_SCALING_IMPL.values())
def trunc_int_scaling_impl(restrict_scaling_type):
    """`trunc_int_scaling_impl` from `restrict_scaling_type`: integers are shifted, so only by powers of two."""
    return pick(RestrictValueType, restrict_scaling_type, TRUNC_INT_SCALING_IMPL, "restrict_scaling_type")


@value
def restrict_scale_positive(restrict_scaling_type=None):
    """Whether scales are positive."""
    return chooses(restrict_scaling_type, RestrictValueType.FP, RestrictValueType.POWER_OF_TWO)


@value
def bipolar_search(restrict_scale_positive):
    """Whether a search tries negative scales too."""
    return not restrict_scale_positive


@choices(*STATS_IMPL.values())
def scaling_stats_impl(scaling_stats_op=None, restrict_scaling_type=None):
    """`scaling_stats_impl` from `scaling_stats_op`."""
    if scaling_stats_op is None:
        return None
    if chooses(scaling_stats_op, StatsOp.SIGNED_MAX) and chooses(
        restrict_scaling_type, RestrictValueType.POWER_OF_TWO
    ):
        raise ValueError(
            "scaling_stats_op = 'signed_max' can be negative, which a power of two cannot: "
            "declare restrict_scaling_type = 'signed_fp', or scaling_stats_op = 'max'"
        )
    return pick(StatsOp, scaling_stats_op, STATS_IMPL, "scaling_stats_op")


@choices(*EXPONENT_IMPL.values())
def exponent_impl(scale_rounding=None):
    """`exponent_impl` from `scale_rounding`."""
    return (
        None
        if scale_rounding is None
        else pick(ScaleRounding, scale_rounding, EXPONENT_IMPL, "scale_rounding")
    )


@value
def scaling_per_output(scaling_per_output_type=None, scaling_per_output_channel=None):
    """What shares a scale: from `scaling_per_output_type`, or from the older flag, which takes precedence."""
    if scaling_per_output_channel is not None:
        return ScalingPerOutputType.CHANNEL if scaling_per_output_channel else ScalingPerOutputType.TENSOR
    if scaling_per_output_type is None:
        return None
    return as_enum(ScalingPerOutputType, scaling_per_output_type, name="scaling_per_output_type")


@value
def parameter_scaling_shape(scaling_per_output):
    """`scaling_shape`: () per tensor, the broadcastable shape of the channels per channel, of the groups per group."""
    if chooses(scaling_per_output, ScalingPerOutputType.CHANNEL):
        return this.scaling_per_output_channel_shape
    if chooses(scaling_per_output, ScalingPerOutputType.GROUP):
        return this.scaling_per_group_shape
    return ()


@value
def act_scaling_shape(scaling_per_output):
    """`scaling_shape`: () per tensor, `per_channel_broadcastable_shape` per channel."""
    if chooses(scaling_per_output, ScalingPerOutputType.CHANNEL):
        return this.per_channel_broadcastable_shape
    return ()
