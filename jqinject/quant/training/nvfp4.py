"""Training with NVFP4: 4 bits for every operand of every product.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025; TransformerEngine's `NVFP4BlockScaling`.
"""

from jqinject.core.transforms import Hadamard
from jqinject.dot import Scheme
from jqinject.dot.schemes.scheme import Kept
from jqinject.inject import this, value
from jqinject.quant.minifloat.nvfp4 import (
    NVFP4TrainingAct,
    NVFP4TrainingGrad,
    NVFP4TrainingSigns,
    NVFP4TrainingWeight,
)

BLOCK = 16


class RotatedInput(NVFP4TrainingAct):
    """`x` of the product for the weight's gradient."""

    pre_transform = (this << 1).hadamard


class Gradient(NVFP4TrainingGrad):
    """`g` of the product for the input's gradient."""

    float_to_int_impl_type = (this << 1).gradient_rounding
    random_bits = (this << 1).random_bits


class RotatedGradient(Gradient):
    """`g` of the product for the weight's gradient."""

    pre_transform = (this << 1).hadamard


class WeightInBlocks(NVFP4TrainingWeight):
    """`w`, in the blocks that the scheme says."""

    group_size = (this << 1).weight_block


@value
def weight_of_dgrad(weight_block):
    """`dgrad_rhs`: of square blocks what the forward product took, else the weight quantized along its outputs."""
    square = isinstance(weight_block, tuple) and weight_block[0] == weight_block[1]
    return Kept.FPROP if square else this.fprop_rhs


class NVFP4Training(Scheme):
    """Training in 4 bits: inputs and gradients in blocks of 16 along what each product sums over, weights in 16 x 16.

    | name | what it does | default |
    |---|---|---|
    | `weight_block` | blocks of weights: square, the same for both products; 16: along the sum | `(16, 16)` |
    | `hadamard` | what turns both operands of `dw`; None for nothing | `Hadamard(16, NVFP4TrainingSigns)` |
    | `gradient_rounding` | how gradients are rounded: "stochastic_round", "round" | "stochastic_round" |
    | `random_bits` | of each random number: 16, or 32, which take twice the time | 16 |

    Its numbers are TransformerEngine's; block scales are e4m3, and one float32 scale is shared by a tensor. Gradients
    pass the quantizers unchanged. Rounding stochastically needs random numbers: `rngs=` of a `QDotGeneral`, in a layer
    that of the layer. The rows of a batch (their last axis before the features) have to be a multiple of 16 while
    training, for the transform. For the backward pass 4.5 bits are kept of a number.

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

    weight_block = (BLOCK, BLOCK)
    hadamard = Hadamard(BLOCK, NVFP4TrainingSigns)
    gradient_rounding = "stochastic_round"
    random_bits = 16
    fprop_lhs = NVFP4TrainingAct
    fprop_rhs = WeightInBlocks
    dgrad_grad = Gradient
    dgrad_rhs = weight_of_dgrad
    wgrad_lhs = RotatedInput
    wgrad_grad = RotatedGradient
