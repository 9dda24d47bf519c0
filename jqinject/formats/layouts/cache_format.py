"""What a checkpoint says of the model's cache of keys and values."""

from __future__ import annotations

from jqinject.formats.layouts.common import Settings
from jqinject.formats.stored_matrix import InputFormat

STRATEGIES = ("tensor", "channel", "token", "group", "attn_head")


def cache_format(method: str, config: Settings) -> InputFormat | None:
    """How keys and values are quantized when they are cached; None if the checkpoint does not say that they are.

    Args:
        method: the quantization method.
        config: its settings; compressed-tensors' `kv_cache_scheme`, ModelOpt's `kv_cache_quant_algo`.

    Raises:
        CheckpointError: the settings are unknown.
    """
    if method == "modelopt" and config.held.get("kv_cache_quant_algo") is not None:
        config.choice("kv_cache_quant_algo", ("FP8",))
        return InputFormat("float", 8, dynamic=False)
    scheme = config.below("kv_cache_scheme") if method == "compressed-tensors" else None
    if scheme is None:
        return None
    return InputFormat(
        scheme.choice("type", ("int", "float"), "int"),
        scheme.integer("num_bits", default=8),
        scheme.flag("symmetric", True),
        scheme.choice("strategy", STRATEGIES, "tensor"),
        dynamic=scheme.flag("dynamic", False),
    )
