"""Integers with a scale for each group: fragments, and weights with float scales."""

from jqinject.inject import ExtendedInjector
from jqinject.inject.enum import ScalingPerOutputType
from jqinject.proxy import (
    GroupwiseActFloatQuantProxyFromInjector,
    GroupwiseActQuantProxyFromInjector,
    GroupwiseWeightFloatQuantProxyFromInjector,
    GroupwiseWeightQuantProxyFromInjector,
)
from jqinject.quant.scaled_int import Int8WeightPerChannelFloat
from jqinject.quant.search import MSEAsymmetricScale, MSESymmetricScale, MSEWeightZeroPoint
from jqinject.quant.shifted_scaled_int import (
    ShiftedUint8WeightPerChannelFloat,
    ShiftedUint8WeightPerChannelFloatHQO,
)


class GroupwiseWeightProxyMixin(ExtendedInjector):
    """The proxy of weights in groups of integers."""

    proxy_class = GroupwiseWeightQuantProxyFromInjector


class GroupwiseActProxyMixin(ExtendedInjector):
    """The proxy of activations in groups of integers."""

    proxy_class = GroupwiseActQuantProxyFromInjector


class GroupwiseWeightFloatProxyMixin(ExtendedInjector):
    """The proxy of weights in groups of minifloats."""

    proxy_class = GroupwiseWeightFloatQuantProxyFromInjector


class GroupwiseActFloatProxyMixin(ExtendedInjector):
    """The proxy of activations in groups of minifloats."""

    proxy_class = GroupwiseActFloatQuantProxyFromInjector


class IntWeightSymmetricGroupQuant(GroupwiseWeightProxyMixin, Int8WeightPerChannelFloat):
    """Narrow signed weights, scale = max |w| / 127 of each group of `group_size` inputs; 8 bits unless declared.

    Declare `group_size`.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(
        ...     64, 4, weight_quant=IntWeightSymmetricGroupQuant, weight_group_size=32, weight_bit_width=4,
        ...     rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale_.shape, fc.quant_weight().bit_width
        ((2, 1, 4), 4)
    """

    scaling_per_output_type = ScalingPerOutputType.GROUP


class IntWeightSymmetricGroupQuantMSE(MSESymmetricScale, IntWeightSymmetricGroupQuant):
    """Narrow signed weights; a learned scale for each group, which starts where the squared error is least."""


class ShiftedUint8WeightGroupQuantFloat(GroupwiseWeightProxyMixin, ShiftedUint8WeightPerChannelFloat):
    """8-bit unsigned weights between the minimum and maximum of each group of `group_size` inputs.

    Declare `group_size`.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(
        ...     64, 4, weight_quant=ShiftedUint8WeightGroupQuantFloat, weight_group_size=16, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().zero_point_.shape
        (4, 1, 4)
    """

    scaling_per_output_type = ScalingPerOutputType.GROUP


class ShiftedUint8WeightGroupQuantFloatMSE(
    MSEAsymmetricScale, MSEWeightZeroPoint, ShiftedUint8WeightGroupQuantFloat
):
    """8-bit unsigned weights; learned scale and zero point for each group, which start where the squared error is
    least."""


class ShiftedUint8WeightPerGroupFloatHQO(GroupwiseWeightProxyMixin, ShiftedUint8WeightPerChannelFloatHQO):
    """8-bit unsigned weights; a learned zero point (no integer) for each group of 32 inputs, which starts from
    half-quadratic optimization."""

    group_size = 32
    scaling_per_output_type = ScalingPerOutputType.GROUP
