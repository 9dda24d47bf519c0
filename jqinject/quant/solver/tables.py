"""Which component each member of an enum selects."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from jqinject.core.bit_width import BitWidthConst, BitWidthParameter, BitWidthStatefulConst
from jqinject.core.rounding import (
    CeilSte,
    DPURoundSte,
    FloorSte,
    LearnedRoundHardSigmoid,
    LearnedRoundIdentity,
    LearnedRoundSigmoid,
    LearnedRoundSte,
    RoundSte,
    RoundToZeroSte,
    StochasticRoundSte,
)
from jqinject.core.scaling.number_range import IntScaling, PowerOfTwoIntScaling
from jqinject.core.scaling.powers_of_two import CeilExponent, EvenExponent, FloorExponent, RoundUpExponent
from jqinject.core.scaling.rule import (
    FloatRestrictValue,
    IntRestrictValue,
    LogFloatRestrictValue,
    PowerOfTwoRestrictValue,
    SignedFloatRestrictValue,
)
from jqinject.core.statistics.extremes import (
    AbsMax,
    AbsMaxAve,
    AbsMinMax,
    AbsPercentile,
    PercentileInterval,
    SignedAbsMax,
)
from jqinject.core.statistics.means import AbsAve, MeanLearnedSigmaStd, MeanSigmaStd, SigmaStd
from jqinject.quant.enums import (
    BitWidthImplType,
    FloatToIntImplType,
    LearnedRoundImplType,
    RestrictValueType,
    ScaleRounding,
    StatsOp,
    as_enum,
)

_Member = TypeVar("_Member", bound=Enum)
_Choice = TypeVar("_Choice")

FLOAT_TO_INT_IMPL: Mapping[FloatToIntImplType, type] = {
    FloatToIntImplType.ROUND: RoundSte,
    FloatToIntImplType.FLOOR: FloorSte,
    FloatToIntImplType.CEIL: CeilSte,
    FloatToIntImplType.ROUND_TO_ZERO: RoundToZeroSte,
    FloatToIntImplType.DPU: DPURoundSte,
    FloatToIntImplType.STOCHASTIC_ROUND: StochasticRoundSte,
    FloatToIntImplType.LEARNED_ROUND: LearnedRoundSte,
}

LEARNED_ROUND_IMPL: Mapping[LearnedRoundImplType, type] = {
    LearnedRoundImplType.HARD_SIGMOID: LearnedRoundHardSigmoid,
    LearnedRoundImplType.SIGMOID: LearnedRoundSigmoid,
    LearnedRoundImplType.IDENTITY: LearnedRoundIdentity,
}

BIT_WIDTH_IMPL: Mapping[BitWidthImplType, type] = {
    BitWidthImplType.CONST: BitWidthConst,
    BitWidthImplType.PARAMETER: BitWidthParameter,
    BitWidthImplType.STATEFUL_CONST: BitWidthStatefulConst,
}

RESTRICT_VALUE_IMPL: Mapping[RestrictValueType, type] = {
    RestrictValueType.FP: FloatRestrictValue,
    RestrictValueType.SIGNED_FP: SignedFloatRestrictValue,
    RestrictValueType.LOG_FP: LogFloatRestrictValue,
    RestrictValueType.POWER_OF_TWO: PowerOfTwoRestrictValue,
    RestrictValueType.INT: IntRestrictValue,
}

INT_SCALING_IMPL: Mapping[RestrictValueType, type] = {
    RestrictValueType.FP: IntScaling,
    RestrictValueType.SIGNED_FP: IntScaling,
    RestrictValueType.LOG_FP: IntScaling,
    RestrictValueType.POWER_OF_TWO: PowerOfTwoIntScaling,
}

EXPONENT_IMPL = {
    ScaleRounding.FLOOR: FloorExponent,
    ScaleRounding.CEIL: CeilExponent,
    ScaleRounding.EVEN: EvenExponent,
    ScaleRounding.RCEIL: RoundUpExponent,
}
STATS_IMPL: Mapping[StatsOp, type] = {
    StatsOp.MAX: AbsMax,
    StatsOp.MAX_AVE: AbsMaxAve,
    StatsOp.AVE: AbsAve,
    StatsOp.MEAN_SIGMA_STD: MeanSigmaStd,
    StatsOp.MEAN_LEARN_SIGMA_STD: MeanLearnedSigmaStd,
    StatsOp.PERCENTILE: AbsPercentile,
    StatsOp.MIN_MAX: AbsMinMax,
    StatsOp.PERCENTILE_INTERVAL: PercentileInterval,
    StatsOp.SIGNED_MAX: SignedAbsMax,
    StatsOp.SIGMA_STD: SigmaStd,
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
    member = as_enum(enum_class, given, name=name)
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
    return None if given is None else table.get(as_enum(enum_class, given, name=name))
