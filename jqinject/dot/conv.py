"""`conv_general_dilated` in low bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.accumulate import integer_accumulator
from jqinject.dot.contraction import Contraction, Operand
from jqinject.dot.functions import assembled, refuse_tensors
from jqinject.dot.numerics import is_integer
from jqinject.dot.operand import OperandQuantizer, QuantizedOperand, missing_key
from jqinject.dot.tensors import KINDS, affine, describe, integers_of, output_dtype
from jqinject.ops.first_order import first_order
from jqinject.quant_tensor import IntQuantTensor, as_array, known_nonzero

UNQUANTIZED = Contraction()
NO_SECOND_DERIVATIVE = (
    "a quantized convolution has no second derivative: rounding has none.\n"
    "  cure: differentiate it once, or use jax.lax.conv_general_dilated where it is differentiated twice"
)


@dataclass(frozen=True)
class Convolution:
    """What is static in one convolution: the arguments of `lax.conv_general_dilated`, checked and complete.

    Attributes:
        specs: of the left operand, the right operand and the output: (batch, feature, *space) in their axes.
        options: the others, by name.
        dtype: of the output.
    """

    specs: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    options: tuple[tuple[str, Any], ...]
    dtype: np.dtype
    contraction: Contraction = UNQUANTIZED

    def floats(self, lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
        """The convolution of floats."""
        numbers = jax.lax.ConvDimensionNumbers(*self.specs)
        return jax.lax.conv_general_dilated(
            lhs, rhs, dimension_numbers=numbers, preferred_element_type=dtype, **dict(self.options)
        )

    def __call__(self, lhs: Operand, rhs: Operand, key: jax.Array | None = None) -> jax.Array:
        """The convolution, quantized as the contraction's quantizers say; `QuantizedOperand`s are taken as they are."""
        if self.contraction.needs_key and key is None:
            raise missing_key()
        return _quantized(self, lhs, rhs, key)

    def operands(
        self, lhs: Operand, rhs: Operand, key: jax.Array | None = None
    ) -> tuple[QuantizedOperand, QuantizedOperand]:
        """Both operands in their formats: a scale for each example, and one for each output feature."""
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        both = (
            (lhs, self.specs[0][0], self.contraction.lhs_quantizer, keys[0]),
            (rhs, self.channel_axis, self.contraction.rhs_quantizer, keys[1]),
        )
        left, right = (
            x
            if isinstance(x, QuantizedOperand)
            else quantizer.quantize(x, _others(x.ndim, axis, quantizer), part)
            for x, axis, quantizer, part in both
        )
        return left, right

    @property
    def channel_axis(self) -> int:
        """The axis of the right operand that becomes the output's features."""
        return self.specs[1][0]

    def of_payloads(self, lhs: QuantizedOperand, rhs: QuantizedOperand) -> jax.Array:
        """The convolution of operands in their formats, in `dtype`."""
        y = self._accumulated(lhs.payload, rhs.payload)
        for scale in (self._of_lhs(lhs.scale), self._of_rhs(rhs.scale)):
            if scale is not None:
                y = y.astype(jnp.float32) * scale
        return y.astype(self.dtype)

    def _accumulated(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if not (is_integer(lhs) and is_integer(rhs)):
            return self.floats(lhs.astype(jnp.float32), rhs.astype(jnp.float32), jnp.float32)
        terms = math.prod(rhs.shape) // max(rhs.shape[self.channel_axis], 1)
        spans = (max(-int(jnp.iinfo(x.dtype).min), int(jnp.iinfo(x.dtype).max)) for x in (lhs, rhs))
        accumulator = integer_accumulator(self.contraction.accumulator_dtype, terms, *spans)
        return self.floats(lhs.astype(jnp.int8), rhs.astype(jnp.int8), accumulator)

    def _of_lhs(self, scale: jax.Array | None) -> jax.Array | None:
        """The left operand's scale, which may differ between examples, laid out like the output."""
        batch, out_batch = self.specs[0][0], self.specs[2][0]
        return _moved(scale, len(self.specs[0]), batch, out_batch, "lhs", "example")

    def _of_rhs(self, scale: jax.Array | None) -> jax.Array | None:
        return _moved(scale, len(self.specs[1]), self.channel_axis, self.specs[2][1], "rhs", "output feature")


def _moved(
    scale: jax.Array | None, ndim: int, axis: int, place: int, side: str, what: str
) -> jax.Array | None:
    if scale is None or scale.size == 1:
        return scale if scale is None else scale.reshape(())
    shape = (*(1,) * (ndim - scale.ndim), *scale.shape)
    if any(size != 1 for at, size in enumerate(shape) if at != axis):
        raise ValueError(
            f"the scale of {side} has shape {scale.shape}, but a convolution can only undo one scale, or one for each "
            f"{what} (axis {axis}).\n  cure: quantize {side} so, or contraction='float'"
        )
    laid = [1] * ndim
    laid[place] = shape[axis]
    return scale.reshape(laid)


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
        config, contraction, key: as for `dot_general`. Two IntQuantTensors without zero points and of at most 8 bits
            are convolved as integers; 8-bit floats are convolved in float32.

    Raises:
        TypeError, ValueError: as for `dot_general`; a scale that varies along what is summed over.

    Example:
        >>> from jqinject.dot import config_v4
        >>> x, kernel = jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 2, 4))
        >>> numbers = ("NHWC", "HWIO", "NHWC")
        >>> y = conv_general_dilated(
        ...     x, kernel, (1, 1), "SAME", dimension_numbers=numbers, config=config_v4(rng_type=None)
        ... )
        >>> y.shape, y.dtype
        ((1, 5, 5, 4), dtype('float32'))
    """
    convolution = quantized_convolution(
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
        return replace(convolution, contraction=assembled(config).fwd)(lhs, rhs, key)
    if _in_integers(lhs, rhs, contraction):
        left, right = affine(lhs), affine(rhs)
        return _integers(
            convolution,
            lhs.value,
            rhs.value,
            QuantizedOperand(left.payload, left.scale),
            QuantizedOperand(right.payload, right.scale),
        )
    return convolution.floats(as_array(lhs), as_array(rhs), convolution.dtype)


def _in_integers(lhs: Any, rhs: Any, contraction: str) -> bool:
    if contraction not in KINDS:
        raise ValueError(f"contraction must be one of {', '.join(map(repr, KINDS))}; got {contraction!r}")
    both = isinstance(lhs, IntQuantTensor) and isinstance(rhs, IntQuantTensor)
    can = both and all(integers_of(x) and x.signed and not known_nonzero(x.zero_point) for x in (lhs, rhs))
    if contraction == "int" and not can:
        raise ValueError(
            "contraction='int' needs two signed IntQuantTensors of at most 8 bits without zero points in a "
            f"convolution, whose borders are zeros; got {describe(lhs)} and {describe(rhs)}."
            "\n  cure: contraction='auto'"
        )
    if contraction == "fp8":
        raise ValueError(
            "a convolution has no contraction of 8-bit floats.\n  cure: contraction='auto', which contracts the "
            "dequantized floats"
        )
    return can and contraction != "float"


def quantized_convolution(
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    *,
    dtype: Any,
    contraction: Contraction = UNQUANTIZED,
) -> Convolution:
    """The convolution that the arguments of `lax.conv_general_dilated` describe."""
    numbers = jax.lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
    options = {
        "window_strides": tuple(window_strides),
        "padding": padding if isinstance(padding, str) else tuple(map(tuple, padding)),
        "lhs_dilation": None if lhs_dilation is None else tuple(lhs_dilation),
        "rhs_dilation": None if rhs_dilation is None else tuple(rhs_dilation),
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
    }
    specs = (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec))
    return Convolution(specs, tuple(options.items()), np.dtype(dtype), contraction)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(conv: Convolution, lhs: Operand, rhs: Operand, key: jax.Array | None) -> jax.Array:
    return conv.of_payloads(*conv.operands(lhs, rhs, key))


def _others(ndim: int, axis: int, quantizer: OperandQuantizer) -> tuple[int, ...]:
    """The axes that share a scale: all but one, or all."""
    if quantizer.calibration_axes == "tensor":
        return tuple(range(ndim))
    return tuple(other for other in range(ndim) if other != axis)


def _quantized_fwd(conv: Convolution, lhs: Operand, rhs: Operand, key: jax.Array | None) -> Any:
    lhs, rhs = (
        x if isinstance(x, QuantizedOperand) else first_order(x, NO_SECOND_DERIVATIVE) for x in (lhs, rhs)
    )
    return _quantized(conv, lhs, rhs, key), (lhs, rhs)


def _quantized_bwd(conv: Convolution, kept: tuple[Operand, Operand], g: jax.Array) -> Any:
    floats = tuple(x.dequantize() if isinstance(x, QuantizedOperand) else x for x in kept)
    gradients = _float_gradients(conv, floats, g)
    return *(
        None if isinstance(x, QuantizedOperand) else gradient
        for x, gradient in zip(kept, gradients, strict=True)
    ), None


def _float_gradients(conv: Convolution, kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[Any, Any]:
    lhs, rhs = kept
    g = first_order(g, NO_SECOND_DERIVATIVE)
    _, pull = jax.vjp(lambda a, b: conv.floats(a, b, conv.dtype), lhs, rhs)
    return pull(g)


_quantized.defvjp(_quantized_fwd, _quantized_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _integers(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, left: QuantizedOperand, right: QuantizedOperand
) -> jax.Array:
    return conv.of_payloads(left, right)


def _integers_fwd(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, left: QuantizedOperand, right: QuantizedOperand
) -> Any:
    lhs, rhs = first_order(lhs, NO_SECOND_DERIVATIVE), first_order(rhs, NO_SECOND_DERIVATIVE)
    return _integers(conv, lhs, rhs, left, right), (lhs, rhs)


def _integers_bwd(conv: Convolution, kept: tuple[jax.Array, jax.Array], g: jax.Array) -> Any:
    return *_float_gradients(conv, kept, g), None, None


_integers.defvjp(_integers_fwd, _integers_bwd)
