"""Tables of numbers, and ranges that suit a normal distribution: NormalFloat4, Lloyd-Max, TurboQuant, QuEST, Quartet.

QuEST clips a row at the number of standard deviations where the squared error of a normal distribution is least; the
gradient passes where `gradient_mask_impl` says, for numbers that rounding moved little. What makes rows normal is a
rotation before the quantizer, `jqinject.core.transforms.Hadamard`; TurboQuant brings its own and undoes it.
"""

from jqinject import core, ops
from jqinject.core.transforms import Chain, Hadamard
from jqinject.inject import ExtendedInjector, this, value
from jqinject.ops.grid import Codebook, half_integers, normal_table
from jqinject.quant import enums, fragments
from jqinject.quant.float_base import FloatBase, Fp4e2m1Mixin, FpOCPMixin
from jqinject.quant.minifloat.blocks import Fp8e4m3Scales, MXActMixin, MXMixin
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver


class NF4Quant(ExtendedInjector):
    """16 numbers in 4 bits: quantiles of a normal distribution. Declare `codebook` for another table.

    Source: Dettmers et al., 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".
    """

    tensor_quant = core.CodebookQuant
    tensor_clamp_impl = core.TensorClamp
    codebook = ops.NF4
    signed = True


class NF4WeightPerTensorFloat(NF4Quant, fragments.MaxStatsScaling, WeightQuantSolver):
    """NormalFloat4 weights, scale = max |w| of the whole tensor, recomputed at every forward."""

    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR
    restrict_scaling_type = enums.RestrictValueType.FP


class NF4WeightPerChannelFloat(NF4WeightPerTensorFloat):
    """NormalFloat4 weights, scale = max |w| of each output channel, recomputed at every forward.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, weight_quant=NF4WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().codes().dtype, fc.weight_quant.bit_width()
        (dtype('uint8'), 4)
    """

    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class NF4WeightPerGroupFloat(NF4WeightPerChannelFloat):
    """NormalFloat4 weights, scale = max |w| of each group of 64 inputs of every channel, recomputed at every forward.

    Source: the block size of Dettmers et al., 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(128, 4, weight_quant=NF4WeightPerGroupFloat, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale_.shape, fc.quant_weight().codes().shape
        ((2, 1, 4), (128, 4))
    """

    group_size = 64
    scaling_per_output_type = enums.ScalingPerOutputType.GROUP


class NF4WeightPerGroupFp8Scale(NF4WeightPerGroupFloat):
    """NF4WeightPerGroupFloat with double quantization: e4m3 scales, one float32 factor for these.

    4.125 bits a weight, 4.5 with float32 scales.

    Source: QLoRA, as above. Differs from it: one factor for all scales of a weight, whose mean is not subtracted; there
    one for each 256.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(128, 4, weight_quant=NF4WeightPerGroupFp8Scale, rngs=nnx.Rngs(0))
        >>> fc.weight_quant.scale_dtype
        dtype(float8_e4m3fn)
    """

    scale_quant = Fp8e4m3Scales
    restrict_scale_threshold_impl = this.scale_quant.restrict_scale_impl


class NF4DynamicActPerRowFloat(fragments.DynamicPerRow, NF4Quant, ActQuantSolver):
    """NormalFloat4 activations, scale = max |x| of each row (the last axis).

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=NF4DynamicActPerRowFloat, return_quant_tensor=True)
        >>> y = identity(jnp.array([[2.0, 0.1], [-0.5, 0.5]]))
        >>> y.scale.tolist(), y.codes().tolist()
        ([[2.0], [0.5]], [[15, 8], [0, 15]])
    """

    scaling_impl = core.RuntimeDynamicStatsScaling
    scaling_stats_op = enums.StatsOp.MAX
    scaling_min_val = 1e-10
    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR
    restrict_scaling_type = enums.RestrictValueType.FP


class NF4DynamicActPerGroupFloat(fragments.DynamicPerGroup, NF4Quant, ActQuantSolver):
    """NormalFloat4 activations, scale = max |x| of each group of 64 features.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=NF4DynamicActPerGroupFloat, group_size=2, return_quant_tensor=True)
        >>> identity(jnp.array([2.0, 0.1, -0.5, 0.5])).scale_.tolist()
        [[2.0], [0.5]]
    """

    group_size = 64
    scaling_stats_op = enums.StatsOp.MAX
    scaling_min_val = 1e-10
    restrict_scaling_type = enums.RestrictValueType.FP


class LloydMaxDynamicActPerRowFloat(fragments.DynamicPerRow, ActQuantSolver):
    """Activations to the 2^b numbers with the least squared error for a normal distribution, 4 bits.

    The scale is the root mean square of a row (the last axis), `s = sqrt(mean x^2)`, and `y = s table[argmin |x / s -
    table|]` with `jqinject.ops.normal_table`. Zeros stay zeros, though the table has none. The gradient goes straight
    through to every number; none goes to the scale.

    Source: Max, 1960, "Quantizing for minimum distortion".

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> x = jax.random.normal(jax.random.key(0), (64, 1024))
        >>> errors = [QuantIdentity(LloydMaxDynamicActPerRowFloat, bit_width=b)(x) - x for b in (2, 3, 4)]
        >>> [f"{float((e ** 2).mean() / (x ** 2).mean()):.3f}" for e in errors]
        ['0.117', '0.034', '0.009']
    """

    tensor_quant = core.CodebookQuant
    tensor_clamp_impl = core.TensorClampSte
    signed = True
    bit_width = 4
    codebook = value(lambda bit_width: normal_table(bit_width))
    scaling_impl = core.RuntimeDynamicStatsScaling
    scaling_stats_op = enums.StatsOp.SIGMA_STD
    normal_clip = value(lambda codebook: Codebook.of(codebook).largest)
    sigma = this.normal_clip
    std_dev_epsilon = 2.0**-100
    restrict_scale_threshold_impl = core.ZeroRestrictValue
    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR
    restrict_scaling_type = enums.RestrictValueType.FP


#: A rotation of as many channels as come. One signed Hadamard matrix takes a vector with a single number to numbers of
#: one magnitude; a second one, with other signs, makes them normal too.
ROTATION = Chain((Hadamard(seed=0), Hadamard(seed=1)))


class TurboQuant4Act(LloydMaxDynamicActPerRowFloat):
    """TurboQuant: rows are rotated, quantized to the best numbers for a normal distribution, and rotated back; 4 bits.

    For a row `x` of d numbers (the last axis) and a rotation `R`: `y = s R^-1 table[argmin |R x / s - table|]`, with
    the root mean square `s = |x| / sqrt(d)`. Stored are the codes, and `s` in float32. The distortion `E |x - y|^2 /
    |x|^2` is that of a normal distribution, for any x: 0.1175, 0.0345 and 0.0095 at 2, 3 and 4 bits. It is meant
    for caches of keys and values, `Rule(cache_quant=TurboQuant4Act)`; any activation may have it.

    Declare `bit_width`, 1 to 8, or another `pre_transform`: `Hadamard(block_size, seed=...)` in blocks, for numbers of
    features that have no Hadamard matrix.

    Source: Zandieh et al., 2025, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", the
    variant of the least squared error. Differs from the paper: the rotation is a product of two Hadamard matrices with
    fixed random signs, instead of a dense matrix; the numbers are those of the normal distribution, which the paper
    takes in the limit of many features.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> x = jnp.zeros((2, 128)).at[0, 3].set(5.0)
        >>> y = QuantIdentity(TurboQuant4Act)(x)
        >>> float(((x - y)[0] ** 2).sum() / 25) < 0.012, float(abs(y[1]).max())
        (True, 0.0)
    """

    pre_transform = ROTATION
    undo_transform = True


class TurboQuant3Act(TurboQuant4Act):
    """TurboQuant4Act with 3 bits."""

    bit_width = 3


class TurboQuant2Act(TurboQuant4Act):
    """TurboQuant4Act with 2 bits."""

    bit_width = 2


#: Bits to the root mean squares at which QuEST clips, near the least squared error of a normal distribution.
NORMAL_CLIP = {
    1: 0.7978845587140913, 2: 1.4935346200015913, 3: 2.051068354131873, 4: 2.513930578568423,
    5: 2.9160938834961225, 6: 3.276597282593217, 7: 3.6010497188221655, 8: 3.884938678807525,
}  # fmt: skip


class QuestQuant(ExtendedInjector):
    """The nearest of 2^b numbers at odd multiples of half a step, up to `normal_clip` root mean squares of the row.

    Declare `bit_width`; or another `codebook`, and `normal_clip`, the number of root mean squares that its largest
    number stands for; `trust`, in root mean squares, or another `gradient_mask_impl` (None leaves it to
    `tensor_clamp_impl`: `TensorClampSte` passes all gradients, `TensorClamp` those within the range).
    """

    tensor_quant = core.CodebookQuant
    tensor_clamp_impl = core.TensorClamp
    signed = True
    bit_width = 4
    codebook = value(half_integers)
    normal_clip = value(lambda bit_width: NORMAL_CLIP[bit_width])
    trust = value(
        lambda codebook, normal_clip: (
            Codebook.of(codebook).widest_gap / 2 * normal_clip / Codebook.of(codebook).largest
        )
    )
    scaling_stats_op = enums.StatsOp.SIGMA_STD
    sigma = this.normal_clip
    std_dev_epsilon = 1e-8
    restrict_scaling_type = enums.RestrictValueType.FP
    gradient_mask_impl = core.TrustMask
    trust_steps = value(
        lambda codebook, normal_clip, trust: trust * Codebook.of(codebook).largest / normal_clip
    )


class QuestWeightPerChannelFloat(QuestQuant, WeightQuantSolver):
    """QuEST's weights, 4 bits: clipped at 2.51 root mean squares of an output channel.

    Source: Panferov et al., 2025, "QuEST: Stable Training of LLMs with 1-Bit Weights and Activations".

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=QuestWeightPerChannelFloat, weight_bit_width=2, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().scale.shape, len(set(fc.quant_weight().value[:, 0].tolist()))
        ((1, 4), 4)
    """

    scaling_impl_type = enums.ScalingImplType.STATS
    scaling_per_output_type = enums.ScalingPerOutputType.CHANNEL


class QuestActPerRowFloat(fragments.DynamicPerRow, QuestQuant, ActQuantSolver):
    """QuEST's activations, 4 bits: clipped at 2.51 root mean squares of a row (the last axis).

    Source: as of `QuestWeightPerChannelFloat`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> identity = QuantIdentity(act_quant=QuestActPerRowFloat)
        >>> x = jnp.zeros((1, 64)).at[0, :2].set(jnp.array([1.0, 0.3]))
        >>> jax.grad(lambda x: identity(x).sum())(x)[0, :3]  # 1 is beyond the range
        Array([0., 1., 1.], dtype=float32)
    """

    scaling_impl = core.RuntimeDynamicStatsScaling
    scaling_per_output_type = enums.ScalingPerOutputType.TENSOR


class MXQuest(ExtendedInjector):
    """e2m1 in groups of 32 whose largest number is 2.92 standard deviations, rounded down to a power of two each.

    Declare `normal_scale`, the standard deviations that 1 stands for, as Quartet's `gaussian_scale`.
    """

    scaling_impl_type = enums.ScalingImplType.STATS
    scaling_stats_op = enums.StatsOp.SIGMA_STD
    normal_scale = 2.92247856 / 6.0
    sigma = this.normal_scale
    about_mean = True
    std_dev_epsilon = 1e-8
    float_scaling_impl = None
    float_to_int_impl = core.RoundHalfToZeroSte
    gradient_mask_impl = core.BelowMask
    limit_steps = 6.0


class MXFloat4e2m1QuestWeight(MXQuest, MXMixin, Fp4e2m1Mixin, FpOCPMixin, FloatBase, WeightQuantSolver):
    """Quartet's weights in the forward product: e2m1, a power of two of the deviation of each group of 32 inputs.

    Source: Castro et al., 2025, "Quartet: Native FP4 Training Can Be Optimal for Large Language Models".

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=MXFloat4e2m1QuestWeight, rngs=nnx.Rngs(0))
        >>> str(fc.quant_weight().format), fc.quant_weight().scale_.shape
        ('float4_e2m1fn', (2, 1, 4))
    """


class MXFloat4e2m1QuestAct(MXQuest, MXActMixin, Fp4e2m1Mixin, FpOCPMixin, FloatBase, ActQuantSolver):
    """Quartet's activations in the forward product: e2m1, a power of two of the deviation of each group of 32 features.

    Source: as of `MXFloat4e2m1QuestWeight`.
    """
