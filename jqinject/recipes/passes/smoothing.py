"""SmoothQuant and AWQ: scales of channels, from the inputs of sites into their weights."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.recipes.passes.float_change import KeepOnline, Rescaling, largest_of, left_out
from jqinject.recipes.passes.solve import NotSolved, Solve, Solved
from jqinject.recipes.quantized_parameter import QuantizedParameter, quantized_parameters
from jqinject.recipes.solvers.scale_search import Clip
from jqinject.recipes.solvers.solver import Checked, Expected, Statistics, at_least, squared_errors
from jqinject.recipes.stream.flat_program import ContractionSite, Note
from jqinject.recipes.stream.stream import Block, module_around
from jqinject.recipes.transforms.factor_walk import factors_of
from jqinject.recipes.transforms.regions import Region, per_channel
from jqinject.recipes.work import Work

#: The range of numbers: their largest magnitude, or the largest less the smallest (of weights, twice their largest
#: magnitude).
Ranges = Literal["maxabs", "minmax"]


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
    alive, unit = (inputs > 0) & (weights > 0), np.float32(1)
    scales = np.where(alive, inputs, unit) ** alpha / np.where(alive, weights, unit) ** (1 - alpha)
    return np.where(alive, np.maximum(scales, np.float32(1e-5)), unit).astype(np.float32)


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
class SmoothQuant(Checked):
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

    alpha: Annotated[float, Expected("within 0 and 1", lambda x: 0 <= x <= 1)] = 0.5
    ranges: Ranges = "maxabs"
    formula: Literal["power", "log"] = "power"
    with_sources: bool = False
    online: KeepOnline = "never"

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        rescaling = Rescaling(work, repr(self), ("largest", "smallest"), self.online)
        for region in rescaling.regions:
            high, low = (rescaling.of_inputs(region, name) for name in ("largest", "smallest"))
            weights = largest_of(region.channels, rescaling.sinks(region))
            makers = [rows for _, rows in rescaling.makers(region)] if self.with_sources else []
            scales = self._scales(high, low, weights, largest_of(region.channels, makers))
            rescaling.done.append(rescaling.multiply(region, 1 / scales))
        return rescaling.finish()

    def _scales(
        self, high: np.ndarray, low: np.ndarray, weights: np.ndarray, makers: np.ndarray
    ) -> np.ndarray:
        """What inputs are divided by, from the largest and the smallest of each channel."""
        if self.ranges == "maxabs":
            inputs = np.maximum(np.abs(high), np.abs(low))
        else:
            inputs, weights = high - low, 2 * weights
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
    if weights == "both":
        count = grid // 2
        return [(i / (count - 1), with_weights) for i in range(count) for with_weights in (False, True)]
    if weights is True:
        return [(0.0, False), *((i / (grid - 2), True) for i in range(grid - 1))]
    return [(i / (grid - 1), weights == "always") for i in range(grid)]


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
    scales = inputs**ratio
    if weights is not None:
        scales = scales / (weights ** (1 - ratio) + np.float32(added))
    scales = np.clip(scales, np.float32(1e-4), np.float32(1e4))
    return (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)


@dataclass(frozen=True)
class AWQ(Checked):
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

    grid: Annotated[int, at_least(4)] = 20
    weights: WithWeights = True
    error: Literal["block", "outputs", "weights"] = "block"
    clip: bool = False

    def __call__(self, work: Work) -> list[Note | Solved | NotSolved]:
        """See `Pass`."""
        rescaling = Rescaling(work, repr(self), ("magnitude", "hessian"))
        quantized = work.quantized_by(work.rules)
        quantized.eval()
        search = AwqSearch(self, rescaling, quantized_parameters(quantized))
        in_blocks = search.in_blocks(work) if self.error == "block" else {}
        for region in rescaling.regions:
            if search.quantized(region):
                scales = in_blocks.get(region.sites[0].name)
                scales = search.best(region) if scales is None else scales
                rescaling.done.append(rescaling.multiply(region, 1 / scales))
            else:
                rescaling.done += left_out(region, "no rule quantizes its weight")
        done = rescaling.finish()
        return [*done, *(Solve(Clip())(work) if self.clip else ())]


class AwqSearch:
    """The search of scales for the regions of a model.

    Args:
        awq: the choices.
        rescaling: of the model, with the statistics.
        parameters: the quantized ones, by path.
    """

    def __init__(self, awq: AWQ, rescaling: Rescaling, parameters: Mapping[str, QuantizedParameter]) -> None:
        self.awq, self.rescaling, self.parameters = awq, rescaling, parameters

    def quantized(self, region: Region) -> list[tuple[ContractionSite, QuantizedParameter]]:
        """The sites of a region whose weight a rule quantizes, each with its parameter: of equal ones the first."""
        firsts: list[ContractionSite] = []
        for site in region.sinks:
            if site.path in self.parameters and not any(map(site.same_as, firsts)):
                firsts.append(site)
        return [(site, self.parameters[site.path]) for site in firsts]

    def best(self, region: Region) -> np.ndarray:
        """The scales of a region with the least error of its sites."""
        return self._least(region, partial(self._error, region))

    def in_blocks(self, work: Work) -> dict[str, np.ndarray]:
        """The scales with the least error of a module around several sites, by the name of the first of them."""
        regions = {
            region.sites[0].name: region
            for region in self.rescaling.regions
            if len(region.sites) > 1 and module_around(region.sites)
        }
        scales: dict[str, np.ndarray] = {}
        for visit in work.stream() if regions else ():
            region = regions.get(visit.site.name)
            if region is not None:
                names = {site.name for site in region.sites}
                block = Block(visit, names, module_around(region.sites))
                if block.reaches:
                    scales[visit.site.name] = self._least(region, block.error)
        return scales

    def _least(self, region: Region, error: Callable[[Mapping[str, jax.Array]], float]) -> np.ndarray:
        """The scales of a region with the least error of its sites' parameters, rounded to nearest under them."""
        tried = self._tried(region)
        errors = [error(self._rounded(region, scales)) for scales in tried]
        return tried[int(np.argmin(errors))]

    def _tried(self, region: Region) -> list[np.ndarray]:
        """The scales that are compared."""
        awq, inputs = self.awq, self.rescaling.of_inputs(region, "magnitude")
        if awq.error == "weights":
            inputs = np.maximum(inputs / (inputs.max() + np.float32(1e-8)), np.float32(1e-4))
        weights = self._mean_magnitudes(region)
        added = 0.0 if awq.weights == "always" else 1e-4
        return [
            awq_scales(inputs, weights if with_weights else None, ratio, added)
            for ratio, with_weights in candidates(awq.grid, awq.weights)
        ]

    def _error(self, region: Region, rounded: Mapping[str, jax.Array]) -> float:
        """The error of a region's sites with other parameters."""
        total = 0.0
        for site, _ in self.quantized(region):
            equal = (self.rescaling.statistics[x.name] for x in region.sinks if site.same_as(x))
            statistics = functools.reduce(Statistics.merged, equal)
            difference = site.weights(rounded[site.name] - self._value(site))
            if self.awq.error == "weights":
                scaled = difference * statistics.mean("magnitude")[:, None]
                total += float(jnp.square(scaled).sum())
            else:
                total += float(squared_errors(difference, statistics.mean("hessian")).sum())
        return total

    def _value(self, site: ContractionSite) -> jax.Array:
        return self.rescaling.values[site.path].astype(jnp.float32)

    def _rounded(self, region: Region, scales: np.ndarray) -> dict[str, jax.Array]:
        """The parameters of a region's sites rounded to nearest under scales, which are taken out again."""
        rounded: dict[str, jax.Array] = {}
        for site, parameter in self.quantized(region):
            if site.path not in rounded:
                factors = jnp.asarray(factors_of(region.parameters[site.path], 1 / scales))
                rounded[site.path] = parameter.nearest(self._value(site) * factors) / factors
        return {site.name: rounded[site.path] for site in region.sinks if site.path in rounded}

    def _mean_magnitudes(self, region: Region) -> np.ndarray:
        relative = [
            (region.sinks[site], self._relative_magnitudes(site, parameter))
            for site, parameter in self.quantized(region)
        ]
        total = per_channel(region.channels, ((own, x.sum(axis=1)) for own, x in relative), np.add, 0)
        rows = ((own, np.full(own.shape, x.shape[1])) for own, x in relative)
        count = per_channel(region.channels, rows, np.add, 0)
        return total / np.maximum(count, 1)

    def _relative_magnitudes(self, site: ContractionSite, parameter: QuantizedParameter) -> np.ndarray:
        """A site's `|w|`, relative to the largest of those that share a scale: a group, or without groups a row."""
        magnitudes = np.abs(self.rescaling.weights(site))
        if parameter.group_size is None:
            largest = magnitudes.max(axis=-1, keepdims=True)
        else:
            largest = np.asarray(site.weights(parameter.largest_of_groups(self._value(site))))
        return magnitudes / (largest + np.float32(1e-6))
