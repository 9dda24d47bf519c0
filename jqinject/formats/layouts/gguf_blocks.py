"""GGUF's types of blocks: their bytes as codes, scales, zero points and minima.

A block is a run of numbers along the contiguous axis of a tensor. Each reader takes the bytes of blocks, `(rows,
blocks, bytes)`, and returns codes `(rows, blocks, numbers)` and statistics `(rows, blocks, groups)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jqinject.formats.layouts.common import exponents
from jqinject.formats.layouts.nibbles import halves
from jqinject.formats.stored_matrix import E2M1, NumberFormat


@dataclass(frozen=True)
class Parts:
    """What blocks hold: `scale * (codes - zero) - minimum`.

    Attributes:
        codes: `(rows, blocks, numbers)`.
        scale, minimum: of groups, `(rows, blocks, groups)`.
        zero: of all codes.
        table: numbers by their codes.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: int = 0
    minimum: np.ndarray | None = None
    table: np.ndarray | None = None


@dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
        numbers: in a block.
        bytes: of a block.
        group: numbers that share a scale.
        format: of the codes.
        read: from bytes to parts.
    """

    numbers: int
    bytes: int
    group: int
    format: NumberFormat
    read: Callable[[np.ndarray], Parts]


def _halfs(raw: np.ndarray) -> np.ndarray:
    """Two bytes as a number of 16 bits."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _bits_of_words(raw: np.ndarray) -> np.ndarray:
    """Four bytes as 32 single bits."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little")


def _q8_0(raw: np.ndarray) -> Parts:
    return Parts(np.ascontiguousarray(raw[..., 2:]).view(np.int8), _halfs(raw[..., :2]))


def _q4_0(raw: np.ndarray) -> Parts:
    return Parts(halves(raw[..., 2:]), _halfs(raw[..., :2]), 8)


def _q4_1(raw: np.ndarray) -> Parts:
    return Parts(halves(raw[..., 4:]), _halfs(raw[..., :2]), minimum=-_halfs(raw[..., 2:4]))


def _q5_0(raw: np.ndarray) -> Parts:
    return Parts(halves(raw[..., 6:]) | _bits_of_words(raw[..., 2:6]) << 4, _halfs(raw[..., :2]), 16)


def _q5_1(raw: np.ndarray) -> Parts:
    codes = halves(raw[..., 8:]) | _bits_of_words(raw[..., 4:8]) << 4
    return Parts(codes, _halfs(raw[..., :2]), minimum=-_halfs(raw[..., 2:4]))


def _mxfp4(raw: np.ndarray) -> Parts:
    return Parts(halves(raw[..., 1:]), exponents(raw[..., :1]), table=E2M1)


def _nvfp4(raw: np.ndarray) -> Parts:
    scales = np.where(raw[..., :4] == 0x7F, np.uint8(0), raw[..., :4])
    groups = raw[..., 4:].reshape(*raw.shape[:-1], 4, 8)
    codes = halves(groups).reshape(*raw.shape[:-1], 64)
    return Parts(codes, scales.view(ml_dtypes.float8_e4m3fn), table=E2M1)


def _six_bits(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and eight minima of twelve bytes."""
    low, middle, high = raw[..., :4], raw[..., 4:8], raw[..., 8:12]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return scales, minima


def _pairs_of_32(raw: np.ndarray) -> np.ndarray:
    """Nibbles of 128 bytes: of each 32 bytes first the low ones, then the high ones."""
    return halves(raw.reshape(*raw.shape[:-1], 4, 32)).reshape(*raw.shape[:-1], 256)


def _two_levels(raw: np.ndarray, codes: np.ndarray) -> Parts:
    scales, minima = _six_bits(raw[..., 4:16])
    return Parts(codes, _halfs(raw[..., :2]) * scales, minimum=_halfs(raw[..., 2:4]) * minima)


def _q4_k(raw: np.ndarray) -> Parts:
    return _two_levels(raw, _pairs_of_32(raw[..., 16:]))


def _q5_k(raw: np.ndarray) -> Parts:
    fifth = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _two_levels(raw, _pairs_of_32(raw[..., 48:]) | fifth.reshape(*raw.shape[:-1], 256) << 4)


def _quarters(raw: np.ndarray) -> np.ndarray:
    """The pairs of bits of 64 bytes: of each 32 bytes first the lowest pairs, then those above them."""
    pairs = raw.reshape(*raw.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return pairs.reshape(*raw.shape[:-1], 256)


def _q6_k(raw: np.ndarray) -> Parts:
    low = halves(raw[..., :128].reshape(*raw.shape[:-1], 2, 64)).reshape(*raw.shape[:-1], 256)
    scale = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return Parts(low | _quarters(raw[..., 128:192]) << 4, _halfs(raw[..., 208:]) * scale, 32)


def _q2_k(raw: np.ndarray) -> Parts:
    pairs = _quarters(raw[..., 16:80])
    scale = _halfs(raw[..., 80:82]) * (raw[..., :16] & 15)
    return Parts(pairs, scale, minimum=_halfs(raw[..., 82:]) * (raw[..., :16] >> 4))


def _q3_k(raw: np.ndarray) -> Parts:
    third = raw[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _quarters(raw[..., 32:96]) | third.reshape(*raw.shape[:-1], 256) << 2
    low = np.concatenate([raw[..., 96:104] & 15, raw[..., 96:104] >> 4], axis=-1)
    shifts = np.repeat(np.arange(0, 8, 2, dtype=np.uint8), 4)
    upper = np.tile(raw[..., 104:108], 4) >> shifts & 3
    scale = (low | upper << 4).astype(np.int8) - 32
    return Parts(codes, _halfs(raw[..., 108:]) * scale, 4)


def _integers(bits: int, has_zero_point: bool = True) -> NumberFormat:
    return NumberFormat("int", bits, signed=not has_zero_point, has_zero_point=has_zero_point)


TYPES = {
    "Q8_0": BlockType(32, 34, 32, _integers(8, False), _q8_0),
    "Q4_0": BlockType(32, 18, 32, _integers(4), _q4_0),
    "Q4_1": BlockType(32, 20, 32, _integers(4), _q4_1),
    "Q5_0": BlockType(32, 22, 32, _integers(5), _q5_0),
    "Q5_1": BlockType(32, 24, 32, _integers(5), _q5_1),
    "Q2_K": BlockType(256, 84, 16, _integers(2), _q2_k),
    "Q3_K": BlockType(256, 110, 16, _integers(3), _q3_k),
    "Q4_K": BlockType(256, 144, 32, _integers(4), _q4_k),
    "Q5_K": BlockType(256, 176, 32, _integers(5), _q5_k),
    "Q6_K": BlockType(256, 210, 16, _integers(6), _q6_k),
    "MXFP4": BlockType(32, 17, 32, NumberFormat("float", 4, name="e2m1", scale="e8m0"), _mxfp4),
    "NVFP4": BlockType(64, 36, 16, NumberFormat("float", 4, name="e2m1", scale="e4m3"), _nvfp4),
}
PLAIN = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
PLAIN |= {f"I{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)}
