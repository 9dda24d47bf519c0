"""`conv_general_dilated` in low bits, and its gradients, which are those of the float convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jqinject.dot.kernels.convolution import Convolution, varies_only_along
from jqinject.dot.kernels.integer import Affine
from jqinject.dot.schemes.contraction import Unscaled
from jqinject.dot.schemes.operand import QuantizedOperand, missing_key
from jqinject.dot.tensors.jax_functions import assembled, refuse_tensors
from jqinject.dot.tensors.tensor_dot import KINDS, affine_of, describe, has_integers, output_dtype
from jqinject.ops.derivatives import backward_only, first_order
from jqinject.ops.minifloats.low_bits import LowBits, as_bits
from jqinject.quant_tensor import IntQuantTensor, as_array

NO_SECOND_DERIVATIVE = (
    "a quantized convolution has no second derivative: rounding has none.\n"
    "  cure: differentiate it once, or use jax.lax.conv_general_dilated where it is differentiated twice"
)


def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    config: Any = None,
    contraction: str = "auto",
    key: jax.Array | None = None,
) -> jax.Array:
    """`lax.conv_general_dilated` in low bits; see `dot_general`.

    With `config`, the forward contraction's quantizers are used: one scale for each example of `lhs`, one for each
    output feature of `rhs`. The gradients are those of the float convolution, straight through.

    Args:
        lhs, rhs: QuantTensors or arrays.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, batch_group_count,
            precision, preferred_element_type: as for `lax.conv_general_dilated`.
        config, contraction, key: as for `dot_general`. Two IntQuantTensors of at most 8 bits are convolved as
            integers if `lhs` has one zero point and one scale (or one for each example), and `rhs` one of both (or
            one for each output feature). 8-bit floats are convolved in float32.

    Raises:
        TypeError, ValueError: as for `dot_general`; with `config`, a scale that varies along what is summed over.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.dot import config_v4
        >>> x, kernel = jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 2, 4))
        >>> numbers = ("NHWC", "HWIO", "NHWC")
        >>> y = conv_general_dilated(
        ...     x, kernel, (1, 1), "SAME", dimension_numbers=numbers, config=config_v4(rng_type=None)
        ... )
        >>> y.shape, y.dtype
        ((1, 5, 5, 4), dtype('float32'))
    """
    convolution = Convolution.of(
        lhs.shape,
        rhs.shape,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        dtype=output_dtype(lhs, rhs, preferred_element_type),
    )
    if config is not None:
        refuse_tensors(lhs, rhs)
        return quantized_conv(replace(convolution, contraction=assembled(config).fwd), lhs, rhs, key)
    if convolves_integers(convolution, lhs, rhs, contraction):
        return integer_conv(convolution, lhs.value, rhs.value, affine_of(lhs), affine_of(rhs))
    return convolution.numbers(as_array(lhs), as_array(rhs), convolution.dtype)


def convolves_integers(conv: Convolution, lhs: Any, rhs: Any, contraction: str = "auto") -> bool:
    """Whether two operands are convolved as integers.

    Raises:
        ValueError: they are asked to be and can't; or there is no such contraction.
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


def quantized_conv(
    conv: Convolution, lhs: Unscaled, rhs: Unscaled, key: jax.Array | None = None
) -> jax.Array:
    """The convolution, quantized as `conv.contraction` says; `QuantizedOperand`s are taken as they are."""
    if conv.contraction.needs_key and key is None:
        raise missing_key()
    with backward_only("a quantized convolution"):
        return _quantized(conv, lhs, rhs, key)


def integer_conv(conv: Convolution, lhs: jax.Array, rhs: Any, left: Affine, right: Affine) -> jax.Array:
    """The convolution of integers.

    Args:
        conv: the convolution.
        lhs, rhs: the values, which receive the gradients and are not looked at forward; instead of `rhs` the dtype of
            its values, if `right` is stored and has no gradient.
        left, right: their integers.
    """
    values = rhs if isinstance(rhs, jax.Array) else None
    with backward_only("a convolution of integers"):
        return _integers((conv, None if values is not None else np.dtype(rhs)), lhs, values, left, right)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(conv: Convolution, lhs: Unscaled, rhs: Unscaled, key: jax.Array | None) -> jax.Array:
    return conv.of_payloads(*conv.operands(lhs, rhs, key))


def _quantized_fwd(conv: Convolution, lhs: Unscaled, rhs: Unscaled, key: jax.Array | None) -> Any:
    lhs, rhs = (
        x if isinstance(x, QuantizedOperand) else first_order(x, NO_SECOND_DERIVATIVE) for x in (lhs, rhs)
    )
    return _quantized(conv, lhs, rhs, key), as_bits((lhs, rhs))


def _quantized_bwd(conv: Convolution, kept: LowBits, g: jax.Array) -> Any:
    lhs, rhs = kept.floats()
    floats = tuple(x.dequantize() if isinstance(x, QuantizedOperand) else x for x in (lhs, rhs))
    of_lhs, of_rhs = float_gradients(conv, floats, g)
    return (
        None if isinstance(lhs, QuantizedOperand) else of_lhs,
        None if isinstance(rhs, QuantizedOperand) else of_rhs,
        None,
    )


_quantized.defvjp(_quantized_fwd, _quantized_bwd)


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
