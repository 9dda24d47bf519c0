"""The random numbers that torch draws on a CPU, for what a reference set leaves to the peer's own initialization."""

from __future__ import annotations

import numpy as np


class TorchRandom:
    """torch's generator after `torch.manual_seed(seed)`: 32-bit numbers of a Mersenne twister.

    Args:
        seed: the seed.
    """

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed)
        self._second_normal = False

    def _draw(self, count: int) -> np.ndarray:
        return self._state.randint(0, 2**32, count, dtype=np.uint32)

    def uniform(self, shape: tuple[int, ...], bound: float) -> np.ndarray:
        """`tensor.uniform_(-bound, bound)`: 24 bits of a number each."""
        bits = self._draw(int(np.prod(shape))) & np.uint32(2**24 - 1)
        low, high = np.float32(-bound), np.float32(bound)
        unit = bits.astype(np.float32) * np.float32(2.0**-24)
        return (unit * (high - low) + low).reshape(shape)

    def skip_normal(self, size: int) -> None:
        """Go on behind `torch.randn(size)`.

        From 16 on a number takes one draw, and the last 16 are drawn again where 16 does not divide; below, two numbers
        take two draws of 64 bits, and the second of a pair is kept for the next call.
        """
        if size >= 16:
            self._draw(size + (16 if size % 16 else 0))
            return
        for _ in range(size):
            if not self._second_normal:
                self._draw(4)
            self._second_normal = not self._second_normal
