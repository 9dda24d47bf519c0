"""Unsigned integers with a zero point: asymmetric quantization."""

from jqinject.quant.fragments import (
    MinMaxStatsScaling,
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
