"""Which component each choice by enum selects: kinds, bit widths, rounding, clamping, and where scales come from."""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, final

import numpy as np

from jqinject import core
from jqinject.inject import choices, this, value
from jqinject.quant import enums
from jqinject.quant.solver.solve_shapes import as_tuple

_Member = TypeVar("_Member", bound=Enum)
_Choice = TypeVar("_Choice")

FLOAT_TO_INT_IMPL: Mapping[enums.FloatToIntImplType, type] = {
    enums.FloatToIntImplType.ROUND: core.RoundSte,
    enums.FloatToIntImplType.FLOOR: core.FloorSte,
    enums.FloatToIntImplType.CEIL: core.CeilSte,
    enums.FloatToIntImplType.ROUND_TO_ZERO: core.RoundToZeroSte,
    enums.FloatToIntImplType.DPU: core.DPURoundSte,
    enums.FloatToIntImplType.STOCHASTIC_ROUND: core.StochasticRoundSte,
    enums.FloatToIntImplType.LEARNED_ROUND: core.LearnedRoundSte,
}

LEARNED_ROUND_IMPL: Mapping[enums.LearnedRoundImplType, type] = {
    enums.LearnedRoundImplType.HARD_SIGMOID: core.LearnedRoundHardSigmoid,
    enums.LearnedRoundImplType.SIGMOID: core.LearnedRoundSigmoid,
    enums.LearnedRoundImplType.IDENTITY: core.LearnedRoundIdentity,
}

BIT_WIDTH_IMPL: Mapping[enums.BitWidthImplType, type] = {
    enums.BitWidthImplType.CONST: core.BitWidthConst,
    enums.BitWidthImplType.PARAMETER: core.BitWidthParameter,
    enums.BitWidthImplType.STATEFUL_CONST: core.BitWidthStatefulConst,
}

RESTRICT_VALUE_IMPL: Mapping[enums.RestrictValueType, type] = {
    enums.RestrictValueType.FP: core.FloatRestrictValue,
    enums.RestrictValueType.SIGNED_FP: core.SignedFloatRestrictValue,
    enums.RestrictValueType.LOG_FP: core.LogFloatRestrictValue,
    enums.RestrictValueType.POWER_OF_TWO: core.PowerOfTwoRestrictValue,
    enums.RestrictValueType.INT: core.IntRestrictValue,
}

INT_SCALING_IMPL: Mapping[enums.RestrictValueType, type] = {
    enums.RestrictValueType.FP: core.IntScaling,
    enums.RestrictValueType.SIGNED_FP: core.IntScaling,
    enums.RestrictValueType.LOG_FP: core.IntScaling,
    enums.RestrictValueType.POWER_OF_TWO: core.PowerOfTwoIntScaling,
}

EXPONENT_IMPL = {
    enums.ScaleRounding.FLOOR: core.FloorExponent,
    enums.ScaleRounding.CEIL: core.CeilExponent,
    enums.ScaleRounding.EVEN: core.EvenExponent,
    enums.ScaleRounding.RCEIL: core.RoundUpExponent,
}
STATS_IMPL: Mapping[enums.StatsOp, type] = {
    enums.StatsOp.MAX: core.AbsMax,
    enums.StatsOp.MAX_AVE: core.AbsMaxAve,
    enums.StatsOp.AVE: core.AbsAve,
    enums.StatsOp.MEAN_SIGMA_STD: core.MeanSigmaStd,
    enums.StatsOp.MEAN_LEARN_SIGMA_STD: core.MeanLearnedSigmaStd,
    enums.StatsOp.PERCENTILE: core.AbsPercentile,
    enums.StatsOp.MIN_MAX: core.AbsMinMax,
    enums.StatsOp.PERCENTILE_INTERVAL: core.PercentileInterval,
    enums.StatsOp.SIGNED_MAX: core.SignedAbsMax,
    enums.StatsOp.SIGMA_STD: core.SigmaStd,
}


def pick(enum_class: type[_Member], given: Any, table: Mapping[_Member, _Choice], name: str) -> _Choice:
    """What a table holds for an enum member or its name.

    Args:
        enum_class: the enum.
        given: a member or its name in any case.
        table: the choices.
        name: the injector's name that `given` was declared under, for the error text.

    Raises:
        ValueError: `given` names no member, or the table has no choice for it; says which there are.
        TypeError: `given` is neither a member nor a string.

    Example:
        >>> pick(FloatToIntImplType, "floor", FLOAT_TO_INT_IMPL, "float_to_int_impl_type").__name__
        'FloorSte'
    """
    member = enums.as_enum(enum_class, given, name=name)
    try:
        return table[member]
    except KeyError:
        names = ", ".join(repr(str(choice.value)) for choice in table)
        raise ValueError(
            f"{name} = {str(member.value)!r} cannot be used here; it takes one of {names}"
        ) from None


def pick_or_none(
    enum_class: type[_Member], given: Any, table: Mapping[_Member, _Choice], name: str
) -> _Choice | None:
    """As `pick`, but None if nothing is given or the table has no choice for it."""
    return None if given is None else table.get(enums.as_enum(enum_class, given, name=name))


@final
class ScalingConstInit:
    """The declared `scaling_const`.

    Example:
        >>> ScalingConstInit(0.1)()
        0.1
    """

    def __init__(self, scaling_const: Any) -> None:
        self.scaling_const = scaling_const

    def __call__(self) -> Any:
        """The start value."""
        return self.scaling_const


@final
class MinMaxScalingInit:
    """max(|min_val|, |max_val|).

    Args:
        min_val: the least value to represent.
        max_val: the greatest value to represent.

    Raises:
        ValueError: nothing lies between the two.

    Example:
        >>> MinMaxScalingInit(min_val=-2.0, max_val=1.5)()
        2.0
    """

    def __init__(self, min_val: float, max_val: float) -> None:
        if not float(min_val) < float(max_val):
            raise ValueError(
                f"min_val has to be below max_val, got min_val = {min_val} and max_val = {max_val}"
            )
        self.scaling_init = max(abs(float(min_val)), abs(float(max_val)))

    def __call__(self) -> float:
        """The start value."""
        return self.scaling_init


@final
class HeScalingInit:
    """The mean over the tracked weights of sqrt(2 / fan_in).

    fan_in is the number of weights behind one output channel (He et al., 2015, "Delving deep into rectifiers").

    differs from Brevitas: there, axis 0 counts as the output channels of every weight, which for transposed
    convolutions (in, out, ...) is the input's.

    Args:
        tracked_parameter_list: weights (Variables or arrays).
        output_channel_dim: their output channel axis, or axes.

    Example:
        >>> import jax.numpy as jnp
        >>> HeScalingInit([jnp.zeros((8, 3))], output_channel_dim=1)()
        0.5
    """

    def __init__(
        self, tracked_parameter_list: Sequence[Any], output_channel_dim: int | tuple[int, ...] = 0
    ) -> None:
        fans = [
            math.prod(weight.shape)
            // max(math.prod(weight.shape[axis] for axis in as_tuple(output_channel_dim)), 1)
            for weight in tracked_parameter_list
        ]
        self.scaling_init = sum(math.sqrt(2.0 / max(fan, 1)) for fan in fans) / len(fans)

    def __call__(self) -> float:
        """The start value."""
        return self.scaling_init


WEIGHT_TENSOR_QUANT = {
    enums.QuantType.FP: None,
    enums.QuantType.INT: core.RescalingIntQuant,
    enums.QuantType.TERNARY: core.TernaryQuant,
    enums.QuantType.BINARY: core.BinaryQuant,
}
ACT_TENSOR_QUANT = {**WEIGHT_TENSOR_QUANT, enums.QuantType.BINARY: core.ClampedBinaryQuant}
PRESCALED_BIAS_TENSOR_QUANT = {enums.QuantType.FP: None, enums.QuantType.INT: core.PrescaledRestrictIntQuant}
OWN_SCALE_BIAS_TENSOR_QUANT = {enums.QuantType.FP: None, enums.QuantType.INT: core.RescalingIntQuant}
TRUNC_TENSOR_QUANT = {enums.QuantType.FP: None, enums.QuantType.INT: core.TruncIntQuant}
LEARNED_SCALING = (
    enums.ScalingImplType.AFFINE_STATS,
    enums.ScalingImplType.PARAMETER_FROM_STATS,
    enums.ScalingImplType.PARAMETER,
)


@choices(core.RescalingIntQuant, core.TernaryQuant, core.BinaryQuant)
def weight_tensor_quant(quant_type, scaling_per_output=None):
    """`tensor_quant` of weights from `quant_type`."""
    _check_groups_fit(quant_type, scaling_per_output)
    return pick(enums.QuantType, quant_type, WEIGHT_TENSOR_QUANT, "quant_type")


@choices(core.RescalingIntQuant, core.TernaryQuant, core.ClampedBinaryQuant)
def act_tensor_quant(quant_type, scaling_per_output=None):
    """`tensor_quant` of activations from `quant_type`."""
    _check_groups_fit(quant_type, scaling_per_output)
    return pick(enums.QuantType, quant_type, ACT_TENSOR_QUANT, "quant_type")


@choices(core.PrescaledRestrictIntQuant, core.RescalingIntQuant)
def bias_tensor_quant(quant_type, requires_input_scale):
    """`tensor_quant` of biases from `quant_type` and from whether the scale comes in with the input."""
    table = PRESCALED_BIAS_TENSOR_QUANT if requires_input_scale else OWN_SCALE_BIAS_TENSOR_QUANT
    return pick(enums.QuantType, quant_type, table, "quant_type")


@choices(core.TruncIntQuant)
def trunc_tensor_quant(quant_type):
    """`tensor_quant` of accumulators from `quant_type`."""
    return pick(enums.QuantType, quant_type, TRUNC_TENSOR_QUANT, "quant_type")


def _check_groups_fit(quant_type, scaling_per_output):
    if enums.chooses(scaling_per_output, enums.ScalingPerOutputType.GROUP) and enums.chooses(
        quant_type, enums.QuantType.TERNARY, enums.QuantType.BINARY
    ):
        raise ValueError(
            f"quant_type = {str(quant_type)!r} has no scales for groups.\n"
            "  cure: quant_type = 'int' with bit_width = 2, or scaling_per_output_type = 'channel'"
        )


@choices(core.IntQuant)
def int_quant(quant_type):
    """`int_quant` from `quant_type`."""
    return (
        core.IntQuant
        if enums.as_enum(enums.QuantType, quant_type, name="quant_type") is enums.QuantType.INT
        else None
    )


@choices(*BIT_WIDTH_IMPL.values())
def bit_width_impl(bit_width_impl_type):
    """`bit_width_impl` from `bit_width_impl_type`."""
    return pick(enums.BitWidthImplType, bit_width_impl_type, BIT_WIDTH_IMPL, "bit_width_impl_type")


@choices(*FLOAT_TO_INT_IMPL.values())
def float_to_int_impl(float_to_int_impl_type):
    """`float_to_int_impl` from `float_to_int_impl_type`."""
    return pick(enums.FloatToIntImplType, float_to_int_impl_type, FLOAT_TO_INT_IMPL, "float_to_int_impl_type")


@choices(*LEARNED_ROUND_IMPL.values())
def learned_round_impl(learned_round_impl_type):
    """`learned_round_impl` from `learned_round_impl_type`."""
    return pick(
        enums.LearnedRoundImplType, learned_round_impl_type, LEARNED_ROUND_IMPL, "learned_round_impl_type"
    )


@value
def learned_round_init(tracked_parameter_list):
    """Where learned rounding starts: at 0 for each element of the weight."""
    if len(tracked_parameter_list) != 1:
        found = "no weight" if not tracked_parameter_list else f"{len(tracked_parameter_list)} weights"
        raise ValueError(
            "float_to_int_impl_type = 'learned_round' learns how each element of one weight is rounded, and this "
            f"quantizer has {found}.\n  cure: a quantizer of its own for each layer (weight_quant=MyQuantizer), "
            "and 'round' or 'stochastic_round' for activations"
        )
    return np.zeros(tracked_parameter_list[0].shape, np.float32)


@choices(core.TensorClamp, core.TensorClampSte)
def parameter_tensor_clamp_impl(bit_width_impl_type, scaling_impl_type):
    """`tensor_clamp_impl`: a learned scale or bit width needs the gradient of the clamped elements, others pass it."""
    learned = enums.chooses(bit_width_impl_type, enums.BitWidthImplType.PARAMETER) or enums.chooses(
        scaling_impl_type, *LEARNED_SCALING
    )
    return core.TensorClamp if learned else core.TensorClampSte


PARAMETER_SCALING_IMPL = {
    enums.ScalingImplType.PARAMETER: core.ParameterScaling,
    enums.ScalingImplType.PARAMETER_FROM_STATS: core.ParameterFromStatsFromParameterScaling,
    enums.ScalingImplType.CONST: core.ConstScaling,
    enums.ScalingImplType.HE: core.ConstScaling,
    enums.ScalingImplType.STATS: core.StatsFromParameterScaling,
    enums.ScalingImplType.AFFINE_STATS: core.StatsFromParameterScaling,
}
PARAMETER_SCALING_INIT = {
    enums.ScalingImplType.CONST: ScalingConstInit,
    enums.ScalingImplType.PARAMETER: ScalingConstInit,
    enums.ScalingImplType.HE: HeScalingInit,
}
ACT_SCALING_IMPL = {
    enums.ScalingImplType.PARAMETER: core.ParameterScaling,
    enums.ScalingImplType.PARAMETER_FROM_STATS: core.ParameterFromRuntimeStatsScaling,
    enums.ScalingImplType.CONST: core.ConstScaling,
    enums.ScalingImplType.STATS: core.RuntimeStatsScaling,
    enums.ScalingImplType.AFFINE_STATS: core.RuntimeStatsScaling,
}
ACT_SCALING_INIT = {
    enums.ScalingImplType.CONST: MinMaxScalingInit,
    enums.ScalingImplType.PARAMETER: MinMaxScalingInit,
}
TRUNC_SCALING_IMPL = {
    enums.TruncScalingImplType.MSB: core.TruncMsbScaling,
    enums.TruncScalingImplType.WRAPPER: core.TruncScalingWrapper,
}
TRUNC_INT_SCALING_IMPL = {enums.RestrictValueType.POWER_OF_TWO: core.PowerOfTwoIntScaling}


@choices(*PARAMETER_SCALING_IMPL.values(), core.SharedExponentScaling)
def parameter_scaling_impl(scaling_impl_type=None, scale_rounding=None):
    """`scaling_impl` of weights and biases from `scaling_impl_type`."""
    if scaling_impl_type is None:
        return None
    if scale_rounding is not None:
        if not enums.chooses(scaling_impl_type, enums.ScalingImplType.STATS):
            raise ValueError(
                f"scale_rounding = {scale_rounding!r} rounds the power of two of a tensor's own blocks, and "
                f"scaling_impl_type = {str(scaling_impl_type)!r} takes the scale from elsewhere.\n"
                "  cure: scaling_impl_type = 'stats', or no scale_rounding"
            )
        return core.SharedExponentScaling
    return pick(enums.ScalingImplType, scaling_impl_type, PARAMETER_SCALING_IMPL, "scaling_impl_type")


@choices(*ACT_SCALING_IMPL.values())
def act_scaling_impl(scaling_impl_type=None, scaling_per_output=None):
    """`scaling_impl` of activations from `scaling_impl_type`."""
    if scaling_impl_type is None:
        return None
    if enums.chooses(scaling_per_output, enums.ScalingPerOutputType.GROUP):
        raise ValueError(
            "an activation's groups have no scales of their own to keep (how many there are depends on the "
            "tensor), so scaling_impl_type does not go with scaling_per_output_type = 'group'.\n  cure: "
            "scaling_impl = RuntimeDynamicGroupStatsScaling, as MXInt8Act and Int8DynamicActPerGroupFloat declare"
        )
    return pick(enums.ScalingImplType, scaling_impl_type, ACT_SCALING_IMPL, "scaling_impl_type")


@choices(*TRUNC_SCALING_IMPL.values())
def trunc_scaling_impl(trunc_scaling_impl_type="msb"):
    """`trunc_scaling_impl` from `trunc_scaling_impl_type`."""
    return pick(
        enums.TruncScalingImplType, trunc_scaling_impl_type, TRUNC_SCALING_IMPL, "trunc_scaling_impl_type"
    )


@choices(*PARAMETER_SCALING_INIT.values())
def parameter_scaling_init_impl(scaling_impl_type):
    """Where a scale of weights or biases starts: a declared constant, or He's."""
    return pick_or_none(enums.ScalingImplType, scaling_impl_type, PARAMETER_SCALING_INIT, "scaling_impl_type")


@choices(*ACT_SCALING_INIT.values())
def act_scaling_init_impl(scaling_impl_type):
    """Where a scale of activations starts: max(|min_val|, |max_val|)."""
    return pick_or_none(enums.ScalingImplType, scaling_impl_type, ACT_SCALING_INIT, "scaling_impl_type")


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
    return {enums.ScalingImplType.STATS: False, enums.ScalingImplType.AFFINE_STATS: True}.get(
        enums.as_enum(enums.ScalingImplType, scaling_impl_type, name="scaling_impl_type")
    )


@choices(*RESTRICT_VALUE_IMPL.values())
def restrict_scaling_impl(restrict_scaling_type):
    """`restrict_scaling_impl` from `restrict_scaling_type`."""
    return pick(enums.RestrictValueType, restrict_scaling_type, RESTRICT_VALUE_IMPL, "restrict_scaling_type")


@choices(*INT_SCALING_IMPL.values())
def int_scaling_impl(restrict_scaling_type):
    """`int_scaling_impl` from `restrict_scaling_type`: powers of two span 2^(b-1) steps, others the integers."""
    return pick(enums.RestrictValueType, restrict_scaling_type, INT_SCALING_IMPL, "restrict_scaling_type")


@choices(*TRUNC_INT_SCALING_IMPL.values())
def trunc_int_scaling_impl(restrict_scaling_type):
    """`trunc_int_scaling_impl` from `restrict_scaling_type`: integers are shifted, so only by powers of two."""
    return pick(
        enums.RestrictValueType, restrict_scaling_type, TRUNC_INT_SCALING_IMPL, "restrict_scaling_type"
    )


@value
def restrict_scale_positive(restrict_scaling_type=None):
    """Whether scales are positive."""
    return enums.chooses(
        restrict_scaling_type, enums.RestrictValueType.FP, enums.RestrictValueType.POWER_OF_TWO
    )


@value
def bipolar_search(restrict_scale_positive):
    """Whether a search tries negative scales too."""
    return not restrict_scale_positive


@choices(*STATS_IMPL.values())
def scaling_stats_impl(scaling_stats_op=None, restrict_scaling_type=None):
    """`scaling_stats_impl` from `scaling_stats_op`."""
    if scaling_stats_op is None:
        return None
    if enums.chooses(scaling_stats_op, enums.StatsOp.SIGNED_MAX) and enums.chooses(
        restrict_scaling_type, enums.RestrictValueType.POWER_OF_TWO
    ):
        raise ValueError(
            "scaling_stats_op = 'signed_max' can be negative, which a power of two cannot: "
            "declare restrict_scaling_type = 'signed_fp', or scaling_stats_op = 'max'"
        )
    return pick(enums.StatsOp, scaling_stats_op, STATS_IMPL, "scaling_stats_op")


@choices(*EXPONENT_IMPL.values())
def exponent_impl(scale_rounding=None):
    """`exponent_impl` from `scale_rounding`."""
    return (
        None
        if scale_rounding is None
        else pick(enums.ScaleRounding, scale_rounding, EXPONENT_IMPL, "scale_rounding")
    )


@value
def scaling_per_output(scaling_per_output_type=None, scaling_per_output_channel=None):
    """What shares a scale: from `scaling_per_output_type`, or from the older flag, which takes precedence."""
    if scaling_per_output_channel is not None:
        return (
            enums.ScalingPerOutputType.CHANNEL
            if scaling_per_output_channel
            else enums.ScalingPerOutputType.TENSOR
        )
    if scaling_per_output_type is None:
        return None
    return enums.as_enum(enums.ScalingPerOutputType, scaling_per_output_type, name="scaling_per_output_type")


@value
def parameter_scaling_shape(scaling_per_output):
    """`scaling_shape`: () per tensor, the broadcastable shape of the channels per channel, of the groups per group."""
    if enums.chooses(scaling_per_output, enums.ScalingPerOutputType.CHANNEL):
        return this.scaling_per_output_channel_shape
    if enums.chooses(scaling_per_output, enums.ScalingPerOutputType.GROUP):
        return this.scaling_per_group_shape
    return ()


@value
def act_scaling_shape(scaling_per_output):
    """`scaling_shape`: () per tensor, `per_channel_broadcastable_shape` per channel."""
    if enums.chooses(scaling_per_output, enums.ScalingPerOutputType.CHANNEL):
        return this.per_channel_broadcastable_shape
    return ()
