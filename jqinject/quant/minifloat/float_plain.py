"""Minifloats all of whose codes are numbers: no inf, no nan.

The 8-bit ones reach further than OCP's (480 and 114688), so no hardware has them; `float_ocp` has those that it does.
"""

from jqinject.quant.enums import ScalingPerOutputType
from jqinject.quant.fragments import (
    FloatActBase,
    FloatWeightBase,
    Fp8e4m3Mixin,
    Fp8e5m2Mixin,
    MSESymmetricScale,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
)


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

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class Fp8e5m2WeightPerChannelFloat(Fp8e5m2Mixin, ScaledFloatWeightBase):
    """e5m2 weights, a scale for each output channel, max |w| / 114688."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class Fp8e4m3ActPerChannelFloat2d(Fp8e4m3Mixin, ScaledFloatActBase):
    """e4m3 images, each channel's learned scale starts from its max |x| / 480."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class Fp8e5m2ActPerChannelFloat2d(Fp8e5m2Mixin, ScaledFloatActBase):
    """e5m2 images, each channel's learned scale starts from its max |x| / 114688."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


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
