"""Handing freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

STEP = 2**20  # bytes


class FreedMemory:
    """What was freed since it was last handed back to the system.

    The C library keeps freed memory for later, in holes between what lives on, such as that of a float array beside the
    integers made from it. glibc hands it back when it is asked to; others are left alone.
    """

    def __init__(self) -> None:
        self.size = 0

    def add(self, size: int) -> None:
        """Count what was freed, and hand it back once it is `STEP` bytes.

        Args:
            size: bytes.
        """
        self.size += size
        trim = _malloc_trim()
        if self.size >= STEP and trim is not None:
            self.size = 0
            trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
