"""Cross-layer equalization: channels of consecutive weights get ranges of the same size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jqinject.ops.processes import on_host
from jqinject.recipes.passes.rescaling import Rescaling
from jqinject.recipes.stream.site import LeftOut
from jqinject.recipes.transforms.regions import Region
from jqinject.recipes.work import Work

Numbers = tuple[np.ndarray, np.ndarray]
"""The channel of each row, and the rows."""
NOTHING = 1e-9
"""Channels whose range is at most this keep their factor 1."""


@dataclass(frozen=True)
class Equalize:
    """Multiplies the outputs of weights by a factor for each channel, and divides the weights that contract them by it.

    `s = sqrt(range of the inputs' weights) / sqrt(range of the outputs' weights)`, for each channel and region in
    order, again until no factor of a turn differs from 1 by `threshold`. Where nothing but a norm makes the channels,
    its gain is equalized. The float model's function stays, and is checked.

    Args:
        iterations: at most how many turns.
        threshold: how near to 1 all factors of the last turn are.
        ranges: the largest magnitude of a channel ("maxabs"), or the largest number less the smallest ("range").
        biases: what the biases of outputs are divided by before they count among the weights that make them, or "vaiq"
            for a number that goes by their sizes (`shrinkage_of`); None leaves biases out of the ranges.

    Raises:
        ValueError: there is less than one turn; or, when applied, the float model's outputs move.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019; Brevitas.

    Differs from Brevitas: biases are left out by default (there, `merge_bias=True` and `bias_shrinkage="vaiq"`).

    Example:
        >>> Equalize(iterations=5)
        Equalize(iterations=5, threshold=0.05, ranges='maxabs', biases=None)
    """

    iterations: int = 10
    threshold: float = 0.05
    ranges: Literal["maxabs", "range"] = "maxabs"
    biases: float | Literal["vaiq"] | None = None

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(
                f"Equalize: iterations is {self.iterations}, must be 1 or more.\n  cure: iterations=10"
            )
        if self.ranges not in ("maxabs", "range"):
            raise ValueError(f"Equalize: ranges is {self.ranges!r}, must be 'maxabs' or 'range'")
        numeric = isinstance(self.biases, int | float) and self.biases > 0
        if not numeric and self.biases not in ("vaiq", None):
            raise ValueError(
                f"Equalize: biases is {self.biases!r}, must be a number above 0, 'vaiq' or None.\n  cure: biases='vaiq'"
            )

    def __call__(self, work: Work) -> list[Any]:
        """See `Pass`."""
        rescaling = Rescaling(work, repr(self))
        able = [region for region in rescaling.regions if region.sources or region.gains]
        left = [
            LeftOut(member.site.name, member.site.path, "no weight and no gain makes its inputs")
            for region in rescaling.regions
            for member in region.sinks
            if region not in able
        ]
        total = [np.ones(region.channels, np.float32) for region in able]
        for _ in range(self.iterations):
            largest = 0.0
            for place, region in enumerate(able):
                factors = self._factors(rescaling, region)
                rescaling.multiply(region, factors)
                total[place] *= factors
                largest = max(largest, float(np.abs(1 - factors).max()))
            if largest < self.threshold:
                break
        done = [rescaling.described(region, factors) for region, factors in zip(able, total, strict=True)]
        return [*done, *left, *rescaling.finish()]

    def _factors(self, rescaling: Rescaling, region: Region) -> np.ndarray:
        sinks = [(each.labels.reshape(-1), _columns(rescaling.weights(each.site))) for each in region.sinks]
        contracting = self._range(region.channels, sinks)
        making = self._range(
            region.channels, [self._with_bias(rescaling, region, *each) for each in rescaling.makers(region)]
        )
        alive = (making > NOTHING) & (contracting > NOTHING)
        one = np.float32(1)
        return np.where(
            alive, np.sqrt(np.where(alive, contracting, one)) / np.sqrt(np.where(alive, making, one)), one
        )

    def _with_bias(
        self, rescaling: Rescaling, region: Region, maker: Any, labels: np.ndarray, weights: np.ndarray
    ) -> Numbers:
        path = None if self.biases is None else rescaling.bias_of(maker)
        if self.biases is None or path is None or path not in region.parameters:
            return labels, weights
        value = on_host(rescaling.values[path]).astype(np.float32)
        own = np.broadcast_to(region.parameters[path], value.shape)
        each = np.zeros(region.channels, np.float32)
        each[own[own > 0] - 1] = value[own > 0]
        bias = np.where(labels > 0, each[np.maximum(labels, 1) - 1], 0)
        made = labels > 0
        shrinkage = shrinkage_of(bias[made], weights[made]) if self.biases == "vaiq" else self.biases
        return labels, np.concatenate([weights, bias[:, None] / np.float32(shrinkage)], axis=1)

    def _range(self, channels: int, numbers: Sequence[Numbers]) -> np.ndarray:
        """The range of each channel: of all the rows that are labelled with it."""
        high, low = np.full(channels, -np.inf, np.float32), np.full(channels, np.inf, np.float32)
        mean = np.zeros(channels, np.float32)
        for labels, rows in numbers:
            own = labels > 0
            place, mine = labels[own] - 1, rows[own]
            np.maximum.at(high, place, mine.max(axis=1))
            np.minimum.at(low, place, mine.min(axis=1))
            np.maximum.at(mean, place, np.abs(mine.mean(axis=1)))
        if self.ranges == "maxabs":
            return np.where(np.isfinite(high), np.maximum(np.abs(high), np.abs(low)), 0)
        return np.where(high > low, high - low, mean)


def _columns(weights: np.ndarray) -> np.ndarray:
    """The columns of matrices `(stack, rows, columns)`, one after the other."""
    return weights.swapaxes(1, 2).reshape(-1, weights.shape[1])


def shrinkage_of(bias: np.ndarray, weights: np.ndarray) -> float:
    """What biases are divided by before they count as weights, by how large they are: Brevitas's rule "vaiq".

    Args:
        bias: of each output, `(outputs,)`.
        weights: `(outputs, inputs)`.

    Example:
        >>> weights = np.float32([[0.5], [0.5]])
        >>> shrinkage_of(np.float32([1.0, 2.0]), weights), shrinkage_of(np.float32([200.0, 300.0]), weights)
        (2.0, 20.0)
    """
    sizes = np.maximum(np.abs(weights), np.float32(NOTHING))
    ratios = np.abs(bias)[:, None] / sizes
    median, mean = float(np.sort(ratios, axis=None)[(ratios.size - 1) // 2]), float(ratios.mean())
    if np.abs(bias).max() < 10 and np.abs(bias).max() / sizes.max() < 20:
        return 5.0 if median > 100 or mean > 1000 else 2.0
    if median > 30 or mean > 500:
        return 20.0
    return 10.0 if median > 15 or mean > 250 else 5.0
