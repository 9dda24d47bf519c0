"""The widths of minifloats, from enums."""

from typing import Any

from jqinject.core.bit_width import BitWidthParameter, BitWidthStatefulConst
from jqinject.core.float_width import (
    ComputeMaxMantissa,
    ExponentWidthConst,
    MantissaWidthConst,
    StaticMaxMantissa,
)
from jqinject.inject import ExtendedInjector, choices, this
from jqinject.inject.enum import BitWidthImplType, as_enum
from jqinject.quant.solver.tables import pick

EXPONENT_WIDTH_IMPL = {
    BitWidthImplType.CONST: ExponentWidthConst,
    BitWidthImplType.PARAMETER: BitWidthParameter,
    BitWidthImplType.STATEFUL_CONST: BitWidthStatefulConst,
}
MANTISSA_WIDTH_IMPL = EXPONENT_WIDTH_IMPL | {BitWidthImplType.CONST: MantissaWidthConst}


class ExponentBitWidthClass(ExtendedInjector):
    """The bits of the exponent: `bit_width` means those in here."""

    exponent_bit_width_impl_type = (this << 1).exponent_bit_width_impl_type
    bit_width = (this << 1).exponent_bit_width

    @choices(*EXPONENT_WIDTH_IMPL.values())
    def bit_width_impl(exponent_bit_width_impl_type: Any):
        name = "exponent_bit_width_impl_type"
        return pick(BitWidthImplType, exponent_bit_width_impl_type, EXPONENT_WIDTH_IMPL, name)


class MantissaBitWidthClass(ExtendedInjector):
    """The bits of the mantissa: `bit_width` means those in here."""

    mantissa_bit_width_impl_type = (this << 1).mantissa_bit_width_impl_type
    bit_width = (this << 1).mantissa_bit_width

    @choices(*MANTISSA_WIDTH_IMPL.values())
    def bit_width_impl(mantissa_bit_width_impl_type: Any):
        name = "mantissa_bit_width_impl_type"
        return pick(BitWidthImplType, mantissa_bit_width_impl_type, MANTISSA_WIDTH_IMPL, name)

    @choices(StaticMaxMantissa, ComputeMaxMantissa)
    def compute_max_mantissa(mantissa_bit_width_impl_type: Any):
        member = as_enum(BitWidthImplType, mantissa_bit_width_impl_type, name="mantissa_bit_width_impl_type")
        return StaticMaxMantissa if member is BitWidthImplType.CONST else ComputeMaxMantissa


class SolveFloatBitWidthImplFromEnum(ExtendedInjector):
    """`exponent_bit_width_impl`, `mantissa_bit_width_impl` and `compute_max_mantissa` from two enums."""

    exponent_bit_class = ExponentBitWidthClass
    mantissa_bit_class = MantissaBitWidthClass
    exponent_bit_width_impl = this.exponent_bit_class.bit_width_impl
    mantissa_bit_width_impl = this.mantissa_bit_class.bit_width_impl
    compute_max_mantissa = this.mantissa_bit_class.compute_max_mantissa
