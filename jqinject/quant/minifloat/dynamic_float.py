"""Minifloat activations whose scale is that of the tensor at hand: per tensor, per row (the last axis) and per group.

Nothing is kept, in training or evaluation. Names and numbers are those of Brevitas's examples for language models.
"""

from jqinject.core.rounding import FloorSte
from jqinject.core.scaling.constant import RuntimeDynamicStatsScaling
from jqinject.quant.enums import RestrictValueType, ScalingPerOutputType
from jqinject.quant.fragments import (
    DynamicPerGroup,
    DynamicPerRow,
    Fp8e4m3Mixin,
    FpFNUZMixin,
    FpOCPMixin,
    ScaledFloatActBase,
)
from jqinject.quant.minifloat.float_ocp import Fp8e4m3OCPActPerTensorFloat, Fp8e4m3OCPWeightPerChannelFloat
from jqinject.quant.minifloat.float_plain import Fp8e4m3ActPerTensorFloat, Fp8e4m3WeightPerChannelFloat


class DynamicFloatAct(ScaledFloatActBase):
    """Minifloats with scale = max |x| / largest number of the tensor at hand."""

    scaling_impl = RuntimeDynamicStatsScaling


class Fp8e4m3OCPDynamicActPerTensorFloat(Fp8e4m3Mixin, FpOCPMixin, DynamicFloatAct):
    """e4m3 activations, scale = max |x| / 448 of the tensor."""


class Fp8e4m3FNUZDynamicActPerTensorFloat(Fp8e4m3Mixin, FpFNUZMixin, DynamicFloatAct):
    """e4m3 activations without negative 0, scale = max |x| / 240 of the tensor."""


class FP8e4m3OCPDynamicActPerRowFloat(DynamicPerRow, Fp8e4m3Mixin, FpOCPMixin, DynamicFloatAct):
    """e4m3 activations, scale = max |x| / 448 of each row (the last axis)."""


class FP8e4m3OCPDynamicActPerRowFixedPoint(FP8e4m3OCPDynamicActPerRowFloat):
    """e4m3 activations, a power of two for each row."""

    restrict_scaling_type = RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = FloorSte


class FP8e4m3FNUZDynamicActPerRowFloat(DynamicPerRow, Fp8e4m3Mixin, FpFNUZMixin, DynamicFloatAct):
    """e4m3 activations without negative 0, scale = max |x| / 240 of each row (the last axis)."""


class Fp8e4m3DynamicActPerGroupFloat(DynamicPerGroup, Fp8e4m3ActPerTensorFloat):
    """e4m3 activations, all codes numbers, scale = max |x| / 480 of each group of `group_size` features."""


class Fp8e4m3OCPDynamicActPerGroupFloat(DynamicPerGroup, Fp8e4m3OCPActPerTensorFloat):
    """e4m3 activations, scale = max |x| / 448 of each group of `group_size` features, which you declare."""


class Fp8e4m3WeightSymmetricGroupQuant(Fp8e4m3WeightPerChannelFloat):
    """e4m3 weights, all codes numbers, scale = max |w| / 480 of each group of `group_size` inputs."""

    scaling_per_output_type = ScalingPerOutputType.GROUP


class Fp8e4m3OCPWeightSymmetricGroupQuant(Fp8e4m3OCPWeightPerChannelFloat):
    """e4m3 weights, scale = max |w| / 448 of each group of `group_size` inputs, which you declare."""

    scaling_per_output_type = ScalingPerOutputType.GROUP
