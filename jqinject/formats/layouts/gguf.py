"""GGUF: the tensors of a file as matrices and arrays."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.files.gguf_files import GgufBlocks
from jqinject.formats.files.tensors import Tensor
from jqinject.formats.layouts.gguf_blocks import PLAIN, TYPES, BlockType
from jqinject.formats.stored_matrix import Numbers, StoredMatrix


def read_gguf(blocks: dict[str, GgufBlocks], file: str) -> tuple[list[StoredMatrix], dict[str, Tensor]]:
    """The low-bit matrices of a GGUF file, and its other tensors.

    Args:
        blocks: its tensors.
        file: its name.

    Raises:
        CheckpointError: a type is unknown, or its bytes do not fit the shape.
    """
    matrices: list[StoredMatrix] = []
    arrays: dict[str, Tensor] = {}
    for name, found in blocks.items():
        if found.type in PLAIN:
            dtype = np.dtype(PLAIN[found.type])
            _check_bytes(found, dtype.itemsize, 1)
            arrays[name] = Tensor(dtype, found.shape, file, partial(_plain, found, dtype))
        elif found.type in TYPES:
            kind = TYPES[found.type]
            if not found.shape or found.shape[-1] % kind.numbers:
                raise CheckpointError(
                    f"{name} is {found.type}, whose blocks of {kind.numbers} do not fill {found.shape}"
                )
            _check_bytes(found, kind.bytes, kind.numbers)
            decode = partial(_decode, found, kind)
            matrices.append(
                StoredMatrix(
                    name, found.shape, kind.format, f"GGUF {found.type}", (name,), found.raw.size, decode
                )
            )
        else:
            raise CheckpointError(f"{name} is {found.type}; known are {', '.join((*TYPES, *PLAIN))}")
    return matrices, arrays


def _check_bytes(found: GgufBlocks, size: int, numbers: int) -> None:
    wanted = math.prod(found.shape) // numbers * size
    if found.raw.size != wanted:
        raise CheckpointError(
            f"{found.name} has {found.raw.size} bytes; {found.shape} of {found.type} needs {wanted}"
        )


def _plain(found: GgufBlocks, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(found.raw).reshape(-1).view(dtype).reshape(found.shape)


def _decode(found: GgufBlocks, kind: BlockType) -> Numbers:
    rows = math.prod(found.shape[:-1])
    parts = kind.read(found.raw.reshape(rows, -1, kind.bytes))
    scale = parts.scale.reshape(rows, -1)
    zero = (
        np.full((1, 1), parts.zero, np.uint8).repeat(rows, 0).repeat(scale.shape[1], 1)
        if parts.zero
        else None
    )
    minimum = None if parts.minimum is None else parts.minimum.reshape(rows, -1)
    codes = parts.codes.reshape(rows, -1)
    return Numbers(codes, scale, (1, kind.group), zero, minimum, table=parts.table)
