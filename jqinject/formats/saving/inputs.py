"""What a file can say of a layer's input quantizer: the inverse of `loading.quantizers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from jqinject.core.scaling import ConstScaling
from jqinject.core.transforms import Permutation
from jqinject.formats.errors import CheckpointError
from jqinject.formats.loading.quantizers import LARGEST, static_format
from jqinject.formats.saving.caches import CacheQuantizer
from jqinject.formats.saving.weights import Weight
from jqinject.formats.stored_matrix import InputFormat
from jqinject.model.walk import ModelIndex, dotted
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import (
    Fp8e4m3OCPDynamicActPerGroupFloat,
    FP8e4m3OCPDynamicActPerRowFloat,
    Fp8e4m3OCPDynamicActPerTensorFloat,
    Int8ActDynamicPerRow,
    Int8ActDynamicPerTensor,
    Int8DynamicActPerGroupFloat,
    Int8DynamicActPerRowFloat,
    Int8DynamicActPerTensorFloat,
    NVFP4Act,
    ShiftedUint8DynamicActPerRowFloat,
    ShiftedUint8DynamicActPerTensorFloat,
)

# What each class quantizes to, whether without a zero point, and what shares a scale.
DYNAMIC = {
    Int8DynamicActPerGroupFloat: ("int", True, "group"),
    Fp8e4m3OCPDynamicActPerGroupFloat: ("float", True, "group"),
    ShiftedUint8DynamicActPerRowFloat: ("int", False, "token"),
    ShiftedUint8DynamicActPerTensorFloat: ("int", False, "tensor"),
    Int8ActDynamicPerRow: ("int", True, "token"),
    Int8ActDynamicPerTensor: ("int", True, "tensor"),
    Int8DynamicActPerRowFloat: ("int", True, "token"),
    Int8DynamicActPerTensorFloat: ("int", True, "tensor"),
    FP8e4m3OCPDynamicActPerRowFloat: ("float", True, "token"),
    Fp8e4m3OCPDynamicActPerTensorFloat: ("float", True, "tensor"),
}
CURE = "Int8ActDynamicPerRow, FP8e4m3OCPDynamicActPerRowFloat, NVFP4Act, or a static range of 8 bits"


def input_format_of(layer: Any, path: str, permuted: bool = False) -> InputFormat | None:
    """How a layer quantizes its input; None for a float input.

    Args:
        layer: a frozen layer; None for a parameter without one.
        path: of its weight, for errors.
        permuted: whether the input is permuted before it is quantized.

    Raises:
        CheckpointError: no file can say so.
    """
    proxy = getattr(layer, "input_quant", None)
    if proxy is None or not proxy.is_quant_enabled:
        return None
    declared = proxy.binding.base
    found = _dynamic(proxy, declared) if proxy.quant_metadata.is_dynamic else static_format(proxy)
    if found is None:
        raise CheckpointError(
            f"{path}: no checkpoint can say how {declared.__name__} quantizes the input.\n  cure: {CURE}"
        )
    if permuted and found.group_size is not None:
        raise CheckpointError(
            f"{path}: the input is permuted and then quantized in groups, which no checkpoint can say.\n"
            "  cure: an input quantizer with a scale for the tensor or for each row"
        )
    return found


def _dynamic(proxy: Any, declared: type) -> InputFormat | None:
    if issubclass(declared, NVFP4Act) and not _changes(proxy, declared, NVFP4Act) - {"scale_quant"}:
        scales: Any = declared.scale_quant
        known = scales.scaling_impl is ConstScaling
        whole = np.asarray([LARGEST / scales.scaling_init], np.float32) if known else None
        return InputFormat("float", 4, True, "tensor_group", proxy.group_size, global_scale=whole)
    for base, (kind, symmetric, strategy) in DYNAMIC.items():
        if issubclass(declared, base):
            size = proxy.group_size
            known = (strategy == "group") == (size is not None) and not _changes(proxy, declared, base)
            return InputFormat(kind, 8, symmetric, strategy, size) if known else None
    return None


def _changes(proxy: Any, declared: type, base: type) -> set[str]:
    """What an injector declares beyond a known one, except the size of groups."""
    between = declared.__mro__[: declared.__mro__.index(base)]
    names = {name for one in between for name in vars(one) if not name.startswith("_")}
    return (names | {*proxy.binding.overrides}) - {"group_size"}


def refuse_other_quantizers(
    model: nnx.Module, weights: Sequence[Weight], caches: Sequence[CacheQuantizer] = ()
) -> None:
    """Raise if the model quantizes more than what is written: weights, inputs of their layers, and caches.

    Args:
        model: the model.
        weights: what is written.
        caches: whose scales are written.

    Raises:
        CheckpointError: names the quantizers.
    """
    written = {
        id(getattr(each.stack, name, None)) for each in weights for name in ("weight_quant", "input_quant")
    }
    written |= {id(each.proxy) for each in caches}
    orders = [each.order for each in weights if each.layer is None and each.order is not None]
    lost = []
    for path, node in ModelIndex(model).places:
        if isinstance(node, QuantProxyFromInjector) and id(node) not in written:
            transform = vars(node).get("pre_transform")
            if node.is_quant_enabled or not (transform is None or _is_written(transform, orders)):
                lost.append(dotted(path))
    if lost:
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        frozen = not any(path.endswith("weight_quant") for path in lost)
        cure = (
            "rules without these, in the model that is saved"
            if frozen
            else "save(jqinject.freeze(model), ...)"
        )
        raise CheckpointError(
            f"checkpoints hold weights and the ranges of their layers' inputs; this model also has {shown}.\n"
            f"  cure: {cure}"
        )


def _is_written(transform: Any, orders: Sequence[np.ndarray]) -> bool:
    """Whether a transform before a parameter without a layer is an order of columns that is written."""
    known = isinstance(transform, Permutation)
    return known and any(np.array_equal(transform.order.get_value(), order) for order in orders)
