"""A convolution by a scheme: the operands of its three products."""

from __future__ import annotations

from typing import Any

import jax

from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.schemes.contraction import Contraction
from jqinject.dot.schemes.product_transforms import transform_of
from jqinject.dot.schemes.scheme import SchemeSpec
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
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
    contraction: Contraction,
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
        contraction: by the scheme, of `SchemeSpec.of_convolution`; tiles are ignored.
        conv: the convolution.
        lhs, rhs: float arrays, or operands that are already quantized.
        unrounded: what a quantized `rhs` was made from, for `dgrad_rhs`; None for its dequantized value.
    """
    scheme = contraction.scheme
    check_no_transform(scheme, contraction.where)
    (x, over_x), (kernel, over_kernel) = operands_of(conv, lhs, rhs)
    left: Any = lhs
    if not is_quantized(lhs):
        left = contraction.operand("fprop_lhs", x, over_x, in_rows=False).tensor
    right: Any = rhs
    if not is_quantized(rhs):
        right = contraction.operand("fprop_rhs", kernel, over_kernel, beside=left, in_rows=False).tensor
    shape = jax.eval_shape(lambda a, b: conv.numbers(a, b, conv.dtype), as_array(left), as_array(right)).shape
    g = jax.ShapeDtypeStruct(shape, conv.dtype)
    original = rhs if unrounded is None else unrounded
    kernel_of_dgrad = as_array(right) if "dgrad_dequantized" in scheme.flags else original
    x_of_wgrad = as_array(left) if "wgrad_dequantized" in scheme.flags else lhs
    # What a backward product keeps: examples and inputs, inputs and outputs.
    dgrad, wgrad = (
        contraction.backward_product(names, _labelled("out", g, of_g), _labelled(*other), in_rows=False)
        for names, of_g, other in (
            (("dgrad_grad", "dgrad_rhs"), conv.specs[2][0], ("rhs", kernel_of_dgrad, conv.specs[1][1])),
            (("wgrad_grad", "wgrad_lhs"), conv.specs[2][1], ("lhs", x_of_wgrad, conv.specs[0][1])),
        )
    )
    return convolve_operands(conv, left, right, dgrad, wgrad)


def check_no_transform(scheme: SchemeSpec, where: str) -> None:
    """Refuse a transform: what a convolution sums over, windows, lies along no axis of its operands.

    Args:
        scheme: of the convolution.
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
