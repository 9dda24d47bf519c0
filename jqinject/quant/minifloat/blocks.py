"""Numbers in small groups: OCP microscaling (MX), 32 that share a power of two; NVFP4, 16 that share an e4m3 number.

`NVFP4Weight` and `NVFP4Act` are Brevitas's, whose gradients go through the scales. `NVFP4Training...` are for the
operands of a `Scheme`: the arithmetic of TransformerEngine, bit for bit, and gradients that pass unchanged.
"""

from typing import Any

from jqinject import core
from jqinject.core.scaling.block_scaling import midmax_mantissa_bias
from jqinject.inject import ExtendedInjector, choices, this, value
from jqinject.quant import enums, solver
from jqinject.quant.float_base import (
    FloatBase,
    Fp4e2m1Mixin,
    Fp6e2m3Mixin,
    Fp6e3m2Mixin,
    Fp8e4m3Mixin,
    Fp8e5m2Mixin,
    FpOCPMixin,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
)
from jqinject.quant.fragments import (
    FullIntQuant,
    MaxStatsScaling,
    MinMaxStatsScaling,
    MSEAsymmetricScale,
    MSESymmetricScale,
    MSEWeightZeroPoint,
    ShiftedMinUintQuant,
)
from jqinject.quant.solver.roles import FLOAT_TO_INT_IMPL, selected


class RestrictThresholdMixin(ExtendedInjector):
    """How the largest number of the format becomes a power of two: rounded down."""

    restrict_value_float_to_int_impl = core.FloorSte
    restrict_scaling_impl = core.PowerOfTwoRestrictValue


@choices(core.MaxIntScaling, core.PowerOfTwoIntScaling)
def steps_to_largest(scale_rounding: str | None = None) -> object:
    """Integer steps to the largest number; rounded up, a power of two is one step beyond it, which is clamped."""
    beyond = enums.chooses(scale_rounding, enums.ScaleRounding.CEIL)
    return core.PowerOfTwoIntScaling if beyond else core.MaxIntScaling


@value
def fraction_bits(bit_width: int, signed: bool) -> int:
    """`mantissa_bit_width` of integers read as numbers from 1 to below 2: the bits below the highest."""
    return bit_width - 1 - signed


class MXMixin(ExtendedInjector):
    """A power of two for each group of 32: the group's largest magnitude and the format's largest number, both rounded
    down to one, divided. This is the specification's rule.

    `scale_rounding = "floor"`, `"ceil"`, `"even"` or `"rceil"` (up, so that nothing is clamped) rounds by the rules of
    the specification and of hardware, without a least scale; see `jqinject.core.SharedExponentScaling`. The largest
    number of signed 8-bit integers is 127, from 64 on they have the specification's exponent 0; for "ceil" it is 128,
    one step beyond, as they would lose a bit to a power of two that holds it.

    With `restrict_value_float_to_int_impl = RoundMidMaxSte` minifloats are not clamped that would not round to the
    largest number.
    """

    threshold_mixin = RestrictThresholdMixin
    group_size = 32
    restrict_scaling_type = enums.RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = core.FloorSte
    scaling_per_output_type = enums.ScalingPerOutputType.GROUP
    restrict_threshold_impl = this.threshold_mixin.restrict_scaling_impl
    int_scaling_impl = steps_to_largest
    midmax_mantissa_bit_bias = value(midmax_mantissa_bias)


class MXActMixin(MXMixin):
    """MX of activations: groups lie along the features, of which fewer than 32 are one group; their scales are those of
    the current tensor."""

    @choices(core.RuntimeDynamicGroupStatsScaling, core.SharedExponentScaling)
    def scaling_impl(scale_rounding: Any = None) -> object:
        """As `scale_rounding` says."""
        return core.RuntimeDynamicGroupStatsScaling if scale_rounding is None else core.SharedExponentScaling


class MXInt8Weight(MXMixin, FullIntQuant, MaxStatsScaling, solver.WeightQuantSolver):
    """8-bit signed weights, a power of two for each group of 32 inputs.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=MXInt8Weight, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale_.shape
        (2, 1, 4)
    """

    bit_width = 8
    mantissa_bit_width = fraction_bits


class ShiftedMXUInt8Weight(MXMixin, ShiftedMinUintQuant, MinMaxStatsScaling, solver.WeightQuantSolver):
    """8-bit unsigned weights, a power of two and a zero point for each group of 32 inputs."""

    bit_width = 8
    mantissa_bit_width = fraction_bits


class MXInt8WeightMSE(MSESymmetricScale, MXInt8Weight):
    """8-bit signed weights; a learned power of two for each group, which starts where the squared error is least."""


class ShiftedMXUInt8WeightMSE(MSEAsymmetricScale, MSEWeightZeroPoint, ShiftedMXUInt8Weight):
    """8-bit unsigned weights; a learned power of two and zero point for each group, started likewise."""


class MXInt8Act(MXActMixin, FullIntQuant, MaxStatsScaling, solver.ActQuantSolver):
    """8-bit signed activations, a power of two for each group of 32 features.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=MXInt8Act, return_quant_tensor=True)
        >>> identity(jnp.ones((2, 64))).scale_.shape
        (2, 2, 1)
    """

    bit_width = 8
    mantissa_bit_width = fraction_bits


class MXFloat8e4m3Weight(MXMixin, Fp8e4m3Mixin, FpOCPMixin, ScaledFloatWeightBase):
    """e4m3 weights, a power of two for each group of 32 inputs.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=MXFloat8e4m3Weight, rngs=nnx.Rngs(0))
        >>> str(fc.quant_weight().format), fc.quant_weight().scale_.shape
        ('float8_e4m3fn', (2, 1, 4))
    """


class MXFloat8e4m3WeightMSE(MSESymmetricScale, MXFloat8e4m3Weight):
    """e4m3 weights; a learned power of two for each group, which starts where the squared error is least."""


class MXFloat8e5m2Weight(MXMixin, Fp8e5m2Mixin, FpOCPMixin, ScaledFloatWeightBase):
    """e5m2 weights, a power of two for each group of 32 inputs."""


class MXFloat6e3m2Weight(MXMixin, Fp6e3m2Mixin, FpOCPMixin, ScaledFloatWeightBase):
    """e3m2 weights (6 bits), a power of two for each group of 32 inputs."""


class MXFloat6e2m3Weight(MXMixin, Fp6e2m3Mixin, FpOCPMixin, ScaledFloatWeightBase):
    """e2m3 weights (6 bits), a power of two for each group of 32 inputs."""


class MXFloat4e2m1Weight(MXMixin, Fp4e2m1Mixin, FpOCPMixin, ScaledFloatWeightBase):
    """e2m1 weights (4 bits), a power of two for each group of 32 inputs."""


class MXFloat8e4m3Act(MXActMixin, Fp8e4m3Mixin, FpOCPMixin, ScaledFloatActBase):
    """e4m3 activations, a power of two for each group of 32 features."""


class MXFloat8e5m2Act(MXActMixin, Fp8e5m2Mixin, FpOCPMixin, ScaledFloatActBase):
    """e5m2 activations, a power of two for each group of 32 features."""


class MXFloat6e3m2Act(MXActMixin, Fp6e3m2Mixin, FpOCPMixin, ScaledFloatActBase):
    """e3m2 activations (6 bits), a power of two for each group of 32 features."""


class MXFloat6e2m3Act(MXActMixin, Fp6e2m3Mixin, FpOCPMixin, ScaledFloatActBase):
    """e2m3 activations (6 bits), a power of two for each group of 32 features."""


class MXFloat4e2m1Act(MXActMixin, Fp4e2m1Mixin, FpOCPMixin, ScaledFloatActBase):
    """e2m1 activations (4 bits), a power of two for each group of 32 features."""


class Fp8e4m3Scales(FpOCPMixin, Fp8e4m3Mixin, ScaledFloatActBase):
    """How scales are quantized: e4m3, one float32 scale = largest / 448 for all of them."""

    scaling_impl = core.RuntimeDynamicStatsScaling
    restrict_value_float_to_int_impl = this.tensor_quant
    restrict_scale_impl = core.QuantRestrictValue


class Fp8e4m3ConstScales(Fp8e4m3Scales):
    """The same with a constant float32 scale, `scaling_init / 448`.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> shared = {"weight_quant": NVFP4Weight, "weight_scale_quant": Fp8e4m3ConstScales.let(scaling_init=448.0)}
        >>> q, k = (QuantLinear(64, 4, **shared, rngs=nnx.Rngs(n)) for n in range(2))
        >>> float(q.weight_quant.scale_factor), float(k.weight_quant.scale_factor)
        (1.0, 1.0)
    """

    scaling_impl = core.ConstScaling


class NVFP4Mixin(Fp4e2m1Mixin):
    """Groups of 16 e2m1 numbers; scale = max |x| / 6 of a group, in e4m3."""

    group_size = 16
    scaling_per_output_type = enums.ScalingPerOutputType.GROUP
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

    scaling_impl = core.RuntimeDynamicGroupStatsScaling


#: The signs of TransformerEngine's random Hadamard transform of 16 numbers.
NVFP4TrainingSigns = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class NVFP4TwoLevels(Fp4e2m1Mixin, FpOCPMixin, FloatBase):
    """e2m1 numbers in blocks of 16 that lie along what a product sums over; an e4m3 scale for each block, one float32
    scale for these.

    | name | what it does |
    |---|---|
    | `block_scale_impl` | how both scales follow from magnitudes, in which order of float32 operations: `NVFP4Scales` |
    | `shared_per_row` | a shared scale for each row instead of the tensor |
    | `float_to_int_impl_type` | how numbers are rounded: "round" or "stochastic_round" |

    `block_scale_impl = FourOverSixScales` picks of two scales, `LeastErrorScales` the best of all, `LeastNormalScales`
    rounds as torchao does.
    """

    group_size = 16
    scaling_per_output_type = enums.ScalingPerOutputType.GROUP
    scaling_impl = core.RuntimeDynamicTwoLevelScaling
    block_scale_impl = core.NVFP4Scales


class NVFP4TrainingWeight(NVFP4TwoLevels, solver.WeightQuantSolver):
    """e2m1 weights (4 bits) in blocks of 16 inputs, scales as TransformerEngine computes them.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=NVFP4TrainingWeight, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale_.shape, fc.quant_weight().codes().dtype
        ((4, 1, 4), dtype('uint8'))
    """


class NVFP4TrainingAct(NVFP4TwoLevels, solver.ActQuantSolver):
    """e2m1 activations (4 bits) in blocks of 16 features, scales as TransformerEngine computes them.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=NVFP4TrainingAct)
        >>> identity(jnp.array([0.1, -1.2, 2.4, 6.0]))
        Array([ 0., -1.,  2.,  6.], dtype=float32)
    """


class NVFP4TrainingGrad(NVFP4TwoLevels, solver.GradQuantSolver):
    """e2m1 gradients (4 bits) in blocks of 16 along the last axis, in a `Scheme` along what is summed over."""


class NVFP4TrainingGradStochastic(NVFP4TrainingGrad):
    """e2m1 gradients (4 bits) in blocks of 16, rounded stochastically, so that a mean over many is right."""

    float_to_int_impl_type = enums.FloatToIntImplType.STOCHASTIC_ROUND


class NVFP4Eden(NVFP4TwoLevels):
    """NVFP4 of MS-EDEN: numbers rounded to nearest, block scales corrected and rounded stochastically.

    | name | what it does |
    |---|---|
    | `scale_to_int_impl_type` | how block scales are rounded: "stochastic_round", or "round" without random numbers |
    | `correction_size` | numbers that share a correction: those that are rotated together, 128 by default |

    On average it is right over random rotations, which both operands of a product go through: `QuartetII`.
    """

    float_to_int_impl_type = enums.FloatToIntImplType.ROUND
    block_scale_impl = core.EdenScales
    scale_to_int_impl_type = enums.FloatToIntImplType.STOCHASTIC_ROUND
    scale_to_int_impl = selected("scale_to_int_impl_type", FLOAT_TO_INT_IMPL)


class NVFP4TrainingActEden(NVFP4Eden, solver.ActQuantSolver):
    """e2m1 activations (4 bits) in blocks of 16 to nearest, with corrected scales: see `NVFP4TrainingGradEden`."""


class NVFP4TrainingGradEden(NVFP4Eden, solver.GradQuantSolver):
    """e2m1 gradients (4 bits) in blocks of 16 to nearest, with scales corrected by MS-EDEN and rounded stochastically.

    Source: Panferov et al., 2026, "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient
    Estimation".

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.core import Hadamard
        >>> from jqinject.nn import QuantIdentity
        >>> eden = QuantIdentity(act_quant=NVFP4TrainingActEden, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(0), (64, 128))
        >>> signs = jax.random.rademacher(jax.random.key(1), (128,), jnp.float32)
        >>> turn = Hadamard(128)
        >>> y = signs * turn.inverse(eden(turn(signs * x)))
        >>> bool(jnp.square(y - x).mean() < 0.012), bool(abs((x * y).sum() / (x * x).sum() - 1) < 0.003)
        (True, True)
    """
