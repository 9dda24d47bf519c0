"""Weights and activations of three values."""

from jqinject.core.clamp import TensorClamp, TensorClampSte
from jqinject.quant.fragments import NarrowIntQuant, PerTensorConstScaling2bit
from jqinject.quant.solver import ActQuantSolver, WeightQuantSolver


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
