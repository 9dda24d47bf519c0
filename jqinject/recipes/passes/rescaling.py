"""What passes share that multiply channels by factors which leave the float model's function as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.model.running.progress import with_progress
from jqinject.model.walk import ModelIndex
from jqinject.ops.devices.processes import on_host
from jqinject.recipes.solving import finite_statistics
from jqinject.recipes.statistics import Statistics
from jqinject.recipes.stream.site import ContractionSite, LeftOut, Path
from jqinject.recipes.transforms.biases import Biases
from jqinject.recipes.transforms.labels import factors_of
from jqinject.recipes.transforms.regions import Member, Region, Regions, by_region
from jqinject.recipes.work import Work, site_path

TOLERANCE = 1e-5
"""How far a float32 model's outputs may move, relative to the largest."""


@dataclass(frozen=True)
class Rescaled:
    """What was done to the inputs of some sites.

    Attributes:
        sites: the names of the sites.
        folded: the parameters that were multiplied by factors, those of the sites excepted.
        channels: how many factors there are.
        smallest, largest: of the factors of the sites' inputs.
    """

    sites: tuple[str, ...]
    folded: tuple[str, ...]
    channels: int
    smallest: float
    largest: float

    def __str__(self) -> str:
        factors = f"{self.channels} factors from {self.smallest:.3g} to {self.largest:.3g}"
        return f"{', '.join(self.sites)}: {factors}, in {', '.join(self.folded)}"


class Rescaling:
    """A float model whose channels are being rescaled.

    Args:
        work: of the recipe.
        by: the pass, for messages.
        statistics: names of `Statistics` to collect at every site.

    Attributes:
        regions: those of the model's sites, in the order in which the sites run.
        left_out: sites whose inputs cannot be rescaled, and why.
        statistics: of the float model's sites, by name.
    """

    def __init__(self, work: Work, by: str, statistics: Sequence[str] = ()) -> None:
        if work.is_quantized:
            raise ValueError(
                f"{by} changes the float model, and a pass before it has made the quantized one.\n"
                f"  cure: Recipe({by}, Solve(GPTQ()))"
            )
        self.work, self.by = work, by
        stream = work.float_stream()
        traced = stream.traced
        inputs = list(zip(traced.flat.inputs, traced.program.inputs, strict=True))
        weights = [(slot, given) for slot, given in inputs if given.is_weight]
        self.values: dict[Path, Any] = {given.weight_path: jnp.asarray(given.value) for _, given in weights}
        shapes = {slot: tuple(np.shape(given.value)) for slot, given in inputs}
        owners = {slot: (given.weight_path, shapes[slot]) for slot, given in weights}
        self.sites = list(stream.sites)
        self._flat, self._slots = traced.flat, {path: slot for slot, (path, _) in owners.items()}
        self._biases = Biases(traced.flat, owners)
        self._regions = Regions(
            traced.flat, traced.found, owners, shapes, traced.program.output_tree.num_leaves
        )
        self.regions, reasons = by_region(self._regions, self.sites)
        self.left_out = [*stream.left_out]
        self.left_out += [LeftOut(s.name, s.path, reasons[s.name]) for s in self.sites if s.name in reasons]
        self.statistics: dict[str, Statistics] = {}
        with jax.default_matmul_precision("highest"):
            for visit in with_progress(stream, "measuring", shown=work.progress and bool(statistics)):
                if statistics:
                    wanted = ("magnitude",) if visit.site.name in reasons else statistics
                    self.statistics[visit.site.name] = finite_statistics(visit, *wanted)
            self._before = next(stream.outputs())[0]
        self._done: list[tuple[Region, dict[Path, Any]]] = []

    def weights(self, site: ContractionSite) -> np.ndarray:
        """A site's weights as they are now, float32 `(stack, rows, columns)`."""
        return on_host(site.weights(self.values[site.path].astype(jnp.float32)))

    def bias_of(self, maker: ContractionSite | Path) -> Path | None:
        """The parameter that is added to the outputs of a site, or to what a norm's gain is multiplied with.

        Args:
            maker: the site, or the path of the gain.
        """
        if isinstance(maker, ContractionSite):
            found = self._biases.of(self._flat.steps[maker.step].outputs[0])
        else:
            moves = ("broadcast_in_dim", "mul", "div")
            found = self._biases.of(self._slots[maker], moves)
        return None if found is None else found.path

    def of_inputs(self, region: Region, name: str) -> np.ndarray:
        """A statistic of the inputs of a region's sites for each channel: the largest, or smallest, of all sites.

        Args:
            region: of this model.
            name: "largest", "smallest", or "magnitude" for the mean.
        """
        found = [
            on_host(each.mean(name) if name == "magnitude" else getattr(each, name))
            for each in (self.statistics[member.site.name] for member in region.sinks)
        ]
        return per_channel(region, region.sinks, found, smallest=name == "smallest")

    def of_weights(self, region: Region) -> np.ndarray:
        """The largest magnitude among the weights of each channel, of all of a region's sinks."""
        found = [np.abs(self.weights(member.site)).max(axis=1) for member in region.sinks]
        return per_channel(region, region.sinks, found)

    def makers(self, region: Region) -> Iterator[tuple[ContractionSite | Path, np.ndarray, np.ndarray]]:
        """The weights and the gains that make a region's channels, as they are now.

        Each with the label of every row, and the rows: `(rows, columns)`, of one number for a gain.
        """
        for member in region.sources:
            weights = self.weights(member.site)
            yield member.site, member.labels.reshape(-1), weights.reshape(-1, weights.shape[2])
        for path in region.gains:
            value = on_host(self.values[path]).astype(np.float32)
            labels = np.broadcast_to(region.parameters[path], value.shape)
            yield path, labels.reshape(-1), value.reshape(-1, 1)

    def of_makers(self, region: Region) -> np.ndarray:
        """The largest magnitude among the weights and gains that make each channel; 0 without any."""
        total = np.zeros(region.channels, np.float32)
        for _, labels, rows in self.makers(region):
            own = labels > 0
            np.maximum.at(total, labels[own] - 1, np.abs(rows[own]).max(axis=1))
        return total

    def multiply(self, region: Region, factors: np.ndarray) -> Rescaled:
        """Multiply the inputs of a region's sites by factors, and divide their weights by them.

        Args:
            region: of this model.
            factors: of its channels, all above 0.

        Returns:
            What was done.
        """
        factors = np.asarray(factors, np.float32)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            name = region.sinks[0].site.name
            raise ValueError(f"{self.by}: the factors of the inputs of {name} are not all finite and above 0")
        held = {}
        for path, labels in region.parameters.items():
            value = self.values[path]
            held[path] = jnp.asarray(factors_of(labels, factors))
            self.values[path] = (value.astype(jnp.float32) * held[path]).astype(value.dtype)
        self._done.append((region, held))
        return self.described(region, factors)

    def described(self, region: Region, factors: np.ndarray) -> Rescaled:
        """What factors do to a region, for the report."""
        own = {site_path(member.site) for member in region.sinks}
        folded = tuple(path for path in map(_text, region.parameters) if path not in own)
        names = tuple(member.site.name for member in region.sinks)
        return Rescaled(names, folded, region.channels, float(factors.min()), float(factors.max()))

    def finish(self) -> list[LeftOut]:
        """Put the parameters into the float model, whose function must be as before.

        Returns:
            The sites that were left out.

        Raises:
            ValueError: the outputs are others; the text names the site that is to blame. The model stays as it was.
        """
        model = self._with(self.values)
        error, allowed = self.error_of(model), self.allowed
        if not error <= allowed:
            raise ValueError(
                f"{self.by}: the float model's outputs moved by {error:.2g} of the largest, and at most {allowed:.2g} "
                f"is rounding; first where the inputs of {self._blamed(allowed)} were rescaled.\n"
                "  cure: look whether the model's code depends on the numbers of its parameters; or leave this pass out"
            )
        self.work.model = model
        return self.left_out

    def _with(self, values: dict[Path, Any]) -> nnx.Module:
        model = nnx.clone(self.work.model, graph=True)
        entries = {tuple(map(str, path)): entry for path, entry in ModelIndex(model).by_path.items()}
        changed = {path for region, _ in self._done for path in region.parameters}
        for path in changed:
            entries[tuple(map(str, path))].variable.set_value(values[path])
        return model

    def error_of(self, model: nnx.Module) -> float:
        """How far the outputs of a model are from the float model's, relative to the largest.

        Args:
            model: with other parameters.
        """
        before, self.work.model = self.work.model, model
        try:
            stream = self.work.float_stream(self.work.calls[:1])
        finally:
            self.work.model = before
        with jax.default_matmul_precision("highest"):
            for _ in stream:
                pass
            after = next(stream.outputs())[0]
        pairs = zip(self._before, after, strict=True)
        return max(
            (_moved(*pair) for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.inexact)), default=0.0
        )

    @property
    def allowed(self) -> float:
        """How far they may be: what rounding explains."""
        dtypes = [x.dtype for x in (*self._before, *self.values.values())]
        floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        return max(TOLERANCE, *(8 * float(jnp.finfo(dtype).eps) for dtype in floats))

    def _blamed(self, allowed: float) -> str:
        values = {path: jnp.asarray(x) for path, x in self._original().items()}
        for region, held in self._done:
            for path, factors in held.items():
                values[path] = (values[path].astype(jnp.float32) * factors).astype(values[path].dtype)
            if not self.error_of(self._with(values)) <= allowed:
                return region.sinks[0].site.name
        return "no single site, but of all of them together"

    def _original(self) -> dict[Path, Any]:
        entries = {
            tuple(map(str, path)): entry for path, entry in ModelIndex(self.work.model).by_path.items()
        }
        return {path: entries[tuple(map(str, path))].variable.get_value() for path in self.values}


def per_channel(
    region: Region, members: Sequence[Member], found: Sequence[np.ndarray], *, smallest: bool = False
) -> np.ndarray:
    """The largest (or smallest) number of each channel.

    Args:
        region: with the channels.
        members: its sites.
        found: numbers for the labels of each site, in their shape.
        smallest: whether the smallest is wanted.
    """
    total = np.full(region.channels, np.inf if smallest else -np.inf, np.float32)
    for member, numbers in zip(members, found, strict=True):
        own = member.labels > 0
        (np.minimum if smallest else np.maximum).at(total, member.labels[own] - 1, numbers[own])
    return total


def _moved(before: jax.Array, after: jax.Array) -> float:
    first, second = (on_host(x).astype(np.float64) for x in (before, after))
    largest = np.abs(first).max(initial=0.0)
    return float(np.abs(first - second).max(initial=0.0) / (largest if largest > 0 else 1.0))


def _text(path: Path) -> str:
    return ".".join(map(str, path))
