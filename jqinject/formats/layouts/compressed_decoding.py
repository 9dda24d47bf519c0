"""The numbers of compressed-tensors from their tensors."""

from __future__ import annotations

import numpy as np

from jqinject.formats.bits import unpack_padded_words, unpack_stream
from jqinject.formats.files.tensors import Tensor
from jqinject.formats.layouts.common import as_blocks, exponents
from jqinject.formats.layouts.nibbles import low_nibble_first
from jqinject.formats.stored_matrix import E2M1, E2M3, Numbers

Arrays = dict[str, Tensor]
Shape = tuple[int, int]


def packed_integers(arrays: Arrays, shape: Shape, block: Shape, bits: int) -> Numbers:
    """Streams of integers along the rows; zero points likewise, but down the columns."""
    offset = 1 << (bits - 1)
    streams = [(arrays["weight_packed"].read(), shape[1])]
    zero = arrays.get("weight_zero_point")
    is_packed = zero is not None and zero.dtype.itemsize == 4
    if zero is not None and is_packed:
        streams.append((np.ascontiguousarray(zero.read().T), shape[0]))
    unpack = unpack_padded_words if _is_padded(streams, bits) else unpack_stream
    codes, *down = (_signed(unpack(words, bits, count), offset) for words, count in streams)
    zero_point = None if zero is None else down[0].T if is_packed else as_blocks(zero.read())
    scale = as_blocks(arrays["weight_scale"].read())
    order = arrays.get("weight_g_idx")
    return Numbers(codes, scale, block, zero_point, group_of_column=None if order is None else order.read())


def plain(arrays: Arrays, shape: Shape, block: Shape, bits: int) -> Numbers:
    """Integers or minifloats of 8 bits, as they are."""
    zero = arrays.get("weight_zero_point")
    zero_point = None if zero is None else as_blocks(zero.read())
    return Numbers(arrays["weight"].read(), as_blocks(arrays["weight_scale"].read()), block, zero_point)


def mx_bytes(arrays: Arrays, shape: Shape, block: Shape, bits: int) -> Numbers:
    """Minifloats of 8 bits with scales that are powers of two."""
    return Numbers(arrays["weight"].read(), exponents(arrays["weight_scale"].read()), block)


def mx_packed(arrays: Arrays, shape: Shape, block: Shape, bits: int) -> Numbers:
    """Minifloats of 4 or 6 bits with scales that are powers of two."""
    raw = arrays["weight_packed"].read()
    codes, table = (low_nibble_first(raw), E2M1) if bits == 4 else (unpack_stream(raw, 6, shape[1]), E2M3)
    return Numbers(codes, exponents(arrays["weight_scale"].read()), block, table=table)


def nvfp4(arrays: Arrays, shape: Shape, block: Shape, bits: int) -> Numbers:
    """Minifloats of 4 bits; the scale of a group is divided by that of the tensor."""
    whole = np.float32(arrays["weight_global_scale"].read().reshape(-1)[0])
    scale, codes = arrays["weight_scale"].read(), low_nibble_first(arrays["weight_packed"].read())
    return Numbers(codes, scale, block, factor=np.float32(1.0 / whole), table=E2M1)


def words_of(count: int, bits: int) -> tuple[int, int]:
    """The words of a stream of numbers: of a dense one, and with whole numbers in each word, as older releases packed.

    Example:
        >>> words_of(96, 4), words_of(96, 3)
        ((12, 12), (9, 10))
    """
    return -(-count * bits // 32), -(-count // (32 // bits))


def _is_padded(streams: list[tuple[np.ndarray, int]], bits: int) -> bool:
    """Whether words hold whole numbers; by how many they are, and where both ways fit by the bits that this leaves."""
    for words, count in streams:
        dense, padded = words_of(count, bits)
        if dense != padded:
            return words.shape[-1] == padded
    used = 32 // bits * bits  # of a word; the last one of a dense stream has unused bits too
    before = [np.ascontiguousarray(words).view(np.uint32)[..., :-1] for words, _ in streams]
    return (
        used < 32
        and any(each.size for each in before)
        and not any(np.any(each >> np.uint32(used)) for each in before)
    )


def _signed(codes: np.ndarray, offset: int) -> np.ndarray:
    return (codes.astype(np.int16) - offset).astype(np.int8)


DECODERS = {
    "pack-quantized": packed_integers,
    "int-quantized": plain,
    "float-quantized": plain,
    "mxfp8-quantized": mx_bytes,
    "mxfp4-pack-quantized": mx_packed,
    "mxfp6-pack-quantized": mx_packed,
    "nvfp4-pack-quantized": nvfp4,
}
