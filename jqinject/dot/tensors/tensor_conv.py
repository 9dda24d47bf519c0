"""The convolution of two QuantTensors as integers, with the gradients of the float convolution."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from jqinject.dot.kernels.convolution import Convolution, varies_only_along
from jqinject.dot.kernels.integer import Affine, has_integers
from jqinject.dot.tensors.tensor_dot import KINDS, describe
from jqinject.ops.derivatives import backward_only, first_order
from jqinject.quant_tensor import IntQuantTensor

NO_SECOND_DERIVATIVE = (
    "a quantized convolution has no second derivative: rounding has none.\n"
    "  cure: differentiate it once, or use jax.lax.conv_general_dilated where it is differentiated twice"
)


def convolves_integers(conv: Convolution, lhs: Any, rhs: Any, contraction: str = "auto") -> bool:
    """Whether two operands are convolved as integers.

    Raises:
        ValueError: they should be and cannot; or `contraction` is unknown.
    """
    if contraction not in KINDS:
        raise ValueError(f"contraction must be one of {', '.join(map(repr, KINDS))}; got {contraction!r}")
    if contraction == "fp8":
        raise ValueError(
            "a convolution has no contraction of 8-bit floats.\n  cure: contraction='auto', which contracts the "
            "dequantized floats"
        )
    can = (
        isinstance(lhs, IntQuantTensor)
        and isinstance(rhs, IntQuantTensor)
        and has_integers(lhs)
        and has_integers(rhs)
        and lhs.zero_point.size == 1
        and varies_only_along(rhs.zero_point, rhs.ndim, conv.channel_axis)
        and varies_only_along(lhs.scale, lhs.ndim, conv.specs[0][0])
        and varies_only_along(rhs.scale, rhs.ndim, conv.channel_axis)
    )
    if contraction == "int" and not can:
        raise ValueError(
            "contraction='int' of a convolution needs two IntQuantTensors of at most 8 bits: the left one with one "
            "zero point, and one scale or one for each example; the right one with one scale or one for each output "
            f"feature, and zero points likewise; got {describe(lhs)} and {describe(rhs)}."
            "\n  cure: contraction='auto'"
        )
    return can and contraction != "float"


def integer_conv(conv: Convolution, lhs: jax.Array, rhs: Any, left: Affine, right: Affine) -> jax.Array:
    """The convolution of integers.

    Args:
        conv: the convolution.
        lhs, rhs: the values, which receive the gradients and are unused forward; instead of `rhs` the dtype of
            its values, if `right` is stored and has no gradient.
        left, right: their integers.
    """
    values = rhs if isinstance(rhs, jax.Array) else None
    with backward_only("a convolution of integers"):
        return _integers((conv, None if values is not None else np.dtype(rhs)), lhs, values, left, right)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _integers(
    static: tuple[Convolution, Any], lhs: jax.Array, rhs: jax.Array | None, left: Affine, right: Affine
) -> jax.Array:
    return static[0].of_integers(left, right)


def _integers_fwd(
    static: tuple[Convolution, Any], lhs: jax.Array, rhs: jax.Array | None, left: Affine, right: Affine
) -> Any:
    lhs, rhs = first_order((lhs, rhs), NO_SECOND_DERIVATIVE)
    return _integers(static, lhs, rhs, left, right), (lhs, right if rhs is None else rhs)


def _integers_bwd(static: tuple[Convolution, Any], kept: tuple[jax.Array, Any], g: jax.Array) -> Any:
    (conv, stored), (lhs, rhs) = static, kept
    if isinstance(rhs, Affine):
        floats = lhs, rhs.dequantized().astype(stored)
        return float_gradients(conv, floats, g)[0], None, None, None
    return *float_gradients(conv, (lhs, rhs), g), None, None


_integers.defvjp(_integers_fwd, _integers_bwd)


def float_gradients(conv: Convolution, kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[Any, Any]:
    """The gradients of both operands of the convolution of floats."""
    lhs, rhs = kept
    g = first_order(g, NO_SECOND_DERIVATIVE)
    _, pull = jax.vjp(lambda a, b: conv.numbers(a, b, conv.dtype), lhs, rhs)
    return pull(g)
