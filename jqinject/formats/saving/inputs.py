"""What compressed-tensors can say of a layer's input quantizer."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jqinject.formats.errors import CheckpointError
from jqinject.quant import (
    FP8e4m3OCPDynamicActPerRowFloat,
    Int8ActDynamicPerRow,
    Int8DynamicActPerRowFloat,
)
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DYNAMIC = {
    Int8ActDynamicPerRow: "int",
    Int8DynamicActPerRowFloat: "int",
    FP8e4m3OCPDynamicActPerRowFloat: "float",
}


def input_settings(layer: Any, path: str) -> tuple[dict[str, Any] | None, dict[str, np.ndarray]]:
    """`input_activations` of a module, and the tensors beside it; None for a float input.

    Args:
        layer: a frozen layer; None for a parameter without one.
        path: of its weight, for errors.

    Raises:
        CheckpointError: the format has no such input.
    """
    proxy = getattr(layer, "input_quant", None)
    if proxy is None or not proxy.is_quant_enabled:
        return None, {}
    declared = proxy.binding.base
    if getattr(proxy, "pre_transform", None) is not None:
        raise CheckpointError(
            f"{path}: a transform of the input is not written.\n  cure: a model without online transforms"
        )
    kind = next((kind for base, kind in DYNAMIC.items() if issubclass(declared, base)), None)
    if kind is not None:
        return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}, {}
    if not proxy.quant_metadata.is_dynamic:
        known = proxy.sample()
        kind = _static_kind(known)
        if kind is not None:
            settings = {
                "num_bits": 8,
                "type": kind,
                "symmetric": True,
                "strategy": "tensor",
                "dynamic": False,
            }
            return settings, {"input_scale": np.asarray(known.scale, np.float32).reshape(1)}
    raise CheckpointError(
        f"{path}: compressed-tensors cannot say how {declared.__name__} quantizes the input.\n"
        "  cure: Int8ActDynamicPerRow, FP8e4m3OCPDynamicActPerRowFloat, or a signed static range of 8 bits"
    )


def _static_kind(known: Any) -> str | None:
    """What a quantized number of a static range is, if it is symmetric and has one scale."""
    if np.size(known.scale) != 1 or np.any(np.asarray(known.zero_point)):
        return None
    if isinstance(known, IntQuantTensor):
        return "int" if known.signed and int(known.bit_width) == 8 else None
    is_e4m3 = isinstance(known, FloatQuantTensor) and np.dtype(known.q_dtype) == E4M3
    return "float" if is_e4m3 else None
