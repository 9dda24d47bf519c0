"""GGUF's types of blocks: their bytes as codes, scales, zero points and minima; and a file's tensors as matrices.

A block is a run of numbers along the contiguous axis of a tensor. `TYPES` reads the bytes of blocks, `(rows, blocks,
bytes)`, as codes `(rows, blocks, numbers)` and statistics `(rows, blocks, groups)`, and writes two of the types.
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
from jqinject.formats.layouts.layout_settings import exponents, refuse_order_and_inputs
from jqinject.formats.safetensors_files import Tensor
from jqinject.formats.stored_matrix import E2M1, InputFormat, Matrix, StoredMatrix
from jqinject.ops import Grid, IntGrid

GGUF_GROUP = 32
Bytes: TypeAlias = Callable[[np.ndarray], np.ndarray]
Statistics: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]
"""From the bytes of blocks to the scale of each group, and its minimum; None without minima."""


@dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
        numbers: in a block.
        bytes: of a block.
        group: numbers that share a scale.
        grid: of the numbers.
        codes: from bytes to the numbers.
        statistics: from bytes to scales and minima.
        zero_point: of all codes.
        write: from integers with a sign, `(rows, blocks, numbers)`, to the bytes behind the scale; None if not written.
    """

    numbers: int
    bytes: int
    group: int
    grid: Grid
    codes: Bytes
    statistics: Statistics
    zero_point: int = 0
    write: Bytes | None = None


def _halfs(raw: np.ndarray) -> np.ndarray:
    """Return two bytes as a number of 16 bits."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _signed_bytes(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.int8)


def _one_half(raw: np.ndarray) -> tuple[np.ndarray, None]:
    return _halfs(raw[..., :2]), None


def _two_halves(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _halfs(raw[..., :2]), -_halfs(raw[..., 2:4])


def _nibbles(at: int, high: int | None = None) -> Bytes:
    """Return the reader of nibbles, and of a fifth bit for each in the four bytes at `high`."""

    def read(raw: np.ndarray) -> np.ndarray:
        if high is None:
            return halves(raw[..., at:])
        words = np.ascontiguousarray(raw[..., high : high + 4])
        return halves(raw[..., at:]) | np.unpackbits(words, axis=-1, bitorder="little") << 4

    return read


def _nvfp4(raw: np.ndarray) -> np.ndarray:
    return halves(raw[..., 4:].reshape(*raw.shape[:-1], 4, 8)).reshape(*raw.shape[:-1], 64)


def _nvfp4_scale(raw: np.ndarray) -> tuple[np.ndarray, None]:
    return np.where(raw[..., :4] == 0x7F, np.uint8(0), raw[..., :4]).view(ml_dtypes.float8_e4m3fn), None


def _pairs_of_32(raw: np.ndarray) -> np.ndarray:
    """Return the nibbles of 128 bytes: of each 32 bytes first the low ones, then the high ones."""
    return halves(raw.reshape(*raw.shape[:-1], 4, 32)).reshape(*raw.shape[:-1], 256)


def _bits_of_32(raw: np.ndarray) -> np.ndarray:
    """Return the bits of 32 bytes: first the lowest bit of each."""
    return (raw[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(*raw.shape[:-1], 256)


def _quarters(raw: np.ndarray) -> np.ndarray:
    """Return the pairs of bits of 64 bytes: of each 32 bytes first the lowest pairs, then those above them."""
    pairs = raw.reshape(*raw.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return pairs.reshape(*raw.shape[:-1], 256)


def _two_levels(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight minima of 6 bits in twelve bytes, in units of two floats."""
    low, middle, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return _halfs(raw[..., :2]) * scales, _halfs(raw[..., 2:4]) * minima


def _q5_k(raw: np.ndarray) -> np.ndarray:
    return _pairs_of_32(raw[..., 48:]) | _bits_of_32(raw[..., 16:48]) << 4


def _q6_k(raw: np.ndarray) -> np.ndarray:
    low = halves(raw[..., :128].reshape(*raw.shape[:-1], 2, 64)).reshape(*raw.shape[:-1], 256)
    return low | _quarters(raw[..., 128:192]) << 4


def _q6_k_scale(raw: np.ndarray) -> tuple[np.ndarray, None]:
    return _halfs(raw[..., 208:]) * _signed_bytes(raw[..., 192:208]), None


def _q2_k_levels(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _halfs(raw[..., 80:82]) * (raw[..., :16] & 15), _halfs(raw[..., 82:]) * (raw[..., :16] >> 4)


def _q3_k(raw: np.ndarray) -> np.ndarray:
    return _quarters(raw[..., 32:96]) | _bits_of_32(raw[..., :32]) << 2


def _q3_k_scale(raw: np.ndarray) -> tuple[np.ndarray, None]:
    shifts = np.repeat(np.arange(0, 8, 2, dtype=np.uint8), 4)
    upper = np.tile(raw[..., 104:108], 4) >> shifts & 3
    return _halfs(raw[..., 108:]) * ((halves(raw[..., 96:104]) | upper << 4).astype(np.int8) - 32), None


def _shifted_nibbles(integers: np.ndarray) -> np.ndarray:
    first, second = np.split((integers + 8).astype(np.uint8), 2, axis=-1)
    return first | second << 4


def _unsigned(bits: int) -> IntGrid:
    return IntGrid(bits, signed=False)


# Bytes of integers with a sign, after a scale of two bytes.
_INTEGERS = (lambda raw: _signed_bytes(raw[..., 2:])), (lambda integers: integers.view(np.uint8))
TYPES = {
    "Q8_0": BlockType(32, 34, 32, IntGrid(8), _INTEGERS[0], _one_half, 0, _INTEGERS[1]),
    "Q4_0": BlockType(32, 18, 32, _unsigned(4), _nibbles(2), _one_half, 8, _shifted_nibbles),
    "Q4_1": BlockType(32, 20, 32, _unsigned(4), _nibbles(4), _two_halves),
    "Q5_0": BlockType(32, 22, 32, _unsigned(5), _nibbles(6, 2), _one_half, 16),
    "Q5_1": BlockType(32, 24, 32, _unsigned(5), _nibbles(8, 4), _two_halves),
    "Q2_K": BlockType(256, 84, 16, _unsigned(2), lambda raw: _quarters(raw[..., 16:80]), _q2_k_levels),
    "Q3_K": BlockType(256, 110, 16, _unsigned(3), _q3_k, _q3_k_scale, 4),
    "Q4_K": BlockType(256, 144, 32, _unsigned(4), lambda raw: _pairs_of_32(raw[..., 16:]), _two_levels),
    "Q5_K": BlockType(256, 176, 32, _unsigned(5), _q5_k, _two_levels),
    "Q6_K": BlockType(256, 210, 16, _unsigned(6), _q6_k, _q6_k_scale, 32),
    "MXFP4": BlockType(32, 17, 32, E2M1, _nibbles(1), lambda raw: (exponents(raw[..., :1]), None)),
    "NVFP4": BlockType(64, 36, 16, E2M1, _nvfp4, _nvfp4_scale),
}
PLAIN: dict[str, Any] = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
}


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
    blocks = raw.reshape(math.prod(shape[:-1]), -1, block.bytes)
    scale, minimum = block.statistics(blocks[:0])
    arrays = {
        "codes": Tensor(raw.dtype, raw.shape, "", lambda: block.codes(blocks)),
        "scale": Tensor(scale.dtype, blocks.shape, "", lambda: block.statistics(blocks)[0]),
    }
    if minimum is not None:
        arrays["minimum"] = Tensor.of(blocks).map(lambda x: np.asarray(block.statistics(x)[1]))
    elif block.zero_point:
        arrays["zero_point"] = arrays["scale"].map(lambda x: np.full(x.shape, block.zero_point, np.uint8))
    by_row = {name: tensor.map(lambda x: x.reshape(len(blocks), -1)) for name, tensor in arrays.items()}
    return StoredMatrix(name, shape, block.grid, f"GGUF {kind}", (1, block.group), by_row)


def gguf_blocks(
    matrix: Matrix, path: str, inputs: InputFormat | None, round_scales: bool
) -> tuple[str, np.ndarray]:
    """Return the type of a matrix' blocks, and their bytes: Q8_0 for 8 bits, Q4_0 for 2 to 4.

    Args:
        matrix: its numbers.
        path: of the weight, for errors.
        inputs: how its input is quantized.
        round_scales: whether scales may be rounded to the 16 bits that blocks have.

    Raises:
        CheckpointError: it is of another kind, its groups are no such blocks, or its scales have more bits.
    """
    refuse_order_and_inputs(path, "GGUF", matrix, inputs)
    bits = matrix.grid.bit_width
    if not matrix.grid.is_integer or not 2 <= bits <= 8:
        raise CheckpointError(
            f"{path} is {matrix.label}; GGUF is written from integers of 2 to 8 bits, as Q8_0 or "
            "Q4_0.\n  cure: IntWeightSymmetricGroupQuant.let(group_size=32), of 8 or 4 bits"
        )
    matrix = matrix.signed()
    if matrix.zero_point is not None and np.any(matrix.zero_point):
        raise CheckpointError(
            f"{path} has zero points; GGUF's Q8_0 and Q4_0 have none.\n"
            "  cure: symmetric weights, such as IntWeightSymmetricGroupQuant"
        )
    columns, group = matrix.codes.shape[1], matrix.group
    if columns % GGUF_GROUP or (group % GGUF_GROUP and group != columns):
        raise CheckpointError(
            f"{path} has groups of {group} in rows of {columns}; blocks of GGUF are {GGUF_GROUP} inputs.\n"
            f"  cure: IntWeightSymmetricGroupQuant.let(group_size={GGUF_GROUP})"
        )
    scale = np.repeat(matrix.scales(), group // GGUF_GROUP, axis=1)[:, : columns // GGUF_GROUP]
    with np.errstate(over="ignore"):
        stored = scale.astype(np.float16)
    lost = ~np.isfinite(stored) | ((stored == 0) & (scale != 0))
    if np.any(lost) or (not round_scales and np.any(stored.astype(np.float32) != scale)):
        cure = "round_scales=True, which changes weights by up to 1 in 2048"
        cure = f"another scale than {scale[lost][0]:.3g}" if np.any(lost) else cure
        raise CheckpointError(
            f"{path} has scales that are no floats of 16 bits, as GGUF's are.\n  cure: {cure}"
        )
    kind = "Q8_0" if bits > 4 else "Q4_0"
    write = TYPES[kind].write
    assert write is not None, "of these two"
    blocks = write(matrix.codes.reshape(matrix.codes.shape[0], -1, GGUF_GROUP))
    return kind, np.concatenate([stored[..., None].view(np.uint8), blocks], axis=-1)


def _check_bytes(name: str, kind: str, shape: tuple[int, ...], raw: np.ndarray, size: int) -> None:
    if raw.size != size:
        raise CheckpointError(f"{name} has {raw.size} bytes; {shape} of {kind} needs {size}")
