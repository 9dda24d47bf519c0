"""Integers with scales of the current tensor (dynamic), learned steps (LSQ), two and three values, fewer bits of sums.

Of dynamic scales nothing is kept, in training or evaluation; names and numbers are those of Brevitas's examples for
language models.
"""

from jqinject import core
from jqinject.quant import enums
from jqinject.quant.fragments import (
    DynamicPerGroup,
    DynamicPerRow,
    FullIntQuant,
    LearnedStepFromInput,
    LearnedStepFromWeight,
    NarrowIntQuant,
    ParamFromRuntimePercentileScaling,
    PerChannelFloatScaling8bit,
    PerTensorConstScaling2bit,
    PerTensorFloatScaling8bit,
    PerTensorPoTScaling8bit,
    SignedBinaryClampedConst,
    UintQuant,
)
from jqinject.quant.integer.scaled_int import Int8ActPerTensorFloat, ShiftedUint8ActPerTensorFloat
from jqinject.quant.solver import ActQuantSolver, TruncQuantSolver, WeightQuantSolver


class Int8DynamicActPerTensorFloat(Int8ActPerTensorFloat):
    """8-bit signed activations, scale = max |x| / 128 of the tensor.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=Int8DynamicActPerTensorFloat, return_quant_tensor=True)
        >>> [float(identity(jnp.array([1.0, -x])).scale) for x in (128.0, 2.0)]
        [1.0, 0.015625]
    """

    scaling_impl = core.RuntimeDynamicStatsScaling
    scaling_stats_op = enums.StatsOp.MAX


class Int8DynamicActPerRowFloat(DynamicPerRow, Int8DynamicActPerTensorFloat):
    """8-bit signed activations, scale = max |x| / 128 of each row (the last axis)."""


class Int8DynamicActPerRowFixedPoint(Int8DynamicActPerRowFloat):
    """8-bit signed activations, a power of two for each row: max |x| rounded down to one, / 128."""

    restrict_scaling_type = enums.RestrictValueType.POWER_OF_TWO
    restrict_value_float_to_int_impl = core.FloorSte


class Int8DynamicActPerGroupFloat(DynamicPerGroup, Int8ActPerTensorFloat):
    """8-bit signed activations, scale = max |x| / 128 of each group of `group_size` features, which you declare.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=Int8DynamicActPerGroupFloat, group_size=2, return_quant_tensor=True)
        >>> identity(jnp.array([128.0, -1.0, 0.5, 64.0])).scale_.tolist()
        [[1.0], [0.5]]
    """

    scaling_stats_op = enums.StatsOp.MAX


class ShiftedUint8DynamicActPerTensorFloat(ShiftedUint8ActPerTensorFloat):
    """8-bit unsigned activations between the tensor's minimum and maximum."""

    scaling_impl = core.RuntimeDynamicStatsScaling
    scaling_stats_op = enums.StatsOp.MIN_MAX
    zero_point_impl = core.RuntimeDynamicStatsZeroPoint
    zero_point_stats_impl = core.NegativeMinOrZero


class ShiftedUint8DynamicActPerRowFloat(DynamicPerRow, ShiftedUint8DynamicActPerTensorFloat):
    """8-bit unsigned activations between the minimum and maximum of each row (the last axis)."""


class ShiftedUint8DynamicActPerGroupFloat(DynamicPerGroup, ShiftedUint8ActPerTensorFloat):
    """8-bit unsigned activations between the minimum and maximum of each group of `group_size` features.

    Differs from Brevitas: there, zero points are cut into groups a second time, and the result has another shape.
    """

    scaling_stats_op = enums.StatsOp.MIN_MAX
    zero_point_impl = core.RuntimeDynamicGroupZeroPoint
    zero_point_stats_impl = core.NegativeMinOrZero


class Int8WeightPerChannelLearned(
    FullIntQuant, LearnedStepFromWeight, PerChannelFloatScaling8bit, WeightQuantSolver
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


class Int8ActPerTensorLearned(FullIntQuant, LearnedStepFromInput, PerTensorFloatScaling8bit, ActQuantSolver):
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


class SignedBinaryWeightPerTensorConst(SignedBinaryClampedConst, WeightQuantSolver):
    """-0.1 or 0.1 by the sign of the weight; the gradient passes straight through.

    differs from Brevitas: there the forward pass clamps the weight itself in place; here the weight is left alone, and
    the quantized values and gradients are the same.
    """

    tensor_clamp_impl = core.TensorClampSte
    scaling_const = 0.1


class SignedBinaryActPerTensorConst(SignedBinaryClampedConst, ActQuantSolver):
    """-1 or 1 by the sign of the activation; no gradient outside [-1, 1]."""

    tensor_clamp_impl = core.TensorClamp
    min_val = -1.0
    max_val = 1.0


class SignedTernaryWeightPerTensorConst(NarrowIntQuant, PerTensorConstScaling2bit, WeightQuantSolver):
    """-0.1, 0 or 0.1: narrow 2-bit integers with a constant scale, rounded to the nearest.

    This is not `core.quant.TernaryQuant`, whose threshold is a choice: declare `quant_type = "ternary"` and `threshold`
    for that one.
    """

    tensor_clamp_impl = core.TensorClampSte
    scaling_const = 0.1


class SignedTernaryActPerTensorConst(NarrowIntQuant, PerTensorConstScaling2bit, ActQuantSolver):
    """-1, 0 or 1: narrow 2-bit integers with a constant scale; no gradient outside [-1, 1]."""

    tensor_clamp_impl = core.TensorClamp
    min_val = -1.0
    max_val = 1.0


class _To8bit(TruncQuantSolver):
    """8-bit integers from integers of more bits."""

    bit_width = 8
    quant_type = enums.QuantType.INT
    bit_width_impl_type = enums.BitWidthImplType.CONST


class TruncTo8bit(_To8bit):
    """The 8 most significant bits: `floor(q / 2**(b - 8))`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import IntQuantTensor
        >>> from jqinject.nn import TruncAvgPool2d
        >>> x = IntQuantTensor.from_int(jnp.array([3, 0, 0, 0]).reshape(1, 2, 2, 1), 1.0, signed=False)
        >>> TruncAvgPool2d((2, 2), trunc_quant=TruncTo8bit)(x).int().ravel()
        Array([0], dtype=uint8)
    """

    float_to_int_impl_type = enums.FloatToIntImplType.FLOOR
    trunc_scaling_impl_type = enums.TruncScalingImplType.MSB


class RoundTo8bit(TruncTo8bit):
    """The 8 most significant bits, rounded: `round(q / 2**(b - 8))`, ties to even.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject import IntQuantTensor
        >>> from jqinject.nn import TruncAvgPool2d
        >>> x = IntQuantTensor.from_int(jnp.array([3, 0, 0, 0]).reshape(1, 2, 2, 1), 1.0, signed=False)
        >>> TruncAvgPool2d((2, 2), trunc_quant=RoundTo8bit)(x).int().ravel()
        Array([1], dtype=uint8)
    """

    float_to_int_impl_type = enums.FloatToIntImplType.ROUND


class ShiftRoundSaturateTo8bit(_To8bit, ParamFromRuntimePercentileScaling, PerTensorPoTScaling8bit):
    """Shifted right by a learned number of bits that starts from the 99.999th percentile of |q|, rounded, saturated."""

    float_to_int_impl_type = enums.FloatToIntImplType.ROUND
    trunc_scaling_impl_type = enums.TruncScalingImplType.WRAPPER
