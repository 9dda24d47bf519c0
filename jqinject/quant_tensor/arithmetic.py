"""Arithmetic that keeps the integers: the scale, zero point, bit width and sign of the result.

Each function is the rule behind one operator of `IntQuantTensor`. Scales of two operands are compared when they are
concrete. Different ones are refused in evaluation; in training mode, where the running statistics of a quantizer that
both share give each its own, the result has their mean and need not be valid, so without such a quantizer it warns.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.ops.power import exp2
from jqinject.quant_tensor._integer_fields import Tensor
from jqinject.quant_tensor.bit_widths import same_kind, sum_bit_width
from jqinject.quant_tensor.concrete import brief, known_different, known_nonzero


class DifferentScalesWarning(UserWarning):
    """Tensors of different scales were combined in training mode; evaluation refuses them."""


def check_same_scale(a: jax.Array, b: jax.Array, training: bool, operation: str) -> None:
    """Raise ValueError, in training mode warn, if two scales are known to be different.

    Args:
        a, b: the scales.
        training: whether a tensor was made in training mode.
        operation: for the text.
    """
    if not known_different(a, b):
        return
    text = (
        f"{operation}: scaling factors are different, {brief(a)} and {brief(b)}. The "
        "integers of two tensors can only be combined on one grid: quantize both operands with one "
        "shared quantizer (QuantEltwiseAdd and QuantConcat have one), or decay one of them with `.value`."
    )
    if not training:
        raise ValueError(text)
    text += " In training mode the result has the mean of the scales, and evaluation refuses it."
    warnings.warn(text, DifferentScalesWarning, stacklevel=4)


def add(a: Tensor, b: Tensor, same_quantizer: bool = False) -> Tensor:
    """a + b: same scale, zero points add, bits = ceil(log2((max_a + max_b) - (min_a + min_b))), signed if
    either is.

    The sum of a signed and an unsigned operand of the same width may not fit the result's range; then `is_valid`
    is false.

    Args:
        a, b: the operands.
        same_quantizer: whether one quantizer made both, so that in training only its running statistics differ.

    Raises:
        ValueError: the scales are known to differ and neither operand was made in training mode.

    Warns:
        DifferentScalesWarning: they are known to differ, in training mode, and no quantizer made both.
    """
    training = a.training or b.training
    if not (training and same_quantizer):
        check_same_scale(a.scale, b.scale, training, "a + b")
    return a.set(
        value=a.value + b.value,
        scale=(a.scale + b.scale) / 2,
        zero_point=a.zero_point + b.zero_point,
        bit_width=sum_bit_width(a.bit_width, a.signed, b.bit_width, b.signed),
        signed=a.signed or b.signed,
        training=training,
    )


def shift(a: Tensor, offset: Any) -> Tensor:
    """a + offset for a plain number or array: the integers stay, the zero point moves by -offset / scale."""
    step = jnp.asarray(offset, a.dtype) if not isinstance(offset, jax.Array) else offset
    value = a.value + step
    return a.set(value=value, zero_point=a.zero_point - step.astype(a.scale.dtype) / a.scale)


def negate(a: Tensor) -> Tensor:
    """-a: integers and zero point change sign; an unsigned tensor becomes signed and one bit wider.

    A signed tensor keeps its width, so one that uses its least integer -2^(b-1) has no valid negative.

    differs from Brevitas: the zero point is negated too. Brevitas keeps it, so its result is not -a.
    """
    return a.set(
        value=-a.value,
        zero_point=-a.zero_point,
        bit_width=a.bit_width if a.signed else a.bit_width + 1,
        signed=True,
    )


def absolute(a: Tensor) -> Tensor:
    """|a|: a signed tensor becomes unsigned and one bit narrower; an unsigned one stays as it is.

    A tensor that uses its least integer -2^(b-1) has no valid absolute value of that width.

    An unsigned tensor with a zero point, which has negative values, has the integers |q - z|.

    differs from Brevitas: a signed tensor with a zero point other than 0 is refused (there, the result is not |a|).
    There, an unsigned tensor is returned as it is, negative values included.

    Raises:
        ValueError: the tensor is signed, and its zero point is known not to be 0.
    """
    if not a.signed:
        # -a for negative numbers instead of |a|: the gradient at 0 stays 1.
        value = jnp.where(a.value < 0, -a.value, a.value)
        return a.set(value=value, zero_point=jnp.zeros_like(a.zero_point))
    if known_nonzero(a.zero_point):
        raise ValueError(
            f"abs: the zero point is {brief(a.zero_point)}, so |value| lies on another grid than the "
            "integers. Use a symmetric quantizer (zero point 0), or jnp.abs(x.value) for a plain array."
        )
    return a.set(
        value=jnp.abs(a.value),
        zero_point=jnp.zeros_like(a.zero_point),
        bit_width=_minus_one(a.bit_width),
        signed=False,
    )


def _minus_one(bit_width: Any) -> Any:
    return max(1, bit_width - 1) if isinstance(bit_width, int) else bit_width - 1


def _zero_product(a: Tensor, b: Tensor, operation: str) -> jax.Array:
    """The zero point of a product: zero, and both operands' must be zero too."""
    if known_nonzero(a.zero_point) or known_nonzero(b.zero_point):
        raise ValueError(
            f"{operation}: zero points of the operands are non-zero, {brief(a.zero_point)} and "
            f"{brief(b.zero_point)}; the result is then no integer tensor of this bit width. Use symmetric "
            "quantizers (zero point 0), or decay one operand with `.value`."
        )
    # (q_a - z_a) * (q_b - z_b) is an integer without a zero point, even if tracing hides a nonzero z.
    return jnp.zeros_like(a.zero_point * b.zero_point)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a * b: scales multiply, bits add, signed if either is.

    Raises:
        ValueError: a zero point is known not to be 0.
    """
    zero_point = _zero_product(a, b, "a * b")
    left, right = same_kind(a.bit_width, b.bit_width)
    return a.set(
        value=a.value * b.value,
        scale=a.scale * b.scale,
        zero_point=zero_point,
        bit_width=left + right,
        signed=a.signed or b.signed,
        training=a.training or b.training,
    )


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b with scale scale_a / (scale_b * 2^(bits_b - signed_b)), bits added; in general not valid.

    Raises:
        ValueError: a zero point is known not to be 0.
    """
    zero_point = _zero_product(a, b, "a / b")
    left, right = same_kind(a.bit_width, b.bit_width)
    largest = 2 ** (right - int(b.signed)) if isinstance(right, int) else exp2(right - int(b.signed))
    return a.set(
        value=a.value / b.value,
        scale=a.scale / (b.scale * largest),
        zero_point=zero_point,
        bit_width=left + right,
        signed=a.signed or b.signed,
        training=a.training or b.training,
    )
