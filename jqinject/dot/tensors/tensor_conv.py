"""The convolution of two operands, forward as integers if both have them, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.convolution_gradients import is_plain, of_lhs_gradient, of_rhs_gradient
from jqinject.dot.kernels.integer import IntegerOperand, affine_of, has_integers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor, quantized_by
from jqinject.dot.tensors.packed_tensor import array_of, floats_of, unpacked_tensor
from jqinject.dot.tensors.six_operands import UNCHANGED, BackwardProduct, KeptOperands, operands_of
from jqinject.ops.packing import LowBits
from jqinject.ops.ste import backward_only, first_order
from jqinject.quant_tensor import as_array

NO_SECOND_DERIVATIVE = (
    "a quantized convolution has no second derivative: rounding has none.\n"
    "  cure: differentiate it once, or use jax.lax.conv_general_dilated where it is differentiated twice"
)


def integer_conv(conv: Convolution, lhs: IntegerOperand, rhs: IntegerOperand) -> jax.Array:
    """The convolution of integers, with the gradients of the convolution of their floats.

    Args:
        conv: the convolution.
        lhs, rhs: the operands; a stored right one gets no gradient.
    """
    return convolve_operands(conv, lhs, rhs, what="a convolution of integers")


def convolve_operands(
    conv: Convolution,
    lhs: Any,
    rhs: Any,
    dgrad: BackwardProduct = UNCHANGED,
    wgrad: BackwardProduct = UNCHANGED,
    what: str = "a quantized convolution",
) -> jax.Array:
    """The convolution of two operands, with gradients straight through to their floats.

    Args:
        conv: the convolution.
        lhs, rhs: the forward product's operands: arrays, QuantTensors or two `IntegerOperand`s. A stored right one gets
            no gradient.
        dgrad, wgrad: the backward products' operands, without `folded`; of the other one the labels are not read.
        what: the convolution, in words.
    """
    values, kept = operands_of(lhs, rhs, dgrad, wgrad)
    with backward_only(what):
        return _convolve(_Static(conv, values[1] is None), *values, (dgrad.slot, wgrad.slot), kept)


@dataclass(frozen=True)
class _Static:
    conv: Convolution
    stored: bool


def _on_integers(conv: Convolution, lhs: Any, rhs: Any) -> bool:
    """Whether two operands are convolved as integers."""
    return has_integers(lhs) and has_integers(rhs) and conv.filters.fit(lhs, rhs)


def _forward(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Any, kept: KeptOperands
) -> jax.Array:
    conv, left, right = static.conv, unpacked_tensor(kept.lhs), unpacked_tensor(kept.rhs)
    if all([isinstance(x, IntegerOperand) for x in (left, right)]):
        return conv.of_integers(left.integers, right.integers)
    if _on_integers(conv, left, right):
        return conv.of_integers(affine_of(left), affine_of(right))
    left, right = as_array(left), as_array(right)
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return conv.numbers(left.astype(dtype), right.astype(dtype), conv.dtype)


_convolve = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _fwd(
    static: _Static, lhs: jax.Array, rhs: jax.Array | None, slots: Any, kept: KeptOperands
) -> tuple[jax.Array, Any]:
    *_, kept = first_order((lhs, rhs, kept), NO_SECOND_DERIVATIVE)
    return _forward(static, lhs, rhs, slots, kept), (slots, kept.without_unused().for_backward())


def _bwd(static: _Static, residuals: tuple[Any, LowBits], g: jax.Array) -> Any:
    conv, slots, kept = static.conv, residuals[0], KeptOperands.from_forward(residuals[1])
    g = first_order(g, NO_SECOND_DERIVATIVE)
    seen: tuple[Any, Any] = None, None
    if kept.others == kept.quantizers == (None, None):
        dx, dw = _float_gradients(conv, floats_of(kept.lhs), floats_of(kept.rhs), g)
    else:
        of_lhs, of_rhs = (
            (g, None) if by is None else by(g, slot, _made)
            for by, slot in zip(kept.quantizers, slots, strict=True)
        )
        seen = of_lhs[1], of_rhs[1]
        dx, dw = _gradients(conv, kept, g, of_lhs[0], of_rhs[0])
    return dx, None if static.stored else dw, seen, None


_convolve.defvjp(_fwd, _bwd)


def _gradients(
    conv: Convolution, kept: KeptOperands, g: jax.Array, of_lhs: Any, of_rhs: Any
) -> tuple[jax.Array, jax.Array]:
    """The gradients of both operands, as integers if the backward products' operands have them.

    Args:
        conv: the convolution.
        kept: the operands.
        g: the gradient of the output.
        of_lhs, of_rhs: the gradient, quantized for each product.
    """
    left, right = kept.lhs, kept.rhs
    w, x = (
        (right if kept.others[0] is None else kept.others[0]),
        (left if kept.others[1] is None else kept.others[1]),
    )
    shapes = tuple(left.shape), tuple(right.shape), tuple(g.shape)
    dgrad = of_lhs_gradient(conv, shapes, left.dtype) if is_plain(conv) else None
    wgrad = of_rhs_gradient(conv, shapes, right.dtype) if is_plain(conv) else None
    if dgrad is not None and _on_integers(dgrad, of_lhs, w):
        turned = affine_of(w)
        turned = turned._replace(payload=jnp.flip(turned.payload, dgrad.specs[1][2:]))
        dx = dgrad.of_integers(affine_of(of_lhs), turned)
    else:
        kernel = as_array(w).astype(right.dtype)
        dx = _float_gradients(conv, array_of(left), kernel, as_array(of_lhs).astype(g.dtype))[0]
    if wgrad is not None and _on_integers(wgrad, x, of_rhs):
        dw = wgrad.of_integers(affine_of(x), affine_of(of_rhs))
    else:
        image = as_array(x).astype(left.dtype)
        dw = _float_gradients(conv, image, array_of(right), as_array(of_rhs).astype(g.dtype))[1]
    return dx, dw


def _float_gradients(conv: Convolution, lhs: jax.Array, rhs: jax.Array, g: jax.Array) -> tuple[Any, Any]:
    """The gradients of both operands of the convolution of floats."""
    _, pull = jax.vjp(lambda a, b: conv.numbers(a, b, conv.dtype), lhs, rhs)
    return pull(first_order(g, NO_SECOND_DERIVATIVE))


def _made(proxy: Any, g: jax.Array) -> Any:
    labels = tuple(("out", axis) for axis in range(g.ndim))
    return quantized_by(proxy, LabelledTensor(g, labels), (), in_rows=False).tensor
