"""Arithmetic and concatenation that keep the integers: the scale, zero point, bit width and sign of the result.

Each function is the rule behind one operator of `IntQuantTensor`. Scales of two operands are compared when they are
concrete. Different ones are refused in evaluation; in training mode, where the running statistics of a quantizer that
both share give each its own, the result has their mean and need not be valid, so without such a quantizer it warns.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.ops.power import power
from jqinject.quant_tensor.array_methods import as_array, kind_of
from jqinject.quant_tensor.shaping import Tensor, full_rank
from jqinject.quant_tensor.tensor_fields import TensorFields
from jqinject.quant_tensor.validity import brief, known_different, known_nonzero, same_kind, sum_bit_width


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
    zeros = [x._zero_point for x in (a, b) if x._zero_point is not None]
    zero = sum(zeros[1:], zeros[0]) if zeros else None
    bits = sum_bit_width(a.bit_width, a.signed, b.bit_width, b.signed)
    value, scale, signed = a.value + b.value, (a.scale + b.scale) / 2, a.signed or b.signed
    cls: Any = type(a)
    return cls(value, scale, zero, bits, signed, training)


def shift(a: Tensor, offset: object) -> Tensor:
    """a + offset for a plain number or array: the integers stay, the zero point moves by -offset / scale."""
    step = jnp.asarray(offset, a.dtype) if not isinstance(offset, jax.Array) else offset
    value = a.value + step
    return a.set(value=value, zero_point=a.zero_point - step.astype(a.scale.dtype) / a.scale)


def negate(a: Tensor) -> Tensor:
    """-a: integers and zero point change sign; an unsigned tensor becomes signed and one bit wider.

    A signed tensor keeps its width, so one that uses its least integer -2^(b-1) has no valid negative.

    differs from Brevitas: the zero point is negated too. Brevitas keeps it, so its result is not -a.
    """
    zero = None if a._zero_point is None else -a._zero_point
    bits = a.bit_width if a.signed else a.bit_width + 1
    return a.set(value=-a.value, zero_point=zero, bit_width=bits, signed=True)


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
        return a.set(value=value, zero_point=None)
    if known_nonzero(a._zero_point):
        raise ValueError(
            f"abs: the zero point is {brief(a.zero_point)}, so |value| lies on another grid than the "
            "integers. Use a symmetric quantizer (zero point 0), or jnp.abs(x.value) for a plain array."
        )
    bits = max(1, a.bit_width - 1) if isinstance(a.bit_width, int) else a.bit_width - 1
    return a.set(value=jnp.abs(a.value), zero_point=None, bit_width=bits, signed=False)


def product(a: Tensor, b: Tensor, operation: str, value: jax.Array, scale: jax.Array) -> Tensor:
    """Return `a * b` or `a / b` with this value and scale: bits add, signed if either is, no zero point.

    (q_a - z_a) * (q_b - z_b) is an integer without a zero point, even if tracing hides a nonzero z.

    Raises:
        ValueError: a zero point is known not to be 0.
    """
    if known_nonzero(a._zero_point) or known_nonzero(b._zero_point):
        raise ValueError(
            f"{operation}: zero points of the operands are non-zero, {brief(a.zero_point)} and "
            f"{brief(b.zero_point)}; the result is then no integer tensor of this bit width. Use symmetric "
            "quantizers (zero point 0), or decay one operand with `.value`."
        )
    left, right = same_kind(a.bit_width, b.bit_width)
    cls: Any = type(a)
    return cls(value, scale, None, left + right, a.signed or b.signed, a.training or b.training)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b with scale scale_a / (scale_b * 2^(bits_b - signed_b)), bits added; in general not valid.

    Raises:
        ValueError: a zero point is known not to be 0.
    """
    bits = same_kind(a.bit_width, b.bit_width)[1] - int(b.signed)
    return product(a, b, "a / b", a.value / b.value, a.scale / (b.scale * power(bits)))


def concatenate(tensors: Sequence[Any], axis: int = 0, *, same_quantizer: bool = False) -> Any:
    """Tensors joined along an existing axis, an `IntQuantTensor` if all of them are one.

    Scale, zero point, bit width and sign must be the same (scale and zero point only if they are concrete and no
    tensor was made in training mode). In training mode scale and zero point are the means. Metadata that varies
    along `axis`, such as a per-channel scale of tensors joined by channel, is joined as well, and need not be the
    same.

    Args:
        tensors: `IntQuantTensor`s or arrays, at least one.
        axis: the axis to join along.
        same_quantizer: whether one quantizer made all, so that in training only its running statistics differ.

    Returns:
        An `IntQuantTensor`; a plain array if any of `tensors` is not an `IntQuantTensor`.

    Raises:
        ValueError: there is nothing to join, or the tensors are on different grids.

    Warns:
        DifferentScalesWarning: scales are known to differ, in training mode, and no quantizer made all.

    differs from Brevitas: there a per-channel scale keeps its old shape when channels are joined.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, 0.0, 8, signed=True, training=False)
        >>> concatenate([x, x]).int()
        Array([1, 2, 1, 2], dtype=int8)
    """
    if not tensors:
        raise ValueError("concatenate: got no tensors, expected at least one.")
    value = jnp.concatenate([as_array(tensor) for tensor in tensors], axis=axis)
    if any(kind_of(tensor) != "integers" for tensor in tensors):
        return value
    first, *rest = tensors
    if not rest:
        return first
    for tensor in rest:
        _check_same_format(first, tensor)
    training, axis = any(tensor.training for tensor in tensors), axis % first.ndim
    scales = [x.scale for x in tensors]
    along = any(full_rank(scale, first.ndim).shape[axis] > 1 for scale in scales)
    if training and not same_quantizer and not along:
        for scale in scales[1:]:
            check_same_scale(scales[0], scale, True, "concatenate")
    zeros = None
    if any(x._zero_point is not None for x in tensors):
        zeros = _join([x.zero_point for x in tensors], tensors, axis, training, "zero points")
    scale = _join(scales, tensors, axis, training, "scaling factors")
    return first.set(value=value, scale=scale, zero_point=zeros, training=training)


def _check_same_format(a: TensorFields, b: TensorFields) -> None:
    cure = "Quantize both with one shared quantizer, or decay them with `.value`."
    if known_different(a.bit_width, b.bit_width):
        raise ValueError(
            f"concatenate: bit widths are different, {brief(a.bit_width)} and {brief(b.bit_width)}. {cure}"
        )
    if a.signed != b.signed:
        names = ["signed" if x.signed else "unsigned" for x in (a, b)]
        raise ValueError(f"concatenate: signs are different, {names[0]} and {names[1]}. {cure}")


def _join(
    parts: list[jax.Array], tensors: Sequence[TensorFields], axis: int, training: bool, name: str
) -> jax.Array:
    """One metadata field of the result: joined if it varies along the axis, else the shared value, else the mean."""
    full = [full_rank(part, tensors[0].ndim) for part in parts]
    if any(part.shape[axis] > 1 for part in full):
        common = [max(sizes) for sizes in zip(*(part.shape for part in full), strict=True)]
        shapes = [(*common[:axis], x.shape[axis], *common[axis + 1 :]) for x in tensors]
        return jnp.concatenate([jnp.broadcast_to(*part) for part in zip(full, shapes, strict=True)], axis)
    if training:
        return sum(parts[1:], parts[0]) / len(parts)
    for part in parts[1:]:
        if known_different(parts[0], part):
            raise ValueError(
                f"concatenate: {name} are different, {brief(parts[0])} and {brief(part)}. The tensors are on "
                "different grids: quantize them with one shared quantizer, or decay them with `.value`."
            )
    return parts[0]
