"""SmoothQuant: moves large inputs into the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jqinject.recipes.passes.rescaling import Rescaling
from jqinject.recipes.work import Work

Ranges = Literal["maxabs", "minmax"]
"""The range of numbers: their largest magnitude, or the largest less the smallest (of weights, twice their largest
magnitude)."""


def smooth_scales(inputs: np.ndarray, weights: np.ndarray, alpha: float) -> np.ndarray:
    """What SmoothQuant divides inputs by, and multiplies weights by: `inputs^alpha / weights^(1 - alpha)`.

    At least 1e-5; 1 for channels without inputs or without weights.

    Args:
        inputs, weights: the range of each channel, `(channels,)`.
        alpha: how much of the range goes from the inputs to the weights.

    Example:
        >>> smooth_scales(np.float32([16.0, 0.0]), np.float32([1.0, 1.0]), 0.5).tolist()
        [4.0, 1.0]
    """
    alive = (inputs > 0) & (weights > 0)
    one = np.float32(1)
    found = np.where(alive, inputs, one) ** alpha / np.where(alive, weights, one) ** (1 - alpha)
    return np.where(alive, np.maximum(found, np.float32(1e-5)), one).astype(np.float32)


@dataclass(frozen=True)
class SmoothQuant:
    """Divides the inputs of sites by a scale for each channel, and multiplies the weights that contract them by it.

    `s = inputs^alpha / weights^(1 - alpha)`, over all sites that contract the same channels. The division is folded
    into whatever makes the inputs: a norm's gain and bias, or the outputs of another weight. Sites for which that is
    impossible are left out, and the report says why. The float model's function stays, and is checked.

    Args:
        alpha: 0 leaves the inputs' ranges to themselves and makes those of the weights equal, 1 the reverse.
        ranges: how ranges are measured; "minmax" as in llm-compressor.

    Raises:
        ValueError: `alpha` is not within 0 and 1; or, when applied, the float model's outputs move.

    Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    2023.

    Differs from llm-compressor: channels that are always 0 keep their scale; neighbours are found from the program, not
    from a list of names.

    Example:
        >>> SmoothQuant(alpha=0.8)
        SmoothQuant(alpha=0.8, ranges='maxabs')
    """

    alpha: float = 0.5
    ranges: Ranges = "maxabs"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(
                f"SmoothQuant: alpha is {self.alpha}, must be within 0 and 1.\n  cure: alpha=0.5"
            )
        if self.ranges not in ("maxabs", "minmax"):
            raise ValueError(f"SmoothQuant: ranges is {self.ranges!r}, must be 'maxabs' or 'minmax'")

    def __call__(self, work: Work) -> list[Any]:
        """See `Pass`."""
        rescaling = Rescaling(work, repr(self), ("largest", "smallest"))
        found: list[Any] = []
        for region in rescaling.regions:
            high, low = (rescaling.of_inputs(region, name) for name in ("largest", "smallest"))
            weights = rescaling.of_weights(region)
            if self.ranges == "maxabs":
                inputs = np.maximum(np.abs(high), np.abs(low))
            else:
                inputs, weights = high - low, 2 * weights
            found.append(rescaling.multiply(region, 1 / smooth_scales(inputs, weights, self.alpha)))
        return found + rescaling.finish()
