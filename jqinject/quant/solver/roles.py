"""Solvers: one injector for each role, which turns choices by enum into components. A base of every quantizer.

A row `name = function` means: unless `name` is declared, `function` computes it from the names of its arguments.
`selected` makes the rows that a table says; the functions below it check what does not go together. What follows from
the layer is in `solve_shapes`. Below the solvers there is for each role the quantizer that does not quantize: a layer
that has it computes in float.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jqinject import core, proxy
from jqinject.inject import ExtendedInjector, choices, value
from jqinject.quant import enums
from jqinject.quant.enums import QuantType, RestrictValueType, ScalingImplType, ScalingPerOutputType
from jqinject.quant.solver import solve_shapes

_REQUIRED = inspect.Parameter.empty


def pick(name: str, choice: object, table: Mapping[Any, Any], otherwise: object = _REQUIRED) -> Any:
    """What a table holds for an enum member or its name.

    Args:
        name: the injector's name that the choice was declared under, for the error text.
        choice: a member or its name in any case.
        table: the options, by members of one enum.
        otherwise: the result if nothing is declared or the table has no option for it; without it that is an error.

    Raises:
        ValueError: `choice` names no member, or the table has no option for it; says which there are.
        TypeError: `choice` is neither a member nor a string.

    Example:
        >>> pick("float_to_int_impl_type", "floor", FLOAT_TO_INT_IMPL).__name__
        'FloorSte'
    """
    if choice is None and otherwise is not _REQUIRED:
        return otherwise
    member = enums.as_enum(type(next(iter(table))), choice, name=name)
    if member not in table and otherwise is _REQUIRED:
        options = ", ".join(repr(str(option.value)) for option in table)
        raise ValueError(f"{name} = {str(member.value)!r} cannot be used here; it takes one of {options}")
    return table.get(member, otherwise)


def selected(
    name: str, table: Mapping[Any, Any], default: object = _REQUIRED, otherwise: object = _REQUIRED
) -> Any:
    """Return the `@value` function that looks up the choice declared under a name.

    Args:
        name: of an enum's choice, such as "float_to_int_impl_type".
        table: member -> component class, or another value.
        default: the choice if none is declared; without it one has to be.
        otherwise: the result where not every member selects something; see `pick`.

    Example:
        >>> from jqinject.inject import ExtendedInjector
        >>> class Q(ExtendedInjector):
        ...     float_to_int_impl_type = "floor"
        ...     float_to_int_impl = selected("float_to_int_impl_type", FLOAT_TO_INT_IMPL)
        >>> Q.float_to_int_impl
        FloorSte()
    """

    def select(**choice: object) -> object:
        return pick(name, choice.get(name, default), table, otherwise)

    argument = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    vars(select)["__signature__"] = inspect.Signature([argument])
    return solve_shapes.choosing(select, *table.values())


# The quantizer itself: its kind, its bit width, how it rounds and clamps.

FLOAT_TO_INT_IMPL = {
    enums.FloatToIntImplType.ROUND: core.RoundSte,
    enums.FloatToIntImplType.FLOOR: core.FloorSte,
    enums.FloatToIntImplType.CEIL: core.CeilSte,
    enums.FloatToIntImplType.ROUND_TO_ZERO: core.RoundToZeroSte,
    enums.FloatToIntImplType.DPU: core.DPURoundSte,
    enums.FloatToIntImplType.STOCHASTIC_ROUND: core.StochasticRoundSte,
    enums.FloatToIntImplType.LEARNED_ROUND: core.LearnedRoundSte,
}
LEARNED_ROUND_IMPL = {
    enums.LearnedRoundImplType.HARD_SIGMOID: core.LearnedRoundHardSigmoid,
    enums.LearnedRoundImplType.SIGMOID: core.LearnedRoundSigmoid,
    enums.LearnedRoundImplType.IDENTITY: core.LearnedRoundIdentity,
}
BIT_WIDTH_IMPL = {
    enums.BitWidthImplType.CONST: core.BitWidthConst,
    enums.BitWidthImplType.PARAMETER: core.BitWidthParameter,
    enums.BitWidthImplType.STATEFUL_CONST: core.BitWidthStatefulConst,
}
WEIGHT_TENSOR_QUANT = {
    QuantType.FP: None,
    QuantType.INT: core.RescalingIntQuant,
    QuantType.TERNARY: core.TernaryQuant,
    QuantType.BINARY: core.BinaryQuant,
}
ACT_TENSOR_QUANT = {**WEIGHT_TENSOR_QUANT, QuantType.BINARY: core.ClampedBinaryQuant}
TRUNC_TENSOR_QUANT = {QuantType.FP: None, QuantType.INT: core.TruncIntQuant}
INT_QUANT = dict.fromkeys(QuantType) | {QuantType.INT: core.IntQuant}


def tensor_quant_from(table: Mapping[QuantType, Any]) -> Any:
    """Return `tensor_quant` from `quant_type`; groups have scales only where numbers are integers."""

    def select(quant_type: str, scaling_per_output: str | None = None) -> object:
        tensor_quant = pick("quant_type", quant_type, table)
        has_groups = enums.chooses(scaling_per_output, ScalingPerOutputType.GROUP)
        if has_groups and tensor_quant not in (None, core.RescalingIntQuant):
            raise ValueError(
                f"quant_type = {str(quant_type)!r} has no scales for groups.\n"
                "  cure: quant_type = 'int' with bit_width = 2, or scaling_per_output_type = 'channel'"
            )
        return tensor_quant

    return solve_shapes.choosing(select, *table.values())


@choices(core.PrescaledRestrictIntQuant, core.RescalingIntQuant)
def bias_tensor_quant(quant_type: str, requires_input_scale: bool) -> object:
    """`tensor_quant` of biases from `quant_type` and from whether the scale comes in with the input."""
    component = core.PrescaledRestrictIntQuant if requires_input_scale else core.RescalingIntQuant
    return pick("quant_type", quant_type, {QuantType.FP: None, QuantType.INT: component})


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
@dataclass(frozen=True, eq=False)
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

    tracked_parameter_list: Sequence[Any]
    output_channel_dim: int | tuple[int, ...] = 0

    def __call__(self) -> float:
        """The start value."""
        deviations = []
        for weight in self.tracked_parameter_list:
            channels = math.prod(
                weight.shape[axis] for axis in solve_shapes.as_tuple(self.output_channel_dim)
            )
            fan_in = math.prod(weight.shape) // max(channels, 1)
            deviations.append(math.sqrt(2.0 / max(fan_in, 1)))
        return sum(deviations) / len(deviations)


# Where a scale comes from, and which values it may take.

RESTRICT_VALUE_IMPL = {
    RestrictValueType.FP: core.FloatRestrictValue,
    RestrictValueType.SIGNED_FP: core.SignedFloatRestrictValue,
    RestrictValueType.LOG_FP: core.LogFloatRestrictValue,
    RestrictValueType.POWER_OF_TWO: core.PowerOfTwoRestrictValue,
    RestrictValueType.INT: core.IntRestrictValue,
}
# 2^(b-1) steps; of other scales as many as there are integers
POWER_OF_TWO_STEPS = {RestrictValueType.POWER_OF_TWO: core.PowerOfTwoIntScaling}
_FLOATS = (RestrictValueType.FP, RestrictValueType.SIGNED_FP, RestrictValueType.LOG_FP)
INT_SCALING_IMPL = dict.fromkeys(_FLOATS, core.IntScaling) | POWER_OF_TWO_STEPS
EXPONENT_IMPL = {
    enums.ScaleRounding.FLOOR: core.FloorExponent,
    enums.ScaleRounding.CEIL: core.CeilExponent,
    enums.ScaleRounding.EVEN: core.EvenExponent,
    enums.ScaleRounding.RCEIL: core.RoundUpExponent,
}
STATS_IMPL = {
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
ACT_SCALING_INIT = dict.fromkeys((ScalingImplType.CONST, ScalingImplType.PARAMETER), MinMaxScalingInit)
TRUNC_SCALING_IMPL = {
    enums.TruncScalingImplType.MSB: core.TruncMsbScaling,
    enums.TruncScalingImplType.WRAPPER: core.TruncScalingWrapper,
}


class Choices(ExtendedInjector):
    """What is chosen in the same way in every role."""

    bit_width_impl = selected("bit_width_impl_type", BIT_WIDTH_IMPL)
    float_to_int_impl = selected("float_to_int_impl_type", FLOAT_TO_INT_IMPL)
    learned_round_impl_type = enums.LearnedRoundImplType.HARD_SIGMOID
    learned_round_impl = selected("learned_round_impl_type", LEARNED_ROUND_IMPL)
    scaling_init = value(lambda scaling_init_impl: None if scaling_init_impl is None else scaling_init_impl())
    restrict_scaling_impl = selected("restrict_scaling_type", RESTRICT_VALUE_IMPL)
    int_scaling_impl = selected("restrict_scaling_type", INT_SCALING_IMPL)

    @value
    def learned_round_init(tracked_parameter_list):
        """Where learned rounding starts: at 0 for each element of the weight."""
        if len(tracked_parameter_list) != 1:
            weights = "no weight" if not tracked_parameter_list else f"{len(tracked_parameter_list)} weights"
            raise ValueError(
                "float_to_int_impl_type = 'learned_round' learns how each element of one weight is rounded, and this "
                f"quantizer has {weights}.\n  cure: a quantizer of its own for each layer (weight_quant=MyQuantizer), "
                "and 'round' or 'stochastic_round' for activations"
            )
        return np.zeros(tracked_parameter_list[0].shape, np.float32)

    @choices(*STATS_IMPL.values())
    def scaling_stats_impl(
        scaling_stats_op: object = None, restrict_scaling_type: str | None = None
    ) -> object:
        """`scaling_stats_impl` from `scaling_stats_op`."""
        impl = scaling_stats_op and pick("scaling_stats_op", scaling_stats_op, STATS_IMPL)
        if impl is core.SignedAbsMax and enums.chooses(restrict_scaling_type, RestrictValueType.POWER_OF_TWO):
            raise ValueError(
                "scaling_stats_op = 'signed_max' can be negative, which a power of two cannot: "
                "declare restrict_scaling_type = 'signed_fp', or scaling_stats_op = 'max'"
            )
        return impl

    @choices()
    def scaling_per_output(
        scaling_per_output_type: Any = None, scaling_per_output_channel: bool | None = None
    ) -> str | None:
        """What shares a scale: from `scaling_per_output_type`, or from the older flag, which takes precedence."""
        if scaling_per_output_channel is not None:
            return ScalingPerOutputType.CHANNEL if scaling_per_output_channel else ScalingPerOutputType.TENSOR
        if scaling_per_output_type is None:
            return None
        return enums.as_enum(ScalingPerOutputType, scaling_per_output_type, name="scaling_per_output_type")


class ParameterChoices(ExtendedInjector):
    """What is chosen for weights and biases."""

    scaling_init_impl = selected("scaling_impl_type", PARAMETER_SCALING_INIT, otherwise=None)

    @choices(core.TensorClamp, core.TensorClampSte)
    def tensor_clamp_impl(bit_width_impl_type: object, scaling_impl_type: str | None) -> object:
        """A learned scale or bit width needs the gradient of the clamped elements, others pass it."""
        learned = enums.chooses(
            scaling_impl_type,
            ScalingImplType.AFFINE_STATS,
            ScalingImplType.PARAMETER_FROM_STATS,
            ScalingImplType.PARAMETER,
        )
        learned = learned or enums.chooses(bit_width_impl_type, enums.BitWidthImplType.PARAMETER)
        return core.TensorClamp if learned else core.TensorClampSte

    @choices(*PARAMETER_SCALING_IMPL.values(), core.SharedExponentScaling)
    def scaling_impl(scaling_impl_type: Any = None, scale_rounding: str | None = None) -> object:
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


class ActChoices(ExtendedInjector):
    """What is chosen for activations and accumulators."""

    scaling_init_impl = selected("scaling_impl_type", ACT_SCALING_INIT, otherwise=None)
    # -max_val has the same magnitude, so the scale is max_val's
    min_val = value(lambda signed, max_val: -float(max_val) if signed else 0.0)

    @choices(*ACT_SCALING_IMPL.values())
    def scaling_impl(scaling_impl_type: Any = None, scaling_per_output: str | None = None) -> object:
        """`scaling_impl` of activations from `scaling_impl_type`."""
        if scaling_impl_type is not None and enums.chooses(scaling_per_output, ScalingPerOutputType.GROUP):
            raise ValueError(
                "an activation's groups have no scales of their own to keep (how many there are depends on the "
                "tensor), so scaling_impl_type does not go with scaling_per_output_type = 'group'.\n  cure: "
                "scaling_impl = RuntimeDynamicGroupStatsScaling, as MXInt8Act and Int8DynamicActPerGroupFloat declare"
            )
        return scaling_impl_type and pick("scaling_impl_type", scaling_impl_type, ACT_SCALING_IMPL)


class BlockChoices(ExtendedInjector):
    """What is chosen for weights and activations: integers, the sign of scales, the exponents of blocks."""

    int_quant = selected("quant_type", INT_QUANT)
    bipolar_search = value(lambda restrict_scale_positive: not restrict_scale_positive)
    exponent_impl = selected("scale_rounding", EXPONENT_IMPL, default=None, otherwise=None)

    @value
    def restrict_scale_positive(restrict_scaling_type=None):
        """Whether scales are positive."""
        return enums.chooses(restrict_scaling_type, RestrictValueType.FP, RestrictValueType.POWER_OF_TWO)


def _rows(*tables: type[ExtendedInjector]) -> dict[str, Any]:
    """The declarations of some tables, for the body of a solver."""
    return {name: spec.declared for table in tables for name, spec in table.__declared__.items()}


class WeightQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum and the shape of the layer into the components of a weight quantizer."""

    vars().update(_rows(Choices, ParameterChoices, BlockChoices))
    vars().update(_rows(solve_shapes.Shapes, solve_shapes.WeightShapes))
    proxy_class = proxy.WeightQuantProxyFromInjector
    tensor_quant = tensor_quant_from(WEIGHT_TENSOR_QUANT)


class ActQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum into the components of an activation quantizer."""

    vars().update(_rows(Choices, ActChoices, BlockChoices))
    vars().update(_rows(solve_shapes.Shapes, solve_shapes.ActShapes))
    proxy_class = proxy.ActQuantProxyFromInjector
    tensor_quant = tensor_quant_from(ACT_TENSOR_QUANT)
    input_view_impl = solve_shapes.by_output(
        core.Identity, core.Identity, core.DynamicOverSubChannelBlockView
    )
    group_dim, block_dim = -1, -2
    block_width = solve_shapes.block_width


class GradQuantSolver(ActQuantSolver, defaults=True):
    """As for activations, and what is recorded belongs to the backward pass."""

    proxy_class = proxy.GradQuantProxyFromInjector
    amax_of_gradient = True


class BiasQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum and the shape of the layer into the components of a bias quantizer."""

    vars().update(_rows(Choices, ParameterChoices, solve_shapes.Shapes, solve_shapes.BiasShapes))
    proxy_class = proxy.BiasQuantProxyFromInjector
    tensor_quant = bias_tensor_quant
    int_quant = selected("quant_type", INT_QUANT)


class TruncQuantSolver(ExtendedInjector, defaults=True):
    """Turns the choices by enum into the components of a quantizer of accumulators."""

    vars().update(_rows(Choices, ActChoices, solve_shapes.Shapes, solve_shapes.ActShapes))
    proxy_class = proxy.TruncQuantProxyFromInjector
    tensor_quant = selected("quant_type", TRUNC_TENSOR_QUANT)
    trunc_scaling_impl = selected("trunc_scaling_impl_type", TRUNC_SCALING_IMPL, default="msb")
    trunc_int_scaling_impl = selected("restrict_scaling_type", POWER_OF_TWO_STEPS)


class NoneWeightQuant(WeightQuantSolver):
    """Float weights."""

    quant_type = enums.QuantType.FP


class NoneActQuant(ActQuantSolver):
    """Float activations."""

    quant_type = enums.QuantType.FP


class NoneBiasQuant(BiasQuantSolver):
    """Float biases."""

    quant_type = enums.QuantType.FP
    requires_input_scale = False


class NoneTruncQuant(TruncQuantSolver):
    """Accumulators with all their bits."""

    quant_type = enums.QuantType.FP
