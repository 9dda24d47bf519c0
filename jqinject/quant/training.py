"""Schemes of training: int8, FP8, MXFP8, MXFP4 and NVFP4, and the quantizers of their operands.

FP8 has scales for a tensor, a row or a block: TransformerEngine's recipes and DeepSeek's blocks. MX has blocks of 32
along what each product sums over, so every operand is quantized for its product.

Source: Open Compute Project, "Microscaling Formats (MX)" 1.0; NVIDIA TransformerEngine's `MXFP8BlockScaling`, whose
codes and scales these are; NVIDIA, "Pretraining Large Language Models with NVFP4", 2025.
"""

import jax.numpy as jnp

from jqinject import core, dot
from jqinject.dot.schemes.scheme import Kept
from jqinject.inject import ExtendedInjector, this, value
from jqinject.quant import aqt, enums, float_base, fragments, solver
from jqinject.quant.minifloat import blocks, float8


class StraightThrough(ExtendedInjector):
    """Gradients pass unchanged, numbers and infinities saturate, the payload is kept."""

    straight_through = True
    float_clamp_impl = core.FloatSaturate


class BlockTraining(StraightThrough, float_base.FpOCPMixin, float_base.FloatBase):
    """Minifloats in blocks with a scale for each, from its largest magnitude; declare the format."""

    scaling_per_output_type = enums.ScalingPerOutputType.GROUP
    scaling_impl_type = enums.ScalingImplType.STATS
    float_scaling_impl = core.FloatScaling


class MXTraining(BlockTraining):
    """Blocks of 32, a power of two for each, rounded up so that nothing saturates; declare the format.

    `scale_rounding` rounds otherwise: `"floor"`, `"ceil"`, `"even"`.
    """

    group_size = 32
    scaling_impl = core.SharedExponentScaling
    scale_rounding = enums.ScaleRounding.RCEIL


class MXFP8TrainingWeight(float_base.Fp8e4m3Mixin, MXTraining, solver.WeightQuantSolver):
    """e4m3 weights in blocks of 32 along what is summed over, a power of two for each, rounded up.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=MXFP8TrainingWeight, rngs=nnx.Rngs(0))
        >>> str(fc.quant_weight().format), fc.quant_weight().scale_.shape
        ('float8_e4m3fn', (2, 1, 4))
    """


class MXFP8TrainingAct(float_base.Fp8e4m3Mixin, MXTraining, solver.ActQuantSolver):
    """e4m3 activations in blocks of 32 along the last axis, a power of two for each, rounded up."""


class MXFP8TrainingGrad(float_base.Fp8e4m3Mixin, MXTraining, solver.GradQuantSolver):
    """e4m3 gradients in blocks of 32 along the last axis, a power of two for each, rounded up."""


class MXFP8e5m2TrainingGrad(float_base.Fp8e5m2Mixin, MXTraining, solver.GradQuantSolver):
    """e5m2 gradients in blocks of 32 along the last axis, a power of two for each, rounded up."""


class MXFP4TrainingWeight(float_base.Fp4e2m1Mixin, MXTraining, solver.WeightQuantSolver):
    """e2m1 weights in blocks of 32 along what is summed over, a power of two for each, rounded up."""


class MXFP4TrainingAct(float_base.Fp4e2m1Mixin, MXTraining, solver.ActQuantSolver):
    """e2m1 activations in blocks of 32 along the last axis, a power of two for each, rounded up."""


class MXFP4TrainingGrad(float_base.Fp4e2m1Mixin, MXTraining, solver.GradQuantSolver):
    """e2m1 gradients in blocks of 32 along the last axis, a power of two for each, rounded stochastically."""

    float_to_int_impl_type = enums.FloatToIntImplType.STOCHASTIC_ROUND


class MXFP8Training(dot.Scheme):
    """MXFP8: every operand in e4m3, in blocks of 32 along its product's sum, powers of two rounded up.

    Gradients in e5m2: `MXFP8Training.let(dgrad_grad=MXFP8e5m2TrainingGrad, wgrad_grad=MXFP8e5m2TrainingGrad)`.

    Source: TransformerEngine's `MXFP8BlockScaling`, which is also its name here.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.dot import QDotGeneral
        >>> layer = nnx.Linear(64, 32, dot_general=QDotGeneral(MXFP8Training), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 64))).shape
        (2, 32)
    """

    fprop_lhs = wgrad_lhs = MXFP8TrainingAct
    fprop_rhs = dgrad_rhs = MXFP8TrainingWeight
    dgrad_grad = wgrad_grad = MXFP8TrainingGrad


class MXFP4Training(dot.Scheme):
    """MXFP4: every operand in e2m1, in blocks of 32 along its product's sum; gradients rounded stochastically.

    It needs random numbers: `rngs=` where it is used.
    """

    fprop_lhs = wgrad_lhs = MXFP4TrainingAct
    fprop_rhs = dgrad_rhs = MXFP4TrainingWeight
    dgrad_grad = wgrad_grad = MXFP4TrainingGrad


class Fp8OfTensor(ExtendedInjector):
    """8-bit floats, numbers multiplied by max / amax of the current tensor; no state. Declare `q_dtype`."""

    by_factor = True
    scaling_impl_type = enums.ScalingImplType.STATS
    restrict_scaling_type = enums.RestrictValueType.FP
    scaling_stats_op = enums.StatsOp.MAX
    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR


class Fp8TrainingWeight(float_base.Fp8e4m3, Fp8OfTensor, solver.WeightQuantSolver):
    """e4m3 weights, one scale, of the current weight.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=Fp8TrainingWeight, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().payload().dtype, fc.quant_weight().scale.shape
        (dtype(float8_e4m3fn), ())
    """


class Fp8TrainingAct(float_base.Fp8e4m3, Fp8OfTensor, solver.ActQuantSolver):
    """e4m3 activations, one scale, of the current tensor."""

    scaling_impl = core.RuntimeDynamicStatsScaling


class Fp8TrainingGrad(float_base.Fp8e5m2, Fp8OfTensor, solver.GradQuantSolver):
    """e5m2 gradients, one scale, of the current gradient."""

    scaling_impl = core.RuntimeDynamicStatsScaling


class Fp8RowTrainingWeight(Fp8TrainingWeight):
    """e4m3 weights, a scale for each output channel: all numbers that are summed together."""

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class Fp8RowTrainingAct(fragments.DynamicPerRow, Fp8TrainingAct):
    """e4m3 activations, a scale for each row: all numbers that are summed together."""


class Fp8RowTrainingGrad(fragments.DynamicPerRow, float_base.Fp8e4m3, Fp8TrainingGrad):
    """e4m3 gradients, a scale for each row: all numbers that are summed together."""


class Fp8Block(BlockTraining):
    """Minifloats in blocks with a float32 scale = max |x| / largest number for each."""

    group_size = 128
    restrict_scaling_type = enums.RestrictValueType.FP
    scaling_min_val = None
    scaling_impl = core.RuntimeDynamicGroupStatsScaling


class Fp8BlockTrainingWeight(float_base.Fp8e4m3Mixin, Fp8Block, solver.WeightQuantSolver):
    """e4m3 weights in blocks of 128 x 128, a float32 scale for each."""

    group_size = (128, 128)


class Fp8BlockTrainingAct(float_base.Fp8e4m3Mixin, Fp8Block, solver.ActQuantSolver):
    """e4m3 activations in blocks of 128 along the last axis, a float32 scale for each."""


class Fp8BlockTrainingGrad(float_base.Fp8e4m3Mixin, Fp8Block, solver.GradQuantSolver):
    """e4m3 gradients in blocks of 128 along the last axis, a float32 scale for each."""


class Fp8DelayedTraining(dot.Scheme):
    """One scale for each tensor, from the amaxes of earlier steps: e4m3, gradients in e5m2.

    It keeps histories: take gradients by `jqinject.value_and_grad`.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; Flax's `Fp8DotGeneral`.
    """

    fprop_lhs = float8.Fp8e4m3ActPerTensorDelayed
    fprop_rhs = float8.Fp8e4m3WeightPerTensorDelayed
    dgrad_grad = wgrad_grad = float8.Fp8e5m2GradPerTensorDelayed


class DelayedByFactor(ExtendedInjector):
    """8-bit floats of numbers that are multiplied by max / amax of earlier steps, as the scheme says."""

    by_factor = True
    scaling_init = value(lambda q_dtype: float(jnp.finfo(q_dtype).max))  # a first factor of 1
    amax_history_length = (this << 1).amax_history_len
    amax_compute_algo = (this << 1).amax_compute_algo
    margin = (this << 1).margin


class DelayedScalingAct(DelayedByFactor, float8.Fp8e4m3ActPerTensorDelayed):
    """`x`, in e4m3."""


class DelayedScalingWeight(DelayedByFactor, float8.Fp8e4m3WeightPerTensorDelayed):
    """`w`, in e4m3."""


class DelayedScalingGrad(DelayedByFactor, float8.Fp8e5m2GradPerTensorDelayed):
    """`g`, in e5m2."""


class DelayedScaling(dot.Scheme):
    """One factor for each tensor, `max / amax` of earlier steps: e4m3, gradients in e5m2.

    | name | what it does | default |
    |---|---|---|
    | `amax_history_len` | the earlier steps that count | 1024 |
    | `amax_compute_algo` | which of their amaxes: "max", the largest, or "most_recent" | "max" |
    | `margin` | powers of two that the factor is lower by | 0 |

    It keeps histories: take gradients by `jqinject.value_and_grad`.

    Source: TransformerEngine's recipe of this name. Differs from it: an inf or nan stays out of the history.
    `Fp8DelayedTraining` divides by a scale, as Flax does.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(16, 4, scheme=DelayedScaling.let(amax_history_len=16), rngs=nnx.Rngs(0))
    """

    amax_history_len = 1024
    amax_compute_algo = "max"
    margin = 0
    fprop_lhs = DelayedScalingAct
    fprop_rhs = DelayedScalingWeight
    dgrad_grad = wgrad_grad = DelayedScalingGrad


class Fp8CurrentTraining(dot.Scheme):
    """One scale for each tensor, of the current tensor: e4m3, gradients in e5m2. Backward products take the payloads
    of the forward product.

    Source: TransformerEngine's `Float8CurrentScaling`, which is also its name here; torchao's tensorwise recipe.
    """

    fprop_lhs = Fp8TrainingAct
    fprop_rhs = Fp8TrainingWeight
    dgrad_grad = wgrad_grad = Fp8TrainingGrad


class Fp8RowTraining(dot.Scheme):
    """A scale for each row and column of what is summed over, of the current tensor, all e4m3; every operand is
    quantized along its own product's sum.

    Source: torchao's rowwise recipe.
    """

    fprop_lhs = wgrad_lhs = Fp8RowTrainingAct
    fprop_rhs = dgrad_rhs = Fp8RowTrainingWeight
    dgrad_grad = wgrad_grad = Fp8RowTrainingGrad


class Fp8BlockTraining(dot.Scheme):
    """Activations and gradients in blocks of 1 x 128, weights in blocks of 128 x 128, which fit both of their products.

    `Float8BlockScaling` does the same with powers of two.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report"; TransformerEngine's `Float8BlockScaling` with
    `NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1`.
    """

    fprop_lhs = wgrad_lhs = Fp8BlockTrainingAct
    fprop_rhs = Fp8BlockTrainingWeight
    dgrad_grad = wgrad_grad = Fp8BlockTrainingGrad


class Float8BlockScaling(dot.Scheme):
    """e4m3 in blocks of 1 x 128, weights in 128 x 128, with a power of two for each, rounded up.

    Source: TransformerEngine's recipe of this name, by its defaults.
    """

    fprop_lhs = wgrad_lhs = MXFP8TrainingAct.let(group_size=128)
    fprop_rhs = MXFP8TrainingWeight.let(group_size=(128, 128))
    dgrad_grad = wgrad_grad = MXFP8TrainingGrad.let(group_size=128)


class Int8Training(aqt.ConfigV4):
    """AQT's int8 training: `y = x w` and `dx = g w^T` are products of int8 numbers, `dw` is in float.

    Every operand is quantized for its product, scale = max |x| / 127.5 over what is summed; the gradient is rounded
    stochastically, so it needs random numbers: `rngs=` where it is used. `Int8Training.let(drhs_bits=8)` makes `dw` a
    product of int8 numbers too.

    Source: Google's AQT, `config_v4()`; Abdolrashidi et al., 2021, "Pareto-Optimal Quantized ResNet Is Mostly 4-bit".

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(16, 4, scheme=Int8Training, rngs=nnx.Rngs(0))
    """


class TernaryWeight(aqt.OperandInjector):
    """-1, 0 or 1 times the mean magnitude of the weight, to nearest; the gradient passes unchanged."""

    bits = 2
    calibration = core.AbsMeanRange
    calibration_axes = "tensor"
    preserve_max_val = True


class Int8PerToken(aqt.OperandInjector):
    """int8 activations, scale = max |x| / 127 of all numbers that are summed; the gradient passes unchanged."""

    bits = 8
    preserve_max_val = True


class BitNet158(dot.Scheme):
    """BitNet b1.58: ternary weights times int8 activations; gradients of the quantized product in float.

    Source: Ma et al., 2024, "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits".

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.dot import dot_general
        >>> x, w = jnp.array([[127.0, 2.4]]), jnp.array([[3.0], [-0.1]])
        >>> dot_general(x, w, (((1,), (0,)), ((), ())), config=BitNet158)  # 127 * 1 * mean |w|
        Array([[196.84999]], dtype=float32)
    """

    fprop_lhs = Int8PerToken
    fprop_rhs = TernaryWeight


NVFP4_BLOCK = 16


class NVFP4RotatedInput(blocks.NVFP4TrainingAct):
    """`x` of the product for the weight's gradient."""

    pre_transform = (this << 1).hadamard


class NVFP4Gradient(blocks.NVFP4TrainingGrad):
    """`g` of the product for the input's gradient."""

    float_to_int_impl_type = (this << 1).gradient_rounding
    random_bits = (this << 1).random_bits


class NVFP4RotatedGradient(NVFP4Gradient):
    """`g` of the product for the weight's gradient."""

    pre_transform = (this << 1).hadamard


class NVFP4WeightInBlocks(blocks.NVFP4TrainingWeight):
    """`w`, in the blocks that the scheme says."""

    group_size = (this << 1).weight_block


@value
def weight_of_dgrad(weight_block: int | tuple[int, int] | None) -> object:
    """`dgrad_rhs`: of square blocks what the forward product took, else the weight quantized along its outputs."""
    square = isinstance(weight_block, tuple) and weight_block[0] == weight_block[1]
    return Kept.FPROP if square else this.fprop_rhs


class NVFP4Training(dot.Scheme):
    """Training in 4 bits: inputs and gradients in blocks of 16 along what each product sums over, weights in 16 x 16.

    | name | what it does | default |
    |---|---|---|
    | `weight_block` | blocks of weights: square, the same for both products; 16: along the sum | `(16, 16)` |
    | `hadamard` | what turns both operands of `dw`; None for nothing | `Hadamard(16, NVFP4TrainingSigns)` |
    | `gradient_rounding` | how gradients are rounded: "stochastic_round", "round" | "stochastic_round" |
    | `random_bits` | of each random number: 8, 16 or 32; more take longer | 16 |

    Its numbers are those of TransformerEngine's `NVFP4BlockScaling`, which is also its name here; block scales are
    e4m3, and one float32 scale is shared by a tensor. Gradients pass the quantizers unchanged. Rounding stochastically
    needs random numbers: `rngs=` of a `QDotGeneral`, in a layer that of the layer. The rows of a batch (their last axis
    before the features) have to be a multiple of 16 while training, for the transform. For the backward pass 4.5 bits
    are kept of a number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.dot import QDotGeneral
        >>> op = QDotGeneral(NVFP4Training, rngs=nnx.Rngs(0))
        >>> layer = nnx.Linear(32, 16, dot_general=op, rngs=nnx.Rngs(1))
        >>> grads = nnx.grad(lambda m, x: m(x).sum())(layer, jnp.ones((16, 32)))
        >>> bool(jnp.isfinite(grads.kernel[...]).all())
        True
    """

    weight_block = (NVFP4_BLOCK, NVFP4_BLOCK)
    hadamard = core.Hadamard(NVFP4_BLOCK, blocks.NVFP4TrainingSigns)
    gradient_rounding = "stochastic_round"
    random_bits = 16
    fprop_lhs = blocks.NVFP4TrainingAct
    fprop_rhs = NVFP4WeightInBlocks
    dgrad_grad = NVFP4Gradient
    dgrad_rhs = weight_of_dgrad
    wgrad_lhs = NVFP4RotatedInput
    wgrad_grad = NVFP4RotatedGradient


#: TransformerEngine's names, of recipes that are schemes above.
Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling = Fp8CurrentTraining, MXFP8Training, NVFP4Training
