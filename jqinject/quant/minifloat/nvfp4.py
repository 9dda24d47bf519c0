"""NVFP4: groups of 16 e2m1 numbers, whose scales are e4m3 numbers that share one float32 scale."""

from jqinject.core.quant_restrict_val import QuantRestrictValue
from jqinject.core.scaling import RuntimeDynamicGroupStatsScaling, RuntimeDynamicStatsScaling
from jqinject.inject import this
from jqinject.quant.enums import ScalingPerOutputType
from jqinject.quant.fragments import (
    Fp4e2m1Mixin,
    Fp8e4m3Mixin,
    FpOCPMixin,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
)


class Fp8e4m3Scales(FpOCPMixin, Fp8e4m3Mixin, ScaledFloatActBase):
    """How scales are quantized: e4m3, one float32 scale = largest / 448 for all of them."""

    scaling_impl = RuntimeDynamicStatsScaling
    restrict_value_float_to_int_impl = this.tensor_quant
    restrict_scale_impl = QuantRestrictValue


class NVFP4Mixin(Fp4e2m1Mixin):
    """Groups of 16 e2m1 numbers; scale = max |x| / 6 of a group, in e4m3."""

    group_size = 16
    scaling_per_output_type = ScalingPerOutputType.GROUP
    scale_quant = Fp8e4m3Scales
    restrict_scale_threshold_impl = this.scale_quant.restrict_scale_impl


class NVFP4Weight(NVFP4Mixin, FpOCPMixin, ScaledFloatWeightBase):
    """e2m1 weights (4 bits), an e4m3 scale for each group of 16 inputs, one float32 scale for these.

    Source: NVIDIA's NVFP4.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=NVFP4Weight, rngs=nnx.Rngs(0))
        >>> str(fc.quant_weight().format), fc.quant_weight().scale_.shape
        ('float4_e2m1fn', (4, 1, 4))
    """


class NVFP4Act(NVFP4Mixin, FpOCPMixin, ScaledFloatActBase):
    """e2m1 activations (4 bits), an e4m3 scale for each group of 16 features, one float32 scale for these.

    Source: NVIDIA's NVFP4.
    """

    scaling_impl = RuntimeDynamicGroupStatsScaling
