"""Weights as integers with a float scale for each group."""

from jqinject.quant.fragments import (
    HQOWeightZeroPoint,
    MaxStatsScaling,
    MinMaxStatsScaling,
    MSEAsymmetricScale,
    MSESymmetricScale,
    MSEWeightZeroPoint,
    NarrowIntQuant,
    PerGroupFloatScaling8bit,
    ShiftedMinUintQuant,
)
from jqinject.quant.solver import WeightQuantSolver


class IntWeightSymmetricGroupQuant(
    NarrowIntQuant, MaxStatsScaling, PerGroupFloatScaling8bit, WeightQuantSolver
):
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


class IntWeightSymmetricGroupQuantMSE(MSESymmetricScale, IntWeightSymmetricGroupQuant):
    """Narrow signed weights; a learned scale for each group, which starts where the squared error is least."""


class ShiftedUint8WeightGroupQuantFloat(
    ShiftedMinUintQuant, MinMaxStatsScaling, PerGroupFloatScaling8bit, WeightQuantSolver
):
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


class ShiftedUint8WeightGroupQuantFloatMSE(
    MSEAsymmetricScale, MSEWeightZeroPoint, ShiftedUint8WeightGroupQuantFloat
):
    """8-bit unsigned weights; learned scale and zero point for each group, which start where the squared error is
    least."""


class ShiftedUint8WeightPerGroupFloatHQO(HQOWeightZeroPoint, ShiftedUint8WeightGroupQuantFloat):
    """8-bit unsigned weights; a learned zero point (not an integer) for each group of 32 inputs, which starts from
    half-quadratic optimization."""

    group_size = 32
    quantize_zero_point = False
