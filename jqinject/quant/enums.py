"""The enums that choose an implementation. A member equals its name in lower case; strings in any case choose it."""

import enum
from typing import Any, TypeVar

from jqinject.inject.errors import did_you_mean, lines

_Member = TypeVar("_Member", bound=enum.Enum)


class ImplEnum(enum.StrEnum):
    """Base of the enums below: a member is its own name in lower case.

    >>> QuantType.INT == "int", QuantType.INT == "INT", QuantType("INT"), str(QuantType.INT)
    (True, False, <QuantType.INT: 'int'>, 'int')

    Members of different enums differ, whatever they are called. The hash is that of the lower-case name, so a
    member finds the entry `table["int"]` and `"int"` finds the entry `table[QuantType.INT]`. Where an injector
    declares a member, its name in any case chooses it.
    """

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, enum.Enum):
            return self is other
        return isinstance(other, str) and self.value == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class BitWidthImplType(ImplEnum):
    """Where the bit width comes from."""

    CONST = enum.auto()
    PARAMETER = enum.auto()
    STATEFUL_CONST = enum.auto()


class QuantType(ImplEnum):
    """What a tensor is quantized to; `FP` is no quantization."""

    BINARY = enum.auto()
    TERNARY = enum.auto()
    INT = enum.auto()
    FP = enum.auto()


class RestrictValueType(ImplEnum):
    """Which values a scale may take."""

    FP = enum.auto()
    SIGNED_FP = enum.auto()
    LOG_FP = enum.auto()
    INT = enum.auto()
    POWER_OF_TWO = enum.auto()


class FloatToIntImplType(ImplEnum):
    """How a float becomes an integer."""

    ROUND = enum.auto()
    CEIL = enum.auto()
    FLOOR = enum.auto()
    ROUND_TO_ZERO = enum.auto()
    DPU = enum.auto()
    LEARNED_ROUND = enum.auto()
    STOCHASTIC_ROUND = enum.auto()


class LearnedRoundImplType(ImplEnum):
    """The function that learned rounding goes through."""

    HARD_SIGMOID = enum.auto()
    SIGMOID = enum.auto()
    IDENTITY = enum.auto()


class ScalingImplType(ImplEnum):
    """Where the scale comes from."""

    HE = enum.auto()
    CONST = enum.auto()
    STATS = enum.auto()
    AFFINE_STATS = enum.auto()
    PARAMETER = enum.auto()
    PARAMETER_FROM_STATS = enum.auto()


class ScalingPerOutputType(ImplEnum):
    """What shares one scale."""

    TENSOR = enum.auto()
    CHANNEL = enum.auto()
    GROUP = enum.auto()


class ScaleRounding(ImplEnum):
    """How the power of two that a block shares is rounded."""

    FLOOR = enum.auto()
    CEIL = enum.auto()
    EVEN = enum.auto()
    RCEIL = enum.auto()


class StatsOp(ImplEnum):
    """The statistic that a scale is computed from."""

    MAX = enum.auto()
    AVE = enum.auto()
    MAX_AVE = enum.auto()
    MEAN_SIGMA_STD = enum.auto()
    MEAN_LEARN_SIGMA_STD = enum.auto()
    PERCENTILE = enum.auto()
    MIN_MAX = enum.auto()
    PERCENTILE_INTERVAL = enum.auto()
    SIGNED_MAX = enum.auto()
    SIGMA_STD = enum.auto()


class TruncScalingImplType(ImplEnum):
    """How truncation scales its output."""

    MSB = enum.auto()
    WRAPPER = enum.auto()


def chooses(value: object, *members: ImplEnum) -> bool:
    """Whether a declared value is one of some members, or the name of one in any case.

    >>> chooses("INT", QuantType.INT, QuantType.FP), chooses(RestrictValueType.INT, QuantType.INT), chooses(None)
    (True, False, False)
    """
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        value = value.lower()
    return value in members


def as_enum(enum_class: type[_Member], value: object, *, name: str = "") -> _Member:
    """A member of `enum_class` from a member or its name in any case.

    >>> as_enum(StatsOp, "Max_Ave")
    <StatsOp.MAX_AVE: 'max_ave'>

    Args:
        enum_class: the enum.
        value: a member, or a string.
        name: the name under which the value was declared, for the error text.

    Raises:
        ValueError: for a string that names no member; lists the members and the nearest.
        TypeError: for anything else, a member of another enum included.
    """
    if isinstance(value, enum_class):
        return value
    subject = f"{name} = " if name else ""
    members = f"one of {', '.join(enum_class.__members__)}"
    if isinstance(value, enum.Enum) or not isinstance(value, str):
        raise TypeError(
            f"{subject}{value!r} is not a {enum_class.__name__}: give {members}, as a member or a string"
        )
    if value.upper() in enum_class.__members__:
        return enum_class[value.upper()]
    near = did_you_mean(value, enum_class.__members__)
    raise ValueError(lines(f"{subject}{value!r} is not a {enum_class.__name__}: give {members}", near))
