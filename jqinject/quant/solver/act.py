"""The solver of activations."""

from typing import Any

from jqinject.core.quant import ClampedBinaryQuant, RescalingIntQuant, TernaryQuant
from jqinject.core.scaling import (
    ConstScaling,
    ParameterFromRuntimeStatsScaling,
    ParameterScaling,
    RuntimeStatsScaling,
)
from jqinject.inject import ExtendedInjector, choices, this, value
from jqinject.inject.enum import QuantType, ScalingImplType, ScalingPerOutputType
from jqinject.proxy import ActQuantProxyFromInjector, GroupwiseActQuantProxyFromInjector
from jqinject.quant.solver.common import (
    SCALAR_SHAPE,
    SolveAffineRescalingFromEnum,
    SolveBitWidthImplFromEnum,
    SolveIntQuantFromEnum,
    SolveIntScalingImplFromEnum,
    SolveRestrictScaleSign,
    SolveRestrictScalingImplFromEnum,
    SolveScalingStatsInputViewShapeImplFromEnum,
    SolveScalingStatsOpFromEnum,
    SolveStatsReduceDimFromEnum,
    SolveTensorQuantFloatToIntImplFromEnum,
)
from jqinject.quant.solver.groups import SolveGroupwiseActInputViewImpl, check_groups_fit
from jqinject.quant.solver.initial import MinMaxScalingInit
from jqinject.quant.solver.tables import pick, pick_or_none

ACT_TENSOR_QUANT = {
    QuantType.FP: None,
    QuantType.INT: RescalingIntQuant,
    QuantType.TERNARY: TernaryQuant,
    QuantType.BINARY: ClampedBinaryQuant,
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


class SolveActTensorQuantFromEnum(SolveIntQuantFromEnum):
    """`tensor_quant` from `quant_type`."""

    @choices(RescalingIntQuant, TernaryQuant, ClampedBinaryQuant)
    def tensor_quant(quant_type, scaling_per_output=None):
        check_groups_fit(quant_type, scaling_per_output)
        return pick(QuantType, quant_type, ACT_TENSOR_QUANT, "quant_type")


class SolveActScalingImplFromEnum(SolveAffineRescalingFromEnum):
    """`scaling_impl` from `scaling_impl_type`."""

    @choices(*ACT_SCALING_IMPL.values())
    def scaling_impl(scaling_impl_type=None, scaling_per_output=None):
        if scaling_impl_type is None:
            return None
        if scaling_per_output == ScalingPerOutputType.GROUP:
            raise ValueError(
                "an activation's groups have no scales of their own to keep (how many there are depends on the "
                "tensor), so scaling_impl_type does not go with scaling_per_output_type = 'group'.\n  cure: "
                "scaling_impl = RuntimeDynamicGroupStatsScaling, as MXInt8Act and Int8DynamicActPerGroupFloat declare"
            )
        return pick(ScalingImplType, scaling_impl_type, ACT_SCALING_IMPL, "scaling_impl_type")


class SolveActScalingInitFromEnum(ExtendedInjector):
    """`scaling_init` = max(|min_val|, |max_val|) where the scale is a constant or starts as one."""

    @choices(*ACT_SCALING_INIT.values())
    def scaling_init_impl(scaling_impl_type: Any):
        return pick_or_none(ScalingImplType, scaling_impl_type, ACT_SCALING_INIT, "scaling_impl_type")

    @value
    def scaling_init(scaling_init_impl: Any):
        return None if scaling_init_impl is None else scaling_init_impl()

    @value
    def min_val(signed, max_val):
        # Symmetric, where nothing else is said: -max_val has the same magnitude, so the scale is max_val's.
        return -float(max_val) if signed else 0.0


class SolveActScalingShape(ExtendedInjector):
    """`scaling_shape`: () per tensor, `per_channel_broadcastable_shape` per channel.

    A layer that knows how many channels flow through a slot of its says so; else the user declares the shape.
    """

    @value
    def per_channel_broadcastable_shape(activation_channel_shape=None):
        if activation_channel_shape is None:
            raise ValueError(
                "a scale for each channel needs to know the channels, and this layer does not know how many flow "
                "here.\n  cure: per_channel_broadcastable_shape = (4,) for 4 channels along the last axis, (4, 1, 1) "
                "along the third from the end"
            )
        return activation_channel_shape

    @value
    def channel_shape(scaling_per_output, scaling_stats_permute_dims=None):
        per_channel = scaling_per_output == ScalingPerOutputType.CHANNEL
        if per_channel and scaling_stats_permute_dims is None:
            return this.per_channel_broadcastable_shape
        return None

    @value
    def scaling_per_output_channel_shape():
        return this.per_channel_broadcastable_shape

    @value
    def scaling_shape(scaling_per_output):
        # `this` is only followed in the branch taken: a per-tensor quantizer needs no channel shape.
        if scaling_per_output == ScalingPerOutputType.CHANNEL:
            return this.per_channel_broadcastable_shape
        return SCALAR_SHAPE


class ActQuantSolver(
    SolveActTensorQuantFromEnum,
    SolveActScalingImplFromEnum,
    SolveIntScalingImplFromEnum,
    SolveBitWidthImplFromEnum,
    SolveTensorQuantFloatToIntImplFromEnum,
    SolveScalingStatsOpFromEnum,
    SolveRestrictScalingImplFromEnum,
    SolveActScalingInitFromEnum,
    SolveStatsReduceDimFromEnum,
    SolveActScalingShape,
    SolveScalingStatsInputViewShapeImplFromEnum,
    SolveGroupwiseActInputViewImpl,
    SolveRestrictScaleSign,
):
    """Turns the choices by enum into the components of an activation quantizer.

    List it last among the bases of a quantizer, so that whatever the others declare wins.
    """

    @value
    def proxy_class(scaling_per_output):
        per_group = scaling_per_output == ScalingPerOutputType.GROUP
        return GroupwiseActQuantProxyFromInjector if per_group else ActQuantProxyFromInjector
