"""Quartet: every product of a training step in MXFP4, of rotated operands.

Source: Castro et al., 2025, "Quartet: Native FP4 Training Can Be Optimal for Large Language Models", algorithm 1.
"""

from jqinject.core.scaling.number_range import FloatScaling
from jqinject.core.scaling.rule import ScaledRestrictValue
from jqinject.core.transforms import Hadamard
from jqinject.dot import Scheme
from jqinject.inject import this, value
from jqinject.quant.enums import StatsOp
from jqinject.quant.fragments import Fp4e2m1Mixin, FpOCPMixin
from jqinject.quant.fragments.minifloats import FloatBase
from jqinject.quant.minifloat.mx import MXActMixin
from jqinject.quant.quest import MXFloat4e2m1QuestAct
from jqinject.quant.solver import ActQuantSolver, GradQuantSolver
from jqinject.quant.training.mx import StraightThrough

GROUP = 32


class ThreeQuarters(StraightThrough, MXActMixin, Fp4e2m1Mixin, FpOCPMixin, FloatBase):
    """e2m1 in groups of 32 of at most 6: scale = 4/3 of the power of two at or below a quarter of the group's largest.

    Three quarters of a number are rounded in steps of that power of two, so rounding up never goes beyond 6, and what
    is rounded stochastically is right on average. Products of two such numbers get the paper's 16/9 from both scales.
    """

    scaling_stats_op = StatsOp.MAX
    float_scaling_impl = FloatScaling
    restrict_scale_threshold_impl = ScaledRestrictValue
    scale_factor = 4 / 3
    float_to_int_impl_type = (this << 1).gradient_rounding


class Forward(StraightThrough, MXFloat4e2m1QuestAct):
    """`x` and `w` of the forward product, transformed."""

    pre_transform = (this << 1).hadamard


class Again(ThreeQuarters, ActQuantSolver):
    """`w` and `x` of the backward products: what the forward product saw, transformed along the other axis."""

    pre_transform = (this << 1).hadamard


class Gradient(ThreeQuarters, GradQuantSolver):
    """`g` of both backward products."""

    pre_transform = (this << 1).hadamard


@value
def signs_of(hadamard, random_signs):
    """Whether signs are drawn; without a transform there is nothing to draw them for."""
    return random_signs and hadamard is not None


class Quartet(Scheme):
    """Training in MXFP4, 4.25 bits for every operand: groups of 32 along what each product sums over.

    | name | what it does | default |
    |---|---|---|
    | `hadamard` | what both operands of each product go through; None for nothing | `Hadamard(32)` |
    | `random_signs` | whether random signs, new ones at each call, come before it in the backward products | True |
    | `gradient_rounding` | how the backward products' operands are rounded: "stochastic_round", "round" | \
"stochastic_round" |

    Forward, with `H` the Hadamard matrix of each 32 features and `Q` rounding to nearest with the scale of
    `MXFloat4e2m1QuestAct`, `y = Q(x H) Q(H^T w)`. Backward, with `R` a Hadamard matrix with random signs and `S`
    stochastic rounding with 4/3 of a power of two as scale,

        dx = (M_x * (S(g R) S(R^T (H^T w)_q^T))) H^T,    dw = H (M_w * (S((x H)_q^T R) S(R^T g)))

    where `(...)_q` is what the forward product saw, and the masks `M` are 0 where it clipped a number (6 or more in
    steps of its scale). Without masks and rounding these are the gradients of `y = x w`. On average over keys they are
    `dw = H (M_w * ((x H)_q^T g))` and `dx = (M_x * (g (H^T w)_q^T)) H^T`, as in the paper: shorter than `x^T g` and
    `g w^T`, 0.86 to 0.91 of them for normal numbers. About half of this are the masks, half the numbers that the
    forward product clipped. Inputs, outputs and rows of a
    batch (the last axis before the features) have to be multiples of 32 while training. It needs random numbers:
    `rngs=` where it is used.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(64, 32, scheme=Quartet, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((32, 64))).shape
        (32, 32)
    """

    hadamard = Hadamard(GROUP)
    random_signs = True
    gradient_rounding = "stochastic_round"
    fprop_lhs = fprop_rhs = Forward
    dgrad_grad = wgrad_grad = Gradient
    dgrad_rhs = wgrad_lhs = Again
    dgrad_source = wgrad_source = "dequantized"
    dgrad_random_signs = wgrad_random_signs = signs_of
