"""The quantizers of a loaded layer: its weight's, which gives way to the stored numbers, and its input's."""

from __future__ import annotations

from typing import Any

from jqinject.core.scaling import ConstScaling
from jqinject.formats.errors import CheckpointError
from jqinject.formats.stored_matrix import InputFormat
from jqinject.quant import (
    Fp8e4m3OCPActPerTensorFloat,
    Fp8e4m3OCPDynamicActPerGroupFloat,
    FP8e4m3OCPDynamicActPerRowFloat,
    Fp8e4m3OCPDynamicActPerTensorFloat,
    Int8ActDynamicPerRow,
    Int8ActDynamicPerTensor,
    Int8ActPerTensorFloat,
    Int8DynamicActPerGroupFloat,
    NVFP4Act,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8DynamicActPerRowFloat,
    ShiftedUint8DynamicActPerTensorFloat,
)
from jqinject.quant.minifloat.nvfp4 import Fp8e4m3Scales

LARGEST = 448.0
BELOW_ZERO = 128  # a signed zero point, counted from the lowest integer


def input_quantizer(given: InputFormat | None, name: str) -> Any:
    """The injector of a layer's input; None for float inputs.

    Args:
        given: what the checkpoint says.
        name: of the matrix, for errors.

    Raises:
        CheckpointError: there is no such quantizer.
    """
    if given is None:
        return None
    made = _dynamic(given) if given.dynamic else _static(given)
    if made is None:
        raise CheckpointError(f"{name}: there is no quantizer for its input, {given}")
    return made


def _dynamic(given: InputFormat) -> Any:
    if given.kind == "float" and given.bits == 4:
        return NVFP4Act if given.global_scale is None else _nvfp4(float(given.global_scale[0]))
    if given.bits != 8:
        return None
    if given.strategy == "group":
        size = given.group_size
        base = {"int": Int8DynamicActPerGroupFloat, "float": Fp8e4m3OCPDynamicActPerGroupFloat}[given.kind]
        return base.let(group_size=size) if given.symmetric else None
    if given.kind == "float":
        return {"token": FP8e4m3OCPDynamicActPerRowFloat, "tensor": Fp8e4m3OCPDynamicActPerTensorFloat}.get(
            given.strategy
        )
    symmetric = {"token": Int8ActDynamicPerRow, "tensor": Int8ActDynamicPerTensor}
    shifted = {"token": ShiftedUint8DynamicActPerRowFloat, "tensor": ShiftedUint8DynamicActPerTensorFloat}
    return (symmetric if given.symmetric else shifted).get(given.strategy)


def _static(given: InputFormat) -> Any:
    if given.scale is None or given.bits != 8 or given.strategy != "tensor":
        return None
    scale = float(given.scale[0])
    if given.kind == "float":

        class StaticFloatInput(Fp8e4m3OCPActPerTensorFloat):
            collected_range = scale * LARGEST

        return StaticFloatInput
    if given.zero_point is None:

        class StaticInput(Int8ActPerTensorFloat):
            collected_range = scale * BELOW_ZERO

        return StaticInput

    class StaticShiftedInput(ShiftedUint8ActPerTensorFloat):
        collected_range = scale * (2 * BELOW_ZERO - 1)
        collected_zero_point = (float(given.zero_point[0]) + BELOW_ZERO) * scale

    return StaticShiftedInput


def _nvfp4(whole: float) -> Any:
    """Inputs whose scales of groups have a given factor, `1 / whole`."""

    class StaticScales(Fp8e4m3Scales):
        scaling_impl = ConstScaling
        scaling_init = LARGEST / whole

    class StaticNVFP4Input(NVFP4Act):
        scale_quant = StaticScales

    return StaticNVFP4Input
