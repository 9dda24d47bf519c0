"""NVFP4: groups of 16 e2m1 numbers, whose scales are e4m3 numbers that share one float32 scale.

`NVFP4Weight` and `NVFP4Act` are Brevitas's, whose gradients go through the scales. `NVFP4Training...` are for the
operands of a `Scheme`: the arithmetic of TransformerEngine, bit for bit, and gradients that pass unchanged.
"""

from jqinject.core.scaling.constant import RuntimeDynamicGroupStatsScaling, RuntimeDynamicStatsScaling
from jqinject.core.scaling.powers_of_two import QuantRestrictValue
from jqinject.core.scaling.two_levels import NVFP4Scales, RuntimeDynamicTwoLevelScaling
from jqinject.inject import this
from jqinject.quant.enums import FloatToIntImplType, ScalingPerOutputType, StatsOp
from jqinject.quant.fragments import (
    FloatBase,
    Fp4e2m1Mixin,
    Fp8e4m3Mixin,
    FpOCPMixin,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
)
from jqinject.quant.solver import ActQuantSolver, GradQuantSolver, WeightQuantSolver


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


NVFP4TrainingSigns = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of TransformerEngine's random Hadamard transform of 16 numbers."""


class NVFP4TwoLevels(Fp4e2m1Mixin, FpOCPMixin, FloatBase):
    """e2m1 numbers in blocks of 16 that lie along what a product sums over; an e4m3 scale for each block, one float32
    scale for these.

    | name | what it does |
    |---|---|
    | `block_scale_impl` | how both scales follow from magnitudes, in which order of float32 operations: `NVFP4Scales` |
    | `shared_per_row` | a shared scale for each row instead of the tensor |
    | `float_to_int_impl_type` | how numbers are rounded: "round" or "stochastic_round" |

    `block_scale_impl = FourOverSixScales` picks of two scales, `LeastNormalScales` rounds as torchao does.
    """

    group_size = 16
    scaling_per_output_type = ScalingPerOutputType.GROUP
    scaling_stats_op = StatsOp.MAX
    scaling_impl = RuntimeDynamicTwoLevelScaling
    block_scale_impl = NVFP4Scales


class NVFP4TrainingWeight(NVFP4TwoLevels, WeightQuantSolver):
    """e2m1 weights (4 bits) in blocks of 16 inputs, scales as TransformerEngine computes them.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=NVFP4TrainingWeight, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale_.shape, fc.quant_weight().codes().dtype
        ((4, 1, 4), dtype('uint8'))
    """


class NVFP4TrainingAct(NVFP4TwoLevels, ActQuantSolver):
    """e2m1 activations (4 bits) in blocks of 16 features, scales as TransformerEngine computes them.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=NVFP4TrainingAct)
        >>> identity(jnp.array([0.1, -1.2, 2.4, 6.0]))
        Array([ 0., -1.,  2.,  6.], dtype=float32)
    """


class NVFP4TrainingGrad(NVFP4TwoLevels, GradQuantSolver):
    """e2m1 gradients (4 bits) in blocks of 16 along the last axis, in a `Scheme` along what is summed over."""


class NVFP4TrainingGradStochastic(NVFP4TrainingGrad):
    """e2m1 gradients (4 bits) in blocks of 16, rounded stochastically, so that a mean over many is right."""

    float_to_int_impl_type = FloatToIntImplType.STOCHASTIC_ROUND
