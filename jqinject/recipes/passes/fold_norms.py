"""`FoldNorms`: puts the gains and biases of norms into the weights that read them."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.recipes.passes.float_change import Change, FloatChange
from jqinject.recipes.stream.flat_program import ContractionSite, Note, Slot
from jqinject.recipes.transforms.gains_and_biases import Gain, affine, bias_of, gains_by_parameter
from jqinject.recipes.transforms.rotations import rotated_regions
from jqinject.recipes.work import Work


@dataclass(frozen=True)
class FoldNorms:
    """Sets the gains of norms to 1, and multiplies the weights that read their outputs by them.

    A bias goes into the biases that follow these weights; where one has none, it is divided by the gain and stays. A
    gain of the form `1 + g` (Gemma) becomes 1 by `g = 0`. Gains are found from the program: parameters that channels
    are multiplied by, all products of which are contracted with parameters. The float model's function stays, and is
    checked.

    Args:
        center: take the mean over the outputs of all weights that make what a LayerNorm takes, too, so that an RMSNorm
            in its place would compute the same: LayerNorm to RMSNorm.

    Raises:
        ValueError: when applied, the float model's outputs move.

    Source: `MergeLnAffine` and `LayerNormToRMS` of Brevitas; QuaRot folds RMSNorm's gains so that the stream can be
    rotated.

    Differs from Brevitas: the module stays a LayerNorm, whose own mean is then 0.

    Example:
        >>> FoldNorms()
        FoldNorms(center=False)
    """

    center: bool = False

    def __call__(self, work: Work) -> list[Note]:
        """See `Pass`."""
        change = _Folding(work, repr(self))
        for slot, gains in gains_by_parameter(change.flat).items():
            why = gains if isinstance(gains, str) else change.fold(slot, gains)
            path = change.flat.parameters[slot]
            change.done.append(Note(path, "", reason=f"stays: {why}") if isinstance(why, str) else why)
        change.finish()
        return [*change.done, *(centred(work, repr(self)) if self.center else ())]


class _Folding(FloatChange):
    """Folds the gains of a float model."""

    def fold(self, slot: Slot, gains: list[Gain]) -> Note | str:
        """Let weights take over a parameter; why not, if they cannot."""
        lines = {affine(self.flat, gain) for gain in gains}
        line = lines.pop() if len(lines) == 1 else None
        if line is None:
            return "its numbers go through something that is not linear"
        sinks = [sink for gain in gains for sink in gain.sinks]
        steps = {sink.index for sink in sinks}
        for sink in sinks:
            reader = self.flat.other_use(self.flat.slot_of[sink.path], steps)
            if reader is not None:
                return f"{sink.path} is read by {reader.name} too"
        how, changes = self._fold_biases(gains) if any(gain.biases for gain in gains) else ("", [])
        if how is None:
            return "its bias can neither be folded nor divided by it"
        for gain in gains:
            for sink in gain.sinks:
                changes.append((sink.path, partial(_scaled, site=sink, numbers=gain.spread(sink.weight))))
        slope, start = line
        path = self.flat.parameters[slot]
        changes.append((path, lambda value: jnp.full_like(value, (1 - start) / slope)))
        self.change(sinks[0].name, changes)
        names = ", ".join(dict.fromkeys(sink.name for sink in sinks))
        return Note(path, "", f"in {names}{f'; its bias is {how}' if how else ''}")

    def _fold_biases(self, gains: list[Gain]) -> tuple[str | None, list[tuple[str, Change]]]:
        """How biases are folded or divided, and the changes for it; None if neither is possible."""
        if any(len(gain.biases) != 1 or not self.flat.owned(gain.biases[0]) for gain in gains):
            return None, []
        owners = [next(iter(self.flat.owners[gain.biases[0]])) for gain in gains]
        changes: list[tuple[str, Change]] = []
        for gain, owner in zip(gains, owners, strict=True):
            numbers = self._of_channels(gain)
            for sink in gain.sinks:
                bias = bias_of(self.flat, sink.step.outputs[0])
                if numbers is None or bias is None:
                    return self._divide(gains, owners)
                x = gain.spread(sink.activation, numbers)
                delta = bias.means(self._contracted(sink, x))
                changes.append((bias.path, lambda value, delta=delta: value + delta.reshape(value.shape)))
            changes.append((self.flat.parameters[owner], jnp.zeros_like))
        return "folded", changes

    def _of_channels(self, gain: Gain) -> np.ndarray | None:
        """The bias of each channel of a gain; None if it differs along other axes too."""
        (bias,) = gain.biases
        value = np.asarray(self.flat.value(bias), np.float32)
        numbers = np.zeros(gain.numbers.shape, np.float32)
        numbers[np.broadcast_to(gain.labels[bias], value.shape) - 1] = value
        return numbers if np.array_equal(gain.spread(bias, numbers) + np.zeros_like(value), value) else None

    def _contracted(self, site: ContractionSite, x: np.ndarray) -> jax.Array:
        weight = jnp.asarray(self.flat.value(site.weight))
        full = jnp.broadcast_to(x, self.flat.shapes[site.activation]).astype(weight.dtype)
        return site.contract(weight, full)

    def _divide(self, gains: list[Gain], owners: list[Slot]) -> tuple[str | None, list[tuple[str, Change]]]:
        pairs = [*zip(gains, owners, strict=True)]
        if any(
            self.flat.shapes[own] != gain.numbers.shape or not np.all(gain.numbers) for gain, own in pairs
        ):
            return None, []
        return "divided by the gain", [
            (self.flat.parameters[own], lambda value, gain=gain: value / gain.numbers) for gain, own in pairs
        ]


def _scaled(value: jax.Array, site: ContractionSite, numbers: np.ndarray) -> jax.Array:
    """A parameter whose numbers that a site contracts are multiplied."""
    return site.places.put(value, site.places.taken(value) * numbers)


def centred(work: Work, by: str) -> list[Note]:
    """Centre all that makes the inputs of LayerNorms; the float model's function stays, and is checked.

    Args:
        work: of the recipe.
        by: the pass, for messages.

    Raises:
        ValueError: the outputs move.
    """
    change = FloatChange(work, by)
    for site, region in rotated_regions(change.flat):
        if isinstance(region, str) or not (region.normalized and region.keeps_sums):
            continue
        read = {sink.path for sink in region.sites}
        makers = [path for path in region.parameters if path not in read]
        change.change(site.name, [(path, partial(region.mapped, path, without_mean)) for path in makers])
        sinks = ", ".join(sorted(sink.name for sink in region.sites))
        what = f"centred, so that the norms before {sinks} need no mean"
        change.done.append(Note(", ".join(makers), "", what))
    change.finish()
    return change.done


def without_mean(blocks: jax.Array) -> jax.Array:
    """Subtract the mean of each block, along the last axis.

    Example:
        >>> without_mean(jnp.array([1.0, 3.0])).tolist()
        [-1.0, 1.0]
    """
    return blocks - blocks.mean(axis=-1, keepdims=True)
