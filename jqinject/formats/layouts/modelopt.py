"""ModelOpt: NVFP4, FP8 and INT8, as `hf_quant_config.json` says."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.formats.layouts.common import Settings, as_blocks, scale_of
from jqinject.formats.layouts.nibbles import low_nibble_first
from jqinject.formats.stored_matrix import E2M1, InputFormat, NumberFormat, Numbers, StoredMatrix

ALGORITHMS = ("NVFP4", "FP8", "INT8", "INT8_SQ", "W8A8_SQ_PER_CHANNEL")


def read_modelopt(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """The matrices of ModelOpt's layouts: NVFP4 `codes * weight_scale * weight_scale_2`, FP8 and INT8 `codes *
    weight_scale`.

    Args:
        tensors: of the files.
        config: `quantization`, of hf_quant_config.json.

    Raises:
        CheckpointError: the algorithm is unknown, or the tensors contradict it.
    """
    algorithm = config.choice("quant_algo", ALGORITHMS)
    read = (
        partial(_nvfp4, size=config.integer("group_size", default=16))
        if algorithm == "NVFP4"
        else _eight_bits
    )
    names = sorted(tensors.ending(".weight_scale"))
    for name in names:
        if f"{name}.pre_quant_scale" in tensors:
            raise CheckpointError(f"{name}.pre_quant_scale scales the input, which is not read")
    return [read(tensors, name) for name in names]


def _nvfp4(tensors: Tensors, module: str, size: int) -> StoredMatrix:
    packed = tensors.take(f"{module}.weight", (None, None), "uint8")
    shape = packed.shape[0], packed.shape[1] * 2
    why = f"groups of {size} of {shape[0]}x{shape[1]}"
    scale = tensors.take(
        f"{module}.weight_scale", (shape[0], math.ceil(shape[1] / size)), "float8_e4m3fn", why
    )
    whole = scale_of(tensors, f"{module}.weight_scale_2", [(), (1,)], "one scale of the tensor")
    inputs = _input(
        tensors, module, InputFormat("float", 4, strategy="tensor_group", group_size=size), is_global=True
    )
    kind = NumberFormat("float", 4, name="e2m1", scale="e4m3")

    def decode() -> Numbers:
        factor = np.float32(whole.read().reshape(-1)[0])
        return Numbers(low_nibble_first(packed.read()), scale.read(), (1, size), factor=factor, table=E2M1)

    parts = tuple(f"{module}.{end}" for end in ("weight", "weight_scale", "weight_scale_2"))
    made = StoredMatrix(
        f"{module}.weight", shape, kind, "ModelOpt NVFP4", parts, math.prod(packed.shape), decode
    )
    return made.with_input(inputs)


def _eight_bits(tensors: Tensors, module: str) -> StoredMatrix:
    weight = tensors.take(f"{module}.weight", (None, None), ("float8_e4m3fn", "int8"))
    rows, columns = weight.shape
    scale = scale_of(
        tensors, f"{module}.weight_scale", [(), (1,), (rows,), (rows, 1)], "one scale, or one a row"
    )
    is_float = weight.dtype.name != "int8"
    kind = NumberFormat("float", 8, name="e4m3") if is_float else NumberFormat("int", 8)
    inputs = _input(tensors, module, InputFormat("float" if is_float else "int", 8, dynamic=False))
    parts = f"{module}.weight", f"{module}.weight_scale"
    name = "FP8" if is_float else "INT8"
    decode = partial(_decode, weight, scale)
    made = StoredMatrix(
        f"{module}.weight", (rows, columns), kind, f"ModelOpt {name}", parts, rows * columns, decode
    )
    return made.with_input(inputs)


def _decode(weight: Tensor, scale: Tensor) -> Numbers:
    found = as_blocks(scale.read())
    return Numbers(
        weight.read(), found, (1 if found.shape[0] > 1 else max(weight.shape[0], 1), max(weight.shape[1], 1))
    )


def _input(tensors: Tensors, module: str, form: InputFormat, is_global: bool = False) -> InputFormat | None:
    """The format of an input whose scale the checkpoint has; None if it has none."""
    name = f"{module}.input_scale"
    if name not in tensors:
        return None
    held: Any = (
        scale_of(tensors, name, [(), (1,)], "one scale of the input").read().astype(np.float32).reshape(-1)
    )
    # The other way around in compressed-tensors, whose global scale this is.
    stored = {"global_scale": np.float32(1) / held} if is_global else {"scale": held}
    return InputFormat(form.kind, form.bits, True, form.strategy, form.group_size, form.dynamic, **stored)
