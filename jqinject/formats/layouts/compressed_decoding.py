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
    codes = _signed(_unpacked(arrays["weight_packed"].read(), bits, shape[1]), offset)
    zero = arrays.get("weight_zero_point")
    scale = as_blocks(arrays["weight_scale"].read())
    zero_point = None
    if zero is not None and zero.dtype.itemsize == 4:
        down = np.ascontiguousarray(zero.read().T)
        zero_point = _signed(_unpacked(down, bits, shape[0]), offset).T
    elif zero is not None:
        zero_point = as_blocks(zero.read())
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


def _unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Numbers of words: a dense stream, or as older releases packed them, whole numbers in each word."""
    share = 32 // bits
    dense = -(-count * bits // 32)
    padded = -(-count // share)
    unused = np.uint32(0xFFFFFFFF) << np.uint32(share * bits) if share * bits < 32 else np.uint32(0)
    is_padded = words.shape[-1] != dense
    if dense == padded and dense > 1 and unused:
        # Both would fit: only the older way leaves bits unused.
        is_padded = not np.any(np.ascontiguousarray(words).view(np.uint32)[..., :-1] & unused)
    return unpack_padded_words(words, bits, count) if is_padded else unpack_stream(words, bits, count)


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
