"""A float model whose parameters passes change so that its function stays."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.transforms import Chain, ChannelScale, Transform
from jqinject.model.quantizing.rules import COUNTERPARTS, slots_for
from jqinject.model.walk import ModelIndex
from jqinject.ops.processes import on_host
from jqinject.recipes.online import Online, rule_of, stored
from jqinject.recipes.solvers.solver import Statistics
from jqinject.recipes.stream.flat_program import ContractionSite, Note
from jqinject.recipes.transforms.factor_walk import factors_of
from jqinject.recipes.transforms.gains_and_biases import bias_of
from jqinject.recipes.transforms.regions import Region, by_region, per_channel, region_of
from jqinject.recipes.work import Work

#: How far a float32 model's outputs may move, relative to the largest.
TOLERANCE = 1e-5
Change = Callable[[jax.Array], jax.Array]
#: Paths of parameters, each with what makes another value of its value in float32; in order.
Changes = Sequence[tuple[str, Change]]
#: Of each row the label of its channel, and the rows: `(rows, columns)`, of one number for a gain.
Rows = tuple[np.ndarray, np.ndarray]
#: Layers that know how many features their kernel's last two axes have.
FEATURES = (nnx.Linear, nnx.Conv, nnx.ConvTranspose)


class FloatChange:
    """A float model on its way to other parameters, or to transforms kept online, with the same function.

    The data runs through the model as it is first, so that its outputs are known.

    Args:
        work: of the recipe.
        by: the pass, for messages.
        statistics: names of the `Statistics` that are collected at every site.

    Attributes:
        flat: the model's program.
        values: the parameters as they are now.
        online: path of a parameter -> the transform before the inputs of its sites, as they are now.
        done: what the pass did to each site, or why it left it alone; for the report.
        statistics: of the float model's sites, by name.
    """

    def __init__(self, work: Work, by: str, statistics: Sequence[str] = ()) -> None:
        work.refuse_quantized(f"{by} changes the float model", f"{by}, Solve(GPTQ())")
        self.work, self.by, self.online = work, by, work.online
        stream = work.stream()
        self.flat = flat = stream.flat
        self.values = {path: jnp.asarray(flat.state[slot]) for slot, path in flat.parameters.items()}
        self.done: list[Note] = []
        self.statistics: dict[str, Statistics] = {}
        self._changes: list[tuple[str, Changes, Mapping[str, Online]]] = []
        with jax.default_matmul_precision("highest"):
            for visit in work.bar(stream, "measuring") if statistics else stream:
                if statistics:
                    self.statistics[visit.site.name] = visit.statistics(*statistics)
            self._before = stream.outputs()

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
        self.values, self.online = _changed(self.values, changes), {**self.online, **online}
        self._changes.append((site, changes, self.online))

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
            self._error_of(self._after(self.values, self.online))
        except (TypeError, ValueError, IndexError) as error:
            self.values = before
            self._changes.pop()
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
        sites = [same for same in self.flat.sites if same.path == site.path]
        why = self._why_not_online(sites)
        if not why:
            before = self.online.get(site.path)
            both = transform if before is None else Chain((before.transform, transform))
            online = Online(both, site.matrices.channels, site.step.path)
            self.change(site.name, [(site.path, partial(stored, sites, transform))], {site.path: online})
        return why

    def _why_not_online(self, sites: Sequence[ContractionSite]) -> str:
        """Why no transform can stay before the inputs of the sites of a parameter; empty if one can."""
        first = sites[0]
        took, _, holder = rule_of(first.path, first.step.path, ModelIndex(self.work.model), self.work.rules)
        if type(holder) not in COUNTERPARTS and not self.work.methods:
            return "the model is quantized without tracing it, as recipes with call= do"
        if type(holder) in COUNTERPARTS and "input_quant" not in slots_for(holder):
            return f"a {type(holder).__name__} has no quantizer of its input"
        convolution = first.step.name == "conv_general_dilated"
        if convolution and any(site.matrices.weight.sizes[0] > 1 for site in sites):
            return "the convolution sees its channels in groups"
        if took.configures:
            return "a scheme quantizes it"
        if isinstance(took.quantizer("input_quant"), nnx.Module):
            return "its input shares another layer's quantizer"
        slot = self.flat.slot_of[first.path]
        reader = self.flat.other_use(slot, {site.index for site in sites})
        if reader is not None:
            return f"{reader.name}{reader.where} reads the parameter too"
        return _with_other_channels(sites, math.prod(self.flat.shapes[slot]))

    def finish(self) -> list[Note]:
        """Put the parameters into the float model, whose function must be as before.

        Returns:
            What was done, then the sites that were left out.

        Raises:
            ValueError: the outputs are others; the text names the site that is to blame. The model stays as it was.
        """
        work, allowed = self._after(self.values, self.online), self._allowed()
        error = self._error_of(work)
        if not error <= allowed:
            raise ValueError(
                f"{self.by}: the float model's outputs moved by {error:.2g} of the largest, and at most {allowed:.2g} "
                f"is rounding; first where the inputs of {self._blamed(allowed)} were changed.\n"
                "  cure: look whether the model's code depends on the numbers of its parameters; or leave this pass out"
            )
        self.work.model, self.work.online = work.model, work.online
        return [*self.done, *self.flat.left_out]

    def _after(self, values: Mapping[str, jax.Array], online: Mapping[str, Online]) -> Work:
        """The work with other parameters and other transforms."""
        model = nnx.clone(self.work.model, graph=True)
        index = ModelIndex(model)
        modules = {".".join(path): node for path, node in index.places}
        for path, value in values.items():
            variable = index.by_name[path]
            holder, _, name = path.rpartition(".")
            layer = modules.get(holder)
            if isinstance(layer, FEATURES) and name == "kernel":
                layer.in_features += value.shape[-2] - variable.shape[-2]
                layer.out_features += value.shape[-1] - variable.shape[-1]
            variable.set_value(value)
        return replace(self.work, model=model, online=dict(online))

    def _error_of(self, work: Work) -> float:
        """How far the outputs of a float model are from those before, relative to the largest."""
        stream = work.stream(calls=work.calls[:1])
        with jax.default_matmul_precision("highest"):
            for _ in stream:
                pass
            after = stream.outputs()
        pairs = zip(self._before, after, strict=True)
        changes = (relative_change(*pair) for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.inexact))
        return max(changes, default=0.0)

    def _allowed(self) -> float:
        """How far they may be: what rounding explains."""
        dtypes = [x.dtype for x in (*self._before, *self.values.values())]
        floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        return max(TOLERANCE, *(8 * float(jnp.finfo(dtype).eps) for dtype in floats))

    def _blamed(self, allowed: float) -> str:
        variables = ModelIndex(self.work.model).by_name
        values = {path: jnp.asarray(variables[path].get_value()) for path in self.values}
        for site, changes, online in self._changes:
            values = _changed(values, changes)
            if not self._error_of(self._after(values, online)) <= allowed:
                return site
        return "no single site, but of all of them together"


def _changed(values: Mapping[str, jax.Array], changes: Changes) -> dict[str, jax.Array]:
    after = dict(values)
    for path, apply in changes:
        value = after[path]
        after[path] = jnp.asarray(apply(value.astype(jnp.float32))).astype(value.dtype)
    return after


def _with_other_channels(sites: Sequence[ContractionSite], size: int) -> str:
    """Name two sites that contract the same numbers of a parameter as different channels; empty if there are none."""
    first: dict[int, tuple[ContractionSite, np.ndarray]] = {}
    for site in sites if len(sites) > 1 else ():
        column = site.weights(np.arange(size, dtype=np.int32))[:, :, 0].reshape(-1)
        same, before = first.setdefault(int(column.min()), (site, column))
        inside = np.isin(before, column).all() or np.isin(column, before).all()
        if not inside or same.matrices.channels != site.matrices.channels:
            return f"{same.name} and {site.name} contract different axes or channels of it"
    return ""


def relative_change(before: jax.Array, after: jax.Array, least: float = 0.0) -> float:
    """The largest difference between two arrays, relative to the largest number of the first, or to `least`."""
    first, second = (on_host(x).astype(np.float64) for x in (before, after))
    largest = np.abs(first).max(initial=least)
    return float(np.abs(first - second).max(initial=0.0) / (largest if largest > 0 else 1.0))


#: Which sites get factors before their inputs instead of in a neighbour.
KeepOnline = Literal["never", "rest", "all"]


class Rescaling(FloatChange):
    """A float model whose channels are being rescaled.

    Args:
        work: of the recipe.
        by: the pass, for messages.
        statistics: see `FloatChange`.
        online: which sites get factors before their inputs: "never", the "rest" that no region has, or "all".

    Attributes:
        regions: those of the model's sites, in the order in which the sites run; then those whose factors stay online.
    """

    def __init__(
        self, work: Work, by: str, statistics: Sequence[str] = (), online: KeepOnline = "never"
    ) -> None:
        super().__init__(work, by, statistics)
        alone = ((site, "") for site in self.flat.sites)
        self.regions: list[Region] = []
        rest: dict[tuple[str, int], list[ContractionSite]] = {}
        for site, region in alone if online == "all" else by_region(self.flat, region_of):
            if isinstance(region, Region):
                self.regions.append(region)
            elif online == "never":
                self.flat.left_out.append(Note(site.name, site.path, reason=region))
            else:
                rest.setdefault((site.path, site.matrices.channels), []).append(site)
        self.regions += map(Region.alone, rest.values())

    def bias_of(self, maker: ContractionSite | str) -> str | None:
        """The parameter that is added to the outputs of a site, or to what a norm's gain is multiplied with.

        Args:
            maker: the site, or the path of the gain.
        """
        if isinstance(maker, ContractionSite):
            bias = bias_of(self.flat, maker.step.outputs[0])
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
        means = (on_host(self.statistics[site.name].mean(name)) for site in region.sinks)
        return per_channel(region.channels, zip(region.sinks.values(), means, strict=True), reduce, start)

    def sinks(self, region: Region) -> list[Rows]:
        """The weights that contract a region's channels, as they are now."""
        pairs = ((labels, self.weights(site)) for site, labels in region.sinks.items())
        return [(labels.reshape(-1), x.swapaxes(1, 2).reshape(-1, x.shape[1])) for labels, x in pairs]

    def makers(self, region: Region) -> list[tuple[ContractionSite | str, Rows]]:
        """The sites and the gains that make a region's channels, with their weights as they are now."""
        makers: list[tuple[ContractionSite | str, Rows]] = []
        for site, labels in region.sources.items():
            weights = self.weights(site)
            makers.append((site, (labels.reshape(-1), weights.reshape(-1, weights.shape[2]))))
        for path in region.gains:
            value = on_host(self.values[path]).astype(np.float32)
            labels = np.broadcast_to(region.parameters[path], value.shape)
            makers.append((path, (labels.reshape(-1), value.reshape(-1, 1))))
        return makers

    def multiply(self, region: Region, factors: np.ndarray) -> Note:
        """Multiply the inputs of a region's sites by factors, and divide their weights by them.

        Args:
            region: of this model.
            factors: of its channels, all above 0.

        Returns:
            What was done, or why the factors cannot stay before the sites.
        """
        factors = np.asarray(factors, np.float32)
        first = region.sites[0]
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise ValueError(
                f"{self.by}: the factors of the inputs of {first.name} are not all finite and above 0"
            )
        if region.online:
            scale = ChannelScale(factors.size)
            scale.put(jnp.asarray(factors))
            why = self.keep_online(first, scale)
            return Note(first.name, first.path, reason=why) if why else self.described(region, factors)
        changes = [
            (path, partial(jnp.multiply, jnp.asarray(factors_of(labels, factors))))
            for path, labels in region.parameters.items()
        ]
        self.change(first.name, changes)
        return self.described(region, factors)

    def described(self, region: Region, factors: np.ndarray) -> Note:
        """What factors do to a region, for the report."""
        index, rules, sites = ModelIndex(self.work.model), self.work.rules, region.sites
        folded = tuple(path for path in region.parameters if path not in {site.path for site in sites})
        took = {site.name: rule_of(site.path, site.step.path, index, rules)[0] for site in sites}
        unruled = ", ".join(
            name for name, x in took.items() if not x.configures and x.quantizer("weight_quant") is None
        )
        what = f"{region.channels} factors from {factors.min():.3g} to {factors.max():.3g}"
        where = "kept online" if region.online else f"in {', '.join(folded)}"
        alone = f"; no rule quantizes {unruled}" if unruled else ""
        names = ", ".join(site.name for site in sites)
        return Note(names, "", f"{what}, {where}{alone}", {"channels": region.channels, "folded": folded})


def largest_of(channels: int, rows: Iterable[Rows]) -> np.ndarray:
    """The largest magnitude of each channel, of all the rows that are labelled with it; 0 without any.

    Args:
        channels: how many.
        rows: of weights.
    """
    return per_channel(channels, ((labels, np.abs(x).max(axis=1)) for labels, x in rows), start=0)


def left_out(region: Region, reason: str) -> list[Note]:
    """The sites of a region, left alone for a reason."""
    return [Note(site.name, site.path, reason=reason) for site in region.sites]
