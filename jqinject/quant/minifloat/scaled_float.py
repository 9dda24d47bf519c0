"""Minifloats with a float scale, or none.

* Plain ones, all of whose codes are numbers. The 8-bit ones reach further than OCP's (480 and 114688), so no hardware
  has them.
* OCP's: e4m3 with nan and e5m2 with inf and nan in 8 bits, and 6- and 4-bit ones without. They are the numbers of JAX's
  `float8_e4m3fn`, `float8_e5m2`, `float6_e3m2fn`, `float6_e2m3fn` and `float4_e2m1fn`.
* FNUZ, without inf and negative zero: their bias is one higher, and the code of -0 is nan. They are the numbers of
  JAX's `float8_e4m3fnuz` and `float8_e5m2fnuz`.
* Dynamic activations, whose scale is that of the tensor at hand: per tensor, per row (the last axis) and per group.
  Nothing is kept; names and numbers are those of Brevitas's examples for language models.

Source: Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)" and "Microscaling Formats (MX)".
"""

from jqinject import core
from jqinject.quant import enums
from jqinject.quant.float_base import (
    FloatActBase,
    FloatWeightBase,
    Fp4e2m1Mixin,
    Fp6e2m3Mixin,
    Fp6e3m2Mixin,
    Fp8e4m3Mixin,
    Fp8e5m2Mixin,
    FpFNUZMixin,
    FpOCPMixin,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
)
from jqinject.quant.fragments import DynamicPerGroup, DynamicPerRow, MSESymmetricScale


class Fp8e4m3Weight(Fp8e4m3Mixin, FloatWeightBase):
    """e4m3 weights, without a scale."""


class Fp8e5m2Weight(Fp8e5m2Mixin, FloatWeightBase):
    """e5m2 weights, without a scale."""


class Fp8e4m3Act(Fp8e4m3Mixin, FloatActBase):
    """e4m3 activations, without a scale."""


class Fp8e5m2Act(Fp8e5m2Mixin, FloatActBase):
    """e5m2 activations, without a scale."""


class Fp8e4m3WeightPerTensorFloat(Fp8e4m3Mixin, ScaledFloatWeightBase):
    """e4m3 weights, one scale = max |w| / 480."""


class Fp8e5m2WeightPerTensorFloat(Fp8e5m2Mixin, ScaledFloatWeightBase):
    """e5m2 weights, one scale = max |w| / 114688."""


class Fp8e4m3ActPerTensorFloat(Fp8e4m3Mixin, ScaledFloatActBase):
    """e4m3 activations, a learned scale that starts from max |x| / 480."""


class Fp8e5m2ActPerTensorFloat(Fp8e5m2Mixin, ScaledFloatActBase):
    """e5m2 activations, a learned scale that starts from max |x| / 114688."""


class Fp8e4m3WeightPerChannelFloat(Fp8e4m3Mixin, ScaledFloatWeightBase):
    """e4m3 weights, a scale for each output channel, max |w| / 480."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8e5m2WeightPerChannelFloat(Fp8e5m2Mixin, ScaledFloatWeightBase):
    """e5m2 weights, a scale for each output channel, max |w| / 114688."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8e4m3ActPerChannelFloat2d(Fp8e4m3Mixin, ScaledFloatActBase):
    """e4m3 images, each channel's learned scale starts from its max |x| / 480."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8e5m2ActPerChannelFloat2d(Fp8e5m2Mixin, ScaledFloatActBase):
    """e5m2 images, each channel's learned scale starts from its max |x| / 114688."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8e4m3WeightPerTensorFloatMSE(MSESymmetricScale, Fp8e4m3WeightPerTensorFloat):
    """e4m3 weights, one learned scale that starts from the least squared error."""


class Fp8e5m2WeightPerTensorFloatMSE(MSESymmetricScale, Fp8e5m2WeightPerTensorFloat):
    """e5m2 weights, one learned scale that starts from the least squared error."""


class Fp8e4m3WeightPerChannelFloatMSE(MSESymmetricScale, Fp8e4m3WeightPerChannelFloat):
    """e4m3 weights, learned scales of output channels that start from the least squared error."""


class Fp8e5m2WeightPerChannelFloatMSE(MSESymmetricScale, Fp8e5m2WeightPerChannelFloat):
    """e5m2 weights, learned scales of output channels that start from the least squared error."""


class Fp8e4m3ActPerTensorFloatMSE(MSESymmetricScale, Fp8e4m3ActPerTensorFloat):
    """e4m3 activations, a learned scale that starts from the least squared error."""


class Fp8e5m2ActPerTensorFloatMSE(MSESymmetricScale, Fp8e5m2ActPerTensorFloat):
    """e5m2 activations, a learned scale that starts from the least squared error."""


class Fp8e4m3ActPerChannelFloat2dMSE(MSESymmetricScale, Fp8e4m3ActPerChannelFloat2d):
    """e4m3 images, channels' learned scales that start from the least squared error."""


class Fp8e5m2ActPerChannelFloat2dMSE(MSESymmetricScale, Fp8e5m2ActPerChannelFloat2d):
    """e5m2 images, channels' learned scales that start from the least squared error."""


class FpOCPWeight(FpOCPMixin, FloatWeightBase):
    """OCP weights, without a scale; declare the format."""


class FpOCPAct(FpOCPMixin, FloatActBase):
    """OCP activations, without a scale; declare the format."""


class FpOCPWeightPerTensorFloat(FpOCPMixin, ScaledFloatWeightBase):
    """OCP weights, one scale = max |w| / largest number; declare the format."""


class FpOCPActPerTensorFloat(FpOCPMixin, ScaledFloatActBase):
    """OCP activations, a learned scale that starts from max |x| / largest number; declare the format."""


class FpOCPWeightPerChannelFloat(FpOCPMixin, ScaledFloatWeightBase):
    """OCP weights, a scale for each output channel, max |w| / largest number; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class FpOCPActPerChannelFloat2d(FpOCPMixin, ScaledFloatActBase):
    """OCP images, each channel's learned scale starts from its max |x| / largest number; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8e4m3OCPWeight(FpOCPWeight, Fp8e4m3Mixin):
    """e4m3 weights, without a scale."""


class Fp8e4m3OCPAct(FpOCPAct, Fp8e4m3Mixin):
    """e4m3 activations, without a scale."""


class Fp8e4m3OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, Fp8e4m3Mixin):
    """e4m3 weights, one scale = max |w| / 448."""


class Fp8e4m3OCPActPerTensorFloat(FpOCPActPerTensorFloat, Fp8e4m3Mixin):
    """e4m3 activations, a learned scale that starts from max |x| / 448."""


class Fp8e4m3OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, Fp8e4m3Mixin):
    """e4m3 weights, a scale for each output channel, max |w| / 448."""


class Fp8e5m2OCPWeight(FpOCPWeight, Fp8e5m2Mixin):
    """e5m2 weights, without a scale."""


class Fp8e5m2OCPAct(FpOCPAct, Fp8e5m2Mixin):
    """e5m2 activations, without a scale."""


class Fp8e5m2OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, Fp8e5m2Mixin):
    """e5m2 weights, one scale = max |w| / 57344."""


class Fp8e5m2OCPActPerTensorFloat(FpOCPActPerTensorFloat, Fp8e5m2Mixin):
    """e5m2 activations, a learned scale that starts from max |x| / 57344."""


class Fp8e5m2OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, Fp8e5m2Mixin):
    """e5m2 weights, a scale for each output channel, max |w| / 57344."""


class Fp6e3m2OCPWeight(FpOCPWeight, Fp6e3m2Mixin):
    """e3m2 weights, without a scale."""


class Fp6e3m2OCPAct(FpOCPAct, Fp6e3m2Mixin):
    """e3m2 activations, without a scale."""


class Fp6e3m2OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, Fp6e3m2Mixin):
    """e3m2 weights, one scale = max |w| / 28."""


class Fp6e3m2OCPActPerTensorFloat(FpOCPActPerTensorFloat, Fp6e3m2Mixin):
    """e3m2 activations, a learned scale that starts from max |x| / 28."""


class Fp6e3m2OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, Fp6e3m2Mixin):
    """e3m2 weights, a scale for each output channel, max |w| / 28."""


class Fp6e2m3OCPWeight(FpOCPWeight, Fp6e2m3Mixin):
    """e2m3 weights, without a scale."""


class Fp6e2m3OCPAct(FpOCPAct, Fp6e2m3Mixin):
    """e2m3 activations, without a scale."""


class Fp6e2m3OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, Fp6e2m3Mixin):
    """e2m3 weights, one scale = max |w| / 7.5."""


class Fp6e2m3OCPActPerTensorFloat(FpOCPActPerTensorFloat, Fp6e2m3Mixin):
    """e2m3 activations, a learned scale that starts from max |x| / 7.5."""


class Fp6e2m3OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, Fp6e2m3Mixin):
    """e2m3 weights, a scale for each output channel, max |w| / 7.5."""


class Fp4e2m1OCPWeight(FpOCPWeight, Fp4e2m1Mixin):
    """e2m1 weights, without a scale."""


class Fp4e2m1OCPAct(FpOCPAct, Fp4e2m1Mixin):
    """e2m1 activations, without a scale."""


class Fp4e2m1OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, Fp4e2m1Mixin):
    """e2m1 weights, one scale = max |w| / 6."""


class Fp4e2m1OCPActPerTensorFloat(FpOCPActPerTensorFloat, Fp4e2m1Mixin):
    """e2m1 activations, a learned scale that starts from max |x| / 6."""


class Fp4e2m1OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, Fp4e2m1Mixin):
    """e2m1 weights, a scale for each output channel, max |w| / 6."""


class FpOCPWeightPerTensorFloatMSE(MSESymmetricScale, FpOCPWeightPerTensorFloat):
    """OCP weights, one learned scale that starts from the least squared error; declare the format."""


class FpOCPWeightPerChannelFloatMSE(MSESymmetricScale, FpOCPWeightPerChannelFloat):
    """OCP weights, learned scales of output channels that start from the least squared error; declare the format."""


class FpOCPActPerTensorFloatMSE(MSESymmetricScale, FpOCPActPerTensorFloat):
    """OCP activations, a learned scale that starts from the least squared error; declare the format."""


class FpOCPActPerChannelFloat2dMSE(MSESymmetricScale, FpOCPActPerChannelFloat2d):
    """OCP images, channels' learned scales that start from the least squared error; declare the format."""


class Fp8e4m3OCPWeightPerTensorFloatMSE(FpOCPWeightPerTensorFloatMSE, Fp8e4m3Mixin):
    """e4m3 weights, one learned scale that starts from the least squared error."""


class Fp8e4m3OCPWeightPerChannelFloatMSE(FpOCPWeightPerChannelFloatMSE, Fp8e4m3Mixin):
    """e4m3 weights, learned scales of output channels that start from the least squared error."""


class Fp8e4m3OCPActPerTensorFloatMSE(FpOCPActPerTensorFloatMSE, Fp8e4m3Mixin):
    """e4m3 activations, a learned scale that starts from the least squared error."""


class Fp8e5m2OCPWeightPerTensorFloatMSE(FpOCPWeightPerTensorFloatMSE, Fp8e5m2Mixin):
    """e5m2 weights, one learned scale that starts from the least squared error."""


class Fp8e5m2OCPWeightPerChannelFloatMSE(FpOCPWeightPerChannelFloatMSE, Fp8e5m2Mixin):
    """e5m2 weights, learned scales of output channels that start from the least squared error."""


class Fp8e5m2OCPActPerTensorFloatMSE(FpOCPActPerTensorFloatMSE, Fp8e5m2Mixin):
    """e5m2 activations, a learned scale that starts from the least squared error."""


class FpFNUZWeight(FpFNUZMixin, FloatWeightBase):
    """FNUZ weights, without a scale; declare the format."""


class FpFNUZAct(FpFNUZMixin, FloatActBase):
    """FNUZ activations, without a scale; declare the format."""


class FpFNUZWeightPerTensorFloat(FpFNUZMixin, ScaledFloatWeightBase):
    """FNUZ weights, one scale = max |w| / largest number; declare the format."""


class FpFNUZActPerTensorFloat(FpFNUZMixin, ScaledFloatActBase):
    """FNUZ activations, a learned scale that starts from max |x| / largest number; declare the format."""


class FpFNUZWeightPerChannelFloat(FpFNUZMixin, ScaledFloatWeightBase):
    """FNUZ weights, a scale for each output channel, max |w| / largest number; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class FpFNUZActPerChannelFloat2d(FpFNUZMixin, ScaledFloatActBase):
    """FNUZ images, each channel's learned scale starts from its max |x| / largest number; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8e4m3FNUZWeight(FpFNUZWeight, Fp8e4m3Mixin):
    """e4m3 weights, without a scale."""


class Fp8e4m3FNUZAct(FpFNUZAct, Fp8e4m3Mixin):
    """e4m3 activations, without a scale."""


class Fp8e4m3FNUZWeightPerTensorFloat(FpFNUZWeightPerTensorFloat, Fp8e4m3Mixin):
    """e4m3 weights, one scale = max |w| / 240."""


class Fp8e4m3FNUZActPerTensorFloat(FpFNUZActPerTensorFloat, Fp8e4m3Mixin):
    """e4m3 activations, a learned scale that starts from max |x| / 240."""


class Fp8e4m3FNUZWeightPerChannelFloat(FpFNUZWeightPerChannelFloat, Fp8e4m3Mixin):
    """e4m3 weights, a scale for each output channel, max |w| / 240."""


class Fp8e5m2FNUZWeight(FpFNUZWeight, Fp8e5m2Mixin):
    """e5m2 weights, without a scale."""


class Fp8e5m2FNUZAct(FpFNUZAct, Fp8e5m2Mixin):
    """e5m2 activations, without a scale."""


class Fp8e5m2FNUZWeightPerTensorFloat(FpFNUZWeightPerTensorFloat, Fp8e5m2Mixin):
    """e5m2 weights, one scale = max |w| / 57344."""


class Fp8e5m2FNUZActPerTensorFloat(FpFNUZActPerTensorFloat, Fp8e5m2Mixin):
    """e5m2 activations, a learned scale that starts from max |x| / 57344."""


class Fp8e5m2FNUZWeightPerChannelFloat(FpFNUZWeightPerChannelFloat, Fp8e5m2Mixin):
    """e5m2 weights, a scale for each output channel, max |w| / 57344."""


class FpFNUZWeightPerTensorFloatMSE(MSESymmetricScale, FpFNUZWeightPerTensorFloat):
    """FNUZ weights, one learned scale that starts from the least squared error; declare the format."""


class FpFNUZWeightPerChannelFloatMSE(MSESymmetricScale, FpFNUZWeightPerChannelFloat):
    """FNUZ weights, learned scales of output channels that start from the least squared error; declare the format."""


class FpFNUZActPerTensorFloatMSE(MSESymmetricScale, FpFNUZActPerTensorFloat):
    """FNUZ activations, a learned scale that starts from the least squared error; declare the format."""


class FpFNUZActPerChannelFloat2dMSE(MSESymmetricScale, FpFNUZActPerChannelFloat2d):
    """FNUZ images, channels' learned scales that start from the least squared error; declare the format."""


class Fp8e4m3FNUZWeightPerTensorFloatMSE(FpFNUZWeightPerTensorFloatMSE, Fp8e4m3Mixin):
    """e4m3 weights, one learned scale that starts from the least squared error."""


class Fp8e4m3FNUZWeightPerChannelFloatMSE(FpFNUZWeightPerChannelFloatMSE, Fp8e4m3Mixin):
    """e4m3 weights, learned scales of output channels that start from the least squared error."""


class Fp8e4m3FNUZActPerTensorFloatMSE(FpFNUZActPerTensorFloatMSE, Fp8e4m3Mixin):
    """e4m3 activations, a learned scale that starts from the least squared error."""


class Fp8e5m2FNUZWeightPerTensorFloatMSE(FpFNUZWeightPerTensorFloatMSE, Fp8e5m2Mixin):
    """e5m2 weights, one learned scale that starts from the least squared error."""


class Fp8e5m2FNUZWeightPerChannelFloatMSE(FpFNUZWeightPerChannelFloatMSE, Fp8e5m2Mixin):
    """e5m2 weights, learned scales of output channels that start from the least squared error."""


class Fp8e5m2FNUZActPerTensorFloatMSE(FpFNUZActPerTensorFloatMSE, Fp8e5m2Mixin):
    """e5m2 activations, a learned scale that starts from the least squared error."""


class DynamicFloatAct(ScaledFloatActBase):
    """Minifloats with scale = max |x| / largest number of the tensor at hand."""

    scaling_impl = core.RuntimeDynamicStatsScaling


class Fp8e4m3OCPDynamicActPerTensorFloat(Fp8e4m3Mixin, FpOCPMixin, DynamicFloatAct):
    """e4m3 activations, scale = max |x| / 448 of the tensor."""


class Fp8e4m3FNUZDynamicActPerTensorFloat(Fp8e4m3Mixin, FpFNUZMixin, DynamicFloatAct):
    """e4m3 activations without negative 0, scale = max |x| / 240 of the tensor."""


class Fp8e4m3OCPDynamicActPerRowFloat(DynamicPerRow, Fp8e4m3Mixin, FpOCPMixin, DynamicFloatAct):
    """e4m3 activations, scale = max |x| / 448 of each row (the last axis)."""


class Fp8e4m3OCPDynamicActPerRowFixedPoint(Fp8e4m3OCPDynamicActPerRowFloat):
    """e4m3 activations, a power of two for each row."""

    restrict_scaling_type = enums.RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = core.FloorSte


class Fp8e4m3FNUZDynamicActPerRowFloat(DynamicPerRow, Fp8e4m3Mixin, FpFNUZMixin, DynamicFloatAct):
    """e4m3 activations without negative 0, scale = max |x| / 240 of each row (the last axis)."""


class Fp8e4m3DynamicActPerGroupFloat(DynamicPerGroup, Fp8e4m3ActPerTensorFloat):
    """e4m3 activations, all codes numbers, scale = max |x| / 480 of each group of `group_size` features."""


class Fp8e4m3OCPDynamicActPerGroupFloat(DynamicPerGroup, Fp8e4m3OCPActPerTensorFloat):
    """e4m3 activations, scale = max |x| / 448 of each group of `group_size` features, which you declare."""


class Fp8e4m3WeightSymmetricGroupQuant(Fp8e4m3WeightPerChannelFloat):
    """e4m3 weights, all codes numbers, scale = max |w| / 480 of each group of `group_size` inputs."""

    scaling_per_output_type = enums.ScalingPerOutputType.GROUP


class Fp8e4m3OCPWeightSymmetricGroupQuant(Fp8e4m3OCPWeightPerChannelFloat):
    """e4m3 weights, scale = max |w| / 448 of each group of `group_size` inputs, which you declare."""

    scaling_per_output_type = enums.ScalingPerOutputType.GROUP
