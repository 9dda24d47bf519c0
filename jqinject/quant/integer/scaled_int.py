"""Integers whose scale comes from statistics: float or power of two, with or without zero point, in groups; biases."""

from jqinject import core
from jqinject.quant.fragments import (
    BatchQuantStatsScaling1d,
    BatchQuantStatsScaling2d,
    FullIntQuant,
    HQOActZeroPoint,
    HQOSymmetricScale,
    HQOWeightZeroPoint,
    MaxStatsScaling,
    MinMaxStatsScaling,
    MSEActZeroPoint,
    MSEAsymmetricScale,
    MSESymmetricScale,
    MSEWeightZeroPoint,
    NarrowIntQuant,
    ParamFromRuntimePercentileIntervalScaling,
    ParamFromRuntimePercentileScaling,
    ParamMinMaxInitScaling,
    PerChannelFloatScaling8bit,
    PerChannelPoTScaling8bit,
    PerGroupFloatScaling8bit,
    PerTensorFloatScaling8bit,
    PerTensorPoTScaling8bit,
    ShiftedMinUintQuant,
    ShiftedParamFromPercentileUintQuant,
    UintQuant,
)
from jqinject.quant.solver import ActQuantSolver, BiasQuantSolver, WeightQuantSolver


class MaxStatsWeight(NarrowIntQuant, MaxStatsScaling, WeightQuantSolver):
    """Narrow signed weights, scale = max |w| / largest integer; a fragment says of which elements and which scales."""


class Int8WeightPerTensorFloat(NarrowIntQuant, MaxStatsScaling, PerTensorFloatScaling8bit, WeightQuantSolver):
    """8-bit narrow signed weights, scale = max |w| / 127 of the whole tensor, recomputed at every forward.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().int().dtype
        dtype('int8')
    """


class Int8WeightPerChannelFloat(PerChannelFloatScaling8bit, MaxStatsWeight):
    """8-bit narrow signed weights, scale = max |w| / 127 of each output channel, recomputed at every forward.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale.shape
        (1, 4)
    """


class Int8ActPerTensorFloat(
    FullIntQuant, ParamFromRuntimePercentileScaling, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit signed activations, a learned scale that starts from the 99.999th percentile of |x|.

    For the first `collect_stats_steps` (300) training batches the batch's own percentile sets the scale while its
    moving average is kept; then the average becomes a learned parameter. In eval mode the average is used meanwhile.
    """


class Uint8ActPerTensorFloat(UintQuant, Int8ActPerTensorFloat):
    """8-bit unsigned activations (after a ReLU), a learned scale that starts from the 99.999th percentile of |x|."""


class Int8ActPerTensorFloatMinMaxInit(
    FullIntQuant, ParamMinMaxInitScaling, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit signed activations, a learned scale that starts from `min_val` and `max_val`, which you declare."""


class Uint8ActPerTensorFloatMaxInit(UintQuant, Int8ActPerTensorFloatMinMaxInit):
    """8-bit unsigned activations, a learned scale that starts from `max_val`, which you declare."""

    min_val = 0.0


class Int8ActPerTensorFloatBatchQuant1d(
    FullIntQuant, BatchQuantStatsScaling1d, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit signed activations, scaled by the average over batches of the mean channel maximum; sequences."""


class Int8ActPerTensorFloatBatchQuant2d(BatchQuantStatsScaling2d, Int8ActPerTensorFloatBatchQuant1d):
    """8-bit signed activations, scaled by the average over batches of the mean channel maximum; images."""


class Uint8ActPerTensorFloatBatchQuant1d(UintQuant, Int8ActPerTensorFloatBatchQuant1d):
    """8-bit unsigned activations, scaled by the average over batches of the mean channel maximum; sequences."""


class Uint8ActPerTensorFloatBatchQuant2d(UintQuant, Int8ActPerTensorFloatBatchQuant2d):
    """8-bit unsigned activations, scaled by the average over batches of the mean channel maximum; images."""


class IntBias(FullIntQuant, BiasQuantSolver):
    """Signed biases in the steps of the accumulator: scale = input scale * weight scale. Declare `bit_width`."""

    tensor_clamp_impl = core.TensorClamp
    requires_input_scale = True


class Int8Bias(IntBias):
    """8-bit biases in the steps of the accumulator."""

    bit_width = 8


class Int16Bias(IntBias):
    """16-bit biases in the steps of the accumulator."""

    bit_width = 16


class Int24Bias(IntBias):
    """24-bit biases in the steps of the accumulator."""

    bit_width = 24


class Int32Bias(IntBias):
    """32-bit biases in the steps of the accumulator."""

    bit_width = 32


class Int8BiasPerTensorFloatInternalScaling(
    FullIntQuant, MaxStatsScaling, PerTensorFloatScaling8bit, BiasQuantSolver
):
    """8-bit biases with a scale of their own, max |b| / 128."""

    requires_input_scale = False


class Int8WeightPerTensorFloatMSE(MSESymmetricScale, Int8WeightPerTensorFloat):
    """8-bit narrow signed weights, a learned scale that starts where the squared error is least."""


class Int8WeightPerChannelFloatMSE(MSESymmetricScale, Int8WeightPerChannelFloat):
    """8-bit narrow signed weights, a learned scale of each output channel that starts at the least squared error."""


class Int8ActPerTensorFloatMSE(MSESymmetricScale, Int8ActPerTensorFloat):
    """8-bit signed activations, a learned scale that starts from those with the least squared error in each batch."""


class Uint8ActPerTensorFloatMSE(MSESymmetricScale, Uint8ActPerTensorFloat):
    """8-bit unsigned activations, a learned scale that starts from those with the least squared error."""


class Int8WeightPerTensorFloatHQO(HQOSymmetricScale, Int8WeightPerTensorFloat):
    """8-bit narrow signed weights, a learned scale that starts from half-quadratic optimization."""


class Int8WeightPerChannelFloatHQO(HQOSymmetricScale, Int8WeightPerChannelFloat):
    """8-bit narrow signed weights, a learned scale of each output channel from half-quadratic optimization."""


class Int8WeightPerTensorFixedPoint(PerTensorPoTScaling8bit, MaxStatsWeight):
    """8-bit narrow signed weights, scale = 2^ceil(log2(max |w|)) / 128 of the whole tensor."""


class Int8WeightPerChannelFixedPoint(
    NarrowIntQuant, MaxStatsScaling, PerChannelPoTScaling8bit, WeightQuantSolver
):
    """8-bit narrow signed weights, scale = 2^ceil(log2(max |w|)) / 128 of each output channel."""


class Int8ActPerTensorFixedPoint(
    FullIntQuant, ParamFromRuntimePercentileScaling, PerTensorPoTScaling8bit, ActQuantSolver
):
    """8-bit signed activations, a learned power-of-two scale that starts from the 99.999th percentile of |x|."""


class Int8ActPerTensorFixedPointMinMaxInit(PerTensorPoTScaling8bit, Int8ActPerTensorFloatMinMaxInit):
    """8-bit signed activations, a learned power-of-two scale that starts from `min_val` and `max_val`."""


class Uint8ActPerTensorFixedPoint(UintQuant, Int8ActPerTensorFixedPoint):
    """8-bit unsigned activations, a learned power-of-two scale that starts from the 99.999th percentile of |x|."""


class Uint8ActPerTensorFixedPointMaxInit(UintQuant, Int8ActPerTensorFixedPointMinMaxInit):
    """8-bit unsigned activations, a learned power-of-two scale that starts from `max_val`."""

    min_val = 0.0


class Int8BiasPerTensorFixedPointInternalScaling(
    PerTensorPoTScaling8bit, Int8BiasPerTensorFloatInternalScaling
):
    """8-bit biases with a power-of-two scale of their own."""


class Int8WeightPerTensorFixedPointMSE(MSESymmetricScale, Int8WeightPerTensorFixedPoint):
    """8-bit narrow signed weights, a learned power-of-two scale that starts where the squared error is least."""


class Int8WeightPerChannelFixedPointMSE(MSESymmetricScale, Int8WeightPerChannelFixedPoint):
    """8-bit narrow signed weights, a learned power-of-two scale of each output channel, started likewise."""


class Int8ActPerTensorFixedPointMSE(MSESymmetricScale, Int8ActPerTensorFixedPoint):
    """8-bit signed activations, a learned power-of-two scale that starts from those with the least squared error."""


class Uint8ActPerTensorFixedPointMSE(MSESymmetricScale, Uint8ActPerTensorFixedPoint):
    """8-bit unsigned activations, a learned power-of-two scale that starts from those with the least squared error."""


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


class IntWeightSymmetricGroupQuant(PerGroupFloatScaling8bit, MaxStatsWeight):
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
