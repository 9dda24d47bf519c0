"""Minifloats with a float scale, or none.

* Plain ones, all of whose codes are numbers. The 8-bit ones reach further than OCP's (480 and 114688), so no hardware
  has them.
* OCP's: e4m3 with nan and e5m2 with inf and nan in 8 bits, and 6- and 4-bit ones without. They are the numbers of JAX's
  `float8_e4m3fn`, `float8_e5m2`, `float6_e3m2fn`, `float6_e2m3fn` and `float4_e2m1fn`.
* FNUZ, without inf and negative zero: their bias is one higher, and the code of -0 is nan. They are the numbers of
  JAX's `float8_e4m3fnuz` and `float8_e5m2fnuz`.
* Dynamic activations, whose scale is that of the current tensor: per tensor, per row (the last axis) and per group.
  Nothing is kept; names and numbers are those of Brevitas's examples for language models.

Source: Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)" and "Microscaling Formats (MX)".
"""

from jqinject import core
from jqinject.quant import enums, float_base, fragments


class Fp8e4m3Weight(float_base.Fp8e4m3Mixin, float_base.FloatWeightBase):
    """e4m3 weights, without a scale."""


class Fp8e5m2Weight(float_base.Fp8e5m2Mixin, float_base.FloatWeightBase):
    """e5m2 weights, without a scale."""


class Fp8e4m3Act(float_base.Fp8e4m3Mixin, float_base.FloatActBase):
    """e4m3 activations, without a scale."""


class Fp8e5m2Act(float_base.Fp8e5m2Mixin, float_base.FloatActBase):
    """e5m2 activations, without a scale."""


class Fp8e4m3WeightPerTensorFloat(float_base.Fp8e4m3Mixin, float_base.ScaledFloatWeightBase):
    """e4m3 weights, one scale = max |w| / 480."""


class Fp8e5m2WeightPerTensorFloat(float_base.Fp8e5m2Mixin, float_base.ScaledFloatWeightBase):
    """e5m2 weights, one scale = max |w| / 114688."""


class Fp8e4m3ActPerTensorFloat(float_base.Fp8e4m3Mixin, float_base.ScaledFloatActBase):
    """e4m3 activations, a learned scale that starts from max |x| / 480."""


class Fp8e5m2ActPerTensorFloat(float_base.Fp8e5m2Mixin, float_base.ScaledFloatActBase):
    """e5m2 activations, a learned scale that starts from max |x| / 114688."""


class Fp8e4m3WeightPerChannelFloat(float_base.PerOutputChannel, Fp8e4m3WeightPerTensorFloat):
    """e4m3 weights, a scale for each output channel, max |w| / 480."""


class Fp8e5m2WeightPerChannelFloat(float_base.PerOutputChannel, Fp8e5m2WeightPerTensorFloat):
    """e5m2 weights, a scale for each output channel, max |w| / 114688."""


class Fp8e4m3ActPerChannelFloat2d(float_base.PerOutputChannel, Fp8e4m3ActPerTensorFloat):
    """e4m3 images, each channel's learned scale starts from its max |x| / 480."""


class Fp8e5m2ActPerChannelFloat2d(float_base.PerOutputChannel, Fp8e5m2ActPerTensorFloat):
    """e5m2 images, each channel's learned scale starts from its max |x| / 114688."""


class Fp8e4m3WeightPerTensorFloatMSE(fragments.MSESymmetricScale, Fp8e4m3WeightPerTensorFloat):
    """e4m3 weights, one learned scale that starts from the least squared error."""


class Fp8e5m2WeightPerTensorFloatMSE(fragments.MSESymmetricScale, Fp8e5m2WeightPerTensorFloat):
    """e5m2 weights, one learned scale that starts from the least squared error."""


class Fp8e4m3WeightPerChannelFloatMSE(fragments.MSESymmetricScale, Fp8e4m3WeightPerChannelFloat):
    """e4m3 weights, learned scales of output channels that start from the least squared error."""


class Fp8e5m2WeightPerChannelFloatMSE(fragments.MSESymmetricScale, Fp8e5m2WeightPerChannelFloat):
    """e5m2 weights, learned scales of output channels that start from the least squared error."""


class Fp8e4m3ActPerTensorFloatMSE(fragments.MSESymmetricScale, Fp8e4m3ActPerTensorFloat):
    """e4m3 activations, a learned scale that starts from the least squared error."""


class Fp8e5m2ActPerTensorFloatMSE(fragments.MSESymmetricScale, Fp8e5m2ActPerTensorFloat):
    """e5m2 activations, a learned scale that starts from the least squared error."""


class Fp8e4m3ActPerChannelFloat2dMSE(fragments.MSESymmetricScale, Fp8e4m3ActPerChannelFloat2d):
    """e4m3 images, channels' learned scales that start from the least squared error."""


class Fp8e5m2ActPerChannelFloat2dMSE(fragments.MSESymmetricScale, Fp8e5m2ActPerChannelFloat2d):
    """e5m2 images, channels' learned scales that start from the least squared error."""


class FpOCPWeight(float_base.FpOCPMixin, float_base.FloatWeightBase):
    """OCP weights, without a scale; declare the format."""


class FpOCPAct(float_base.FpOCPMixin, float_base.FloatActBase):
    """OCP activations, without a scale; declare the format."""


class FpOCPWeightPerTensorFloat(float_base.FpOCPMixin, float_base.ScaledFloatWeightBase):
    """OCP weights, one scale = max |w| / largest number; declare the format."""


class FpOCPActPerTensorFloat(float_base.FpOCPMixin, float_base.ScaledFloatActBase):
    """OCP activations, a learned scale that starts from max |x| / largest number; declare the format."""


class FpOCPWeightPerChannelFloat(float_base.FpOCPMixin, float_base.ScaledFloatWeightBase):
    """OCP weights, a scale for each output channel, max |w| / largest number; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class FpOCPActPerChannelFloat2d(float_base.FpOCPMixin, float_base.ScaledFloatActBase):
    """OCP images, each channel's learned scale starts from its max |x| / largest number; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8e4m3OCPWeight(FpOCPWeight, float_base.Fp8e4m3Mixin):
    """e4m3 weights, without a scale."""


class Fp8e4m3OCPAct(FpOCPAct, float_base.Fp8e4m3Mixin):
    """e4m3 activations, without a scale."""


class Fp8e4m3OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, float_base.Fp8e4m3Mixin):
    """e4m3 weights, one scale = max |w| / 448."""


class Fp8e4m3OCPActPerTensorFloat(FpOCPActPerTensorFloat, float_base.Fp8e4m3Mixin):
    """e4m3 activations, a learned scale that starts from max |x| / 448."""


class Fp8e4m3OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, float_base.Fp8e4m3Mixin):
    """e4m3 weights, a scale for each output channel, max |w| / 448."""


class Fp8e5m2OCPWeight(FpOCPWeight, float_base.Fp8e5m2Mixin):
    """e5m2 weights, without a scale."""


class Fp8e5m2OCPAct(FpOCPAct, float_base.Fp8e5m2Mixin):
    """e5m2 activations, without a scale."""


class Fp8e5m2OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, float_base.Fp8e5m2Mixin):
    """e5m2 weights, one scale = max |w| / 57344."""


class Fp8e5m2OCPActPerTensorFloat(FpOCPActPerTensorFloat, float_base.Fp8e5m2Mixin):
    """e5m2 activations, a learned scale that starts from max |x| / 57344."""


class Fp8e5m2OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, float_base.Fp8e5m2Mixin):
    """e5m2 weights, a scale for each output channel, max |w| / 57344."""


class Fp6e3m2OCPWeight(FpOCPWeight, float_base.Fp6e3m2Mixin):
    """e3m2 weights, without a scale."""


class Fp6e3m2OCPAct(FpOCPAct, float_base.Fp6e3m2Mixin):
    """e3m2 activations, without a scale."""


class Fp6e3m2OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, float_base.Fp6e3m2Mixin):
    """e3m2 weights, one scale = max |w| / 28."""


class Fp6e3m2OCPActPerTensorFloat(FpOCPActPerTensorFloat, float_base.Fp6e3m2Mixin):
    """e3m2 activations, a learned scale that starts from max |x| / 28."""


class Fp6e3m2OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, float_base.Fp6e3m2Mixin):
    """e3m2 weights, a scale for each output channel, max |w| / 28."""


class Fp6e2m3OCPWeight(FpOCPWeight, float_base.Fp6e2m3Mixin):
    """e2m3 weights, without a scale."""


class Fp6e2m3OCPAct(FpOCPAct, float_base.Fp6e2m3Mixin):
    """e2m3 activations, without a scale."""


class Fp6e2m3OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, float_base.Fp6e2m3Mixin):
    """e2m3 weights, one scale = max |w| / 7.5."""


class Fp6e2m3OCPActPerTensorFloat(FpOCPActPerTensorFloat, float_base.Fp6e2m3Mixin):
    """e2m3 activations, a learned scale that starts from max |x| / 7.5."""


class Fp6e2m3OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, float_base.Fp6e2m3Mixin):
    """e2m3 weights, a scale for each output channel, max |w| / 7.5."""


class Fp4e2m1OCPWeight(FpOCPWeight, float_base.Fp4e2m1Mixin):
    """e2m1 weights, without a scale."""


class Fp4e2m1OCPAct(FpOCPAct, float_base.Fp4e2m1Mixin):
    """e2m1 activations, without a scale."""


class Fp4e2m1OCPWeightPerTensorFloat(FpOCPWeightPerTensorFloat, float_base.Fp4e2m1Mixin):
    """e2m1 weights, one scale = max |w| / 6."""


class Fp4e2m1OCPActPerTensorFloat(FpOCPActPerTensorFloat, float_base.Fp4e2m1Mixin):
    """e2m1 activations, a learned scale that starts from max |x| / 6."""


class Fp4e2m1OCPWeightPerChannelFloat(FpOCPWeightPerChannelFloat, float_base.Fp4e2m1Mixin):
    """e2m1 weights, a scale for each output channel, max |w| / 6."""


class FpOCPWeightPerTensorFloatMSE(fragments.MSESymmetricScale, FpOCPWeightPerTensorFloat):
    """OCP weights, one learned scale that starts from the least squared error; declare the format."""


class FpOCPWeightPerChannelFloatMSE(fragments.MSESymmetricScale, FpOCPWeightPerChannelFloat):
    """OCP weights, learned scales of output channels that start from the least squared error; declare the format."""


class FpOCPActPerTensorFloatMSE(fragments.MSESymmetricScale, FpOCPActPerTensorFloat):
    """OCP activations, a learned scale that starts from the least squared error; declare the format."""


class FpOCPActPerChannelFloat2dMSE(fragments.MSESymmetricScale, FpOCPActPerChannelFloat2d):
    """OCP images, channels' learned scales that start from the least squared error; declare the format."""


class Fp8e4m3OCPWeightPerTensorFloatMSE(FpOCPWeightPerTensorFloatMSE, float_base.Fp8e4m3Mixin):
    """e4m3 weights, one learned scale that starts from the least squared error."""


class Fp8e4m3OCPWeightPerChannelFloatMSE(FpOCPWeightPerChannelFloatMSE, float_base.Fp8e4m3Mixin):
    """e4m3 weights, learned scales of output channels that start from the least squared error."""


class Fp8e4m3OCPActPerTensorFloatMSE(FpOCPActPerTensorFloatMSE, float_base.Fp8e4m3Mixin):
    """e4m3 activations, a learned scale that starts from the least squared error."""


class Fp8e5m2OCPWeightPerTensorFloatMSE(FpOCPWeightPerTensorFloatMSE, float_base.Fp8e5m2Mixin):
    """e5m2 weights, one learned scale that starts from the least squared error."""


class Fp8e5m2OCPWeightPerChannelFloatMSE(FpOCPWeightPerChannelFloatMSE, float_base.Fp8e5m2Mixin):
    """e5m2 weights, learned scales of output channels that start from the least squared error."""


class Fp8e5m2OCPActPerTensorFloatMSE(FpOCPActPerTensorFloatMSE, float_base.Fp8e5m2Mixin):
    """e5m2 activations, a learned scale that starts from the least squared error."""


class FpFNUZWeight(float_base.FpFNUZMixin, float_base.FloatWeightBase):
    """FNUZ weights, without a scale; declare the format."""


class FpFNUZAct(float_base.FpFNUZMixin, float_base.FloatActBase):
    """FNUZ activations, without a scale; declare the format."""


class FpFNUZWeightPerTensorFloat(float_base.FpFNUZMixin, float_base.ScaledFloatWeightBase):
    """FNUZ weights, one scale = max |w| / largest number; declare the format."""


class FpFNUZActPerTensorFloat(float_base.FpFNUZMixin, float_base.ScaledFloatActBase):
    """FNUZ activations, a learned scale that starts from max |x| / largest number; declare the format."""


class FpFNUZWeightPerChannelFloat(float_base.FpFNUZMixin, float_base.ScaledFloatWeightBase):
    """FNUZ weights, a scale for each output channel, max |w| / largest number; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class FpFNUZActPerChannelFloat2d(float_base.FpFNUZMixin, float_base.ScaledFloatActBase):
    """FNUZ images, each channel's learned scale starts from its max |x| / largest number; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8e4m3FNUZWeight(FpFNUZWeight, float_base.Fp8e4m3Mixin):
    """e4m3 weights, without a scale."""


class Fp8e4m3FNUZAct(FpFNUZAct, float_base.Fp8e4m3Mixin):
    """e4m3 activations, without a scale."""


class Fp8e4m3FNUZWeightPerTensorFloat(FpFNUZWeightPerTensorFloat, float_base.Fp8e4m3Mixin):
    """e4m3 weights, one scale = max |w| / 240."""


class Fp8e4m3FNUZActPerTensorFloat(FpFNUZActPerTensorFloat, float_base.Fp8e4m3Mixin):
    """e4m3 activations, a learned scale that starts from max |x| / 240."""


class Fp8e4m3FNUZWeightPerChannelFloat(FpFNUZWeightPerChannelFloat, float_base.Fp8e4m3Mixin):
    """e4m3 weights, a scale for each output channel, max |w| / 240."""


class Fp8e5m2FNUZWeight(FpFNUZWeight, float_base.Fp8e5m2Mixin):
    """e5m2 weights, without a scale."""


class Fp8e5m2FNUZAct(FpFNUZAct, float_base.Fp8e5m2Mixin):
    """e5m2 activations, without a scale."""


class Fp8e5m2FNUZWeightPerTensorFloat(FpFNUZWeightPerTensorFloat, float_base.Fp8e5m2Mixin):
    """e5m2 weights, one scale = max |w| / 57344."""


class Fp8e5m2FNUZActPerTensorFloat(FpFNUZActPerTensorFloat, float_base.Fp8e5m2Mixin):
    """e5m2 activations, a learned scale that starts from max |x| / 57344."""


class Fp8e5m2FNUZWeightPerChannelFloat(FpFNUZWeightPerChannelFloat, float_base.Fp8e5m2Mixin):
    """e5m2 weights, a scale for each output channel, max |w| / 57344."""


class FpFNUZWeightPerTensorFloatMSE(fragments.MSESymmetricScale, FpFNUZWeightPerTensorFloat):
    """FNUZ weights, one learned scale that starts from the least squared error; declare the format."""


class FpFNUZWeightPerChannelFloatMSE(fragments.MSESymmetricScale, FpFNUZWeightPerChannelFloat):
    """FNUZ weights, learned scales of output channels that start from the least squared error; declare the format."""


class FpFNUZActPerTensorFloatMSE(fragments.MSESymmetricScale, FpFNUZActPerTensorFloat):
    """FNUZ activations, a learned scale that starts from the least squared error; declare the format."""


class FpFNUZActPerChannelFloat2dMSE(fragments.MSESymmetricScale, FpFNUZActPerChannelFloat2d):
    """FNUZ images, channels' learned scales that start from the least squared error; declare the format."""


class Fp8e4m3FNUZWeightPerTensorFloatMSE(FpFNUZWeightPerTensorFloatMSE, float_base.Fp8e4m3Mixin):
    """e4m3 weights, one learned scale that starts from the least squared error."""


class Fp8e4m3FNUZWeightPerChannelFloatMSE(FpFNUZWeightPerChannelFloatMSE, float_base.Fp8e4m3Mixin):
    """e4m3 weights, learned scales of output channels that start from the least squared error."""


class Fp8e4m3FNUZActPerTensorFloatMSE(FpFNUZActPerTensorFloatMSE, float_base.Fp8e4m3Mixin):
    """e4m3 activations, a learned scale that starts from the least squared error."""


class Fp8e5m2FNUZWeightPerTensorFloatMSE(FpFNUZWeightPerTensorFloatMSE, float_base.Fp8e5m2Mixin):
    """e5m2 weights, one learned scale that starts from the least squared error."""


class Fp8e5m2FNUZWeightPerChannelFloatMSE(FpFNUZWeightPerChannelFloatMSE, float_base.Fp8e5m2Mixin):
    """e5m2 weights, learned scales of output channels that start from the least squared error."""


class Fp8e5m2FNUZActPerTensorFloatMSE(FpFNUZActPerTensorFloatMSE, float_base.Fp8e5m2Mixin):
    """e5m2 activations, a learned scale that starts from the least squared error."""


class Fp8e4m3OCPDynamicActPerTensorFloat(
    float_base.Fp8e4m3Mixin, float_base.FpOCPMixin, float_base.DynamicFloatAct
):
    """e4m3 activations, scale = max |x| / 448 of the tensor."""


class Fp8e4m3FNUZDynamicActPerTensorFloat(
    float_base.Fp8e4m3Mixin, float_base.FpFNUZMixin, float_base.DynamicFloatAct
):
    """e4m3 activations without negative 0, scale = max |x| / 240 of the tensor."""


class Fp8e4m3OCPDynamicActPerRowFloat(
    fragments.DynamicPerRow, float_base.Fp8e4m3Mixin, float_base.FpOCPMixin, float_base.DynamicFloatAct
):
    """e4m3 activations, scale = max |x| / 448 of each row (the last axis)."""


class Fp8e4m3OCPDynamicActPerRowFixedPoint(Fp8e4m3OCPDynamicActPerRowFloat):
    """e4m3 activations, a power of two for each row."""

    restrict_scaling_type = enums.RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = core.FloorSte


class Fp8e4m3FNUZDynamicActPerRowFloat(fragments.DynamicPerRow, Fp8e4m3FNUZDynamicActPerTensorFloat):
    """e4m3 activations without negative 0, scale = max |x| / 240 of each row (the last axis)."""


class Fp8e4m3DynamicActPerGroupFloat(fragments.DynamicPerGroup, Fp8e4m3ActPerTensorFloat):
    """e4m3 activations, all codes numbers, scale = max |x| / 480 of each group of `group_size` features."""


class Fp8e4m3OCPDynamicActPerGroupFloat(fragments.DynamicPerGroup, Fp8e4m3OCPActPerTensorFloat):
    """e4m3 activations, scale = max |x| / 448 of each group of `group_size` features, which you declare."""


class Fp8e4m3WeightSymmetricGroupQuant(Fp8e4m3WeightPerChannelFloat):
    """e4m3 weights, all codes numbers, scale = max |w| / 480 of each group of `group_size` inputs."""

    scaling_per_output_type = enums.ScalingPerOutputType.GROUP


class Fp8e4m3OCPWeightSymmetricGroupQuant(Fp8e4m3OCPWeightPerChannelFloat):
    """e4m3 weights, scale = max |w| / 448 of each group of `group_size` inputs, which you declare."""

    scaling_per_output_type = enums.ScalingPerOutputType.GROUP
