"""Integers with a float scale: weights, activations and biases."""

from jqinject.core.clamp import TensorClamp
from jqinject.quant.fragments import (
    BatchQuantStatsScaling1d,
    BatchQuantStatsScaling2d,
    HQOSymmetricScale,
    IntQuant,
    MaxStatsScaling,
    MSESymmetricScale,
    NarrowIntQuant,
    ParamFromRuntimePercentileScaling,
    ParamMinMaxInitScaling,
    PerChannelFloatScaling8bit,
    PerTensorFloatScaling8bit,
    UintQuant,
)
from jqinject.quant.solver import ActQuantSolver, BiasQuantSolver, WeightQuantSolver


class Int8WeightPerTensorFloat(NarrowIntQuant, MaxStatsScaling, PerTensorFloatScaling8bit, WeightQuantSolver):
    """8-bit narrow signed weights, scale = max |w| / 127 of the whole tensor, recomputed at every forward.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().int().dtype
        dtype('int8')
    """


class Int8WeightPerChannelFloat(
    NarrowIntQuant, MaxStatsScaling, PerChannelFloatScaling8bit, WeightQuantSolver
):
    """8-bit narrow signed weights, scale = max |w| / 127 of each output channel, recomputed at every forward.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale.shape
        (1, 4)
    """


class Int8ActPerTensorFloat(
    IntQuant, ParamFromRuntimePercentileScaling, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit signed activations, a learned scale that starts from the 99.999th percentile of |x|.

    For the first `collect_stats_steps` (300) training batches the batch's own percentile sets the scale while its
    moving average is kept; then the average becomes a learned parameter. In eval mode the average is used meanwhile.
    """


class Uint8ActPerTensorFloat(
    UintQuant, ParamFromRuntimePercentileScaling, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit unsigned activations (after a ReLU), a learned scale that starts from the 99.999th percentile of |x|."""


class Int8ActPerTensorFloatMinMaxInit(
    IntQuant, ParamMinMaxInitScaling, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit signed activations, a learned scale that starts from `min_val` and `max_val`, which you declare."""


class Uint8ActPerTensorFloatMaxInit(
    UintQuant, ParamMinMaxInitScaling, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit unsigned activations, a learned scale that starts from `max_val`, which you declare."""

    min_val = 0.0


class Int8ActPerTensorFloatBatchQuant1d(
    IntQuant, BatchQuantStatsScaling1d, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit signed activations, scaled by the average over batches of the mean channel maximum; sequences."""


class Int8ActPerTensorFloatBatchQuant2d(
    IntQuant, BatchQuantStatsScaling2d, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit signed activations, scaled by the average over batches of the mean channel maximum; images."""


class Uint8ActPerTensorFloatBatchQuant1d(
    UintQuant, BatchQuantStatsScaling1d, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit unsigned activations, scaled by the average over batches of the mean channel maximum; sequences."""


class Uint8ActPerTensorFloatBatchQuant2d(
    UintQuant, BatchQuantStatsScaling2d, PerTensorFloatScaling8bit, ActQuantSolver
):
    """8-bit unsigned activations, scaled by the average over batches of the mean channel maximum; images."""


class IntBias(IntQuant, BiasQuantSolver):
    """Signed biases in the steps of the accumulator: scale = input scale * weight scale. Declare `bit_width`."""

    tensor_clamp_impl = TensorClamp
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
    IntQuant, MaxStatsScaling, PerTensorFloatScaling8bit, BiasQuantSolver
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
