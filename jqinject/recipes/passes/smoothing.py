"""SmoothQuant and AWQ: scales of channels, from the inputs of sites into their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.recipes.passes.float_change import KeepOnline, Rescaling
from jqinject.recipes.passes.solve import Solve
from jqinject.recipes.quantized_parameter import QuantizedParameter, quantized_parameters
from jqinject.recipes.solvers.scale_search import Clip
from jqinject.recipes.solvers.solver import squared_errors
from jqinject.recipes.stream.flat_program import ContractionSite, LeftOut
from jqinject.recipes.stream.stream import Block, module_around
from jqinject.recipes.transforms.regions import Region
from jqinject.recipes.transforms.transform_walk import factors_of
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
    online: KeepOnline = "never"

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


WithWeights = bool | Literal["both", "always"]


def candidates(grid: int, weights: WithWeights) -> list[tuple[float, bool]]:
    """The exponents that are tried, and with each whether the weights take part.

    Args:
        grid: how many.
        weights: see `AWQ`.

    Example:
        >>> candidates(4, True)
        [(0.0, False), (0.0, True), (0.5, True), (1.0, True)]
    """
    if weights == "always":
        return [(i / (grid - 1), True) for i in range(grid)]
    if weights == "both":
        count = grid // 2
        return [(i / (count - 1), each) for i in range(count) for each in (False, True)]
    if weights:
        return [(0.0, False), *((i / (grid - 2), True) for i in range(grid - 1))]
    return [(i / (grid - 1), False) for i in range(grid)]


def awq_scales(
    inputs: np.ndarray, weights: np.ndarray | None, ratio: float, added: float = 1e-4
) -> np.ndarray:
    """What AWQ divides inputs by: `inputs^ratio / weights^(1 - ratio)`, around 1.

    Args:
        inputs: mean magnitude of each channel, `(channels,)`.
        weights: mean magnitude of its weights, each relative to the largest of its group; None if they take no part.
        ratio: the exponent.
        added: to the weights' magnitudes.

    Example:
        >>> awq_scales(np.float32([1.0, 16.0]), None, 0.5).tolist()
        [0.5, 2.0]
    """
    found = inputs**ratio
    if weights is not None:
        found = found / (weights ** (1 - ratio) + np.float32(added))
    found = np.clip(found, np.float32(1e-4), np.float32(1e4))
    return (found / np.sqrt(found.max() * found.min())).astype(np.float32)


@dataclass(frozen=True)
class AWQ:
    """Divides the inputs of sites by a scale for each channel, and multiplies the weights that contract them by it.

    `s = inputs^r / weights^(1 - r)`, where the exponent `r` is that with the least error when the sites' weights are
    rounded to nearest as the rules say. The division is folded as in `SmoothQuant`. It changes the
    float model's parameters, not its function; `Solve` rounds them.

    Args:
        grid: how many candidates are tried.
        weights: whether the weights' magnitudes take part in the scales: True (but not in the candidate 0), False,
            "both" for either, or "always", as in ModelOpt.
        error: that of the "block", the innermost module around several sites that share their inputs (queries, keys
            and values: the attention), and of a single site's output; that of the sites' "outputs", all together; or
            that of the "weights" times the mean magnitude of their inputs, as in Qwix. Sites whose only common module
            is the model itself are taken by their outputs.
        clip: whether ranges are then cut where outputs get better by it, and weights rounded to nearest on them: the
            pass `Solve(Clip())`. A `Solve` after it keeps the ranges.

    Raises:
        ValueError: the grid has fewer than 4 candidates, or another choice is unknown; or, when applied, the float
            model's outputs move.

    Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023;
    llm-compressor; ModelOpt's `awq_lite` and, with `clip=True`, `awq_full`; Qwix.

    Example:
        >>> AWQ(grid=10)
        AWQ(grid=10, weights=True, error='block', clip=False)
    """

    grid: int = 20
    weights: WithWeights = True
    error: Literal["block", "outputs", "weights"] = "block"
    clip: bool = False

    def __post_init__(self) -> None:
        if self.grid < 4:
            raise ValueError(f"AWQ: grid is {self.grid}, must be 4 or more.\n  cure: grid=20")
        if self.weights not in (True, False, "both", "always"):
            raise ValueError(f"AWQ: weights is {self.weights!r}, must be True, False, 'both' or 'always'")
        if self.error not in ("block", "outputs", "weights"):
            raise ValueError(f"AWQ: error is {self.error!r}, must be 'block', 'outputs' or 'weights'")

    def __call__(self, work: Work) -> list[Any]:
        """See `Pass`."""
        rescaling = Rescaling(work, repr(self), ("magnitude", "hessian"))
        quantized = work.quantized_by(work.rules)
        quantized.eval()
        parameters = quantized_parameters(quantized)
        found: list[Any] = []
        in_blocks = self._best_in_blocks(work, rescaling, parameters) if self.error == "block" else {}
        for region in rescaling.regions:
            if any(member.site.parameter in parameters for member in region.sinks):
                scales = in_blocks.get(region.sinks[0].site.name)
                scales = self.best(rescaling, region, parameters) if scales is None else scales
                found.append(rescaling.multiply(region, 1 / scales))
                continue
            reason = "no rule quantizes its weight"
            found += [LeftOut(each.site.name, each.site.path, reason) for each in region.sinks]
        found += rescaling.finish()
        return found + Solve(Clip())(work) if self.clip else found

    def best(
        self, rescaling: Rescaling, region: Region, parameters: Mapping[str, QuantizedParameter]
    ) -> np.ndarray:
        """The scales of a region with the least error.

        Args:
            rescaling: with the statistics.
            region: whose.
            parameters: the quantized ones, by path.
        """
        tried = self._tried(rescaling, region, parameters)
        errors = [self._error_of(rescaling, region, parameters, scales) for scales in tried]
        return tried[int(np.argmin(errors))]

    def _best_in_blocks(
        self, work: Work, rescaling: Rescaling, parameters: Mapping[str, QuantizedParameter]
    ) -> dict[str, np.ndarray]:
        """The scales with the least error of a module around several sites, by the name of the first of them."""
        regions = {
            region.sinks[0].site.name: region
            for region in rescaling.regions
            if len(region.sinks) > 1 and module_around([member.site for member in region.sinks])
        }
        found: dict[str, np.ndarray] = {}
        for visit in work.float_stream() if regions else ():
            region = regions.get(visit.site.name)
            if region is None:
                continue
            sites = [member.site for member in region.sinks]
            block = Block(visit, {site.name for site in sites}, module_around(sites))
            if block.reaches:
                tried = self._tried(rescaling, region, parameters)
                errors = [
                    block.error(dict(_rounded(rescaling, region, parameters, scales))) for scales in tried
                ]
                found[visit.site.name] = tried[int(np.argmin(errors))]
        return found

    def _tried(
        self, rescaling: Rescaling, region: Region, parameters: Mapping[str, QuantizedParameter]
    ) -> list[np.ndarray]:
        """The scales that are compared."""
        inputs = rescaling.of_inputs(region, "magnitude")
        if self.error == "weights":
            inputs = np.maximum(inputs / (inputs.max() + np.float32(1e-8)), np.float32(1e-4))
        weights = _mean_magnitudes(rescaling, region, parameters)
        added = 0.0 if self.weights == "always" else 1e-4
        return [
            awq_scales(inputs, weights if with_weights else None, ratio, added)
            for ratio, with_weights in candidates(self.grid, self.weights)
        ]

    def _error_of(
        self,
        rescaling: Rescaling,
        region: Region,
        parameters: Mapping[str, QuantizedParameter],
        scales: np.ndarray,
    ) -> float:
        """The error of a region's sites with their weights rounded to nearest under scales."""
        total, rounded = 0.0, dict(_rounded(rescaling, region, parameters, scales))
        for member in region.sinks:
            site = member.site
            if site.name not in rounded:
                continue
            wrong = site.weights(rounded[site.name] - rescaling.values[site.path].astype(jnp.float32))
            statistics = rescaling.statistics[site.name]
            if self.error == "weights":
                total += float(jnp.square(wrong * statistics.mean("magnitude")[:, None]).sum())
            else:
                total += float(squared_errors(wrong, statistics.mean("hessian")).sum())
        return total


def _rounded(
    rescaling: Rescaling, region: Region, parameters: Mapping[str, QuantizedParameter], scales: np.ndarray
) -> Iterator[tuple[str, jax.Array]]:
    """The parameters of a region's sites rounded to nearest under scales, which are taken out again."""
    for member in region.sinks:
        site = member.site
        parameter = parameters.get(site.parameter)
        if parameter is not None:
            value = rescaling.values[site.path].astype(jnp.float32)
            factors = jnp.asarray(factors_of(region.parameters[site.path], 1 / scales))
            yield site.name, parameter.nearest(value * factors) / factors


def _mean_magnitudes(
    rescaling: Rescaling, region: Region, parameters: Mapping[str, QuantizedParameter]
) -> np.ndarray:
    total, count = np.zeros(region.channels, np.float32), np.zeros(region.channels, np.float32)
    for member in region.sinks:
        parameter = parameters.get(member.site.parameter)
        if parameter is not None:
            relative = _relative_magnitudes(rescaling, member.site, parameter)
            own = member.labels > 0
            np.add.at(total, member.labels[own] - 1, relative.sum(axis=1)[own])
            np.add.at(count, member.labels[own] - 1, relative.shape[1])
    return total / np.maximum(count, 1)


def _relative_magnitudes(
    rescaling: Rescaling, site: ContractionSite, parameter: QuantizedParameter
) -> np.ndarray:
    """A site's `|w|`, relative to the largest of those that share a scale: a group, or without groups a row."""
    magnitudes = np.abs(rescaling.weights(site))
    if parameter.group_size is None:
        largest = magnitudes.max(axis=-1, keepdims=True)
    else:
        value = rescaling.values[site.path].astype(jnp.float32)
        largest = np.asarray(site.weights(parameter.largest_of_groups(value)))
    return magnitudes / (largest + np.float32(1e-6))
