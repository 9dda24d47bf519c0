"""What the literature leads to expect, and whether it is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from recipe_trials.intervals import Interval, difference

Cell = tuple[str, str, str]
"""Track, format, method."""


@dataclass(frozen=True)
class Ordering:
    """One cell of the table is expected to be better than another.

    Attributes:
        text: in words.
        better, worse: the cells.
    """

    text: str
    better: Cell
    worse: Cell

    def verdict(self, scores: Callable[[Cell], np.ndarray | None]) -> tuple[str, Interval | None]:
        """Whether it is seen, and by how much the worse is worse.

        Args:
            scores: of a cell, (seeds, windows); None if it was not measured.
        """
        worse, better = scores(self.worse), scores(self.better)
        if worse is None or better is None:
            return "not measured", None
        gap = difference(worse, better)
        return "seen" if gap.low > 0 else "not seen" if gap.high < 0 else "within noise", gap


ORDERINGS = (
    Ordering("GPTQ better than RTN at 3 bits", ("natural", "W3A16", "GPTQ"), ("natural", "W3A16", "RTN")),
    Ordering("Qronos better than RTN at 3 bits", ("natural", "W3A16", "Qronos"), ("natural", "W3A16", "RTN")),
    Ordering(
        "rotation better than SmoothQuant, W4A4, outliers",
        ("planted", "W4A4", "rotation"),
        ("planted", "W4A4", "SmoothQuant"),
    ),
    Ordering(
        "SmoothQuant better than RTN, W4A4, outliers",
        ("planted", "W4A4", "SmoothQuant"),
        ("planted", "W4A4", "RTN"),
    ),
    Ordering("RTN better in NVFP4 than in MXFP4", ("natural", "NVFP4", "RTN"), ("natural", "MXFP4", "RTN")),
    Ordering("Hadamard hurts RTN in NVFP4", ("natural", "NVFP4", "RTN"), ("natural", "NVFP4", "rotation")),
)
