"""OCP's minifloats: e4m3 with nan and e5m2 with inf and nan in 8 bits, and 6- and 4-bit ones without.

They are the numbers of JAX's `float8_e4m3fn`, `float8_e5m2`, `float6_e3m2fn`, `float6_e2m3fn` and `float4_e2m1fn`.

Source: Open Compute Project, "OCP 8-bit Floating Point Specification (OFP8)" and "Microscaling Formats (MX)".
"""

from jqinject.quant.enums import ScalingPerOutputType
from jqinject.quant.fragments import (
    FloatActBase,
    FloatWeightBase,
    Fp4e2m1Mixin,
    Fp6e2m3Mixin,
    Fp6e3m2Mixin,
    Fp8e4m3Mixin,
    Fp8e5m2Mixin,
    FpOCPMixin,
    MSESymmetricScale,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
)


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

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class FpOCPActPerChannelFloat2d(FpOCPMixin, ScaledFloatActBase):
    """OCP images, each channel's learned scale starts from its max |x| / largest number; declare the format."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


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
