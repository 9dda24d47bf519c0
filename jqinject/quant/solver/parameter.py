"""Fragments shared by the solvers of weights and biases, whose tensor is a parameter known beforehand."""

from typing import Any

from jqinject.core.clamp import TensorClamp, TensorClampSte
from jqinject.core.scaling import (
    ConstScaling,
    ParameterFromStatsFromParameterScaling,
    ParameterScaling,
    StatsFromParameterScaling,
)
from jqinject.inject import ExtendedInjector, choices, this, value
from jqinject.inject.enum import BitWidthImplType, ScalingImplType, ScalingPerOutputType
from jqinject.quant.solver.common import SCALAR_SHAPE, SolveAffineRescalingFromEnum
from jqinject.quant.solver.initial import HeScalingInit, ScalingConstInit
from jqinject.quant.solver.tables import pick, pick_or_none

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
LEARNED_SCALING = (
    ScalingImplType.AFFINE_STATS,
    ScalingImplType.PARAMETER_FROM_STATS,
    ScalingImplType.PARAMETER,
)


class SolveParameterScalingImplFromEnum(SolveAffineRescalingFromEnum):
    """`scaling_impl` from `scaling_impl_type`."""

    @choices(*PARAMETER_SCALING_IMPL.values())
    def scaling_impl(scaling_impl_type=None):
        if scaling_impl_type is None:
            return None
        return pick(ScalingImplType, scaling_impl_type, PARAMETER_SCALING_IMPL, "scaling_impl_type")


class SolveParameterScalingInitFromEnum(ExtendedInjector):
    """`scaling_init` from `scaling_impl_type`: a declared constant, or He's."""

    @choices(*PARAMETER_SCALING_INIT.values())
    def scaling_init_impl(scaling_impl_type: Any):
        return pick_or_none(ScalingImplType, scaling_impl_type, PARAMETER_SCALING_INIT, "scaling_impl_type")

    @value
    def scaling_init(scaling_init_impl: Any):
        return None if scaling_init_impl is None else scaling_init_impl()


class SolveParameterTensorClampImplFromEnum(ExtendedInjector):
    """`tensor_clamp_impl`: a learned scale or bit width needs the gradient of the clamped elements, others pass it."""

    @choices(TensorClamp, TensorClampSte)
    def tensor_clamp_impl(bit_width_impl_type, scaling_impl_type):
        learned = bit_width_impl_type == BitWidthImplType.PARAMETER or scaling_impl_type in LEARNED_SCALING
        return TensorClamp if learned else TensorClampSte


class SolveParameterScalingShape(ExtendedInjector):
    """`scaling_shape`: () per tensor, the broadcastable shape of the channels per channel, of the groups per group."""

    @value
    def scaling_shape(scaling_per_output):
        if scaling_per_output == ScalingPerOutputType.CHANNEL:
            return this.scaling_per_output_channel_shape
        if scaling_per_output == ScalingPerOutputType.GROUP:
            return this.scaling_per_group_shape
        return SCALAR_SHAPE
