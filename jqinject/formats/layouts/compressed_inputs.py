"""What compressed-tensors says of the inputs of a matrix."""

from __future__ import annotations

import numpy as np

from jqinject.formats.files.tensors import Tensors
from jqinject.formats.layouts.common import Settings, scale_of
from jqinject.formats.stored_matrix import InputFormat

STRATEGIES = ("tensor", "token", "group", "tensor_group", "channel")


def input_format(tensors: Tensors, module: str, settings: Settings | None) -> InputFormat | None:
    """How the input of a module is quantized; None if it is not.

    Args:
        tensors: of the checkpoint; static scales are taken from them.
        module: its name.
        settings: `input_activations`.

    Raises:
        CheckpointError: the settings are unknown, or a static scale is missing.
    """
    if settings is None:
        return None
    kind = settings.choice("type", ("int", "float"), "int")
    symmetric = settings.flag("symmetric", True)
    dynamic = settings.choice("dynamic", (True, False, "local"), False)
    strategy = settings.choice("strategy", STRATEGIES, "tensor")
    grouped = strategy in ("group", "tensor_group")
    made = {
        "kind": kind,
        "bits": settings.integer("num_bits", default=8),
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": settings.integer("group_size") if grouped else None,
        "dynamic": dynamic is not False,
    }
    if dynamic == "local":
        return InputFormat(**made, global_scale=_one(tensors, f"{module}.input_global_scale"))
    if dynamic:
        return InputFormat(**made)
    zero_point = None
    if not symmetric:
        zero_point = tensors.of_shape(
            f"{module}.input_zero_point", [(1,), ()], "a static input with zero points"
        )
        zero_point = zero_point.read().astype(np.float32).reshape(-1)
    notes = settings.below("observer_kwargs")
    made["unsigned"] = notes is not None and notes.held.get("unsigned") is True
    return InputFormat(**made, scale=_one(tensors, f"{module}.input_scale"), zero_point=zero_point)


def _one(tensors: Tensors, name: str) -> np.ndarray:
    found = scale_of(tensors, name, [(1,), ()], "one scale of a static input")
    return found.read().astype(np.float32).reshape(-1)
