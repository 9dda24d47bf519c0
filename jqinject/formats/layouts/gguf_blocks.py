"""GGUF's types of blocks: their bytes as codes, scales, zero points and minima; and a file's tensors as matrices.

A block is a run of numbers along the contiguous axis of a tensor. Each reader takes the bytes of blocks, `(rows,
blocks, bytes)`, and returns codes `(rows, blocks, numbers)` and statistics `(rows, blocks, groups)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from jqinject.formats.bits import halves
from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.gguf_files import gguf_reader, gguf_shape
from jqinject.formats.layouts.layout_settings import E8M0, exponents
from jqinject.formats.safetensors_files import Tensor
from jqinject.formats.stored_matrix import E2M1, FLOAT32, Matrix, StoredMatrix
from jqinject.ops import Grid, IntGrid

Parts: TypeAlias = tuple[np.ndarray, np.ndarray, int | np.ndarray]
"""Codes and scales; and the zero point of all codes, an int, or the minimum of each group."""


@dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
        numbers: in a block.
        bytes: of a block.
        group: numbers that share a scale.
        grid: of the numbers.
        read: from bytes to parts.
        scale_dtype: of the scales that `read` returns.
    """

    numbers: int
    bytes: int
    group: int
    grid: Grid
    read: Callable[[np.ndarray], Parts]
    scale_dtype: np.dtype = FLOAT32


def _halfs(raw: np.ndarray) -> np.ndarray:
    """Return two bytes as a number of 16 bits."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _bits_of_words(raw: np.ndarray) -> np.ndarray:
    """Return four bytes as 32 single bits."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little")


def _q8_0(raw: np.ndarray) -> Parts:
    return np.ascontiguousarray(raw[..., 2:]).view(np.int8), _halfs(raw[..., :2]), 0


def _q4_0(raw: np.ndarray) -> Parts:
    return halves(raw[..., 2:]), _halfs(raw[..., :2]), 8


def _q4_1(raw: np.ndarray) -> Parts:
    return halves(raw[..., 4:]), _halfs(raw[..., :2]), -_halfs(raw[..., 2:4])


def _q5_0(raw: np.ndarray) -> Parts:
    return halves(raw[..., 6:]) | _bits_of_words(raw[..., 2:6]) << 4, _halfs(raw[..., :2]), 16


def _q5_1(raw: np.ndarray) -> Parts:
    codes = halves(raw[..., 8:]) | _bits_of_words(raw[..., 4:8]) << 4
    return codes, _halfs(raw[..., :2]), -_halfs(raw[..., 2:4])


def _mxfp4(raw: np.ndarray) -> Parts:
    return halves(raw[..., 1:]), exponents(raw[..., :1]), 0


def _nvfp4(raw: np.ndarray) -> Parts:
    scales = np.where(raw[..., :4] == 0x7F, np.uint8(0), raw[..., :4])
    groups = raw[..., 4:].reshape(*raw.shape[:-1], 4, 8)
    return halves(groups).reshape(*raw.shape[:-1], 64), scales.view(ml_dtypes.float8_e4m3fn), 0


def _pairs_of_32(raw: np.ndarray) -> np.ndarray:
    """Return the nibbles of 128 bytes: of each 32 bytes first the low ones, then the high ones."""
    return halves(raw.reshape(*raw.shape[:-1], 4, 32)).reshape(*raw.shape[:-1], 256)


def _two_levels(raw: np.ndarray, codes: np.ndarray) -> Parts:
    """Return codes with eight scales and eight minima of 6 bits in twelve bytes, in units of two floats."""
    low, middle, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return codes, _halfs(raw[..., :2]) * scales, _halfs(raw[..., 2:4]) * minima


def _q4_k(raw: np.ndarray) -> Parts:
    return _two_levels(raw, _pairs_of_32(raw[..., 16:]))


def _q5_k(raw: np.ndarray) -> Parts:
    fifth = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _two_levels(raw, _pairs_of_32(raw[..., 48:]) | fifth.reshape(*raw.shape[:-1], 256) << 4)


def _quarters(raw: np.ndarray) -> np.ndarray:
    """Return the pairs of bits of 64 bytes: of each 32 bytes first the lowest pairs, then those above them."""
    pairs = raw.reshape(*raw.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return pairs.reshape(*raw.shape[:-1], 256)


def _q6_k(raw: np.ndarray) -> Parts:
    low = halves(raw[..., :128].reshape(*raw.shape[:-1], 2, 64)).reshape(*raw.shape[:-1], 256)
    scale = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return low | _quarters(raw[..., 128:192]) << 4, _halfs(raw[..., 208:]) * scale, 32


def _q2_k(raw: np.ndarray) -> Parts:
    scale = _halfs(raw[..., 80:82]) * (raw[..., :16] & 15)
    return _quarters(raw[..., 16:80]), scale, _halfs(raw[..., 82:]) * (raw[..., :16] >> 4)


def _q3_k(raw: np.ndarray) -> Parts:
    third = raw[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _quarters(raw[..., 32:96]) | third.reshape(*raw.shape[:-1], 256) << 2
    low = np.concatenate([raw[..., 96:104] & 15, raw[..., 96:104] >> 4], axis=-1)
    shifts = np.repeat(np.arange(0, 8, 2, dtype=np.uint8), 4)
    upper = np.tile(raw[..., 104:108], 4) >> shifts & 3
    scale = (low | upper << 4).astype(np.int8) - 32
    return codes, _halfs(raw[..., 108:]) * scale, 4


def _unsigned(bits: int) -> IntGrid:
    return IntGrid(bits, signed=False)


TYPES = {
    "Q8_0": BlockType(32, 34, 32, IntGrid(8), _q8_0),
    "Q4_0": BlockType(32, 18, 32, _unsigned(4), _q4_0),
    "Q4_1": BlockType(32, 20, 32, _unsigned(4), _q4_1),
    "Q5_0": BlockType(32, 22, 32, _unsigned(5), _q5_0),
    "Q5_1": BlockType(32, 24, 32, _unsigned(5), _q5_1),
    "Q2_K": BlockType(256, 84, 16, _unsigned(2), _q2_k),
    "Q3_K": BlockType(256, 110, 16, _unsigned(3), _q3_k),
    "Q4_K": BlockType(256, 144, 32, _unsigned(4), _q4_k),
    "Q5_K": BlockType(256, 176, 32, _unsigned(5), _q5_k),
    "Q6_K": BlockType(256, 210, 16, _unsigned(6), _q6_k),
    "MXFP4": BlockType(32, 17, 32, E2M1, _mxfp4, E8M0),
    "NVFP4": BlockType(64, 36, 16, E2M1, _nvfp4, np.dtype(ml_dtypes.float8_e4m3fn)),
}
PLAIN: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
PLAIN |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}


def read_gguf(path: Path) -> tuple[list[StoredMatrix], dict[str, Tensor], dict[str, Any]]:
    """Return the low-bit matrices of a GGUF file, its other tensors, and the values that it carries with them.

    Raises:
        CheckpointError: it is broken; a type is unknown, or its bytes do not fit the shape.
        MissingLibraryError: the library gguf is not installed.
    """
    reader = gguf_reader(path)
    names = [str(tensor.name) for tensor in reader.tensors]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CheckpointError(f"{path.name} has two tensors {twice}.\n  cure: fetch or write it again")
    matrices: list[StoredMatrix] = []
    arrays: dict[str, Tensor] = {}
    for name, tensor in zip(names, reader.tensors, strict=True):
        data = np.asarray(tensor.data)
        raw = np.frombuffer(
            data.view(np.uint8).reshape(-1) if data.flags.c_contiguous else data.tobytes(), np.uint8
        )
        shape, kind = gguf_shape(tensor), tensor.tensor_type.name
        if kind in PLAIN:
            dtype = np.dtype(PLAIN[kind])
            _check_bytes(name, kind, shape, raw, math.prod(shape) * dtype.itemsize)
            arrays[name] = Tensor(
                dtype,
                shape,
                path.name,
                lambda raw=raw, dtype=dtype, shape=shape: raw.view(dtype).reshape(shape),
            )
        elif kind in TYPES:
            matrices.append(gguf_matrix(name, kind, shape, raw))
        else:
            raise CheckpointError(f"{name} is {kind}; known are {', '.join((*TYPES, *PLAIN))}")
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return matrices, arrays, values


def gguf_matrix(name: str, kind: str, shape: tuple[int, ...], raw: np.ndarray) -> StoredMatrix:
    """Return a tensor of blocks as a matrix.

    Args:
        name: of the tensor.
        kind: the name of its type.
        shape: with the contiguous axis last.
        raw: its bytes.

    Raises:
        CheckpointError: they do not fit the shape.
    """
    block = TYPES[kind]
    if not shape or shape[-1] % block.numbers:
        raise CheckpointError(f"{name} is {kind}, whose blocks of {block.numbers} do not fill {shape}")
    _check_bytes(name, kind, shape, raw, math.prod(shape) // block.numbers * block.bytes)
    rows = math.prod(shape[:-1])

    def read() -> Matrix:
        codes, scale, rest = block.read(raw.reshape(rows, -1, block.bytes))
        scale, zero, minimum = scale.reshape(rows, -1), None, None
        if isinstance(rest, np.ndarray):
            minimum = rest.reshape(rows, -1)
        elif rest:
            zero = np.full(scale.shape, rest, np.uint8)
        return Matrix(codes.reshape(rows, -1), scale, block.grid, (1, block.group), zero, minimum)

    return StoredMatrix(name, shape, block.grid, f"GGUF {kind}", raw.size, read, block.scale_dtype)


def _check_bytes(name: str, kind: str, shape: tuple[int, ...], raw: np.ndarray, size: int) -> None:
    if raw.size != size:
        raise CheckpointError(f"{name} has {raw.size} bytes; {shape} of {kind} needs {size}")
