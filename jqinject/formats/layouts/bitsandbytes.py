"""bitsandbytes: codes of a table in flat blocks, or integers with a scale for each row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jqinject.formats.checkpoint_errors import CONTRADICTION, CheckpointError
from jqinject.formats.files.tensors import Tensor, Tensors
from jqinject.formats.layouts.common import Settings
from jqinject.formats.layouts.nibbles import high_nibble_first
from jqinject.formats.stored_matrix import NumberFormat, Numbers, StoredMatrix

STATE = ".quant_state.bitsandbytes__"


def read_bitsandbytes(tensors: Tensors, config: Settings) -> list[StoredMatrix]:
    """The matrices of bitsandbytes' layouts.

    4 bits: `matrix = table[codes] * absmax`, in flat blocks of the matrix that may cross its rows. 8 bits: `codes *
    SCB / 127`, a scale for each row.

    Args:
        tensors: of the files.
        config: `quantization_config`.

    Raises:
        CheckpointError: the settings are unknown or contradict the tensors.
    """
    wants_four = config.flag("load_in_4bit", False)
    if wants_four == config.flag("load_in_8bit", False):
        raise CheckpointError(f"{config.where} needs either load_in_4bit or load_in_8bit")
    if not wants_four:
        return [_integers(tensors, module) for module in sorted(tensors.ending(".SCB"))]
    kind = config.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    names = sorted({*tensors.ending(".absmax"), *tensors.ending(STATE + kind)})
    return [_table(tensors, name, kind) for name in names if name.rpartition(".")[2] != "nested"]


def _integers(tensors: Tensors, module: str) -> StoredMatrix:
    weight = tensors.take(f"{module}.weight", (None, None), "int8")
    scale = tensors.of_shape(f"{module}.SCB", [(weight.shape[0],)], "one scale a row")
    parts = [f"{module}.weight", f"{module}.SCB"]
    if f"{module}.weight_format" in tensors:
        layout = tensors.take(f"{module}.weight_format", dtype="uint8").read()
        if layout.any():
            raise CheckpointError(
                f"{module}.weight_format is {layout.tolist()}; only 0 is read, which is row by row"
            )
        parts.append(f"{module}.weight_format")

    def decode() -> Numbers:
        by_row = scale.read().astype(np.float32)[:, None]
        return Numbers(weight.read(), by_row, (1, weight.shape[1]), factor=np.float32(1 / 127))

    shape = weight.shape[0], weight.shape[1]
    return StoredMatrix(
        f"{module}.weight",
        shape,
        NumberFormat("int", 8),
        "bitsandbytes int8",
        tuple(parts),
        math.prod(shape),
        decode,
    )


def _table(tensors: Tensors, name: str, kind: str) -> StoredMatrix:
    raw = tensors.take(name)
    if name + STATE + kind not in tensors:
        raise CheckpointError(
            f"{name} has no {STATE[1:]}{kind}, so its shape and its blocks are unknown.\n  cure: fetch it again"
        )
    state = _state(tensors.text(name + STATE + kind), name, kind)
    shape, block = _sizes(state, name)
    size = math.prod(raw.shape) * raw.dtype.itemsize
    count = math.prod(shape)
    if size != -(-count // 2):
        needed = -(-count // 2)
        raise CheckpointError(
            f"{name} has {size} bytes; the shape {shape} in 4 bits needs {needed}{CONTRADICTION}"
        )
    table = tensors.take(f"{name}.quant_map", (16,), "float32")
    blocks = -(-count // block)
    absmax = tensors.take(
        f"{name}.absmax", (blocks,), ("float32", "uint8"), f"{count} numbers in blocks of {block}"
    )
    parts = [name, f"{name}.quant_map", f"{name}.absmax", name + STATE + kind]
    nested = _Nested(tensors, name, state, blocks) if absmax.dtype == np.uint8 else None
    decode = partial(_decode, raw, table, absmax, nested, count, block)
    numbers = NumberFormat("table", 4, name=kind)
    return StoredMatrix(
        name,
        shape,
        numbers,
        f"bitsandbytes {kind}",
        (*parts, *(nested.parts if nested else ())),
        size,
        decode,
    )


def _state(text: str, name: str, kind: str) -> dict[str, Any]:
    try:
        state = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"the quant_state of {name} is no JSON: {error}") from None
    if not isinstance(state, dict) or state.get("quant_type") != kind:
        raise CheckpointError(f"the quant_state of {name} is {text[:80]!r}, expected one of {kind}")
    return state


def _sizes(state: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], int]:
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise CheckpointError(f"the quant_state of {name} has the shape {shape!r}")
    if not isinstance(block, int) or block < 1:
        raise CheckpointError(f"the quant_state of {name} has blocks of {block!r}")
    return tuple(shape), block


class _Nested:
    """How statistics that are quantized themselves are read."""

    def __init__(self, tensors: Tensors, name: str, state: Mapping[str, Any], blocks: int) -> None:
        self.offset, size = state.get("nested_offset"), state.get("nested_blocksize")
        if not isinstance(self.offset, float | int) or not isinstance(size, int) or size < 1:
            raise CheckpointError(
                f"{name}.absmax is uint8, but its quant_state does not say how to decode it"
            )
        self.size = size
        why = f"{name}.absmax is uint8 and has {blocks} numbers"
        self.table = tensors.take(f"{name}.nested_quant_map", (256,), "float32", why)
        self.absmax = tensors.take(f"{name}.nested_absmax", (-(-blocks // size),), "float32", why)
        self.parts = (f"{name}.nested_quant_map", f"{name}.nested_absmax")

    def decoded(self, codes: np.ndarray) -> np.ndarray:
        """The statistics, float32."""
        block = np.repeat(self.absmax.read(), self.size)[: codes.size]
        return self.table.read()[codes] * block + np.float32(self.offset)


def _decode(
    raw: Tensor, table: Tensor, absmax: Tensor, nested: _Nested | None, count: int, block: int
) -> Numbers:
    codes = high_nibble_first(raw.read().reshape(-1).view(np.uint8))[:count]
    scale = absmax.read() if nested is None else nested.decoded(absmax.read())
    return Numbers(codes[None], scale[None], (1, block), table=table.read())
