"""The solver of biases."""

from typing import Any

from jqinject.core.quant import PrescaledRestrictIntQuant, RescalingIntQuant
from jqinject.inject import ExtendedInjector, choices, value
from jqinject.inject.enum import QuantType
from jqinject.proxy import BiasQuantProxyFromInjector
from jqinject.quant.solver.common import (
    SolveBitWidthImplFromEnum,
    SolveInputViewImpl,
    SolveIntQuantFromEnum,
    SolveIntScalingImplFromEnum,
    SolveRestrictScalingImplFromEnum,
    SolveScalingStatsInputViewShapeImplFromEnum,
    SolveScalingStatsOpFromEnum,
    SolveStatsReduceDimFromEnum,
    SolveTensorQuantFloatToIntImplFromEnum,
)
from jqinject.quant.solver.layers import agreed, as_tuple, channels_of
from jqinject.quant.solver.parameter import (
    SolveParameterScalingImplFromEnum,
    SolveParameterScalingInitFromEnum,
    SolveParameterScalingShape,
    SolveParameterTensorClampImplFromEnum,
)
from jqinject.quant.solver.tables import pick

PRESCALED_BIAS_TENSOR_QUANT = {QuantType.FP: None, QuantType.INT: PrescaledRestrictIntQuant}
OWN_SCALE_BIAS_TENSOR_QUANT = {QuantType.FP: None, QuantType.INT: RescalingIntQuant}


def _shape_of_bias(layer: Any) -> tuple[int, ...]:
    if layer.bias is None:
        return as_tuple(channels_of(layer, layer.output_channel_dim))
    return tuple(layer.bias.shape)


class SolveBiasTensorQuantFromEnum(SolveIntQuantFromEnum):
    """`tensor_quant` from `quant_type` and from whether the scale comes in with the input."""

    @choices(PrescaledRestrictIntQuant, RescalingIntQuant)
    def tensor_quant(quant_type, requires_input_scale):
        table = PRESCALED_BIAS_TENSOR_QUANT if requires_input_scale else OWN_SCALE_BIAS_TENSOR_QUANT
        return pick(QuantType, quant_type, table, "quant_type")


class SolveBiasScalingPerOutputChannelShapeFromModule(ExtendedInjector):
    """The shape of a per-channel bias scale: one for each element."""

    @value
    def scaling_per_output_channel_shape(module):
        return agreed(module, _shape_of_bias, "out_channels")


class SolveBiasScalingStatsInputConcatDimFromModule(ExtendedInjector):
    """Biases have channels alone, along one axis or several: they are viewed as they are."""

    scaling_stats_input_concat_dim = 0
    output_channel_dim = 0

    @value
    def channel_axes(module):
        return len(agreed(module, _shape_of_bias, "out_channels"))

    @value
    def group_dim():
        raise ValueError(
            "a bias has no groups.\n  cure: scaling_per_output_type = 'tensor' or 'channel' for a bias quantizer"
        )


class BiasQuantSolver(
    SolveScalingStatsInputViewShapeImplFromEnum,
    SolveParameterScalingShape,
    SolveStatsReduceDimFromEnum,
    SolveScalingStatsOpFromEnum,
    SolveTensorQuantFloatToIntImplFromEnum,
    SolveRestrictScalingImplFromEnum,
    SolveIntScalingImplFromEnum,
    SolveParameterScalingImplFromEnum,
    SolveParameterTensorClampImplFromEnum,
    SolveParameterScalingInitFromEnum,
    SolveBitWidthImplFromEnum,
    SolveBiasScalingPerOutputChannelShapeFromModule,
    SolveBiasScalingStatsInputConcatDimFromModule,
    SolveBiasTensorQuantFromEnum,
    SolveInputViewImpl,
):
    """Turns the choices by enum and the shape of the layer into the components of a bias quantizer.

    List it last among the bases of a quantizer, so that whatever the others declare wins.
    """

    proxy_class = BiasQuantProxyFromInjector
