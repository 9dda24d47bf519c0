"""Which component each choice by enum selects: kinds, bit widths, rounding, clamping, and where scales come from.

`selected` makes the rows that a table says; the functions below it check what does not go together.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jqinject import core
from jqinject.inject import choices, value
from jqinject.quant import enums
from jqinject.quant.enums import (
    BitWidthImplType,
    FloatToIntImplType,
    LearnedRoundImplType,
    QuantType,
    RestrictValueType,
    ScaleRounding,
    ScalingImplType,
    ScalingPerOutputType,
    StatsOp,
    TruncScalingImplType,
)
from jqinject.quant.solver.solve_shapes import as_tuple

_REQUIRED = inspect.Parameter.empty


def pick(name: str, choice: Any, table: Mapping[Any, Any]) -> Any:
    """What a table holds for an enum member or its name.

    Args:
        name: the injector's name that the choice was declared under, for the error text.
        choice: a member or its name in any case.
        table: the options, by members of one enum.

    Raises:
        ValueError: `choice` names no member, or the table has no option for it; says which there are.
        TypeError: `choice` is neither a member nor a string.

    Example:
        >>> pick("float_to_int_impl_type", "floor", FLOAT_TO_INT_IMPL).__name__
        'FloorSte'
    """
    member = enums.as_enum(type(next(iter(table))), choice, name=name)
    if member not in table:
        options = ", ".join(repr(str(option.value)) for option in table)
        raise ValueError(f"{name} = {str(member.value)!r} cannot be used here; it takes one of {options}")
    return table[member]


def pick_or_none(name: str, choice: Any, table: Mapping[Any, Any], otherwise: Any = None) -> Any:
    """As `pick`, but `otherwise` if nothing is declared or the table has no option for it."""
    if choice is None:
        return otherwise
    return table.get(enums.as_enum(type(next(iter(table))), choice, name=name), otherwise)


def selected(name: str, table: Mapping[Any, Any], default: Any = _REQUIRED, look_up: Any = pick) -> Any:
    """Return the `@value` function that looks up the choice declared under a name.

    Args:
        name: of an enum's choice, such as "float_to_int_impl_type".
        table: member -> component class, or another value.
        default: the choice if none is declared; without it one has to be.
        look_up: `pick`, or `pick_or_none` where not every member selects something.

    Example:
        >>> from jqinject.inject import ExtendedInjector
        >>> class Q(ExtendedInjector):
        ...     float_to_int_impl_type = "floor"
        ...     float_to_int_impl = selected("float_to_int_impl_type", FLOAT_TO_INT_IMPL)
        >>> Q.float_to_int_impl
        FloorSte()
    """

    def select(**choice):
        return look_up(name, choice.get(name, default), table)

    argument = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    vars(select)["__signature__"] = inspect.Signature([argument])
    return choices(*(option for option in table.values() if isinstance(option, type)))(select)


# The quantizer itself: its kind, its bit width, how it rounds and clamps.

FLOAT_TO_INT_IMPL = {
    FloatToIntImplType.ROUND: core.RoundSte,
    FloatToIntImplType.FLOOR: core.FloorSte,
    FloatToIntImplType.CEIL: core.CeilSte,
    FloatToIntImplType.ROUND_TO_ZERO: core.RoundToZeroSte,
    FloatToIntImplType.DPU: core.DPURoundSte,
    FloatToIntImplType.STOCHASTIC_ROUND: core.StochasticRoundSte,
    FloatToIntImplType.LEARNED_ROUND: core.LearnedRoundSte,
}
LEARNED_ROUND_IMPL = {
    LearnedRoundImplType.HARD_SIGMOID: core.LearnedRoundHardSigmoid,
    LearnedRoundImplType.SIGMOID: core.LearnedRoundSigmoid,
    LearnedRoundImplType.IDENTITY: core.LearnedRoundIdentity,
}
BIT_WIDTH_IMPL = {
    BitWidthImplType.CONST: core.BitWidthConst,
    BitWidthImplType.PARAMETER: core.BitWidthParameter,
    BitWidthImplType.STATEFUL_CONST: core.BitWidthStatefulConst,
}
WEIGHT_TENSOR_QUANT = {
    QuantType.FP: None,
    QuantType.INT: core.RescalingIntQuant,
    QuantType.TERNARY: core.TernaryQuant,
    QuantType.BINARY: core.BinaryQuant,
}
ACT_TENSOR_QUANT = {**WEIGHT_TENSOR_QUANT, QuantType.BINARY: core.ClampedBinaryQuant}
INT_QUANT = dict.fromkeys(QuantType) | {QuantType.INT: core.IntQuant}

int_quant = selected("quant_type", INT_QUANT)
bit_width_impl = selected("bit_width_impl_type", BIT_WIDTH_IMPL)
float_to_int_impl = selected("float_to_int_impl_type", FLOAT_TO_INT_IMPL)
learned_round_impl = selected("learned_round_impl_type", LEARNED_ROUND_IMPL)
trunc_tensor_quant = selected("quant_type", {QuantType.FP: None, QuantType.INT: core.TruncIntQuant})


def _tensor_quant(table: Mapping[QuantType, Any]) -> Any:
    def select(quant_type, scaling_per_output=None):
        tensor_quant = pick("quant_type", quant_type, table)
        has_groups = enums.chooses(scaling_per_output, ScalingPerOutputType.GROUP)
        if has_groups and tensor_quant not in (None, core.RescalingIntQuant):
            raise ValueError(
                f"quant_type = {str(quant_type)!r} has no scales for groups.\n"
                "  cure: quant_type = 'int' with bit_width = 2, or scaling_per_output_type = 'channel'"
            )
        return tensor_quant

    return choices(*filter(None, table.values()))(select)


weight_tensor_quant = _tensor_quant(WEIGHT_TENSOR_QUANT)
act_tensor_quant = _tensor_quant(ACT_TENSOR_QUANT)


@choices(core.PrescaledRestrictIntQuant, core.RescalingIntQuant)
def bias_tensor_quant(quant_type, requires_input_scale):
    """`tensor_quant` of biases from `quant_type` and from whether the scale comes in with the input."""
    component = core.PrescaledRestrictIntQuant if requires_input_scale else core.RescalingIntQuant
    return pick("quant_type", quant_type, {QuantType.FP: None, QuantType.INT: component})


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
    learned = enums.chooses(
        scaling_impl_type,
        ScalingImplType.AFFINE_STATS,
        ScalingImplType.PARAMETER_FROM_STATS,
        ScalingImplType.PARAMETER,
    )
    learned = learned or enums.chooses(bit_width_impl_type, BitWidthImplType.PARAMETER)
    return core.TensorClamp if learned else core.TensorClampSte


# Where a constant or learned scale starts.


@final
@dataclass(frozen=True)
class ScalingConstInit:
    """The declared `scaling_const`.

    Example:
        >>> ScalingConstInit(0.1)()
        0.1
    """

    scaling_const: Any

    def __call__(self) -> Any:
        """The start value."""
        return self.scaling_const


@final
@dataclass(frozen=True)
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

    min_val: float
    max_val: float

    def __post_init__(self) -> None:
        if not float(self.min_val) < float(self.max_val):
            got = f"got min_val = {self.min_val} and max_val = {self.max_val}"
            raise ValueError(f"min_val has to be below max_val, {got}")

    def __call__(self) -> float:
        """The start value."""
        return max(abs(float(self.min_val)), abs(float(self.max_val)))


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


# Where a scale comes from, and which values it may take.

RESTRICT_VALUE_IMPL = {
    RestrictValueType.FP: core.FloatRestrictValue,
    RestrictValueType.SIGNED_FP: core.SignedFloatRestrictValue,
    RestrictValueType.LOG_FP: core.LogFloatRestrictValue,
    RestrictValueType.POWER_OF_TWO: core.PowerOfTwoRestrictValue,
    RestrictValueType.INT: core.IntRestrictValue,
}
INT_SCALING_IMPL = {  # powers of two span 2^(b-1) steps, others the integers
    RestrictValueType.FP: core.IntScaling,
    RestrictValueType.SIGNED_FP: core.IntScaling,
    RestrictValueType.LOG_FP: core.IntScaling,
    RestrictValueType.POWER_OF_TWO: core.PowerOfTwoIntScaling,
}
TRUNC_INT_SCALING_IMPL = {RestrictValueType.POWER_OF_TWO: core.PowerOfTwoIntScaling}  # integers are shifted
EXPONENT_IMPL = {
    ScaleRounding.FLOOR: core.FloorExponent,
    ScaleRounding.CEIL: core.CeilExponent,
    ScaleRounding.EVEN: core.EvenExponent,
    ScaleRounding.RCEIL: core.RoundUpExponent,
}
STATS_IMPL = {
    StatsOp.MAX: core.AbsMax,
    StatsOp.MAX_AVE: core.AbsMaxAve,
    StatsOp.AVE: core.AbsAve,
    StatsOp.MEAN_SIGMA_STD: core.MeanSigmaStd,
    StatsOp.MEAN_LEARN_SIGMA_STD: core.MeanLearnedSigmaStd,
    StatsOp.PERCENTILE: core.AbsPercentile,
    StatsOp.MIN_MAX: core.AbsMinMax,
    StatsOp.PERCENTILE_INTERVAL: core.PercentileInterval,
    StatsOp.SIGNED_MAX: core.SignedAbsMax,
    StatsOp.SIGMA_STD: core.SigmaStd,
}
PARAMETER_SCALING_IMPL = {
    ScalingImplType.PARAMETER: core.ParameterScaling,
    ScalingImplType.PARAMETER_FROM_STATS: core.ParameterFromStatsFromParameterScaling,
    ScalingImplType.CONST: core.ConstScaling,
    ScalingImplType.HE: core.ConstScaling,
    ScalingImplType.STATS: core.StatsFromParameterScaling,
    ScalingImplType.AFFINE_STATS: core.StatsFromParameterScaling,
}
PARAMETER_SCALING_INIT = {
    ScalingImplType.CONST: ScalingConstInit,
    ScalingImplType.PARAMETER: ScalingConstInit,
    ScalingImplType.HE: HeScalingInit,
}
ACT_SCALING_IMPL = {
    ScalingImplType.PARAMETER: core.ParameterScaling,
    ScalingImplType.PARAMETER_FROM_STATS: core.ParameterFromRuntimeStatsScaling,
    ScalingImplType.CONST: core.ConstScaling,
    ScalingImplType.STATS: core.RuntimeStatsScaling,
    ScalingImplType.AFFINE_STATS: core.RuntimeStatsScaling,
}
ACT_SCALING_INIT = {
    ScalingImplType.CONST: MinMaxScalingInit,
    ScalingImplType.PARAMETER: MinMaxScalingInit,
}
TRUNC_SCALING_IMPL = {
    TruncScalingImplType.MSB: core.TruncMsbScaling,
    TruncScalingImplType.WRAPPER: core.TruncScalingWrapper,
}
# for information only: `scaling_affine_rescaling_init` enables it
AFFINE_RESCALING = {ScalingImplType.STATS: False, ScalingImplType.AFFINE_STATS: True}

trunc_scaling_impl = selected("trunc_scaling_impl_type", TRUNC_SCALING_IMPL, default="msb")
parameter_scaling_init_impl = selected("scaling_impl_type", PARAMETER_SCALING_INIT, look_up=pick_or_none)
act_scaling_init_impl = selected("scaling_impl_type", ACT_SCALING_INIT, look_up=pick_or_none)
affine_rescaling = selected("scaling_impl_type", AFFINE_RESCALING, look_up=pick_or_none)
restrict_scaling_impl = selected("restrict_scaling_type", RESTRICT_VALUE_IMPL)
int_scaling_impl = selected("restrict_scaling_type", INT_SCALING_IMPL)
trunc_int_scaling_impl = selected("restrict_scaling_type", TRUNC_INT_SCALING_IMPL)
exponent_impl = selected("scale_rounding", EXPONENT_IMPL, default=None, look_up=pick_or_none)


@choices(*PARAMETER_SCALING_IMPL.values(), core.SharedExponentScaling)
def parameter_scaling_impl(scaling_impl_type=None, scale_rounding=None):
    """`scaling_impl` of weights and biases from `scaling_impl_type`."""
    if scaling_impl_type is None or scale_rounding is None:
        return scaling_impl_type and pick("scaling_impl_type", scaling_impl_type, PARAMETER_SCALING_IMPL)
    if not enums.chooses(scaling_impl_type, ScalingImplType.STATS):
        raise ValueError(
            f"scale_rounding = {scale_rounding!r} rounds the power of two of a tensor's own blocks, and "
            f"scaling_impl_type = {str(scaling_impl_type)!r} takes the scale from elsewhere.\n"
            "  cure: scaling_impl_type = 'stats', or no scale_rounding"
        )
    return core.SharedExponentScaling


@choices(*ACT_SCALING_IMPL.values())
def act_scaling_impl(scaling_impl_type=None, scaling_per_output=None):
    """`scaling_impl` of activations from `scaling_impl_type`."""
    if scaling_impl_type is None:
        return None
    if enums.chooses(scaling_per_output, ScalingPerOutputType.GROUP):
        raise ValueError(
            "an activation's groups have no scales of their own to keep (how many there are depends on the "
            "tensor), so scaling_impl_type does not go with scaling_per_output_type = 'group'.\n  cure: "
            "scaling_impl = RuntimeDynamicGroupStatsScaling, as MXInt8Act and Int8DynamicActPerGroupFloat declare"
        )
    return pick("scaling_impl_type", scaling_impl_type, ACT_SCALING_IMPL)


@choices(*STATS_IMPL.values())
def scaling_stats_impl(scaling_stats_op=None, restrict_scaling_type=None):
    """`scaling_stats_impl` from `scaling_stats_op`."""
    impl = scaling_stats_op and pick("scaling_stats_op", scaling_stats_op, STATS_IMPL)
    if impl is core.SignedAbsMax and enums.chooses(restrict_scaling_type, RestrictValueType.POWER_OF_TWO):
        raise ValueError(
            "scaling_stats_op = 'signed_max' can be negative, which a power of two cannot: "
            "declare restrict_scaling_type = 'signed_fp', or scaling_stats_op = 'max'"
        )
    return impl


@value
def scaling_per_output(scaling_per_output_type=None, scaling_per_output_channel=None):
    """What shares a scale: from `scaling_per_output_type`, or from the older flag, which takes precedence."""
    if scaling_per_output_channel is not None:
        return ScalingPerOutputType.CHANNEL if scaling_per_output_channel else ScalingPerOutputType.TENSOR
    if scaling_per_output_type is None:
        return None
    return enums.as_enum(ScalingPerOutputType, scaling_per_output_type, name="scaling_per_output_type")


@value
def scaling_init(scaling_init_impl):
    """`scaling_init`, where the scale is a constant or starts as one."""
    return None if scaling_init_impl is None else scaling_init_impl()


@value
def min_val(signed, max_val):
    """`min_val` unless declared: -max_val has the same magnitude, so the scale is max_val's."""
    return -float(max_val) if signed else 0.0


@value
def restrict_scale_positive(restrict_scaling_type=None):
    """Whether scales are positive."""
    return enums.chooses(restrict_scaling_type, RestrictValueType.FP, RestrictValueType.POWER_OF_TWO)


@value
def bipolar_search(restrict_scale_positive):
    """Whether a search tries negative scales too."""
    return not restrict_scale_positive
