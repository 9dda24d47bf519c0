"""Integers of a few bits, as checkpoints pack them: nibbles, dense little-endian streams, words.

Eight numbers of `n` bits are `n` bytes of a stream: they are packed and unpacked as one integer of 64 bits.
"""

import numpy as np


def unpack_stream(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the integers of streams along the last axis: number `i` occupies bits `i * bits` to `(i + 1) * bits - 1`.

    Args:
        words: integers of any width, `(..., words)`; bit 0 is the lowest bit of the first one.
        bits: of a number, 1 to 8.
        count: how many numbers a stream holds.

    Returns:
        uint8, `(..., count)`.

    Raises:
        ValueError: the words are too few.

    Example:
        >>> unpack_stream(np.array([[0b01_011_010_001]], np.uint32), 3, 3).tolist()
        [[1, 2, 3]]
    """
    raw = np.ascontiguousarray(words).view(np.uint8)
    if raw.shape[-1] * 8 < count * bits:
        raise ValueError(f"{count} numbers of {bits} bits need {count * bits} bits, got {raw.shape[-1] * 8}")
    eights = _in_rows(_in_rows(raw[..., : -(-count * bits // 8)], bits), 8).view(np.uint64)[..., 0, 0]
    numbers = np.empty((*eights.shape, 8), np.uint8)
    for at in range(8):
        numbers[..., at] = eights >> np.uint64(at * bits)
    numbers &= np.uint8(2**bits - 1)
    return np.ascontiguousarray(numbers.reshape(*raw.shape[:-1], eights.shape[-1] * 8)[..., :count])


def _in_rows(x: np.ndarray, size: int) -> np.ndarray:
    """Return the last axis as rows of a size, the last of which is filled with zeros."""
    filled = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    return filled.reshape(*x.shape[:-1], filled.shape[-1] // size, size)


def unpack_padded_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the integers of words that hold `floor(32 / bits)` of them each, with unused bits on top.

    Args:
        words: 32 bits each, `(..., words)`.
        bits: of a number.
        count: how many numbers a row holds.

    Example:
        >>> unpack_padded_words(np.array([[1 | 2 << 3, 7]], np.uint32), 3, 11).tolist()
        [[1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 7]]
    """
    numbers = unpack_stream(words[..., None], bits, 32 // bits).reshape(*words.shape[:-1], -1)
    return np.ascontiguousarray(numbers[..., :count])


def words_of(count: int, bits: int) -> tuple[int, int]:
    """Return the words of numbers: of a dense stream, and with whole numbers in each, as older releases packed.

    Example:
        >>> words_of(96, 4), words_of(96, 3)
        ((12, 12), (9, 10))
    """
    return -(-count * bits // 32), -(-count // (32 // bits))


def pack_stream(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack numbers into words of 32 bits, the last of which is padded with zeros: the inverse of `unpack_stream`.

    Args:
        numbers: unsigned, below `2**bits`, `(..., count)`.
        bits: of a number, 1 to 8.

    Returns:
        int32, `(..., ceil(count * bits / 32))`.

    Example:
        >>> unpack_stream(pack_stream(np.arange(8, dtype=np.uint8), 3), 3, 8).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    rows = _in_rows(_in_rows(numbers.astype(np.uint8), 32), 8)
    eights = np.zeros((*rows.shape[:-1], 1), np.uint64)
    for at in range(8):
        eights |= rows[..., at : at + 1].astype(np.uint64) << np.uint64(at * bits)
    raw = np.ascontiguousarray(eights.view(np.uint8)[..., :bits])
    words = raw.reshape(*numbers.shape[:-1], rows.shape[-3] * 4 * bits).view(np.int32)
    return np.ascontiguousarray(words[..., : words_of(numbers.shape[-1], bits)[0]])
