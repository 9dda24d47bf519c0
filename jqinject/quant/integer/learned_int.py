"""Weights and activations whose steps are learned beside the weights, from the mean magnitude on: LSQ."""

from jqinject.quant.fragments import (
    IntQuant,
    LearnedStepFromInput,
    LearnedStepFromWeight,
    PerChannelFloatScaling8bit,
    PerTensorFloatScaling8bit,
    UintQuant,
)
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver


class Int8WeightPerChannelLearned(
    IntQuant, LearnedStepFromWeight, PerChannelFloatScaling8bit, WeightQuantSolver
):
    """8-bit signed weights, a learned step for each output channel: LSQ.

    A step starts at 2 mean |w| / sqrt(127), from the weight at the first call in training mode, and its gradient is
    multiplied by 1 / sqrt(N 127), where N weights share it. Integers are -128 .. 127. One step for the whole weight, as
    in the paper: `scaling_per_output_type = "tensor"`. Another factor of the gradient: `scaling_gradient_scale`.

    Recipe: load the float weights, then fine-tune steps and weights by one optimizer, at about a tenth of the float
    model's learning rate, with a cosine schedule, weight decay halved at 3 bits and quartered at 2; the first and the
    last layer keep 8 bits.

    Differs from `Int8WeightPerChannelFloatMSE`, which learns 127 times the step, without a factor.

    Source: Esser et al., Learned Step Size Quantization, 2020.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> import jax.numpy as jnp
        >>> fc = QuantLinear(8, 4, weight_quant=Int8WeightPerChannelLearned, rngs=nnx.Rngs(0))
        >>> y = fc(jnp.ones((1, 8)))  # fills the steps
        >>> step = fc.weight_quant.tensor_quant.scaling_impl.value
        >>> bool(jnp.allclose(step[...], 2 * jnp.abs(fc.kernel[...]).mean(0) / 127**0.5))
        True
    """


class Int4WeightPerChannelLearned(Int8WeightPerChannelLearned):
    """4-bit signed weights, a learned step for each output channel: LSQ. Recipe: see `Int8WeightPerChannelLearned`."""

    bit_width = 4


class Int2WeightPerChannelLearned(Int8WeightPerChannelLearned):
    """2-bit signed weights, -2 .. 1 times a learned step for each output channel: LSQ. Recipe: see
    `Int8WeightPerChannelLearned`."""

    bit_width = 2


class Int8ActPerTensorLearned(IntQuant, LearnedStepFromInput, PerTensorFloatScaling8bit, ActQuantSolver):
    """8-bit signed activations, one learned step: LSQ.

    The step starts at 2 mean |x| / sqrt(127), of the batches of `jqinject.calibrate`, or else of the first one in
    training (`collect_stats_steps` of them), and its gradient is multiplied by 1 / sqrt(N 127), where an example has N
    numbers. Integers are -128 .. 127. Another factor of the gradient: `scaling_gradient_scale`. Recipe: see
    `Int8WeightPerChannelLearned`.

    Differs from `Int8ActPerTensorFloat`, which learns 127 times the step, without a factor, from a percentile on.

    Source: Esser et al., Learned Step Size Quantization, 2020.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> act = QuantIdentity(act_quant=Int8ActPerTensorLearned)
        >>> y = act(jnp.array([[1.0, -3.0]]))  # fills the step
        >>> bool(jnp.isclose(act.act_quant.scale(), 2 * 2 / 127**0.5))
        True
    """


class Int4ActPerTensorLearned(Int8ActPerTensorLearned):
    """4-bit signed activations, one learned step: LSQ. See `Int8ActPerTensorLearned`."""

    bit_width = 4


class Uint8ActPerTensorLearned(UintQuant, LearnedStepFromInput, PerTensorFloatScaling8bit, ActQuantSolver):
    """8-bit unsigned activations (after a ReLU), 0 .. 255 times one learned step: LSQ.

    See `Int8ActPerTensorLearned`.
    """


class Uint4ActPerTensorLearned(Uint8ActPerTensorLearned):
    """4-bit unsigned activations (after a ReLU), 0 .. 15 times one learned step: LSQ. See `Int8ActPerTensorLearned`."""

    bit_width = 4
