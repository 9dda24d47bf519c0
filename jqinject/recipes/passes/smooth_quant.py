"""SmoothQuant: moves large inputs into the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jqinject.recipes.passes.rescaling import Online, Rescaling
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


def log_scales(inputs: np.ndarray) -> np.ndarray:
    """What log equalization divides inputs by: `inputs / log2(2 + inputs)`; 1 for channels without inputs.

    Args:
        inputs: the range of each channel, `(channels,)`.

    Example:
        >>> log_scales(np.float32([2.0, 0.0])).tolist()
        [1.0, 1.0]
    """
    alive = inputs > 0
    return np.where(alive, np.where(alive, inputs, 1) / np.log2(2 + inputs), 1).astype(np.float32)


@dataclass(frozen=True)
class SmoothQuant:
    """Divides the inputs of sites by a scale for each channel, and multiplies the weights that contract them by it.

    `s = inputs^alpha / weights^(1 - alpha)`, over all sites that contract the same channels. The division is folded
    into whatever makes the inputs: a norm's gain and bias, or the outputs of another weight. Sites for which that is
    impossible are left out, and the report says why. The float model's function stays, and is checked.

    Args:
        alpha: 0 leaves the inputs' ranges to themselves and makes those of the weights equal, 1 the reverse.
        ranges: how ranges are measured; "minmax" as in llm-compressor.
        formula: "power", or "log" for `s = inputs / log2(2 + inputs)`, which leaves weights and `alpha` aside: log
            equalization.
        with_sources: the inputs' range is the mean of theirs and that of the weights and gains that make
            them, where there are such: Brevitas's `co_optimize_act_weights`.
        online: "rest" keeps the factors of sites that cannot be folded before their inputs, as a transform that is
            stored and served with the model (Brevitas's `add_mul_node`); "all" those of every site (`layerwise`).

    Raises:
        ValueError: `alpha` is not within 0 and 1; a choice that there is not; or, when applied, the float model's
            outputs move.

    Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    2023; llm-compressor's log equalization; Brevitas's `activation_equalization_mode`, whose scales are the inverse.

    Differs from llm-compressor: channels that are always 0 keep their scale; neighbours are found from the program, not
    from a list of names.

    Example:
        >>> SmoothQuant(alpha=0.8)
        SmoothQuant(alpha=0.8, ranges='maxabs', formula='power', with_sources=False, online='never')
    """

    alpha: float = 0.5
    ranges: Ranges = "maxabs"
    formula: Literal["power", "log"] = "power"
    with_sources: bool = False
    online: Online = "never"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(
                f"SmoothQuant: alpha is {self.alpha}, must be within 0 and 1.\n  cure: alpha=0.5"
            )
        if self.ranges not in ("maxabs", "minmax"):
            raise ValueError(f"SmoothQuant: ranges is {self.ranges!r}, must be 'maxabs' or 'minmax'")
        if self.formula not in ("power", "log"):
            raise ValueError(f"SmoothQuant: formula is {self.formula!r}, must be 'power' or 'log'")
        if self.online not in ("never", "rest", "all"):
            raise ValueError(f"SmoothQuant: online is {self.online!r}, must be 'never', 'rest' or 'all'")

    def __call__(self, work: Work) -> list[Any]:
        """See `Pass`."""
        rescaling = Rescaling(work, repr(self), ("largest", "smallest"), self.online)
        found: list[Any] = []
        for region in rescaling.regions:
            high, low = (rescaling.of_inputs(region, name) for name in ("largest", "smallest"))
            makers = rescaling.of_makers(region) if self.with_sources else None
            scales = self._scales(high, low, rescaling.of_weights(region), makers)
            found.append(rescaling.multiply(region, 1 / scales))
        for sites in rescaling.alone.values():
            high, low, weights = (
                rescaling.of_columns(sites, name) for name in ("largest", "smallest", "weights")
            )
            found.append(rescaling.scale_online(sites, 1 / self._scales(high, low, weights, None)))
        return found + rescaling.finish()

    def _scales(
        self, high: np.ndarray, low: np.ndarray, weights: np.ndarray, makers: np.ndarray | None
    ) -> np.ndarray:
        """What inputs are divided by, from the largest and the smallest of each channel."""
        if self.ranges == "maxabs":
            inputs = np.maximum(np.abs(high), np.abs(low))
        else:
            inputs, weights = high - low, 2 * weights
        if makers is not None:
            inputs = np.where(makers > 0, (inputs + makers) / 2, inputs)
        return log_scales(inputs) if self.formula == "log" else smooth_scales(inputs, weights, self.alpha)
