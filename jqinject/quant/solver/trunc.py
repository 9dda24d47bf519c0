"""The solver of accumulators."""

from jqinject.core.quant import TruncIntQuant
from jqinject.core.scaling import PowerOfTwoIntScaling, TruncMsbScaling, TruncScalingWrapper
from jqinject.inject import ExtendedInjector, choices
from jqinject.inject.enum import QuantType, RestrictValueType, TruncScalingImplType
from jqinject.proxy import TruncQuantProxyFromInjector
from jqinject.quant.solver.act import (
    SolveActScalingImplFromEnum,
    SolveActScalingInitFromEnum,
    SolveActScalingShape,
)
from jqinject.quant.solver.common import (
    SolveBitWidthImplFromEnum,
    SolveInputViewImpl,
    SolveIntScalingImplFromEnum,
    SolveRestrictScalingImplFromEnum,
    SolveScalingStatsInputViewShapeImplFromEnum,
    SolveScalingStatsOpFromEnum,
    SolveStatsReduceDimFromEnum,
    SolveTensorQuantFloatToIntImplFromEnum,
)
from jqinject.quant.solver.tables import pick

TRUNC_TENSOR_QUANT = {QuantType.FP: None, QuantType.INT: TruncIntQuant}
TRUNC_SCALING_IMPL = {
    TruncScalingImplType.MSB: TruncMsbScaling,
    TruncScalingImplType.WRAPPER: TruncScalingWrapper,
}
TRUNC_INT_SCALING_IMPL = {RestrictValueType.POWER_OF_TWO: PowerOfTwoIntScaling}


class SolveTruncTensorQuantFromEnum(ExtendedInjector):
    """`tensor_quant` from `quant_type`."""

    @choices(TruncIntQuant)
    def tensor_quant(quant_type):
        return pick(QuantType, quant_type, TRUNC_TENSOR_QUANT, "quant_type")


class SolveTruncScalingImplFromEnum(ExtendedInjector):
    """`trunc_scaling_impl` from `trunc_scaling_impl_type`."""

    @choices(*TRUNC_SCALING_IMPL.values())
    def trunc_scaling_impl(trunc_scaling_impl_type="msb"):
        return pick(
            TruncScalingImplType, trunc_scaling_impl_type, TRUNC_SCALING_IMPL, "trunc_scaling_impl_type"
        )


class SolveTruncIntScalingImplFromEnum(ExtendedInjector):
    """`trunc_int_scaling_impl` from `restrict_scaling_type`: integers are shifted, so only by powers of two."""

    @choices(*TRUNC_INT_SCALING_IMPL.values())
    def trunc_int_scaling_impl(restrict_scaling_type):
        return pick(RestrictValueType, restrict_scaling_type, TRUNC_INT_SCALING_IMPL, "restrict_scaling_type")


class TruncQuantSolver(
    SolveBitWidthImplFromEnum,
    SolveTensorQuantFloatToIntImplFromEnum,
    SolveActScalingImplFromEnum,
    SolveIntScalingImplFromEnum,
    SolveScalingStatsOpFromEnum,
    SolveRestrictScalingImplFromEnum,
    SolveActScalingInitFromEnum,
    SolveStatsReduceDimFromEnum,
    SolveActScalingShape,
    SolveScalingStatsInputViewShapeImplFromEnum,
    SolveInputViewImpl,
    SolveTruncTensorQuantFromEnum,
    SolveTruncScalingImplFromEnum,
    SolveTruncIntScalingImplFromEnum,
):
    """Turns the choices by enum into the components of a quantizer of accumulators.

    List it last among the bases of a quantizer, so that whatever the others declare wins.
    """

    proxy_class = TruncQuantProxyFromInjector
