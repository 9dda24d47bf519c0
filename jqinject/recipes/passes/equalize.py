"""Equalization and splitting of channels between consecutive weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.processes import on_host
from jqinject.recipes.passes.float_change import Rescaling, Rows, largest_of, left_out
from jqinject.recipes.solvers.solver import Checked, Expected, at_least
from jqinject.recipes.stream.flat_program import ContractionSite, Note
from jqinject.recipes.transforms.factor_walk import varies
from jqinject.recipes.transforms.regions import Region, per_channel
from jqinject.recipes.work import Work

#: Channels whose range is at most this keep their factor 1.
NOTHING = 1e-9
SHRINKAGE = Expected(
    "a number above 0, 'vaiq' or None",
    lambda x: x == "vaiq" or (isinstance(x, int | float) and x > 0),
    "vaiq",
)


@dataclass(frozen=True)
class Equalize(Checked):
    """Multiplies the outputs of weights by a factor for each channel, and divides the weights that contract them by it.

    `s = sqrt(range of the inputs' weights) / sqrt(range of the outputs' weights)`, for each channel and region in
    order, again until no factor of a turn differs from 1 by `threshold`. Where nothing but a norm makes the channels,
    its gain is equalized. The float model's function stays, and is checked.

    Args:
        iterations: at most how many turns.
        threshold: how near to 1 all factors of the last turn are.
        ranges: the largest magnitude of a channel ("maxabs"), or the largest number less the smallest ("range").
        biases: what the biases of outputs are divided by before they count among the weights that make them, or "vaiq"
            for a number chosen by their sizes (`shrinkage_of`); None leaves biases out of the ranges.

    Raises:
        ValueError: there is less than one turn; or, when applied, the float model's outputs move.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019; Brevitas.

    Differs from Brevitas: biases are left out by default (there, `merge_bias=True` and `bias_shrinkage="vaiq"`).

    Example:
        >>> Equalize(iterations=5)
        Equalize(iterations=5, threshold=0.05, ranges='maxabs', biases=None)
    """

    iterations: Annotated[int, at_least(1)] = 10
    threshold: float = 0.05
    ranges: Literal["maxabs", "range"] = "maxabs"
    biases: Annotated[float | Literal["vaiq"] | None, SHRINKAGE] = None

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        rescaling = Rescaling(work, repr(self))
        able = [region for region in rescaling.regions if region.sources or region.gains]
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
        rescaling.done += [rescaling.described(*pair) for pair in zip(able, total, strict=True)]
        for region in rescaling.regions:
            if region not in able:
                rescaling.done += left_out(region, "no weight and no gain makes its inputs")
        return rescaling.finish()

    def _factors(self, rescaling: Rescaling, region: Region) -> np.ndarray:
        makers = [self._with_bias(rescaling, region, *maker) for maker in rescaling.makers(region)]
        contracting = self._range(region.channels, rescaling.sinks(region))
        making = self._range(region.channels, makers)
        alive, unit = (making > NOTHING) & (contracting > NOTHING), np.float32(1)
        ratio = np.sqrt(np.where(alive, contracting, unit)) / np.sqrt(np.where(alive, making, unit))
        return np.where(alive, ratio, unit)

    def _with_bias(
        self, rescaling: Rescaling, region: Region, maker: ContractionSite | str, rows: Rows
    ) -> Rows:
        path = None if self.biases is None else rescaling.bias_of(maker)
        if self.biases is None or path is None or path not in region.parameters:
            return rows
        labels, weights = rows
        value = on_host(rescaling.values[path]).astype(np.float32)
        own, labelled = np.broadcast_to(region.parameters[path], value.shape), labels > 0
        of_channels = np.zeros(region.channels, np.float32)
        of_channels[own[own > 0] - 1] = value[own > 0]
        bias = np.where(labelled, of_channels[np.maximum(labels, 1) - 1], 0)
        vaiq = self.biases == "vaiq"
        shrinkage = shrinkage_of(bias[labelled], weights[labelled]) if vaiq else self.biases
        return labels, np.concatenate([weights, bias[:, None] / np.float32(shrinkage)], axis=1)

    def _range(self, channels: int, rows: Sequence[Rows]) -> np.ndarray:
        """The range of each channel: of all the rows that are labelled with it."""
        if self.ranges == "maxabs":
            return largest_of(channels, rows)
        high = per_channel(channels, ((labels, x.max(axis=1)) for labels, x in rows))
        low = per_channel(channels, ((labels, x.min(axis=1)) for labels, x in rows), np.minimum, np.inf)
        mean = per_channel(channels, ((labels, np.abs(x.mean(axis=1))) for labels, x in rows), start=0)
        return np.where(high > low, high - low, mean)


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


@dataclass(frozen=True)
class SplitChannels(Checked):
    """Splits the channels with the largest weights in two, so that the range that their quantizer has to cover shrinks.

    A channel between two weights is copied: on one side its numbers are halved, original and copy; on the other side
    the copy is the same. The layers get wider by the copies, which follow the last channel. It is done where a factor
    for each channel could be moved from one weight to the other, and nothing else in the program depends on how many
    channels there are; other sites are left out, and the report says why. The float model's function stays, and is
    checked.

    Args:
        ratio: the share of the channels that are split, rounded up.
        split_input: halve the weights that contract a channel, and choose channels by these; False: the weights and
            biases that make it.

    Raises:
        ValueError: the ratio is not above 0 and at most 1; or, when applied, the float model's outputs move.

    Source: Zhao et al., "Improving Neural Network Quantization without Retraining using Outlier Channel Splitting",
    2019; Brevitas's `GraphChannelSplitting` (criterion "maxabs").

    Example:
        >>> from flax import nnx
        >>> from jqinject import Rule
        >>> from jqinject.quant import Int8WeightPerChannelFloat
        >>> from jqinject.recipes import Recipe
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Linear(8, 10, rngs=rngs), nnx.relu, nnx.Linear(10, 4, rngs=rngs))
        >>> rule = Rule(weight_quant=Int8WeightPerChannelFloat)
        >>> made = Recipe(SplitChannels(0.2)).apply(model, rule, [jnp.ones((2, 8))], progress=False).model
        >>> made.layers[0].kernel.shape, made.layers[2].kernel.shape
        ((8, 12), (12, 4))
    """

    ratio: Annotated[float, Expected("above 0 and at most 1", lambda x: 0 < x <= 1)] = 0.02
    split_input: bool = False

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        rescaling = Rescaling(work, repr(self))
        for region in rescaling.regions:
            sides = _sides(region)
            done = sides if isinstance(sides, str) else self._split(rescaling, region, sides)
            rescaling.done += left_out(region, done) if isinstance(done, str) else [done]
        return rescaling.finish()

    def _split(self, rescaling: Rescaling, region: Region, sides: Mapping[str, Side]) -> Note | str:
        """Split channels of a region; a sentence if the model cannot be called then."""
        sources, sinks = (
            tuple(sorted({site.path for site in sites})) for sites in (region.sources, region.sinks)
        )
        values = {path: on_host(rescaling.values[path]) for path in (sinks if self.split_input else sources)}
        pairs = ((np.abs(region.parameters[path]), np.abs(x)) for path, x in values.items())
        labelled = ((np.broadcast_to(own, x.shape), x) for own, x in pairs)
        sizes = per_channel(region.channels, labelled, start=0)
        count = math.ceil(self.ratio * region.channels)
        chosen = np.sort(np.argsort(-sizes, kind="stable")[:count])
        changes = [
            (path, partial(_copied, axis=axis, at=at[chosen], halved=(path in sinks) == self.split_input))
            for path, (axis, at) in sides.items()
        ]
        why = rescaling.change_shapes(region.sites[0].name, changes)
        channels = tuple(map(int, chosen))
        shown = ", ".join(map(str, channels[:8])) + (", ..." if count > 8 else "")
        name = f"{', '.join(sources)} to {', '.join(sinks)}"
        return why or Note(name, "", f"{count} channels split: {shown}", {"channels": channels})


def _copied(value: jax.Array, *, axis: int, at: np.ndarray, halved: bool) -> jax.Array:
    """A parameter with copies of channels at the end, these and their originals halved or as they are."""
    if halved:
        value = value.at[(*(slice(None),) * axis, at)].multiply(0.5)
    return jnp.concatenate([value, jnp.take(value, at, axis=axis)], axis=axis)


#: Where channels stand in a parameter: the axis, and the place of each along it.
Side = tuple[int, np.ndarray]


def _sides(region: Region) -> dict[str, Side] | str:
    """Where the channels stand in each parameter; a sentence if a channel cannot be copied."""
    if region.gains or not region.sources:
        return (
            "a norm's gain, not a weight, makes its inputs: channels of what it normalizes cannot be copied"
        )
    if any(labels.shape[0] > 1 for labels in (*region.sinks.values(), *region.sources.values())):
        return "its weights are a stack of matrices, or a convolution with groups"
    sides = {}
    for path, labels in region.parameters.items():
        axes = varies(labels) or {axis for axis in range(labels.ndim) if region.channels == 1}
        flat = np.abs(labels.reshape(-1))
        if len(axes) != 1 or sorted(flat) != list(range(1, region.channels + 1)):
            return f"its channels are not one axis of {path}, each once"
        sides[path] = axes.pop(), np.argsort(flat)
    return sides
