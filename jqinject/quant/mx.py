"""OCP microscaling (MX): groups of 32 numbers that share a power of two as scale."""

from typing import Any

from jqinject.core.restrict_val import PowerOfTwoRestrictValue
from jqinject.core.rounding import FloorSte
from jqinject.core.scaling import RuntimeDynamicGroupStatsScaling
from jqinject.core.scaling.mid_max import midmax_mantissa_bias
from jqinject.inject import ExtendedInjector, this, value
from jqinject.inject.enum import RestrictValueType, ScalingPerOutputType
from jqinject.quant.float_base import (
    Fp4e2m1Mixin,
    Fp6e2m3Mixin,
    Fp6e3m2Mixin,
    Fp8e5m2Mixin,
    ScaledFloatActBase,
    ScaledFloatWeightBase,
)
from jqinject.quant.float_ocp import FpOCPAct, FpOCPWeight
from jqinject.quant.fragments import IntQuant, MaxStatsScaling, MinMaxStatsScaling, ShiftedMinUintQuant
from jqinject.quant.groupwise import (
    GroupwiseActFloatProxyMixin,
    GroupwiseActProxyMixin,
    GroupwiseWeightFloatProxyMixin,
    GroupwiseWeightProxyMixin,
)
from jqinject.quant.search import MSEAsymmetricScale, MSESymmetricScale, MSEWeightZeroPoint
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver


class RestrictThresholdMixin(ExtendedInjector):
    """How the largest number of the format becomes a power of two: rounded down."""

    restrict_value_float_to_int_impl = FloorSte
    restrict_scaling_impl = PowerOfTwoRestrictValue


class MXMixin(ExtendedInjector):
    """A power of two for each group of 32: the group's largest magnitude and the format's largest number, both rounded
    down to one, divided.

    With `restrict_value_float_to_int_impl = RoundMidMaxSte` minifloats are not clamped that would not round to the
    largest number.
    """

    threshold_mixin = RestrictThresholdMixin
    group_size = 32
    restrict_scaling_type = RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = FloorSte
    scaling_per_output_type = ScalingPerOutputType.GROUP

    @value
    def restrict_threshold_impl():
        return this.threshold_mixin.restrict_scaling_impl

    @value
    def midmax_mantissa_bit_bias(mantissa_bit_width: Any, nan_values: Any, inf_values: Any):
        return midmax_mantissa_bias(mantissa_bit_width, nan_values, inf_values)


class MXWeightMixin(MXMixin):
    """MX of weights: groups lie along the inputs, in a convolution the input channels; fewer than 32 are one group.

    A group never runs over two axes. So the kernel of a convolution of 3 input channels has a scale for every 3 numbers:
    in 4 bits with a byte for the scale that is 0.83 byte a number, where groups of 32 take 0.53.
    """


class MXActMixin(MXMixin):
    """MX of activations: groups lie along the features, of which fewer than 32 are one group; their scales are those of
    the tensor at hand."""

    scaling_impl = RuntimeDynamicGroupStatsScaling


class MXInt8Weight(MXWeightMixin, GroupwiseWeightProxyMixin, IntQuant, MaxStatsScaling, WeightQuantSolver):
    """8-bit signed weights, a power of two for each group of 32 inputs.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=MXInt8Weight, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale_.shape
        (2, 1, 4)
    """

    bit_width = 8


class ShiftedMXUInt8Weight(
    MXWeightMixin, GroupwiseWeightProxyMixin, ShiftedMinUintQuant, MinMaxStatsScaling, WeightQuantSolver
):
    """8-bit unsigned weights, a power of two and a zero point for each group of 32 inputs."""

    bit_width = 8


class MXInt8WeightMSE(MSESymmetricScale, MXInt8Weight):
    """8-bit signed weights; a learned power of two for each group, which starts where the squared error is least."""


class ShiftedMXUInt8WeightMSE(MSEAsymmetricScale, MSEWeightZeroPoint, ShiftedMXUInt8Weight):
    """8-bit unsigned weights; a learned power of two and zero point for each group, started likewise."""


class MXInt8Act(MXActMixin, GroupwiseActProxyMixin, IntQuant, MaxStatsScaling, ActQuantSolver):
    """8-bit signed activations, a power of two for each group of 32 features.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=MXInt8Act, return_quant_tensor=True)
        >>> identity(jnp.ones((2, 64))).scale_.shape
        (2, 2, 1)
    """

    bit_width = 8


class MXFloat8e4m3Weight(MXWeightMixin, GroupwiseWeightFloatProxyMixin, FpOCPWeight, ScaledFloatWeightBase):
    """e4m3 weights, a power of two for each group of 32 inputs.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=MXFloat8e4m3Weight, rngs=nnx.Rngs(0))
        >>> str(fc.quant_weight().format), fc.quant_weight().scale_.shape
        ('float8_e4m3fn', (2, 1, 4))
    """

    bit_width = 8
    exponent_bit_width = 4
    mantissa_bit_width = 3


class MXFloat8e4m3WeightMSE(MSESymmetricScale, MXFloat8e4m3Weight):
    """e4m3 weights; a learned power of two for each group, which starts where the squared error is least."""


class MXFloat8e5m2Weight(Fp8e5m2Mixin, MXFloat8e4m3Weight):
    """e5m2 weights, a power of two for each group of 32 inputs."""


class MXFloat6e3m2Weight(Fp6e3m2Mixin, MXFloat8e4m3Weight):
    """e3m2 weights (6 bits), a power of two for each group of 32 inputs."""


class MXFloat6e2m3Weight(Fp6e2m3Mixin, MXFloat8e4m3Weight):
    """e2m3 weights (6 bits), a power of two for each group of 32 inputs."""


class MXFloat4e2m1Weight(Fp4e2m1Mixin, MXFloat8e4m3Weight):
    """e2m1 weights (4 bits), a power of two for each group of 32 inputs."""


class MXFloat8e4m3Act(MXActMixin, GroupwiseActFloatProxyMixin, FpOCPAct, ScaledFloatActBase):
    """e4m3 activations, a power of two for each group of 32 features."""

    bit_width = 8
    exponent_bit_width = 4
    mantissa_bit_width = 3


class MXFloat8e5m2Act(Fp8e5m2Mixin, MXFloat8e4m3Act):
    """e5m2 activations, a power of two for each group of 32 features."""


class MXFloat6e3m2Act(Fp6e3m2Mixin, MXFloat8e4m3Act):
    """e3m2 activations (6 bits), a power of two for each group of 32 features."""


class MXFloat6e2m3Act(Fp6e2m3Mixin, MXFloat8e4m3Act):
    """e2m3 activations (6 bits), a power of two for each group of 32 features."""


class MXFloat4e2m1Act(Fp4e2m1Mixin, MXFloat8e4m3Act):
    """e2m1 activations (4 bits), a power of two for each group of 32 features."""
