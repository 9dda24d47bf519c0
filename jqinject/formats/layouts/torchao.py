"""torchao: tensor subclasses, flattened into safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.formats.layouts.common import Settings, as_blocks
from jqinject.formats.layouts.torchao_inputs import torchao_input
from jqinject.formats.stored_matrix import NumberFormat, Numbers, StoredMatrix

INTEGERS, FLOATS, UNPACKED = "Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"
PLAIN = "Tensor"


def is_torchao(tensors: Tensors) -> bool:
    """Whether the file's metadata describe tensors of torchao."""
    return "tensor_names" in tensors.metadata


def read_torchao(tensors: Tensors, config: Settings | None) -> list[StoredMatrix]:
    """The matrices of torchao's flattened tensors: `matrix = (qdata - zero_point) * scale`.

    Args:
        tensors: of the file, with its metadata.
        config: not needed: the metadata say all.

    Raises:
        CheckpointError: a tensor's class is not known, or contradicts its parts.
    """
    found = []
    for name in _json(tensors.metadata["tensor_names"], "tensor_names"):
        held = _json(tensors.metadata.get(name, "null"), name)
        if isinstance(held, Mapping) and held.get("_type") != PLAIN:
            found.append(_matrix(tensors, name, held))
    return found


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"the metadata {name} are no JSON: {error}") from None


def _matrix(tensors: Tensors, name: str, held: Mapping[str, Any]) -> StoredMatrix:
    kind = held.get("_type")
    if kind not in (INTEGERS, FLOATS, UNPACKED):
        raise CheckpointError(f"{name} is torchao's {kind!r}; known are {INTEGERS}, {FLOATS}, {UNPACKED}")
    module, _, parameter = name.rpartition(".")
    start = f"{module}._{parameter}_" if module else f"_{parameter}_"
    data = Settings(held.get("_data"), f"the metadata of {name}")
    codes = tensors.take(f"{start}qdata", (None, None), "float8_e4m3fn" if kind == FLOATS else "int8")
    rows, columns = codes.shape
    block = data.held.get("block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(x, int) and x > 0 for x in block):
        raise CheckpointError(f"{name} has the block_size {block!r}, expected two sizes")
    shapes = [(math.ceil(rows / block[0]), math.ceil(columns / block[1]))]
    shapes += [(shapes[0][0],)] if shapes[0][1] == 1 else []
    why = f"blocks of {block[0]}x{block[1]} of {rows}x{columns}"
    scale = tensors.of_shape(f"{start}scale", shapes, why)
    zero = tensors.of_shape(f"{start}zero_point", shapes, why) if f"{start}zero_point" in tensors else None
    if "zero_point" in (held.get("_tensor_data_names") or ()) and zero is None:
        raise CheckpointError(f"{name} has no {start}zero_point, which its metadata name")
    bits = _bits(data, kind, name)
    form = (
        NumberFormat("float", 8, name="e4m3")
        if kind == FLOATS
        else NumberFormat("int", bits, has_zero_point=zero is not None)
    )
    parts = tuple(f"{start}{end}" for end in ("qdata", "scale", "zero_point") if f"{start}{end}" in tensors)
    decode = partial(_decode, codes, scale, zero, (block[0], block[1]))
    made = StoredMatrix(name, (rows, columns), form, f"torchao {kind}", parts, rows * columns, decode)
    return made.with_input(torchao_input(tensors, start, data))


def _bits(data: Settings, kind: Any, name: str) -> int:
    if kind != UNPACKED:
        return 8
    target = (data.held.get("target_dtype") or {}).get("_data", "")
    if target not in {f"int{bits}" for bits in range(1, 9)}:
        raise CheckpointError(f"{name} has the target_dtype {target!r}, expected int1 to int8")
    return int(target.removeprefix("int"))


def _decode(codes: Tensor, scale: Tensor, zero: Tensor | None, block: tuple[int, int]) -> Numbers:
    zero_point = None if zero is None or not np.any(zero.read()) else as_blocks(zero.read())
    return Numbers(codes.read(), as_blocks(scale.read()), block, zero_point)
