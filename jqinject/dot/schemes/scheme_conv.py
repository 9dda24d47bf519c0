"""A convolution by a scheme: forward as integers if both operands have them, backward in floats."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.convolution_gradients import is_plain, of_lhs_gradient, of_rhs_gradient
from jqinject.dot.kernels.integer import affine_of
from jqinject.dot.schemes.random_numbers import NoRandomNumbers
from jqinject.dot.schemes.scheme import Kept, SchemeSpec
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, quantized_by
from jqinject.dot.tensors.packed_tensor import is_packed, is_tensor, packed_tensor, unpacked_tensor
from jqinject.dot.tensors.tensor_conv import NO_SECOND_DERIVATIVE, convolves_integers, float_gradients
from jqinject.ops.derivatives import backward_only, first_order
from jqinject.ops.minifloats.low_bits import LowBits, as_bits
from jqinject.quant_tensor import QuantTensor, as_array

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
) -> jax.Array:
    """The convolution of two arrays by a scheme, forward and backward.

    Each of the three products is a convolution of integers if both operands have them, with one scale or one for each
    example (input feature, backward) of the left and each output feature of the right one, and there are no groups.
    Quantizers of activations and gradients see the operand unchanged: features last, as in Flax.

    Args:
        quantizers: of the scheme; tiles are ignored.
        conv: the convolution.
        lhs, rhs: float arrays, or operands that are already quantized.
    """
    scheme = quantizers.scheme.of_convolution()
    (x, over_x), (kernel, over_kernel) = operands_of(conv, lhs, rhs)
    left: Any = lhs
    if not isinstance(lhs, QuantTensor):
        left = quantizers.operand("fprop_lhs", x, over_x, in_rows=False).tensor
    right: Any = rhs
    if not isinstance(rhs, QuantTensor):
        right = quantizers.operand("fprop_rhs", kernel, over_kernel, beside=left, in_rows=False).tensor
    shape = jax.eval_shape(lambda a, b: conv.numbers(a, b, conv.dtype), as_array(left), as_array(right)).shape
    g = jax.ShapeDtypeStruct(shape, conv.dtype)
    # What a backward product keeps: examples and inputs, inputs and outputs.
    kernel_of_dgrad, x_of_wgrad = (
        _labelled("rhs", rhs, conv.specs[1][1]),
        _labelled("lhs", lhs, conv.specs[0][1]),
    )
    dgrad = _backward(quantizers, scheme, "dgrad", _labelled("out", g, conv.specs[2][0]), kernel_of_dgrad)
    wgrad = _backward(quantizers, scheme, "wgrad", _labelled("out", g, conv.specs[2][1]), x_of_wgrad)
    taken = (left, right), (dgrad[1], wgrad[1]), (dgrad[0][0], wgrad[0][0])
    packed = jax.tree.map(packed_tensor, taken, is_leaf=is_tensor)
    with backward_only("a quantized convolution"):
        return _conv(
            conv,
            as_array(left),
            as_array(right),
            (dgrad[0][1], wgrad[0][1]),
            jax.tree.map(jax.lax.stop_gradient, packed),
        )


def _backward(
    quantizers: SchemeQuantizers, scheme: SchemeSpec, product: str, g: Operand, other: Operand
) -> tuple[Any, Any]:
    """For a backward product: the gradient's quantizer and slot, and the other operand; None for the forward one's."""
    name = "dgrad_rhs" if product == "dgrad" else "wgrad_lhs"
    grad = f"{product}_grad"
    by = (None, None) if scheme[grad] is None else quantizers.gradient(grad, *g)
    x, over = other
    if scheme[name] is Kept.FPROP or isinstance(x.tensor, QuantTensor):
        return by, None
    fixed = LabelledTensor(jax.lax.stop_gradient(x.tensor), x.labels)
    if scheme[name] is None:
        return by, fixed.tensor
    if quantizers.draws_in_vain(name, fixed, over):
        return (NoRandomNumbers(f"{quantizers.where}: {scheme.name}.{name}"), None), None
    return by, quantizers.operand(name, fixed, over, in_rows=False).tensor


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(conv: Convolution, lhs: jax.Array, rhs: jax.Array, slots: Any, kept: Any) -> jax.Array:
    left, right = (unpacked_tensor(x) for x in kept[0])
    if convolves_integers(conv, left, right):
        return conv.of_integers(affine_of(left), affine_of(right))
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    return conv.numbers(as_array(left).astype(dtype), as_array(right).astype(dtype), conv.dtype)


def _fwd(conv: Convolution, lhs: jax.Array, rhs: jax.Array, slots: Any, kept: Any) -> Any:
    lhs, rhs = first_order(lhs, NO_SECOND_DERIVATIVE), first_order(rhs, NO_SECOND_DERIVATIVE)
    return _conv(conv, lhs, rhs, slots, kept), (slots, as_bits(kept))


def _bwd(conv: Convolution, residuals: tuple[Any, LowBits], g: jax.Array) -> Any:
    slots, kept = residuals[0], residuals[1].floats()
    (left, right), (w, x), quantizers = jax.tree.map(unpacked_tensor, kept, is_leaf=is_packed)
    w, x = right if w is None else w, left if x is None else x
    g = first_order(g, NO_SECOND_DERIVATIVE)
    of_lhs, dgrad_seen = _quantized(quantizers[0], slots[0], g)
    of_rhs, wgrad_seen = _quantized(quantizers[1], slots[1], g)
    shapes = tuple(left.shape), tuple(right.shape), tuple(g.shape)
    dgrad = of_lhs_gradient(conv, shapes, left.dtype) if is_plain(conv) else None
    wgrad = of_rhs_gradient(conv, shapes, right.dtype) if is_plain(conv) else None
    if dgrad is not None and convolves_integers(dgrad, of_lhs, w):
        turned = affine_of(w)
        turned = turned._replace(payload=jnp.flip(turned.payload, dgrad.specs[1][2:]))
        dx = dgrad.of_integers(affine_of(of_lhs), turned)
    else:
        floats = as_array(left), as_array(w).astype(right.dtype)
        dx = float_gradients(conv, floats, as_array(of_lhs).astype(g.dtype))[0]
    if wgrad is not None and convolves_integers(wgrad, x, of_rhs):
        dw = wgrad.of_integers(affine_of(x), affine_of(of_rhs))
    else:
        floats = as_array(x).astype(left.dtype), as_array(right)
        dw = float_gradients(conv, floats, as_array(of_rhs).astype(g.dtype))[1]
    return dx, dw, (dgrad_seen, wgrad_seen), None


_conv.defvjp(_fwd, _bwd)


def _quantized(taken: Any, slot: Any, g: jax.Array) -> tuple[Any, Any]:
    return (g, None) if taken is None else taken(g, slot, _made)


def _made(proxy: Any, g: jax.Array) -> Any:
    labels = tuple(("out", axis) for axis in range(g.ndim))
    return quantized_by(proxy, LabelledTensor(g, labels), (), in_rows=False).tensor
