"""GGUF's types of blocks: their bytes as codes, scales, zero points and minima; and a file's tensors as matrices.

A block is a run of numbers along the contiguous axis of a tensor. `TYPES` reads the bytes of blocks, `(rows, blocks,
bytes)`, as codes `(rows, blocks, numbers)` and statistics `(rows, blocks, groups)`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import ml_dtypes
import numpy as np

from jqinject.formats.checkpoint_errors import CheckpointError
from jqinject.formats.gguf_files import gguf_reader, gguf_shape
from jqinject.formats.layouts.layout_settings import exponents
from jqinject.formats.safetensors_files import Tensor, Values
from jqinject.formats.stored_matrix import E2M1, E4M3, SavedMatrix, StoredMatrix
from jqinject.ops import Grid, IntGrid

GGUF_GROUP = 32


#: Bits of codes: the bytes from one place to another, how many bits of each code they hold, and how many bytes in a row
#: hold their lowest bits before the next ones follow.
Plane: TypeAlias = tuple[int, int, int, int]
#: From the bytes of blocks to the scale of each group, and its minimum; None without minima.
Statistics: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
        numbers: in a block.
        bytes: of a block.
        group: numbers that share a scale.
        grid: of the numbers.
        planes: the bits of their codes, the lowest ones first.
        statistics: from bytes to scales and minima.
        zero_point: of all codes.
    """

    numbers: int
    bytes: int
    group: int
    grid: Grid
    planes: tuple[Plane, ...]
    statistics: Statistics
    zero_point: int = 0

    def codes(self, raw: np.ndarray) -> np.ndarray:
        """Return the codes of blocks."""
        codes = _codes(raw, *self.planes)
        return codes.view(np.int8) if self.grid.is_integer and self.grid.signed else codes


def _codes(raw: np.ndarray, *planes: Plane) -> np.ndarray:
    """Return the codes that planes of bits make up."""
    codes, lowest = np.uint8(0), 0
    for start, stop, bits, length in planes:
        rows = raw[..., start:stop].reshape(*raw.shape[:-1], (stop - start) // length, 1, length)
        plane = rows >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & np.uint8(2**bits - 1)
        codes = codes | plane.reshape(*raw.shape[:-1], (stop - start) * 8 // bits) << np.uint8(lowest)
        lowest += bits
    return np.asarray(codes)


def _halfs(raw: np.ndarray) -> np.ndarray:
    """Return two bytes as a number of 16 bits."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _one_half(raw: np.ndarray) -> tuple[np.ndarray, None]:
    return _halfs(raw[..., :2]), None


def _two_halves(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _halfs(raw[..., :2]), -_halfs(raw[..., 2:4])


def _nvfp4_scale(raw: np.ndarray) -> tuple[np.ndarray, None]:
    return np.where(raw[..., :4] == 0x7F, np.uint8(0), raw[..., :4]).view(E4M3.storage), None


def _two_levels(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight minima of 6 bits in twelve bytes, in units of two floats."""
    low, middle, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return _halfs(raw[..., :2]) * scales, _halfs(raw[..., 2:4]) * minima


def _q6_k_scale(raw: np.ndarray) -> tuple[np.ndarray, None]:
    return _halfs(raw[..., 208:]) * np.ascontiguousarray(raw[..., 192:208]).view(np.int8), None


def _q2_k_levels(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _halfs(raw[..., 80:82]) * (raw[..., :16] & 15), _halfs(raw[..., 82:]) * (raw[..., :16] >> 4)


def _q3_k_scale(raw: np.ndarray) -> tuple[np.ndarray, None]:
    return _halfs(raw[..., 108:]) * (
        _codes(raw, (96, 104, 4, 8), (104, 108, 2, 4)).astype(np.int8) - 32
    ), None


def _unsigned(bits: int) -> IntGrid:
    return IntGrid(bits, signed=False)


TYPES = {
    "Q8_0": BlockType(32, 34, 32, IntGrid(8), ((2, 34, 8, 1),), _one_half),
    "Q4_0": BlockType(32, 18, 32, _unsigned(4), ((2, 18, 4, 16),), _one_half, 8),
    "Q4_1": BlockType(32, 20, 32, _unsigned(4), ((4, 20, 4, 16),), _two_halves),
    "Q5_0": BlockType(32, 22, 32, _unsigned(5), ((6, 22, 4, 16), (2, 6, 1, 1)), _one_half, 16),
    "Q5_1": BlockType(32, 24, 32, _unsigned(5), ((8, 24, 4, 16), (4, 8, 1, 1)), _two_halves),
    "Q2_K": BlockType(256, 84, 16, _unsigned(2), ((16, 80, 2, 32),), _q2_k_levels),
    "Q3_K": BlockType(256, 110, 16, _unsigned(3), ((32, 96, 2, 32), (0, 32, 1, 32)), _q3_k_scale, 4),
    "Q4_K": BlockType(256, 144, 32, _unsigned(4), ((16, 144, 4, 32),), _two_levels),
    "Q5_K": BlockType(256, 176, 32, _unsigned(5), ((48, 176, 4, 32), (16, 48, 1, 32)), _two_levels),
    "Q6_K": BlockType(256, 210, 16, _unsigned(6), ((0, 128, 4, 64), (128, 192, 2, 32)), _q6_k_scale, 32),
    "MXFP4": BlockType(32, 17, 32, E2M1, ((1, 17, 4, 16),), lambda raw: (exponents(raw[..., :1]), None)),
    "NVFP4": BlockType(64, 36, 16, E2M1, ((4, 36, 4, 8),), _nvfp4_scale),
}
PLAIN = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")


def read_gguf(path: Path) -> tuple[dict[str, StoredMatrix], dict[str, Tensor], Values]:
    """Return the low-bit matrices of a GGUF file, its other tensors, and the values that it carries with them.

    Raises:
        CheckpointError: it is broken; a type is unknown, or its bytes do not fit the shape.
        MissingLibraryError: the library gguf is not installed.
    """
    reader = gguf_reader(path)
    matrices: dict[str, StoredMatrix] = {}
    arrays: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        name = str(tensor.name)
        if name in matrices or name in arrays:
            raise CheckpointError(f"{path.name} has two tensors {name}.\n  cure: fetch or write it again")
        data, shape, kind = np.asarray(tensor.data), gguf_shape(tensor), tensor.tensor_type.name
        if kind in PLAIN:
            data = data.view(ml_dtypes.bfloat16) if kind == "BF16" else data
            arrays[name] = Tensor(data.dtype, shape, path.name, lambda data=data: data)
        elif kind in TYPES:
            matrices[name] = gguf_matrix(name, kind, shape, data)
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
        raw: its bytes, row by row.
    """
    block = TYPES[kind]
    blocks = raw.reshape(math.prod(shape[:-1]), -1, block.bytes)
    scale, minimum = block.statistics(blocks[:0])
    stored = Tensor.of(blocks)
    arrays = {
        "codes": stored.map(block.codes),
        "scale": stored.map(lambda x: block.statistics(x)[0], scale.dtype),
    }
    if minimum is not None:
        arrays["minimum"] = stored.map(lambda x: np.asarray(block.statistics(x)[1]))
    elif block.zero_point:
        arrays["zero_point"] = arrays["scale"].map(lambda x: np.full(x.shape, block.zero_point, np.uint8))
    by_row = {name: tensor.map(lambda x: x.reshape(len(blocks), -1)) for name, tensor in arrays.items()}
    return StoredMatrix(name, shape, block.grid, f"GGUF {kind}", (1, block.group), by_row)


def gguf_blocks(saved: SavedMatrix, round_scales: bool) -> tuple[str, np.ndarray]:
    """Return the type of a matrix' blocks, and their bytes: Q8_0 for 8 bits, Q4_0 for 2 to 4.

    Args:
        saved: the matrix.
        round_scales: whether scales may be rounded to the 16 bits that blocks have.

    Raises:
        CheckpointError: it is of another kind, its groups are no such blocks, or its scales have more bits.
    """
    matrix, bits = saved.matrix.signed().without_zeros(), saved.matrix.grid.bit_width
    columns, group = matrix.codes.shape[1], matrix.group
    is_integer = matrix.grid.is_integer and 2 <= bits <= 8 and matrix.zero_point is None
    are_blocks = columns % GGUF_GROUP == 0 and (group % GGUF_GROUP == 0 or group == columns)
    if not is_integer or not are_blocks or saved.inputs is not None or matrix.group_of_column is not None:
        raise saved.refused(
            "GGUF",
            f"integers of 2 to 8 bits without zero points in blocks of {GGUF_GROUP} inputs (Q8_0, Q4_0), float inputs",
            f"IntWeightSymmetricGroupQuant.let(group_size={GGUF_GROUP}); or method='compressed-tensors'",
        )
    scale = np.repeat(matrix.scales(), group // GGUF_GROUP, axis=1)[:, : columns // GGUF_GROUP]
    with np.errstate(over="ignore"):
        stored = scale.astype(np.float16)
    lost = ~np.isfinite(stored) | ((stored == 0) & (scale != 0))
    if np.any(lost) or (not round_scales and np.any(stored.astype(np.float32) != scale)):
        cure = "round_scales=True, which changes weights by up to 1 in 2048"
        cure = f"another scale than {scale[lost][0]:.3g}" if np.any(lost) else cure
        raise CheckpointError(
            f"{saved.path} has scales that are no floats of 16 bits, as GGUF's are.\n  cure: {cure}"
        )
    blocks = matrix.codes.reshape(matrix.codes.shape[0], -1, GGUF_GROUP)
    if bits > 4:
        kind, integers = "Q8_0", blocks.view(np.uint8)
    else:
        low, high = np.split((blocks + 8).astype(np.uint8), 2, axis=-1)
        kind, integers = "Q4_0", low | high << 4
    return kind, np.concatenate([stored[..., None].view(np.uint8), integers], axis=-1)
