"""The solver of weights."""

from typing import Any

from jqinject.core.quant import BinaryQuant, RescalingIntQuant, TernaryQuant
from jqinject.inject import ExtendedInjector, choices, this, value
from jqinject.inject.enum import QuantType, ScalingPerOutputType
from jqinject.proxy import GroupwiseWeightQuantProxyFromInjector, WeightQuantProxyFromInjector
from jqinject.quant.solver.common import (
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
from jqinject.quant.solver.groups import SolveGroupwiseWeightInputViewImpl, check_groups_fit
from jqinject.quant.solver.layers import agreed, as_tuple, channels_of
from jqinject.quant.solver.parameter import (
    SolveParameterScalingImplFromEnum,
    SolveParameterScalingInitFromEnum,
    SolveParameterScalingShape,
    SolveParameterTensorClampImplFromEnum,
)
from jqinject.quant.solver.tables import pick

WEIGHT_TENSOR_QUANT = {
    QuantType.FP: None,
    QuantType.INT: RescalingIntQuant,
    QuantType.TERNARY: TernaryQuant,
    QuantType.BINARY: BinaryQuant,
}


class SolveWeightTensorQuantFromEnum(SolveIntQuantFromEnum):
    """`tensor_quant` from `quant_type`."""

    @choices(RescalingIntQuant, TernaryQuant, BinaryQuant)
    def tensor_quant(quant_type, scaling_per_output=None):
        check_groups_fit(quant_type, scaling_per_output)
        return pick(QuantType, quant_type, WEIGHT_TENSOR_QUANT, "quant_type")


class SolveWeightScalingPerOutputChannelShapeFromModule(ExtendedInjector):
    """The shape of a per-channel scale, from the layer's weight: 1 but along the axes that channels are counted by."""

    @value
    def out_channels(module, output_channel_dim):
        return agreed(module, lambda layer: channels_of(layer, output_channel_dim), "out_channels")

    @value
    def weight_ndims(module):
        return agreed(module, lambda layer: len(layer.weight_shape), "number of weight axes")

    @value
    def scaling_per_output_channel_shape(weight_ndims: Any, output_channel_dim, out_channels):
        shape = [1] * weight_ndims
        for axis, size in zip(as_tuple(output_channel_dim), as_tuple(out_channels), strict=True):
            shape[axis] = size
        return tuple(shape)


class SolveWeightScalingStatsInputDimsFromModule(ExtendedInjector):
    """How weights are laid out for statistics: channels first; further weights behind, along the rest."""

    @value
    def output_channel_dim(module):
        return agreed(module, lambda layer: layer.output_channel_dim, "output_channel_dim")

    @value
    def permute_dims(module, output_channel_dim):
        ndim = agreed(module, lambda layer: len(layer.weight_shape), "number of weight axes")
        axes = list(range(ndim))
        channels = sorted(axes[axis] for axis in as_tuple(output_channel_dim))
        if channels == axes[: len(channels)]:
            return None
        if len(channels) > 1:
            return (*channels, *(axis for axis in axes if axis not in channels))
        axes[0], axes[channels[0]] = channels[0], 0
        return tuple(axes)

    @value
    def channel_axes(output_channel_dim: Any):
        return len(as_tuple(output_channel_dim))

    @value
    def channel_shape(scaling_per_output):
        # For scales of groups that are quantized in turn: they have an axis more than the weight, whose channels are
        # those of the scale's shape.
        return this.scaling_shape if scaling_per_output == ScalingPerOutputType.CHANNEL else None

    @value
    def scaling_stats_input_concat_dim(scaling_per_output):
        if scaling_per_output == ScalingPerOutputType.GROUP:
            return this.group_elements_axis
        return 1 if scaling_per_output == ScalingPerOutputType.CHANNEL else 0


class WeightQuantSolver(
    SolveStatsReduceDimFromEnum,
    SolveWeightScalingStatsInputDimsFromModule,
    SolveScalingStatsInputViewShapeImplFromEnum,
    SolveScalingStatsOpFromEnum,
    SolveBitWidthImplFromEnum,
    SolveTensorQuantFloatToIntImplFromEnum,
    SolveRestrictScalingImplFromEnum,
    SolveIntScalingImplFromEnum,
    SolveParameterScalingImplFromEnum,
    SolveParameterTensorClampImplFromEnum,
    SolveParameterScalingInitFromEnum,
    SolveParameterScalingShape,
    SolveWeightScalingPerOutputChannelShapeFromModule,
    SolveWeightTensorQuantFromEnum,
    SolveGroupwiseWeightInputViewImpl,
    SolveRestrictScaleSign,
):
    """Turns the choices by enum and the shape of the layer into the components of a weight quantizer.

    List it last among the bases of a quantizer, so that whatever the others declare wins.
    """

    @value
    def proxy_class(scaling_per_output):
        per_group = scaling_per_output == ScalingPerOutputType.GROUP
        return GroupwiseWeightQuantProxyFromInjector if per_group else WeightQuantProxyFromInjector
