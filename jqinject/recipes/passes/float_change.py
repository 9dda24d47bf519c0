"""A float model whose parameters passes change so that its function stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.transforms import ChannelScale, Transform
from jqinject.model.walk import ModelIndex
from jqinject.ops.processes import on_host
from jqinject.recipes.online import (
    Online,
    online_of,
    quantizes_weight,
    stored_for,
    why_not_online,
)
from jqinject.recipes.solvers.solver import Statistics
from jqinject.recipes.stream.flat_program import ContractionSite, LeftOut
from jqinject.recipes.transforms.gains_and_biases import bias_of
from jqinject.recipes.transforms.regions import Region, by_region, per_channel
from jqinject.recipes.transforms.transform_walk import factors_of
from jqinject.recipes.work import Work

TOLERANCE = 1e-5
"""How far a float32 model's outputs may move, relative to the largest."""
Change = Callable[[jax.Array], jax.Array]
Changes = Sequence[tuple[str, Change]]
"""Paths of parameters, each with what makes another value of its value in float32; in order."""
FEATURES = (nnx.Linear, nnx.Conv, nnx.ConvTranspose)
"""Layers that know how many features their kernel's last two axes have."""


class FloatChange:
    """A float model on its way to other parameters, or to transforms kept online, with the same function.

    Args:
        work: of the recipe.
        by: the pass, for messages.

    Attributes:
        flat: the model's program.
        values: the parameters as they are now.
        sites: of the model, in the order in which they run.
        left_out: contractions that no pass can reach, and why.
        statistics: of the float model's sites, by name.
        done: what was changed: the first site, the changes of parameters, and the transforms kept online.
    """

    def __init__(self, work: Work, by: str) -> None:
        work.refuse_quantized(f"{by} changes the float model", f"{by}, Solve(GPTQ())")
        self.work, self.by = work, by
        self.stream = work.float_stream()
        self.flat = flat = self.stream.flat
        self.values = {path: jnp.asarray(flat.state[slot]) for slot, path in flat.parameters.items()}
        self.sites = list(flat.sites)
        self.left_out: list[LeftOut] = [*flat.left_out]
        self.statistics: dict[str, Statistics] = {}
        self.done: list[tuple[str, Changes, Mapping[str, Online]]] = []

    def run(self, names: Callable[[ContractionSite], Sequence[str]] = lambda site: ()) -> None:
        """Run the data through the model as it is, and note its outputs.

        Args:
            names: of the `Statistics` that are collected at a site; none by default.
        """
        collects = any(names(site) for site in self.sites)
        with jax.default_matmul_precision("highest"):
            for visit in self.work.bar(self.stream, "measuring") if collects else self.stream:
                if names(visit.site):
                    self.statistics[visit.site.name] = visit.statistics(*names(visit.site))
            self._before = self.stream.outputs()

    def weights(self, site: ContractionSite) -> np.ndarray:
        """A site's weights as they are now, float32 `(stack, rows, columns)`."""
        return on_host(site.weights(self.values[site.path].astype(jnp.float32)))

    def change(self, site: str, changes: Changes, online: Mapping[str, Online] = {}) -> None:
        """Change parameters, in float32, and keep transforms online.

        Args:
            site: the first site that it is for, for messages.
            changes: of parameters.
            online: path of a parameter -> the transform before the other operand of its sites.
        """
        self.values = _changed(self.values, changes)
        self.done.append((site, changes, online))

    def change_shapes(self, site: str, changes: Changes) -> str:
        """Change the shapes of parameters, unless the model cannot be called with others.

        Args:
            site, changes: see `change`.

        Returns:
            Why that is impossible; empty if it was done.
        """
        before = self.values
        self.change(site, changes)
        try:
            self._error_of(self._after(self.values, self.done))
        except (TypeError, ValueError, IndexError) as error:
            self.values = before
            self.done.pop()
            first = str(error).partition("\n")[0]
            return f"the model's code depends on the number of its channels: {first:.120}"
        return ""

    def keep_online(self, site: ContractionSite, transform: Transform) -> str:
        """Transform the inputs of the sites of a parameter, and keep the transform beside their quantizer.

        Args:
            site: one of the parameter's.
            transform: of the site's contracted axes.

        Returns:
            Why that is impossible; empty if it was done.
        """
        sites = [same for same in self.sites if same.path == site.path]
        why = why_not_online(ModelIndex(self.work.model), self.work.rules, self.flat, sites)
        if not why:
            before = self.work.online | {name: x for _, _, more in self.done for name, x in more.items()}
            online = online_of(site, transform, before.get(site.path))
            self.change(site.name, [(site.path, stored_for(sites, transform))], {site.path: online})
        return why

    def finish(self) -> list[LeftOut]:
        """Put the parameters into the float model, whose function must be as before.

        Returns:
            The sites that were left out.

        Raises:
            ValueError: the outputs are others; the text names the site that is to blame. The model stays as it was.
        """
        work, allowed = self._after(self.values, self.done), self._allowed()
        error = self._error_of(work)
        if not error <= allowed:
            raise ValueError(
                f"{self.by}: the float model's outputs moved by {error:.2g} of the largest, and at most {allowed:.2g} "
                f"is rounding; first where the inputs of {self._blamed(allowed)} were changed.\n"
                "  cure: look whether the model's code depends on the numbers of its parameters; or leave this pass out"
            )
        self.work.model, self.work.online = work.model, work.online
        return self.left_out

    def _after(
        self, values: Mapping[str, jax.Array], done: Sequence[tuple[str, Changes, Mapping[str, Online]]]
    ) -> Work:
        """The work with other parameters, and with the transforms of changes."""
        model = nnx.clone(self.work.model, graph=True)
        index = ModelIndex(model)
        modules = {".".join(path): node for path, node in index.places}
        for path in {path for _, changes, _ in self.done for path, _ in changes}:
            variable, value = index.by_name[path], values[path]
            holder, _, name = path.rpartition(".")
            layer = modules.get(holder)
            if isinstance(layer, FEATURES) and name == "kernel":
                layer.in_features += value.shape[-2] - variable.shape[-2]
                layer.out_features += value.shape[-1] - variable.shape[-1]
            variable.set_value(value)
        online = {name: before for _, _, more in done for name, before in more.items()}
        return replace(self.work, model=model, online=self.work.online | online)

    def _error_of(self, work: Work) -> float:
        """How far the outputs of a float model are from those before, relative to the largest."""
        stream = work.float_stream(work.calls[:1])
        with jax.default_matmul_precision("highest"):
            for _ in stream:
                pass
            after = stream.outputs()
        pairs = zip(self._before, after, strict=True)
        return max(
            (moved_by(*pair) for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.inexact)), default=0.0
        )

    def _allowed(self) -> float:
        """How far they may be: what rounding explains."""
        dtypes = [x.dtype for x in (*self._before, *self.values.values())]
        floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        return max(TOLERANCE, *(8 * float(jnp.finfo(dtype).eps) for dtype in floats))

    def _blamed(self, allowed: float) -> str:
        variables = ModelIndex(self.work.model).by_name
        values = {path: jnp.asarray(variables[path].get_value()) for path in self.values}
        for index, (site, changes, _) in enumerate(self.done):
            values = _changed(values, changes)
            if not self._error_of(self._after(values, self.done[: index + 1])) <= allowed:
                return site
        return "no single site, but of all of them together"


def _changed(values: Mapping[str, jax.Array], changes: Changes) -> dict[str, jax.Array]:
    after = dict(values)
    for path, apply in changes:
        value = after[path]
        after[path] = jnp.asarray(apply(value.astype(jnp.float32))).astype(value.dtype)
    return after


def moved_by(before: jax.Array, after: jax.Array) -> float:
    """The largest difference between two arrays, relative to the largest number of the first."""
    first, second = (on_host(x).astype(np.float64) for x in (before, after))
    largest = np.abs(first).max(initial=0.0)
    return float(np.abs(first - second).max(initial=0.0) / (largest if largest > 0 else 1.0))


@dataclass(frozen=True)
class Folded:
    """A gain, or a batch normalization, that weights took over.

    Attributes:
        path: the gain's, or the module's.
        sites: names of the sites or layers whose weights have it.
        bias: what became of the bias that comes after it: "" without one, "folded", or "divided by the gain".
    """

    path: str
    sites: tuple[str, ...]
    bias: str = ""

    def __str__(self) -> str:
        return f"{self.path}: in {', '.join(self.sites)}{f'; its bias is {self.bias}' if self.bias else ''}"


KeepOnline = Literal["never", "rest", "all"]
"""Which sites get factors before their inputs instead of in a neighbour."""


@dataclass(frozen=True)
class Rescaled:
    """What was done to the inputs of some sites.

    Attributes:
        sites: the names of the sites.
        folded: the parameters that were multiplied by factors, those of the sites excepted.
        channels: how many factors there are.
        smallest, largest: of the factors of the sites' inputs.
        online: whether the factors are kept before the sites' inputs.
        unruled: the names of sites among them whose weight no rule quantizes.
    """

    sites: tuple[str, ...]
    folded: tuple[str, ...]
    channels: int
    smallest: float
    largest: float
    online: bool = False
    unruled: tuple[str, ...] = ()

    def __str__(self) -> str:
        factors = f"{self.channels} factors from {self.smallest:.3g} to {self.largest:.3g}"
        where = "kept online" if self.online else f"in {', '.join(self.folded)}"
        alone = f"; no rule quantizes {', '.join(self.unruled)}" if self.unruled else ""
        return f"{', '.join(self.sites)}: {factors}, {where}{alone}"


class Rescaling(FloatChange):
    """A float model whose channels are being rescaled.

    Args:
        work: of the recipe.
        by: the pass, for messages.
        statistics: names of `Statistics` to collect at every site.
        online: which sites get factors before their inputs: "never", the "rest" that no region has, or "all".

    Attributes:
        regions: those of the model's sites, in the order in which the sites run; then those whose factors stay online.
    """

    def __init__(
        self, work: Work, by: str, statistics: Sequence[str] = (), online: KeepOnline = "never"
    ) -> None:
        super().__init__(work, by)
        self.regions, reasons = by_region(self.flat)
        rest = [site for site in self.sites if site.name in reasons]
        if online == "all":
            self.regions, rest = [], self.sites
        alone: dict[str, list[ContractionSite]] = {}
        for site in rest:
            if online == "never":
                self.left_out.append(LeftOut(site.name, site.path, reasons[site.name]))
            else:
                alone.setdefault(site.path, []).append(site)
        self.regions += map(Region.alone, alone.values())
        plain = {site.name for site in rest if online == "never"}
        self.run(lambda site: ("magnitude",) if statistics and site.name in plain else statistics)

    def bias_of(self, maker: ContractionSite | str) -> str | None:
        """The parameter that is added to the outputs of a site, or to what a norm's gain is multiplied with.

        Args:
            maker: the site, or the path of the gain.
        """
        if isinstance(maker, ContractionSite):
            bias = bias_of(self.flat, self.flat.steps[maker.step].outputs[0])
        else:
            bias = bias_of(self.flat, self.flat.slot_of[maker], ("broadcast_in_dim", "mul", "div"))
        return None if bias is None else bias.path

    def of_inputs(self, region: Region, name: str) -> np.ndarray:
        """A statistic of the inputs of a region's sites for each channel: the largest, or smallest, of all sites.

        Args:
            region: of this model.
            name: "largest", "smallest", or "magnitude" for the mean.
        """
        reduce, start = (np.minimum, np.inf) if name == "smallest" else (np.maximum, -np.inf)
        numbers = [
            (member.labels, on_host(self.statistics[member.site.name].mean(name))) for member in region.sinks
        ]
        return per_channel(region.channels, numbers, reduce, start)

    def of_weights(self, region: Region) -> np.ndarray:
        """The largest magnitude among the weights of each channel, of all of a region's sinks."""
        weights = ((member.labels, np.abs(self.weights(member.site)).max(axis=1)) for member in region.sinks)
        return per_channel(region.channels, weights)

    def makers(self, region: Region) -> Iterator[tuple[ContractionSite | str, np.ndarray, np.ndarray]]:
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
        rows = ((labels, np.abs(rows).max(axis=1)) for _, labels, rows in self.makers(region))
        return per_channel(region.channels, rows, start=0)

    def multiply(self, region: Region, factors: np.ndarray) -> Rescaled | LeftOut:
        """Multiply the inputs of a region's sites by factors, and divide their weights by them.

        Args:
            region: of this model.
            factors: of its channels, all above 0.

        Returns:
            What was done, or why the factors cannot stay before the sites.
        """
        factors = np.asarray(factors, np.float32)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            name = region.sinks[0].site.name
            raise ValueError(f"{self.by}: the factors of the inputs of {name} are not all finite and above 0")
        first = region.sinks[0].site
        if region.online:
            scale = ChannelScale(factors.size)
            scale.put(jnp.asarray(factors))
            why = self.keep_online(first, scale)
            return LeftOut(first.name, first.path, why) if why else self.described(region, factors)
        changes = [
            (path, partial(jnp.multiply, jnp.asarray(factors_of(labels, factors))))
            for path, labels in region.parameters.items()
        ]
        self.change(first.name, changes)
        return self.described(region, factors)

    def described(self, region: Region, factors: np.ndarray) -> Rescaled:
        """What factors do to a region, for the report."""
        own = {member.site.path for member in region.sinks}
        folded = tuple(path for path in region.parameters if path not in own)
        names = tuple(member.site.name for member in region.sinks)
        ends = float(factors.min()), float(factors.max())
        unruled = self._unruled([member.site for member in region.sinks])
        return Rescaled(names, folded, region.channels, *ends, region.online, unruled)

    def _unruled(self, sites: Sequence[ContractionSite]) -> tuple[str, ...]:
        """The names of sites whose weight no rule quantizes."""
        index, rules = ModelIndex(self.work.model), self.work.rules
        return tuple(dict.fromkeys(site.name for site in sites if not quantizes_weight(site, index, rules)))


def left_out(region: Region, reason: str) -> list[LeftOut]:
    """The sites of a region, left alone for a reason."""
    return [LeftOut(member.site.name, member.site.path, reason) for member in region.sinks]
