"""Unsigned integers with a zero point: asymmetric quantization."""

from jqinject.quant.fragments import (
    HQOActZeroPoint,
    HQOWeightZeroPoint,
    MinMaxStatsScaling,
    MSEActZeroPoint,
    MSEAsymmetricScale,
    MSEWeightZeroPoint,
    ParamFromRuntimePercentileIntervalScaling,
    PerChannelFloatScaling8bit,
    PerTensorFloatScaling8bit,
    PerTensorPoTScaling8bit,
    ShiftedMinUintQuant,
    ShiftedParamFromPercentileUintQuant,
)
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver


class ShiftedUint8WeightPerTensorFloat(
    ShiftedMinUintQuant, MinMaxStatsScaling, PerTensorFloatScaling8bit, WeightQuantSolver
):
    """8-bit unsigned weights between the minimum and maximum of the whole tensor, zero point at the minimum."""


class ShiftedUint8WeightPerChannelFloat(
    ShiftedMinUintQuant, MinMaxStatsScaling, PerChannelFloatScaling8bit, WeightQuantSolver
):
    """8-bit unsigned weights between the minimum and maximum of each output channel."""


class ShiftedUint8ActPerTensorFloat(
    ShiftedParamFromPercentileUintQuant,
    ParamFromRuntimePercentileIntervalScaling,
    PerTensorFloatScaling8bit,
    ActQuantSolver,
):
    """8-bit unsigned activations; learned scale and zero point that start from two percentiles of x."""


class ShiftedUint8ActPerTensorFixedPoint(
    ShiftedParamFromPercentileUintQuant,
    ParamFromRuntimePercentileIntervalScaling,
    PerTensorPoTScaling8bit,
    ActQuantSolver,
):
    """8-bit unsigned activations; learned power-of-two scale and zero point that start from two percentiles of x."""


class ShiftedUint8WeightPerTensorFloatMSE(
    MSEAsymmetricScale, MSEWeightZeroPoint, ShiftedUint8WeightPerTensorFloat
):
    """8-bit unsigned weights; learned scale and zero point that start where the squared error is least."""


class ShiftedUint8WeightPerChannelFloatMSE(
    MSEAsymmetricScale, MSEWeightZeroPoint, ShiftedUint8WeightPerChannelFloat
):
    """8-bit unsigned weights; learned scale and zero point of each output channel, started likewise."""


class ShiftedUint8ActPerTensorFloatMSE(MSEAsymmetricScale, MSEActZeroPoint, ShiftedUint8ActPerTensorFloat):
    """8-bit unsigned activations; learned scale and zero point that start from those with the least squared error."""


class ShiftedUint8ActPerTensorFixedPointMSE(
    MSEAsymmetricScale, MSEActZeroPoint, ShiftedUint8ActPerTensorFixedPoint
):
    """8-bit unsigned activations; learned power-of-two scale and zero point, started likewise."""


class ShiftedUint8WeightPerTensorFloatHQO(HQOWeightZeroPoint, ShiftedUint8WeightPerTensorFloat):
    """8-bit unsigned weights; a learned zero point, not an integer, that starts from half-quadratic optimization."""

    quantize_zero_point = False


class ShiftedUint8WeightPerChannelFloatHQO(HQOWeightZeroPoint, ShiftedUint8WeightPerChannelFloat):
    """8-bit unsigned weights; a learned zero point of each output channel, not an integer, started likewise."""

    quantize_zero_point = False


class ShiftedUint8ActPerTensorFloatHQO(HQOActZeroPoint, ShiftedUint8ActPerTensorFloat):
    """8-bit unsigned activations; a learned zero point, not an integer, from half-quadratic optimization."""

    quantize_zero_point = False
