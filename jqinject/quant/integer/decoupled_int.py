"""Weights that are rounded by one scale and rescaled by another: decoupled, weight-normalized, accumulator-aware."""

from jqinject.core.rounding import CeilSte
from jqinject.core.scaling.number_range import PowerOfTwoIntScaling
from jqinject.core.scaling.rule import PowerOfTwoRestrictValue
from jqinject.quant.fragments import (
    AccumulatorAwareWeightQuant,
    AccumulatorAwareZeroCenterWeightQuant,
    WeightNormPerChannelFloatDecoupled,
    WeightPerChannelFloatDecoupled,
    WeightPerTensorFloatDecoupledL2Param,
)


class Int4WeightPerTensorFloatDecoupled(WeightPerTensorFloatDecoupledL2Param):
    """4-bit narrow signed weights: rounded by the l2-norm of the channel maxima, rescaled by a learned scale.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, weight_quant=Int4WeightPerTensorFloatDecoupled, rngs=nnx.Rngs(0))
        >>> bool(fc.weight_quant.pre_scale() == fc.weight_quant.scale())  # until the scale is trained
        True
    """

    bit_width = 4


class Int4WeightPerTensorFixedPointDecoupled(WeightPerTensorFloatDecoupledL2Param):
    """4-bit narrow signed weights as `Int4WeightPerTensorFloatDecoupled`, with power-of-two scales, rounded up."""

    bit_width = 4
    restrict_scaling_impl = PowerOfTwoRestrictValue
    int_scaling_impl = PowerOfTwoIntScaling
    restrict_value_float_to_int_impl = CeilSte


class Int8WeightPerChannelFloatDecoupled(WeightPerChannelFloatDecoupled):
    """8-bit narrow signed weights: rounded by max |w| of each output channel, rescaled by a learned scale."""

    bit_width = 8


class Int8WeightNormL2PerChannelFixedPoint(WeightNormPerChannelFloatDecoupled):
    """8-bit narrow signed weights, normalized by their l2-norm; learned norm and scale of each output channel.

    Its scales are floats: the name is Brevitas's.
    """

    bit_width = 8


class Int8AccumulatorAwareWeightQuant(AccumulatorAwareWeightQuant):
    """8-bit narrow signed weights so small that no accumulator of `accumulator_bit_width` bits (32) overflows: A2Q.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> from jqinject.quant import Int8ActPerTensorFloat
        >>> fc = QuantLinear(
        ...     64, 4, weight_quant=Int8AccumulatorAwareWeightQuant, weight_accumulator_bit_width=16,
        ...     input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
        >>> worst = abs(fc.quant_weight().int()).sum(axis=0) * 128  # inputs are -128 .. 127
        >>> bool((worst <= 2**15 - 1).all())
        True
    """

    bit_width = 8


class Int8AccumulatorAwareZeroCenterWeightQuant(AccumulatorAwareZeroCenterWeightQuant):
    """8-bit narrow signed weights, centered on 0, so small that no accumulator of `accumulator_bit_width` bits (32)
    overflows: A2Q+."""

    bit_width = 8
