"""A convolution by a scheme: forward as integers where both operands have them, backward in floats."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.schemes.quantized_conv import NO_SECOND_DERIVATIVE, convolves_integers, float_gradients
from jqinject.dot.schemes.scheme import Kept
from jqinject.dot.schemes.scheme_quantizers import SchemeQuantizers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.dot.tensors.tensor_dot import affine_of
from jqinject.ops.derivatives import backward_only, first_order
from jqinject.quant_tensor import QuantTensor, as_array


def kernel_of(conv: Convolution, rhs: Any) -> tuple[LabelledTensor, tuple[Any, ...]]:
    """The kernel of a convolution with its labels, and those that are summed over."""
    labels = tuple(("rhs", axis) for axis in range(rhs.ndim))
    return LabelledTensor(rhs, labels), tuple(label for label in labels if label[1] != conv.channel_axis)


def scheme_conv(
    quantizers: SchemeQuantizers, conv: Convolution, lhs: jax.Array, rhs: jax.Array | QuantTensor
) -> jax.Array:
    """The convolution of two arrays, forward and backward as a scheme says.

    Both operands of each backward product are dequantized, as no backend convolves low-bit gradients. Quantizers of
    activations and gradients see their operand as it is: features last, as Flax lays them out.

    Args:
        quantizers: of the scheme; tiles and accumulators do not count.
        conv: the convolution.
        lhs: float array.
        rhs: float array, or a kernel that is quantized already.
    """
    x = LabelledTensor(lhs, tuple(("lhs", axis) for axis in range(lhs.ndim)))
    left = quantizers.operand("fprop_lhs", x, ()).tensor
    kernel, summed = kernel_of(conv, rhs)
    right: Any = rhs
    if not isinstance(rhs, QuantTensor):
        right = quantizers.operand("fprop_rhs", kernel, summed, beside=left).tensor
    shape = jax.eval_shape(lambda a, b: conv.numbers(a, b, conv.dtype), as_array(left), as_array(right)).shape
    g = LabelledTensor(
        jax.ShapeDtypeStruct(shape, conv.dtype), tuple(("out", axis) for axis in range(len(shape)))
    )
    of = {name: quantizers.gradient(name, g, ()) for name in ("dgrad_grad", "wgrad_grad")}
    again = {}
    for name, operand, over in (("dgrad_rhs", kernel, summed), ("wgrad_lhs", x, ())):
        if quantizers.scheme[name] is not Kept.FPROP and not isinstance(operand.tensor, QuantTensor):
            fixed = LabelledTensor(jax.lax.stop_gradient(operand.tensor), operand.labels)
            again[name] = as_array(quantizers.operand(name, fixed, over).tensor)
    takes_integers = convolves_integers(conv, left, right)
    floats = as_array(left), as_array(right)
    payloads = (affine_of(left), affine_of(right)) if takes_integers else floats
    with backward_only("a quantized convolution"):
        return _conv(
            conv,
            takes_integers,
            *floats,
            (of["dgrad_grad"][1], of["wgrad_grad"][1]),
            jax.tree.map(
                jax.lax.stop_gradient,
                (
                    payloads,
                    again.get("dgrad_rhs", floats[1]),
                    again.get("wgrad_lhs", floats[0]),
                    (of["dgrad_grad"][0], of["wgrad_grad"][0]),
                ),
            ),
        )


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
    lhs, rhs, slots, (kernel, x, taken) = residuals
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
    made, seen = taken(g, slot, lambda proxy, x: as_array(proxy.quantize_gradient(x)))
    return made.astype(g.dtype), seen
