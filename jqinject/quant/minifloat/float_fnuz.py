"""Minifloats without inf and negative zero (FNUZ): their bias is one higher, and the code of -0 is nan.

They are the numbers of JAX's `float8_e4m3fnuz` and `float8_e5m2fnuz`.
"""

from jqinject.quant.enums import ScalingPerOutputType
from jqinject.quant.fragments import (
    FloatActBase,
    FloatWeightBase,
    Fp8e4m3Mixin,
    Fp8e5m2Mixin,
    FpFNUZMixin,
    MSESymmetricScale,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
)


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

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class FpFNUZActPerChannelFloat2d(FpFNUZMixin, ScaledFloatActBase):
    """FNUZ images, each channel's learned scale starts from its max |x| / largest number; declare the format."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


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
