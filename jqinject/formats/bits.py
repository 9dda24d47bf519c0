"""Integers of a few bits, as checkpoints pack them: nibbles, dense little-endian streams, words."""

import numpy as np

_AT_ONCE = 1 << 22  # numbers that are unpacked at a time: one byte is needed for each of their bits


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
    if 8 % bits == 0:
        share = 8 // bits
        needed = raw[..., : -(-count // share), None]
        numbers = (needed >> (bits * np.arange(share, dtype=np.uint8))) & np.uint8(2**bits - 1)
        return np.ascontiguousarray(numbers.reshape(*raw.shape[:-1], -1)[..., :count])
    rows = raw.reshape(-1, raw.shape[-1])
    numbers = np.empty((rows.shape[0], count), np.uint8)
    step = max(1, _AT_ONCE // max(count, 1))
    for start in range(0, rows.shape[0], step):
        stop = start + step
        single = np.unpackbits(rows[start:stop], axis=-1, count=count * bits, bitorder="little")
        packed = np.packbits(single.reshape(-1, count, bits), axis=-1, bitorder="little")
        numbers[start:stop] = packed[..., 0]
    return numbers.reshape(*raw.shape[:-1], count)


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
    share, length = 32 // bits, words.shape[-1]
    if length * share < count:
        raise ValueError(f"{count} numbers of {bits} bits need {-(-count // share)} words, got {length}")
    numbers = unpack_stream(words[..., None], bits, share).reshape(*words.shape[:-1], -1)
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
    count = numbers.shape[-1]
    rows = numbers.astype(np.uint8).reshape(-1, count)
    length = -(-count * bits // 32) * 4
    words = np.zeros((rows.shape[0], length), np.uint8)
    step = max(1, _AT_ONCE // max(count, 1))
    for start in range(0, rows.shape[0], step):
        single = np.unpackbits(rows[start : start + step, :, None], axis=-1, count=bits, bitorder="little")
        packed = np.packbits(single.reshape(-1, count * bits), axis=-1, bitorder="little")
        words[start : start + step, : packed.shape[-1]] = packed
    return words.view(np.int32).reshape(*numbers.shape[:-1], length // 4)
