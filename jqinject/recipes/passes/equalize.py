"""Cross-layer equalization: channels of consecutive weights get ranges of the same size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jqinject.ops.devices.processes import on_host
from jqinject.recipes.passes.rescaling import Rescaling, per_channel
from jqinject.recipes.stream.site import LeftOut
from jqinject.recipes.transforms.regions import Region
from jqinject.recipes.work import Work

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

    Raises:
        ValueError: there is less than one turn; or, when applied, the float model's outputs move.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019; Brevitas.

    Differs from Brevitas: biases do not take part in the ranges (there, `merge_bias=False`); where several weights make
    or contract a channel, its range is the largest of theirs.

    Example:
        >>> Equalize(iterations=5)
        Equalize(iterations=5, threshold=0.05, ranges='maxabs')
    """

    iterations: int = 10
    threshold: float = 0.05
    ranges: Literal["maxabs", "range"] = "maxabs"

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(
                f"Equalize: iterations is {self.iterations}, must be 1 or more.\n  cure: iterations=10"
            )
        if self.ranges not in ("maxabs", "range"):
            raise ValueError(f"Equalize: ranges is {self.ranges!r}, must be 'maxabs' or 'range'")

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
        contracting = self._range(
            region, region.sinks, [rescaling.weights(each.site) for each in region.sinks], 1
        )
        if region.sources:
            weights = [rescaling.weights(each.site) for each in region.sources]
            making = self._range(region, region.sources, weights, 2)
        else:
            making = np.zeros(region.channels, np.float32)
            for path in region.gains:
                value = np.abs(on_host(rescaling.values[path]).astype(np.float32))
                labels = np.broadcast_to(region.parameters[path], value.shape)
                np.maximum.at(making, labels[labels > 0] - 1, value[labels > 0])
        alive = (making > NOTHING) & (contracting > NOTHING)
        one = np.float32(1)
        return np.where(
            alive, np.sqrt(np.where(alive, contracting, one)) / np.sqrt(np.where(alive, making, one)), one
        )

    def _range(self, region: Region, members: Any, weights: Sequence[np.ndarray], axis: int) -> np.ndarray:
        if self.ranges == "maxabs":
            return per_channel(region, members, [np.abs(each).max(axis=axis) for each in weights])
        high = per_channel(region, members, [each.max(axis=axis) for each in weights])
        low = per_channel(region, members, [each.min(axis=axis) for each in weights], smallest=True)
        means = [np.abs(each.mean(axis=axis)) for each in weights]
        return np.where(high > low, high - low, per_channel(region, members, means))
