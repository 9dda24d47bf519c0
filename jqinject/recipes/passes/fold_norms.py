"""`FoldNorms`: puts the gains and biases of norms into the weights that read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.program import dotted
from jqinject.recipes.online import site_path
from jqinject.recipes.passes.float_change import Change, FloatChange
from jqinject.recipes.stream.flat_program import Slot
from jqinject.recipes.stream.site import Path
from jqinject.recipes.transforms.gains_and_biases import Biases, Gain, Gains, Sink
from jqinject.recipes.work import Work


@dataclass(frozen=True)
class Folded:
    """A gain that weights took over.

    Attributes:
        path: the gain's.
        sites: names of the sites whose weights have it.
        bias: what became of the bias that comes after it: "" without one, "folded", or "divided by the gain".
    """

    path: str
    sites: tuple[str, ...]
    bias: str = ""

    def __str__(self) -> str:
        return f"{self.path}: in {', '.join(self.sites)}{f'; its bias is {self.bias}' if self.bias else ''}"


@dataclass(frozen=True)
class NotFolded:
    """A gain that stays.

    Attributes:
        path: the gain's.
        reason: why.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: stays: {self.reason}"


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

    def __call__(self, work: Work) -> list[Any]:
        """See `Pass`."""
        change = FloatChange(work, repr(self))
        change.run()
        folding = _Folding(change)
        done: list[Any] = []
        for slot, gains in folding.gains.by_parameter().items():
            path = dotted(change.owners[slot][0])
            why = gains if isinstance(gains, str) else folding.fold(slot, gains)
            if isinstance(why, str):
                done.append(NotFolded(path, why))
            else:
                done.append(why)
        change.finish()
        return [*done, *centred(work, repr(self))] if self.center else done


class _Folding:
    def __init__(self, change: FloatChange) -> None:
        self.change = change
        traced = change.traced
        self.gains = Gains(
            traced.flat,
            traced.found,
            change.links,
            set(change.owners),
            change.value_of,
        )
        self.biases = Biases(traced.flat, change.owners)

    def fold(self, slot: Slot, gains: list[Gain]) -> Folded | str:
        """Let weights take over a parameter; why not, if they cannot."""
        affine = [self.gains.affine(gain) for gain in gains]
        if None in affine or len(set(affine)) != 1 or affine[0] is None:
            return "its numbers go through something that is not linear"
        sinks = [sink for gain in gains for sink in gain.sinks]
        why = self._shared(sinks)
        if why:
            return why
        biases = {other for gain in gains for other in gain.biases}
        changes: dict[Path, Change] = {}
        how = ""
        if biases:
            found = self._biases(gains, changes)
            if found is None:
                return "its bias can neither be folded nor divided by it"
            how = found
        for gain in gains:
            for sink in gain.sinks:
                _then(changes, sink.site.path, _scaled(sink, gain.numbers))
        slope, start = affine[0]
        path = self.change.owners[slot][0]
        _then(changes, path, lambda value: jnp.full_like(value, (1 - start) / slope))
        self.change.change(sinks[0].site.name, changes)
        names = tuple(dict.fromkeys(sink.site.name for sink in sinks))
        return Folded(dotted(path), names, how)

    def _shared(self, sinks: list[Sink]) -> str:
        """Who else reads the weights; empty if no one does."""
        known = {sink.site.step for sink in sinks}
        for sink in sinks:
            slot = next(s for s, (path, _) in self.change.owners.items() if path == sink.site.path)
            for index in _readers(self.gains, slot):
                if index not in known:
                    name = self.change.traced.flat.steps[index].name
                    return f"{site_path(sink.site)} is read by {name} too"
        return ""

    def _biases(self, gains: list[Gain], changes: dict[Path, Change]) -> str | None:
        """Fold biases or divide them; None if neither is possible."""
        deltas: list[tuple[Path, Change]] = []
        for gain in gains:
            if len(gain.biases) != 1:
                return None
            numbers = _along(self.gains.value_of(gain.biases[0]), gain.numbers.size)
            for sink in gain.sinks:
                (result,) = self.change.traced.flat.steps[sink.site.step].outputs
                bias = self.biases.of(result)
                if numbers is None or bias is None:
                    return self._divided(gains, changes)
                made = self._contracted(sink, numbers)
                delta = bias.means(made)
                deltas.append((bias.path, _plus(delta)))
            owner = next(iter(self.gains.owners[gain.biases[0]]))
            deltas.append((self.change.owners[owner][0], jnp.zeros_like))
        for path, apply in dict.fromkeys(deltas):
            _then(changes, path, apply)
        return "folded"

    def _contracted(self, sink: Sink, numbers: np.ndarray) -> Any:
        site = sink.site
        step = self.change.traced.flat.steps[site.step]
        weight = self.gains.value_of(site.weight)
        contracted, _ = step.params["dimension_numbers"]
        axis = contracted[1 - site.place][tuple(contracted[site.place]).index(sink.axis)]
        shape = self.change.links.shapes[site.other]
        sizes = [1] * len(shape)
        sizes[axis] = shape[axis]
        x = jnp.broadcast_to(np.tile(numbers, shape[axis] // numbers.size).reshape(sizes), shape)
        x = x.astype(jnp.asarray(weight).dtype)
        return step.run(*((weight, x) if site.place == 0 else (x, weight)))[0]

    def _divided(self, gains: list[Gain], changes: dict[Path, Change]) -> str | None:
        for gain in gains:
            (owner,) = self.gains.owners[gain.biases[0]]
            path, shape = self.change.owners[owner]
            if shape != gain.numbers.shape or not np.all(gain.numbers):
                return None
            _then(changes, path, _over(gain.numbers))
        return "divided by the gain"


def _then(changes: dict[Path, Change], path: Path, apply: Change) -> None:
    before = changes.get(path)
    changes[path] = apply if before is None else lambda value: apply(before(value))


def _plus(delta: Any) -> Change:
    return lambda value: value + delta.reshape(value.shape)


def _over(numbers: np.ndarray) -> Change:
    return lambda value: value / numbers


def _scaled(sink: Sink, numbers: np.ndarray) -> Change:
    """From a parameter to the same with the numbers that a site contracts multiplied along an axis."""
    site = sink.site

    def apply(value: Any) -> Any:
        operand = site.places.taken(value)
        sizes = [1] * operand.ndim
        sizes[sink.axis] = operand.shape[sink.axis]
        factors = np.tile(numbers, operand.shape[sink.axis] // numbers.size).reshape(sizes)
        return site.places.put(value, operand * factors)

    return apply


def _along(value: Any, size: int) -> np.ndarray | None:
    """The numbers of a value that differ along one axis only; None for others."""
    value = np.asarray(value, np.float32)
    axes = [axis for axis, length in enumerate(value.shape) if length == size]
    for axis in axes:
        rows = np.moveaxis(value, axis, -1).reshape(-1, size)
        if np.all(rows == rows[0]):
            return rows[0]
    return None


def _readers(gains: Gains, slot: Slot) -> list[int]:
    """The steps that read a parameter's numbers other than to move them."""
    owned, found = {slot}, []
    for index, step in enumerate(gains.flat.steps):
        if owned & {*step.inputs}:
            if step.outputs[0] in gains.found.fixed:
                owned.update(step.outputs)
            else:
                found.append(index)
    return found


@dataclass(frozen=True)
class Centred:
    """Parameters whose outputs have the mean 0.

    Attributes:
        paths: of the parameters.
        sites: names of the sites that read what the norms make of these.
    """

    paths: tuple[str, ...]
    sites: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{', '.join(self.paths)}: centred, so that the norms before {', '.join(self.sites)} need no mean"
        )


def centred(work: Work, by: str) -> list[Centred]:
    """Centre all that makes the inputs of LayerNorms; the float model's function stays, and is checked.

    Args:
        work: of the recipe.
        by: the pass, for messages.

    Raises:
        ValueError: the outputs move.
    """
    change = FloatChange(work, by)
    change.run()
    done: list[Centred] = []
    for site, region in change.turning():
        if isinstance(region, str) or not (region.normalized and region.keeps_sums):
            continue
        read = {site_path(each) for each in change.sites if each.name in region.sinks}
        makers = {path: axis for path, axis in region.parameters.items() if dotted(path) not in read}
        changes = {
            path: partial(without_mean, axis=axis, block=region.block) for path, axis in makers.items()
        }
        change.change(site.name, changes)
        names = tuple(map(dotted, makers))
        done.append(Centred(names, tuple(sorted(region.sinks))))
    change.finish()
    return done


def without_mean(value: jax.Array, *, axis: int, block: int) -> jax.Array:
    """Numbers less the mean of each block along an axis.

    Example:
        >>> import jax.numpy as jnp
        >>> without_mean(jnp.array([1.0, 3.0]), axis=0, block=2).tolist()
        [-1.0, 1.0]
    """
    shape = value.shape
    blocks = value.reshape(*shape[:axis], -1, block, *shape[axis + 1 :])
    return (blocks - blocks.mean(axis=axis + 1, keepdims=True)).reshape(shape)
