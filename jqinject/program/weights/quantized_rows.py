"""Activations with a scale for each row, where a row is all that one number of a contraction's output sums over."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax

from jqinject.dot.tensors.labelled_tensor import LabelledTensor, in_order, quantized_along
from jqinject.inject import Binding, DependencyError
from jqinject.quant.enums import ScalingPerOutputType, chooses
from jqinject.quant_tensor import as_array, is_quantized


def has_row_scales(quantizer: Any) -> bool:
    """Whether an injector declares a scale for each row, the numbers along the last axis.

    Example:
        >>> from jqinject.quant import Int8DynamicActPerRowAbsMax, Int8ActPerTensorFloat, Int8DynamicActPerRowFloat
        >>> quantizers = Int8DynamicActPerRowAbsMax, Int8DynamicActPerRowFloat, Int8ActPerTensorFloat
        >>> [has_row_scales(quantizer) for quantizer in quantizers]
        [True, True, False]
    """
    if isinstance(quantizer, Binding):
        return _declares_rows(quantizer)
    return isinstance(quantizer, type) and _declares_rows(Binding(quantizer))


@lru_cache(maxsize=256)
def _declares_rows(binding: Binding) -> bool:
    def said(name: str) -> Any:
        try:
            return binding.resolve(name) if binding.declares(name) else None
        except DependencyError:  # made from what the injector does not declare
            return None

    if said("group_size") or chooses(said("scaling_per_output_type"), ScalingPerOutputType.GROUP):
        return False
    return said("shared_axes") == (-1,) or said("stats_reduce_dim") == -1


def quantized_in_rows(quantize: Callable[[jax.Array], Any], x: jax.Array, rows: tuple[int, ...]) -> Any:
    """An array quantized by a quantizer of rows, with one scale along some axes together.

    Args:
        quantize: the quantizer; it sees these axes as the last one.
        x: the array.
        rows: the axes.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.nn import QuantIdentity
        >>> from jqinject.quant import Int8DynamicActPerRowFloat
        >>> proxy = QuantIdentity(Int8DynamicActPerRowFloat).act_quant
        >>> quantized_in_rows(proxy, jnp.ones((2, 3, 4)), (0, 2)).scale.shape
        (1, 3, 1)
    """
    labels = tuple(("x", axis) for axis in range(x.ndim))
    found = quantized_along(quantize, LabelledTensor(x, labels), tuple(labels[axis] for axis in rows), True)
    moved = in_order(found, labels) if is_quantized(found.tensor) else None
    if moved is not None:
        return moved
    return as_array(found.tensor).transpose([found.axis(label) for label in labels])
