"""A convolution by a scheme: the operands of its three products."""

from __future__ import annotations

from typing import Any

import jax

from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.random_numbers import NoRandomNumbers
from jqinject.dot.schemes.scheme import Kept, SchemeSpec
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.dot.tensors.six_operands import BackwardProduct
from jqinject.dot.tensors.tensor_conv import convolve_operands
from jqinject.quant_tensor import QuantTensor, as_array, is_quantized

Operand = tuple[LabelledTensor, Labels]


def operands_of(conv: Convolution, lhs: Any, rhs: Any) -> tuple[Operand, Operand]:
    """Both operands with their labels, and the axes that share a scale: all but examples, and all but outputs."""
    return (
        _labelled("lhs", lhs, conv.specs[0][0]),
        _labelled("rhs", rhs, conv.channel_axis),
    )


def _labelled(name: str, x: Any, kept: int) -> Operand:
    labels = tuple((name, axis) for axis in range(x.ndim))
    return LabelledTensor(x, labels), tuple(label for label in labels if label[1] != kept)


def scheme_conv(
    quantizers: SchemeQuantizers,
    conv: Convolution,
    lhs: jax.Array | QuantTensor,
    rhs: jax.Array | QuantTensor,
    unrounded: jax.Array | None = None,
) -> jax.Array:
    """The convolution of two arrays by a scheme, forward and backward.

    Each of the three products is a convolution of integers if both operands have them, with one scale or one for each
    example (input feature, backward) of the left and each output feature of the right one, and there are no groups.
    Quantizers of activations and gradients see the operand unchanged: features last, as in Flax.

    Args:
        quantizers: of the scheme; tiles are ignored.
        conv: the convolution.
        lhs, rhs: float arrays, or operands that are already quantized.
        unrounded: what a quantized `rhs` was made from, for `dgrad_rhs`; None for its dequantized value.
    """
    scheme = quantizers.scheme.of_convolution()
    check_no_transform(scheme, quantizers.where)
    (x, over_x), (kernel, over_kernel) = operands_of(conv, lhs, rhs)
    left: Any = lhs
    if not is_quantized(lhs):
        left = quantizers.operand("fprop_lhs", x, over_x, in_rows=False).tensor
    right: Any = rhs
    if not is_quantized(rhs):
        right = quantizers.operand("fprop_rhs", kernel, over_kernel, beside=left, in_rows=False).tensor
    shape = jax.eval_shape(lambda a, b: conv.numbers(a, b, conv.dtype), as_array(left), as_array(right)).shape
    g = jax.ShapeDtypeStruct(shape, conv.dtype)
    original = rhs if unrounded is None else unrounded
    # What a backward product keeps: examples and inputs, inputs and outputs.
    kernel_of_dgrad, x_of_wgrad = (
        _labelled(
            "rhs", as_array(right) if "dgrad_dequantized" in scheme.flags else original, conv.specs[1][1]
        ),
        _labelled("lhs", as_array(left) if "wgrad_dequantized" in scheme.flags else lhs, conv.specs[0][1]),
    )
    dgrad = _backward(quantizers, scheme, "dgrad", _labelled("out", g, conv.specs[2][0]), kernel_of_dgrad)
    wgrad = _backward(quantizers, scheme, "wgrad", _labelled("out", g, conv.specs[2][1]), x_of_wgrad)
    return convolve_operands(conv, left, right, dgrad, wgrad)


def check_no_transform(scheme: SchemeSpec, where: str) -> None:
    """Refuse a transform: what a convolution sums over, windows, lies along no axis of its operands.

    Args:
        scheme: of the convolution, see `SchemeSpec.of_convolution`.
        where: the user's callable.

    Raises:
        TypeError: an operand has a transform.
    """
    for name, given in scheme.operands:
        if transform_of(given) is not None:
            raise TypeError(
                f"{where}: {scheme.name}.{name} declares a pre_transform, which goes along the axis that a product "
                "sums over, and a convolution sums over windows.\n  cure: the scheme without it (hadamard=None), or "
                "a rule that leaves convolutions out"
            )


def _backward(
    quantizers: SchemeQuantizers, scheme: SchemeSpec, product: str, g: Operand, other: Operand
) -> BackwardProduct:
    """The operands of a backward product."""
    name = "dgrad_rhs" if product == "dgrad" else "wgrad_lhs"
    grad = f"{product}_grad"
    by = (None, None) if scheme[grad] is None else quantizers.gradient(grad, *g)
    x, over = other
    # Of a stored operand the original is gone: the next best is what was made of it.
    gone = is_quantized(x.tensor) and scheme[name] is None
    if scheme[name] is Kept.FPROP or gone:
        return BackwardProduct(*by)
    fixed = LabelledTensor(jax.lax.stop_gradient(as_array(x.tensor)), x.labels)
    if scheme[name] is None:
        return BackwardProduct(*by, fixed)
    if quantizers.draws_in_vain(name, fixed, over):
        return BackwardProduct(NoRandomNumbers(f"{quantizers.where}: {scheme.name}.{name}"))
    return BackwardProduct(*by, quantizers.operand(name, fixed, over, in_rows=False))
