"""Histograms of numbers against the range that their quantizer can represent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 48
OUTLYING = 12.0  # a range that is so many times the usual magnitude has outliers
# With a scale of max |x| / steps, that x comes back up to float32 rounding: this is not clipping.
ROUNDING = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Histogram:
    """A histogram, and the range outside of which numbers are clipped.

    Attributes:
        unit: "value"; or, with several scales, "steps" (`x / scale + zero_point`), so that all numbers share one range.
        edges: bin edges, ascending; one more than there are bins.
        counts: numbers in each bin. inf and nan are not counted.
        low, high: the range that the quantizer represents.
    """

    unit: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    low: float
    high: float


@dataclass(frozen=True)
class Clipped:
    """A quantizer's inputs and outputs.

    All broadcast against `x`; float64.

    Attributes:
        x: the inputs.
        value: quantized and dequantized.
        scale: float per step.
        zero_point: the step that stands for 0.
        low, high: the first and the last step of the quantizer's range.
    """

    x: np.ndarray
    value: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    low: float
    high: float

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The range as values, for each scale."""
        return (self.low - self.zero_point) * self.scale, (self.high - self.zero_point) * self.scale

    def outside(self) -> int:
        """How many numbers lie outside the range; an inf does, a nan does not."""
        low, high = self.bounds()
        margin = ROUNDING * np.maximum(np.abs(low), np.abs(high))
        return int(np.sum((self.x < low - margin) | (self.x > high + margin)))


def saturation(calls: Sequence[Clipped]) -> float | None:
    """The share of numbers outside the range; None if there are no numbers."""
    count = sum(call.x.size for call in calls)
    return sum(call.outside() for call in calls) / count if count else None


def histogram(calls: Sequence[Clipped]) -> Histogram | None:
    """The numbers of all calls in one histogram; None without numbers or a finite range."""
    if not sum(call.x.size for call in calls):
        return None
    ranges = [
        np.unique(np.stack(np.broadcast_arrays(*call.bounds())).reshape(2, -1), axis=1) for call in calls
    ]
    each = np.unique(np.concatenate(ranges, axis=1), axis=1)
    if not np.all(np.isfinite(each)):
        return None
    if each.shape[1] == 1:
        unit, (low, high) = "value", each[:, 0].tolist()
        numbers = [call.x for call in calls]
    else:
        unit = "steps"
        low, high = min(call.low for call in calls), max(call.high for call in calls)
        with np.errstate(all="ignore"):  # a scale of 0 leaves nothing to draw
            numbers = [call.x / call.scale + call.zero_point for call in calls]
    flat = np.concatenate([x.reshape(-1) for x in numbers])
    flat = flat[np.isfinite(flat)]
    return _binned(flat, unit, low, high)


def _binned(numbers: np.ndarray, unit: str, low: float, high: float) -> Histogram:
    """The numbers in bins that span all of them and the range."""
    ends = [*([float(numbers.min()), float(numbers.max())] if numbers.size else []), low, high]
    first, last = min(ends), max(ends)
    if not first < last:
        first, last = first - 0.5, last + 0.5
    edges = _edges(numbers, first, last)
    counts, _ = np.histogram(numbers, edges)
    return Histogram(unit, tuple(edges.tolist()), tuple(counts.tolist()), float(low), float(high))


def _edges(numbers: np.ndarray, first: float, last: float) -> np.ndarray:
    """Bins of one width, or with outliers such that grow with the distance from 0.

    With outliers, most numbers would lie in a few bins of one width. The bins then have one width in `asinh(x / c)`: it
    is linear up to `c`, the magnitude that nine of ten numbers do not exceed, and logarithmic beyond.
    """
    usual = float(np.quantile(np.abs(numbers), 0.9)) if numbers.size else 0.0
    if not usual or last - first < OUTLYING * usual:
        return np.linspace(first, last, BINS + 1)
    edges = usual * np.sinh(np.linspace(math.asinh(first / usual), math.asinh(last / usual), BINS + 1))
    edges[0], edges[-1] = first, last
    return edges
