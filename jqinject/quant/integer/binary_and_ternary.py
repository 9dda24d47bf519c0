"""Weights and activations of two values and of three."""

from jqinject.core.clamp import TensorClamp, TensorClampSte
from jqinject.quant.fragments import NarrowIntQuant, PerTensorConstScaling2bit, SignedBinaryClampedConst
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


class SignedTernaryWeightPerTensorConst(NarrowIntQuant, PerTensorConstScaling2bit, WeightQuantSolver):
    """-0.1, 0 or 0.1: narrow 2-bit integers with a constant scale, rounded to the nearest.

    This is not `core.quant.TernaryQuant`, whose threshold is a choice: declare `quant_type = "ternary"` and `threshold`
    for that one.
    """

    tensor_clamp_impl = TensorClampSte
    scaling_const = 0.1


class SignedTernaryActPerTensorConst(NarrowIntQuant, PerTensorConstScaling2bit, ActQuantSolver):
    """-1, 0 or 1: narrow 2-bit integers with a constant scale; no gradient outside [-1, 1]."""

    tensor_clamp_impl = TensorClamp
    min_val = -1.0
    max_val = 1.0
