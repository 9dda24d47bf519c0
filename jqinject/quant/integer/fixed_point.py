"""Integers with a power-of-two scale: fixed point."""

from jqinject.quant.fragments import (
    IntQuant,
    MaxStatsScaling,
    MSESymmetricScale,
    NarrowIntQuant,
    ParamFromRuntimePercentileScaling,
    ParamMinMaxInitScaling,
    PerChannelPoTScaling8bit,
    PerTensorPoTScaling8bit,
    UintQuant,
)
from jqinject.quant.solver import ActQuantSolver, BiasQuantSolver, WeightQuantSolver


class Int8WeightPerTensorFixedPoint(
    NarrowIntQuant, MaxStatsScaling, PerTensorPoTScaling8bit, WeightQuantSolver
):
    """8-bit narrow signed weights, scale = 2^ceil(log2(max |w|)) / 128 of the whole tensor."""


class Int8WeightPerChannelFixedPoint(
    NarrowIntQuant, MaxStatsScaling, PerChannelPoTScaling8bit, WeightQuantSolver
):
    """8-bit narrow signed weights, scale = 2^ceil(log2(max |w|)) / 128 of each output channel."""


class Int8ActPerTensorFixedPoint(
    IntQuant, ParamFromRuntimePercentileScaling, PerTensorPoTScaling8bit, ActQuantSolver
):
    """8-bit signed activations, a learned power-of-two scale that starts from the 99.999th percentile of |x|."""


class Int8ActPerTensorFixedPointMinMaxInit(
    IntQuant, ParamMinMaxInitScaling, PerTensorPoTScaling8bit, ActQuantSolver
):
    """8-bit signed activations, a learned power-of-two scale that starts from `min_val` and `max_val`."""


class Uint8ActPerTensorFixedPoint(
    UintQuant, ParamFromRuntimePercentileScaling, PerTensorPoTScaling8bit, ActQuantSolver
):
    """8-bit unsigned activations, a learned power-of-two scale that starts from the 99.999th percentile of |x|."""


class Uint8ActPerTensorFixedPointMaxInit(
    UintQuant, ParamMinMaxInitScaling, PerTensorPoTScaling8bit, ActQuantSolver
):
    """8-bit unsigned activations, a learned power-of-two scale that starts from `max_val`."""

    min_val = 0.0


class Int8BiasPerTensorFixedPointInternalScaling(
    IntQuant, MaxStatsScaling, PerTensorPoTScaling8bit, BiasQuantSolver
):
    """8-bit biases with a power-of-two scale of their own."""

    requires_input_scale = False


class Int8WeightPerTensorFixedPointMSE(MSESymmetricScale, Int8WeightPerTensorFixedPoint):
    """8-bit narrow signed weights, a learned power-of-two scale that starts where the squared error is least."""


class Int8WeightPerChannelFixedPointMSE(MSESymmetricScale, Int8WeightPerChannelFixedPoint):
    """8-bit narrow signed weights, a learned power-of-two scale of each output channel, started likewise."""


class Int8ActPerTensorFixedPointMSE(MSESymmetricScale, Int8ActPerTensorFixedPoint):
    """8-bit signed activations, a learned power-of-two scale that starts from those with the least squared error."""


class Uint8ActPerTensorFixedPointMSE(MSESymmetricScale, Uint8ActPerTensorFixedPoint):
    """8-bit unsigned activations, a learned power-of-two scale that starts from those with the least squared error."""
