"""What torchao says of the inputs of a matrix, in the metadata of its tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.tensors import Tensors
from jqinject.formats.layouts.common import Settings, scale_of
from jqinject.formats.stored_matrix import InputFormat

KINDS = {"QuantizeTensorToInt8Kwargs": "int", "QuantizeTensorToFloat8Kwargs": "float"}
STRATEGIES = {"PerRow": "token", "PerTensor": "tensor"}
ONE = ((), (1,), (1, 1))


def torchao_input(tensors: Tensors, start: str, data: Settings) -> InputFormat | None:
    """How the input of a matrix is quantized; None if it is not.

    Args:
        tensors: of the file; static scales are taken from them.
        start: of the names of the matrix's tensors.
        data: what the metadata say of the matrix.

    Raises:
        CheckpointError: the settings are unknown, or not read.
    """
    if f"{start}act_pre_scale" in tensors:
        raise CheckpointError(f"{start}act_pre_scale scales the input, which is not read")
    if data.held.get("activation_quantization") is not None:
        data.choice("activation_quantization", ("int8_asym_per_token",))
        return InputFormat("int", 8, symmetric=False, strategy="token")
    given = data.below("act_quant_kwargs")
    if given is None:
        return None
    kind, settings = KINDS[given.choice("_type", tuple(KINDS))], _below(given, "_data")
    settings.choice("reduce_range", (False,), False)
    for bound in ("hp_value_lb", "hp_value_ub"):
        settings.choice(bound, (None,))
    _below(settings, "float8_dtype").choice("_data", ("float8_e4m3fn",), "float8_e4m3fn")
    mapping = _below(settings, "mapping_type").choice("_data", ("SYMMETRIC", "ASYMMETRIC"), "SYMMETRIC")
    shared = _below(settings, "granularity").choice("_type", tuple(STRATEGIES), "PerRow")
    made = InputFormat(kind, 8, mapping == "SYMMETRIC", STRATEGIES[shared])
    return _static(tensors, start, made) if f"{start}act_quant_scale" in tensors else made


def _below(settings: Settings, name: str) -> Settings:
    """What the metadata say of an object; nothing where they leave it out."""
    return settings.below(name) or Settings({}, f"{settings.where}.{name}")


def _static(tensors: Tensors, start: str, made: InputFormat) -> InputFormat:
    """The same with the scale that the file has for all inputs."""
    if made.strategy != "tensor":
        raise CheckpointError(f"{start}act_quant_scale: static scales of rows are not read")
    scale = scale_of(tensors, f"{start}act_quant_scale", ONE, "one scale of a static input")
    zero = None
    if not made.symmetric:
        held = tensors.of_shape(f"{start}act_quant_zero_point", ONE, "a static input with zero points")
        zero = held.read().astype(np.float32).reshape(-1)
    return replace(made, dynamic=False, scale=scale.read().astype(np.float32).reshape(-1), zero_point=zero)
