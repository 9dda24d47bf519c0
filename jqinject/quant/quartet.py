"""Quartet and Quartet II: schemes of training whose operands are all in 4 bits, rotated before they are rounded.

| scheme | format | forward | backward |
|---|---|---|---|
| `Quartet` | MXFP4 | rotated, clipped where that costs a normal distribution least | numbers rounded stochastically |
| `QuartetII` | NVFP4 | not rotated, each block with the better of two scales | numbers rounded to nearest, block \
scales corrected and rounded stochastically |

Source: Castro et al., 2025, "Quartet: Native FP4 Training Can Be Optimal for Large Language Models", algorithm 1;
Panferov et al., 2026, "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation".
"""

from jqinject import core, dot
from jqinject.inject import this, value
from jqinject.quant import codebook, float_base, solver
from jqinject.quant.minifloat import blocks
from jqinject.quant.training import StraightThrough


class QuartetThreeQuarters(
    StraightThrough, blocks.MXActMixin, float_base.Fp4e2m1Mixin, float_base.FpOCPMixin, float_base.FloatBase
):
    """e2m1 in groups of 32 of at most 6: scale = 4/3 of the power of two at or below a quarter of the group's largest.

    Three quarters of a number are rounded in steps of that power of two, so rounding up never goes beyond 6, and what
    is rounded stochastically is right on average. Products of two such numbers get the paper's 16/9 from both scales.
    """

    float_scaling_impl = core.FloatScaling
    restrict_scale_threshold_impl = core.ScaledRestrictValue
    scale_factor = 4 / 3
    float_to_int_impl_type = (this << 1).gradient_rounding
    pre_transform = (this << 1).hadamard


class QuartetForward(StraightThrough, codebook.MXFloat4e2m1QuestAct):
    """`x` and `w` of the forward product, transformed."""

    pre_transform = (this << 1).hadamard


class QuartetBackward(QuartetThreeQuarters, solver.ActQuantSolver):
    """`w` and `x` of the backward products: what the forward product saw, transformed along the other axis."""


class QuartetGradient(QuartetThreeQuarters, solver.GradQuantSolver):
    """`g` of both backward products."""


@value
def signs_of(hadamard: object, random_signs: bool) -> bool:
    """Whether signs are drawn; without a transform there is nothing to draw them for."""
    return random_signs and hadamard is not None


class Quartet(dot.Scheme):
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

    hadamard = core.Hadamard(32)
    random_signs = True
    gradient_rounding = "stochastic_round"
    fprop_lhs = fprop_rhs = QuartetForward
    dgrad_grad = wgrad_grad = QuartetGradient
    dgrad_rhs = wgrad_lhs = QuartetBackward
    dgrad_source = wgrad_source = "dequantized"
    dgrad_random_signs = wgrad_random_signs = signs_of


class QuartetIIForwardAct(blocks.NVFP4TrainingAct):
    """`x` of the forward product."""

    block_scale_impl = (this << 1).forward_scales


class QuartetIIForwardWeight(blocks.NVFP4TrainingWeight):
    """`w` of the forward product."""

    block_scale_impl = (this << 1).forward_scales


class QuartetIIBackward(blocks.NVFP4TrainingActEden):
    """`w` and `x` of the backward products: what the forward product saw, rotated along the other axis."""

    scale_to_int_impl_type = (this << 1).gradient_rounding
    pre_transform = (this << 1).hadamard
    correction_size = (this << 1).correction_size


class QuartetIIGradient(blocks.NVFP4TrainingGradEden):
    """`g` of both backward products."""

    scale_to_int_impl_type = (this << 1).gradient_rounding
    pre_transform = (this << 1).hadamard
    correction_size = (this << 1).correction_size


@value
def rotated_together(hadamard: object) -> int:
    """`correction_size`: the numbers that a Hadamard transform of blocks mixes, else 128."""
    size = hadamard.block_size if isinstance(hadamard, core.Hadamard) else None
    return size or 128


class QuartetII(dot.Scheme):
    """Training in NVFP4, 4.5 bits for every operand: blocks of 16 along what each product sums over.

    | name | what it does | default |
    |---|---|---|
    | `forward_scales` | block scales of the forward product | `FourOverSixScales("mse", e4m3_max=256)` |
    | `hadamard` | what both operands of each backward product go through; None for nothing | `Hadamard(128)` |
    | `random_signs` | whether random signs, new ones at each call, come before it | True |
    | `gradient_rounding` | how block scales of the backward products are rounded: "stochastic_round", "round" | \
"stochastic_round" |
    | `correction_size` | numbers that share a correction of their scales | those that `hadamard` mixes |

    Forward, `y = Q(x) Q(w)` with numbers rounded to nearest, each block with the better of two scales. Backward, with
    `R` a Hadamard matrix of 128 with random signs and `E` MS-EDEN's rounding (`jqinject.core.EdenScales`),

        dx = E(g R) E(R^T w_q^T),    dw = E(x_q^T R) E(R^T g)

    where `(...)_q` is what the forward product saw. On average over keys these are `g w_q^T` and `x_q^T g`, the
    gradients of the forward product with gradients that pass its quantizers unchanged, and closer to them than numbers
    that are rounded stochastically. Two limits, measured: of 128 numbers of which 8 are not 0 the mean is 2 % off
    (4: 4 %; 16: nothing seen), as a Hadamard matrix with random signs is not every rotation; and as both operands of a
    product are rotated alike, that of a vector with itself is 0.9 % too long (at a correlation of 0.9: nothing seen).

    Outputs and rows of a batch (the last axis before the features) have to be multiples of 128 while training. It needs
    random numbers: `rngs=` where it is used.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jqinject.nn import QuantLinear
        >>> layer = QuantLinear(32, 128, scheme=QuartetII, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((128, 32))).shape
        (128, 128)
    """

    forward_scales = core.FourOverSixScales("mse", e4m3_max=256)
    hadamard = core.Hadamard(128)
    random_signs = True
    gradient_rounding = "stochastic_round"
    correction_size = rotated_together
    fprop_lhs = QuartetIIForwardAct
    fprop_rhs = QuartetIIForwardWeight
    dgrad_grad = wgrad_grad = QuartetIIGradient
    dgrad_rhs = wgrad_lhs = QuartetIIBackward
    dgrad_source = wgrad_source = "dequantized"
    dgrad_random_signs = wgrad_random_signs = signs_of
