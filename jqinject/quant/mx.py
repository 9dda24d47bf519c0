"""OCP microscaling (MX): groups of 32 numbers that share a power of two as scale."""

from jqinject.core.restrict_val import PowerOfTwoRestrictValue
from jqinject.core.rounding import FloorSte
from jqinject.core.scaling import RuntimeDynamicGroupStatsScaling
from jqinject.inject import ExtendedInjector, this, value
from jqinject.inject.enum import RestrictValueType, ScalingPerOutputType
from jqinject.quant.fragments import IntQuant, MaxStatsScaling, MinMaxStatsScaling, ShiftedMinUintQuant
from jqinject.quant.groupwise import GroupwiseActProxyMixin, GroupwiseWeightProxyMixin
from jqinject.quant.search import MSEAsymmetricScale, MSESymmetricScale, MSEWeightZeroPoint
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver


class RestrictThresholdMixin(ExtendedInjector):
    """How the largest number of the format becomes a power of two: rounded down."""

    restrict_value_float_to_int_impl = FloorSte
    restrict_scaling_impl = PowerOfTwoRestrictValue


class MXMixin(ExtendedInjector):
    """A power of two for each group of 32: the group's largest magnitude and the format's largest number, both rounded
    down to one, divided."""

    threshold_mixin = RestrictThresholdMixin
    group_size = 32
    restrict_scaling_type = RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = FloorSte
    scaling_per_output_type = ScalingPerOutputType.GROUP

    @value
    def restrict_threshold_impl():
        return this.threshold_mixin.restrict_scaling_impl


class MXWeightMixin(MXMixin):
    """MX of weights: groups lie along the inputs."""


class MXActMixin(MXMixin):
    """MX of activations: groups lie along the features, and their scales are those of the tensor at hand."""

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
