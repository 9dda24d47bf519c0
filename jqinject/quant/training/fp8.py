"""FP8 with scales for a tensor, a row or a block: TransformerEngine's recipes, DeepSeek's blocks."""

from jqinject.core.quantizers.float8_quant import Float8Quant
from jqinject.core.scaling.constant import RuntimeDynamicGroupStatsScaling, RuntimeDynamicStatsScaling
from jqinject.core.scaling.number_range import FloatScaling
from jqinject.dot import Scheme
from jqinject.inject import ExtendedInjector
from jqinject.quant.enums import RestrictValueType, ScalingImplType, ScalingPerOutputType, StatsOp
from jqinject.quant.fragments import DynamicPerRow, Fp8e4m3Mixin, FpOCPMixin
from jqinject.quant.fragments.minifloats import FloatBase
from jqinject.quant.minifloat.float8 import (
    Fp8e4m3,
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3WeightPerTensorDelayed,
    Fp8e5m2,
    Fp8e5m2GradPerTensorDelayed,
)
from jqinject.quant.solver import ActQuantSolver, GradQuantSolver, WeightQuantSolver
from jqinject.quant.training.mx import StraightThrough


class Fp8OfTensor(ExtendedInjector):
    """8-bit floats, numbers multiplied by max / amax of the tensor at hand; no state. Declare `q_dtype`."""

    tensor_quant = Float8Quant
    by_factor = True
    signed = True
    scaling_impl_type = ScalingImplType.STATS
    restrict_scaling_type = RestrictValueType.FP
    scaling_stats_op = StatsOp.MAX
    scaling_per_output_type = ScalingPerOutputType.TENSOR


class Fp8TrainingWeight(Fp8e4m3, Fp8OfTensor, WeightQuantSolver):
    """e4m3 weights, one scale, of the weight at hand.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=Fp8TrainingWeight, rngs=nnx.Rngs(0))
        >>> fc.quant_weight().payload().dtype, fc.quant_weight().scale.shape
        (dtype(float8_e4m3fn), ())
    """


class Fp8TrainingAct(Fp8e4m3, Fp8OfTensor, ActQuantSolver):
    """e4m3 activations, one scale, of the tensor at hand."""

    scaling_impl = RuntimeDynamicStatsScaling


class Fp8TrainingGrad(Fp8e5m2, Fp8OfTensor, GradQuantSolver):
    """e5m2 gradients, one scale, of the gradient at hand."""

    scaling_impl = RuntimeDynamicStatsScaling


class Fp8RowTrainingWeight(Fp8TrainingWeight):
    """e4m3 weights, a scale for each output channel: all numbers that are summed together."""

    scaling_per_output_type = ScalingPerOutputType.CHANNEL


class Fp8RowTrainingAct(DynamicPerRow, Fp8TrainingAct):
    """e4m3 activations, a scale for each row: all numbers that are summed together."""


class Fp8RowTrainingGrad(DynamicPerRow, Fp8e4m3, Fp8TrainingGrad):
    """e4m3 gradients, a scale for each row: all numbers that are summed together."""


class Fp8Block(StraightThrough, FpOCPMixin, FloatBase):
    """Minifloats in blocks with a float32 scale = max |x| / largest number for each."""

    scaling_per_output_type = ScalingPerOutputType.GROUP
    scaling_impl_type = ScalingImplType.STATS
    scaling_stats_op = StatsOp.MAX
    restrict_scaling_type = RestrictValueType.FP
    scaling_min_val = None
    float_scaling_impl = FloatScaling
    scaling_impl = RuntimeDynamicGroupStatsScaling


class Fp8BlockTrainingWeight(Fp8e4m3Mixin, Fp8Block, WeightQuantSolver):
    """e4m3 weights in blocks of 128 x 128, a float32 scale for each."""

    group_size = (128, 128)


class Fp8BlockTrainingAct(Fp8e4m3Mixin, Fp8Block, ActQuantSolver):
    """e4m3 activations in blocks of 128 along the last axis, a float32 scale for each."""

    group_size = 128


class Fp8BlockTrainingGrad(Fp8e4m3Mixin, Fp8Block, GradQuantSolver):
    """e4m3 gradients in blocks of 128 along the last axis, a float32 scale for each."""

    group_size = 128


class Fp8DelayedTraining(Scheme):
    """One scale for each tensor, from the amaxes of earlier steps: e4m3, gradients in e5m2.

    It keeps histories: take gradients by `jqinject.value_and_grad`.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; TransformerEngine's `DelayedScaling`.
    """

    fprop_lhs = Fp8e4m3ActPerTensorDelayed
    fprop_rhs = Fp8e4m3WeightPerTensorDelayed
    dgrad_grad = wgrad_grad = Fp8e5m2GradPerTensorDelayed


class Fp8CurrentTraining(Scheme):
    """One scale for each tensor, of the tensor at hand: e4m3, gradients in e5m2. Backward products take the payloads
    of the forward product.

    Source: TransformerEngine's `Float8CurrentScaling`; torchao's tensorwise recipe.
    """

    fprop_lhs = Fp8TrainingAct
    fprop_rhs = Fp8TrainingWeight
    dgrad_grad = wgrad_grad = Fp8TrainingGrad


class Fp8RowTraining(Scheme):
    """A scale for each row and column of what is summed over, of the tensor at hand, all e4m3; every operand is
    quantized along its own product's sum.

    Source: torchao's rowwise recipe.
    """

    fprop_lhs = wgrad_lhs = Fp8RowTrainingAct
    fprop_rhs = dgrad_rhs = Fp8RowTrainingWeight
    dgrad_grad = wgrad_grad = Fp8RowTrainingGrad


class Fp8BlockTraining(Scheme):
    """Activations and gradients in blocks of 1 x 128, weights in blocks of 128 x 128, which fit both of their products.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report"; TransformerEngine's `Float8BlockScaling`.
    """

    fprop_lhs = wgrad_lhs = Fp8BlockTrainingAct
    fprop_rhs = Fp8BlockTrainingWeight
    dgrad_grad = wgrad_grad = Fp8BlockTrainingGrad
