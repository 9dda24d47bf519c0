"""A convolution by a scheme: forward as integers where both operands have them, backward in floats."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.geometry.labels import Labels
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.integer import affine_of
from jqinject.dot.schemes.scheme import Kept, SchemeSpec
from jqinject.dot.schemes.scheme_quantizers import NoRandomNumbers, SchemeQuantizers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, quantized_by
from jqinject.dot.tensors.tensor_conv import NO_SECOND_DERIVATIVE, convolves_integers, float_gradients
from jqinject.ops.derivatives import backward_only, first_order
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
    """The convolution of two arrays, forward and backward as a scheme says.

    Both operands of each backward product are dequantized, as no backend convolves low-bit gradients. Quantizers of
    activations and gradients see their operand as it is: features last, as Flax lays them out.

    Args:
        quantizers: of the scheme; tiles do not count.
        conv: the convolution.
        lhs, rhs: float arrays, or operands that are quantized already.
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
    floats = as_array(left), as_array(right)
    dgrad = _backward(
        quantizers, scheme, "dgrad", _labelled("out", g, conv.specs[2][0]), (kernel, over_kernel)
    )
    wgrad = _backward(quantizers, scheme, "wgrad", _labelled("out", g, conv.specs[2][1]), (x, over_x))
    takes_integers = convolves_integers(conv, left, right)
    payloads = (affine_of(left), affine_of(right)) if takes_integers else floats
    taken = payloads, (dgrad[1], wgrad[1]), (dgrad[0][0], wgrad[0][0])
    with backward_only("a quantized convolution"):
        return _conv(
            conv,
            takes_integers,
            *floats,
            (dgrad[0][1], wgrad[0][1]),
            jax.tree.map(jax.lax.stop_gradient, taken),
        )


def _backward(
    quantizers: SchemeQuantizers, scheme: SchemeSpec, product: str, g: Operand, other: Operand
) -> tuple[Any, Any]:
    """Of a backward product: the gradient's quantizer and slot, and the other operand; None for the forward one's."""
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
    return by, as_array(quantizers.operand(name, fixed, over, in_rows=False).tensor)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv(
    conv: Convolution, takes_integers: bool, lhs: jax.Array, rhs: jax.Array, slots: Any, kept: Any
) -> jax.Array:
    if takes_integers:
        return conv.of_integers(*kept[0])
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    return conv.numbers(lhs.astype(dtype), rhs.astype(dtype), conv.dtype)


def _fwd(
    conv: Convolution, takes_integers: bool, lhs: jax.Array, rhs: jax.Array, slots: Any, kept: Any
) -> Any:
    lhs, rhs = first_order(lhs, NO_SECOND_DERIVATIVE), first_order(rhs, NO_SECOND_DERIVATIVE)
    y = _conv(conv, takes_integers, lhs, rhs, slots, kept)
    return y, (lhs, rhs, slots, kept[1:])


def _bwd(conv: Convolution, takes_integers: bool, residuals: Any, g: jax.Array) -> Any:
    lhs, rhs, slots, ((kernel, x), taken) = residuals
    kernel, x = (made if given is None else given for given, made in ((kernel, rhs), (x, lhs)))
    g = first_order(g, NO_SECOND_DERIVATIVE)
    of_lhs, dgrad_seen = _quantized(taken[0], slots[0], g)
    of_rhs, wgrad_seen = _quantized(taken[1], slots[1], g)
    return (
        float_gradients(conv, (lhs, kernel.astype(rhs.dtype)), of_lhs)[0],
        float_gradients(conv, (x.astype(lhs.dtype), rhs), of_rhs)[1],
        (dgrad_seen, wgrad_seen),
        None,
    )


_conv.defvjp(_fwd, _bwd)


def _quantized(taken: Any, slot: Any, g: jax.Array) -> tuple[jax.Array, Any]:
    if taken is None:
        return g, None
    made, seen = taken(g, slot, _made)
    return made.astype(g.dtype), seen


def _made(proxy: Any, g: jax.Array) -> jax.Array:
    labels = tuple(("out", axis) for axis in range(g.ndim))
    return as_array(quantized_by(proxy, LabelledTensor(g, labels), (), in_rows=False).tensor)
