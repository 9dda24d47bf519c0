"""OCP microscaling (MX): groups of 32 numbers that share a power of two as scale."""

from jqinject.core.rounding import FloorSte
from jqinject.core.scaling.constant import RuntimeDynamicGroupStatsScaling
from jqinject.core.scaling.number_range import MaxIntScaling, PowerOfTwoIntScaling
from jqinject.core.scaling.powers_of_two import SharedExponentScaling, midmax_mantissa_bias
from jqinject.core.scaling.rule import PowerOfTwoRestrictValue
from jqinject.inject import ExtendedInjector, choices, this, value
from jqinject.quant.enums import RestrictValueType, ScaleRounding, ScalingPerOutputType
from jqinject.quant.fragments import (
    Fp4e2m1Mixin,
    Fp6e2m3Mixin,
    Fp6e3m2Mixin,
    Fp8e4m3Mixin,
    Fp8e5m2Mixin,
    FpOCPMixin,
    IntQuant,
    MaxStatsScaling,
    MinMaxStatsScaling,
    MSEAsymmetricScale,
    MSESymmetricScale,
    MSEWeightZeroPoint,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
    ShiftedMinUintQuant,
)
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver
from jqinject.quant.solver.tables import pick_or_none


class RestrictThresholdMixin(ExtendedInjector):
    """How the largest number of the format becomes a power of two: rounded down."""

    restrict_value_float_to_int_impl = FloorSte
    restrict_scaling_impl = PowerOfTwoRestrictValue


@choices(MaxIntScaling, PowerOfTwoIntScaling)
def int_scaling_impl(scale_rounding=None):
    """Integer steps to the largest number; rounded up, a power of two is one step beyond it, which is clamped."""
    beyond = {ScaleRounding.CEIL: PowerOfTwoIntScaling}
    return pick_or_none(ScaleRounding, scale_rounding, beyond, "scale_rounding") or MaxIntScaling


@value
def fraction_bits(bit_width, signed):
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
    restrict_scaling_type = RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = FloorSte
    scaling_per_output_type = ScalingPerOutputType.GROUP
    restrict_threshold_impl = this.threshold_mixin.restrict_scaling_impl
    int_scaling_impl = int_scaling_impl
    midmax_mantissa_bit_bias = value(midmax_mantissa_bias)


class MXActMixin(MXMixin):
    """MX of activations: groups lie along the features, of which fewer than 32 are one group; their scales are those of
    the tensor at hand."""

    @choices(RuntimeDynamicGroupStatsScaling, SharedExponentScaling)
    def scaling_impl(scale_rounding=None):
        """As `scale_rounding` says."""
        return RuntimeDynamicGroupStatsScaling if scale_rounding is None else SharedExponentScaling


class MXInt8Weight(MXMixin, IntQuant, MaxStatsScaling, WeightQuantSolver):
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


class ShiftedMXUInt8Weight(MXMixin, ShiftedMinUintQuant, MinMaxStatsScaling, WeightQuantSolver):
    """8-bit unsigned weights, a power of two and a zero point for each group of 32 inputs."""

    bit_width = 8
    mantissa_bit_width = fraction_bits


class MXInt8WeightMSE(MSESymmetricScale, MXInt8Weight):
    """8-bit signed weights; a learned power of two for each group, which starts where the squared error is least."""


class ShiftedMXUInt8WeightMSE(MSEAsymmetricScale, MSEWeightZeroPoint, ShiftedMXUInt8Weight):
    """8-bit unsigned weights; a learned power of two and zero point for each group, started likewise."""


class MXInt8Act(MXActMixin, IntQuant, MaxStatsScaling, ActQuantSolver):
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
