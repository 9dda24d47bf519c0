"""Two codes of four bits in a byte."""

from __future__ import annotations

import numpy as np


def low_nibble_first(raw: np.ndarray) -> np.ndarray:
    """The codes of bytes whose low four bits come first, along the last axis.

    Example:
        >>> low_nibble_first(np.array([0x21, 0x43], np.uint8)).tolist()
        [1, 2, 3, 4]
    """
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)


def high_nibble_first(raw: np.ndarray) -> np.ndarray:
    """The codes of bytes whose high four bits come first, along the last axis.

    Example:
        >>> high_nibble_first(np.array([0x21, 0x43], np.uint8)).tolist()
        [2, 1, 4, 3]
    """
    return np.stack([raw >> 4, raw & 15], axis=-1).reshape(*raw.shape[:-1], -1)


def halves(raw: np.ndarray) -> np.ndarray:
    """The codes of blocks of bytes, all low four bits before all high ones, along the last axis.

    Example:
        >>> halves(np.array([0x21, 0x43], np.uint8)).tolist()
        [1, 3, 2, 4]
    """
    return np.concatenate([raw & 15, raw >> 4], axis=-1)
