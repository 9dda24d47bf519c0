"""Concatenation of tensors on the same grid."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.quant_tensor.arithmetic import check_same_scale
from jqinject.quant_tensor.base import as_array
from jqinject.quant_tensor.concrete import brief, known_different
from jqinject.quant_tensor.int_quant_tensor import IntQuantTensor
from jqinject.quant_tensor.shaping import full_rank


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
    quantized = [tensor for tensor in tensors if isinstance(tensor, IntQuantTensor)]
    if len(quantized) < len(tensors):
        return value
    first = quantized[0]
    if len(quantized) == 1:
        return first
    for other in quantized[1:]:
        _check_same_format(first, other)
    training = any(tensor.training for tensor in quantized)
    if training and not same_quantizer:
        _warn_of_different_scales(quantized, axis)
    return first.set(
        value=value,
        scale=_join([x.scale for x in quantized], quantized, axis, training, "scaling factors"),
        zero_point=_join([x.zero_point for x in quantized], quantized, axis, training, "zero points"),
        training=training,
    )


def _check_same_format(a: IntQuantTensor, b: IntQuantTensor) -> None:
    cure = "Quantize both with one shared quantizer, or decay them with `.value`."
    if known_different(a.bit_width, b.bit_width):
        raise ValueError(
            f"concatenate: bit widths are different, {brief(a.bit_width)} and {brief(b.bit_width)}. {cure}"
        )
    if a.signed != b.signed:
        names = ["signed" if x.signed else "unsigned" for x in (a, b)]
        raise ValueError(f"concatenate: signs are different, {names[0]} and {names[1]}. {cure}")


def _warn_of_different_scales(tensors: Sequence[IntQuantTensor], axis: int) -> None:
    scales = [tensor.scale for tensor in tensors]
    if all(full_rank(scale, tensors[0].ndim).shape[axis] == 1 for scale in scales):
        for scale in scales[1:]:
            check_same_scale(scales[0], scale, True, "concatenate")


def _join(
    parts: list[jax.Array], tensors: list[IntQuantTensor], axis: int, training: bool, name: str
) -> jax.Array:
    """One metadata field of the result: joined if it varies along the axis, else the shared value, else the mean."""
    ndim = tensors[0].ndim
    full = [full_rank(part, ndim) for part in parts]
    if any(part.shape[axis] > 1 for part in full):
        return _joined_along(full, tensors, axis)
    if training:
        return sum(parts[1:], parts[0]) / len(parts)
    for part in parts[1:]:
        if known_different(parts[0], part):
            raise ValueError(
                f"concatenate: {name} are different, {brief(parts[0])} and {brief(part)}. The tensors are on "
                "different grids: quantize them with one shared quantizer, or decay them with `.value`."
            )
    return parts[0]


def _joined_along(full: list[jax.Array], tensors: list[IntQuantTensor], axis: int) -> jax.Array:
    ndim = tensors[0].ndim
    common = [max(part.shape[i] for part in full) for i in range(ndim)]
    expanded = []
    for part, tensor in zip(full, tensors, strict=True):
        shape = list(common)
        shape[axis] = tensor.shape[axis]
        expanded.append(jnp.broadcast_to(part, shape))
    return jnp.concatenate(expanded, axis=axis)
