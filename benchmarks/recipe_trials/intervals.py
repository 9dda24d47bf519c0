"""Bootstrap intervals of means over seeds and over windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DRAWS, LEVEL = 2_000, 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and what it may be.

    Attributes:
        mean: of all scores.
        low, high: 95 % of the means of scores that were drawn again.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(scores: np.ndarray, seed: int = 0) -> Interval:
    """The mean of scores, with seeds and windows drawn again.

    Args:
        scores: (seeds, windows).
        seed: of the draws, so that two arrays of the same shape are drawn alike.
    """
    random = np.random.default_rng(seed)
    seeds, windows = scores.shape
    rows = random.integers(0, seeds, (DRAWS, seeds, 1))
    columns = random.integers(0, windows, (DRAWS, 1, windows))
    means = scores[rows, columns].mean(axis=(1, 2))
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(scores.mean()), float(low), float(high))


def difference(left: np.ndarray, right: np.ndarray) -> Interval:
    """`left - right`, window by window, and seed by seed where both have several.

    Args:
        left, right: (seeds, windows); one seed stands for all where the result does not depend on it.
    """
    alone = 1 in (len(left), len(right))
    count = max(len(left), len(right)) if alone else min(len(left), len(right))
    return interval(_seeds(left, count) - _seeds(right, count))


def _seeds(scores: np.ndarray, count: int) -> np.ndarray:
    return np.broadcast_to(scores, (count, scores.shape[1])) if len(scores) == 1 else scores[:count]
