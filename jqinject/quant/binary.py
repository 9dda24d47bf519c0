"""Weights and activations of two values."""

from jqinject.core.clamp import TensorClamp, TensorClampSte
from jqinject.quant.fragments import SignedBinaryClampedConst
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver


class SignedBinaryWeightPerTensorConst(SignedBinaryClampedConst, WeightQuantSolver):
    """-0.1 or 0.1 by the sign of the weight; the gradient passes straight through.

    differs from Brevitas: there the forward pass clamps the weight itself in place; here the weight is left alone, and
    the quantized values and gradients are the same.
    """

    tensor_clamp_impl = TensorClampSte
    scaling_const = 0.1


class SignedBinaryActPerTensorConst(SignedBinaryClampedConst, ActQuantSolver):
    """-1 or 1 by the sign of the activation; no gradient outside [-1, 1]."""

    tensor_clamp_impl = TensorClamp
    min_val = -1.0
    max_val = 1.0
