"""Weights as indices into a table of numbers."""

from jqinject.core.clamp import TensorClamp
from jqinject.core.quantizers.codebook_quant import CodebookQuant
from jqinject.inject import ExtendedInjector, this
from jqinject.ops import NF4
from jqinject.quant.enums import RestrictValueType, ScalingPerOutputType
from jqinject.quant.fragments import MaxStatsScaling
from jqinject.quant.minifloat.nvfp4 import Fp8e4m3Scales
from jqinject.quant.solver import WeightQuantSolver


class NF4Quant(ExtendedInjector):
    """16 numbers in 4 bits: quantiles of a normal distribution. Declare `codebook` for another table.

    Source: Dettmers et al., 2023, "QLoRA: Efficient Finetuning of Quantized LLMs".
    """

    tensor_quant = CodebookQuant
    tensor_clamp_impl = TensorClamp
    codebook = NF4
    signed = True


class NF4WeightPerTensorFloat(NF4Quant, MaxStatsScaling, WeightQuantSolver):
    """NormalFloat4 weights, scale = max |w| of the whole tensor, recomputed at every forward."""

    scaling_per_output_type = ScalingPerOutputType.TENSOR
    restrict_scaling_type = RestrictValueType.FP


class NF4WeightPerChannelFloat(NF4WeightPerTensorFloat):
    """NormalFloat4 weights, scale = max |w| of each output channel, recomputed at every forward.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(8, 4, weight_quant=NF4WeightPerChannelFloat, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().codes().dtype, fc.weight_quant.bit_width()
        (dtype('uint8'), 4)
    """

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


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
    scaling_per_output_type = ScalingPerOutputType.GROUP


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
