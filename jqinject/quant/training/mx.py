"""MXFP8 and MXFP4: blocks of 32 along what each product sums over, so every operand is quantized for its product.

Source: Open Compute Project, "Microscaling Formats (MX)" 1.0; NVIDIA TransformerEngine's `MXFP8BlockScaling`, whose
codes and scales these are.
"""

from jqinject.core.clamp import FloatSaturate
from jqinject.core.scaling.number_range import FloatScaling
from jqinject.core.scaling.powers_of_two import SharedExponentScaling
from jqinject.dot import Scheme
from jqinject.inject import ExtendedInjector
from jqinject.quant.enums import (
    FloatToIntImplType,
    ScaleRounding,
    ScalingImplType,
    ScalingPerOutputType,
    StatsOp,
)
from jqinject.quant.fragments import Fp4e2m1Mixin, Fp8e4m3Mixin, Fp8e5m2Mixin, FpOCPMixin
from jqinject.quant.fragments.minifloats import FloatBase
from jqinject.quant.solver import ActQuantSolver, GradQuantSolver, WeightQuantSolver


class StraightThrough(ExtendedInjector):
    """Gradients pass unchanged, numbers and infinities saturate, the payload is kept."""

    straight_through = True
    float_clamp_impl = FloatSaturate


class MXTraining(StraightThrough, FpOCPMixin, FloatBase):
    """Blocks of 32, a power of two for each, rounded up so that nothing saturates; declare the format.

    `scale_rounding` rounds otherwise: `"floor"`, `"ceil"`, `"even"`.
    """

    group_size = 32
    scaling_per_output_type = ScalingPerOutputType.GROUP
    scaling_impl_type = ScalingImplType.STATS
    scaling_stats_op = StatsOp.MAX
    float_scaling_impl = FloatScaling
    scaling_impl = SharedExponentScaling
    scale_rounding = ScaleRounding.RCEIL


class MXFP8TrainingWeight(Fp8e4m3Mixin, MXTraining, WeightQuantSolver):
    """e4m3 weights in blocks of 32 along what is summed over, a power of two for each, rounded up.

    Example:
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> fc = QuantLinear(64, 4, weight_quant=MXFP8TrainingWeight, rngs=nnx.Rngs(0))
        >>> str(fc.quant_weight().format), fc.quant_weight().scale_.shape
        ('float8_e4m3fn', (2, 1, 4))
    """


class MXFP8TrainingAct(Fp8e4m3Mixin, MXTraining, ActQuantSolver):
    """e4m3 activations in blocks of 32 along the last axis, a power of two for each, rounded up."""


class MXFP8TrainingGrad(Fp8e4m3Mixin, MXTraining, GradQuantSolver):
    """e4m3 gradients in blocks of 32 along the last axis, a power of two for each, rounded up."""


class MXFP8e5m2TrainingGrad(Fp8e5m2Mixin, MXTraining, GradQuantSolver):
    """e5m2 gradients in blocks of 32 along the last axis, a power of two for each, rounded up."""


class MXFP4TrainingWeight(Fp4e2m1Mixin, MXTraining, WeightQuantSolver):
    """e2m1 weights in blocks of 32 along what is summed over, a power of two for each, rounded up."""


class MXFP4TrainingAct(Fp4e2m1Mixin, MXTraining, ActQuantSolver):
    """e2m1 activations in blocks of 32 along the last axis, a power of two for each, rounded up."""


class MXFP4TrainingGrad(Fp4e2m1Mixin, MXTraining, GradQuantSolver):
    """e2m1 gradients in blocks of 32 along the last axis, a power of two for each, rounded stochastically."""

    float_to_int_impl_type = FloatToIntImplType.STOCHASTIC_ROUND


class MXFP8Training(Scheme):
    """MXFP8: every operand in e4m3, in blocks of 32 along its product's sum, powers of two rounded up.

    Gradients in e5m2: `MXFP8Training.let(dgrad_grad=MXFP8e5m2TrainingGrad, wgrad_grad=MXFP8e5m2TrainingGrad)`.

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


class MXFP4Training(Scheme):
    """MXFP4: every operand in e2m1, in blocks of 32 along its product's sum; gradients rounded stochastically.

    It needs random numbers: `rngs=` where it is used.
    """

    fprop_lhs = wgrad_lhs = MXFP4TrainingAct
    fprop_rhs = dgrad_rhs = MXFP4TrainingWeight
    dgrad_grad = wgrad_grad = MXFP4TrainingGrad
