"""What passes share that multiply channels by factors which leave the float model's function as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jqinject.core.transforms import ChannelScale
from jqinject.model.walk import ModelIndex
from jqinject.ops.processes import on_host
from jqinject.program import dotted
from jqinject.recipes.online import columns_of, quantizes_weight
from jqinject.recipes.passes.float_change import FloatChange
from jqinject.recipes.stream.site import ContractionSite, LeftOut, Path
from jqinject.recipes.transforms.biases import Biases
from jqinject.recipes.transforms.regions import Member, Region, Regions, by_region
from jqinject.recipes.transforms.transform_walk import factors_of
from jqinject.recipes.work import Work, site_path

Online = Literal["never", "rest", "all"]
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
        regions: those of the model's sites, in the order in which the sites run; none if all factors stay online.
        alone: the sites of each parameter whose factors stay online.
    """

    def __init__(self, work: Work, by: str, statistics: Sequence[str] = (), online: Online = "never") -> None:
        super().__init__(work, by)
        traced = self.traced
        self._flat, self._slots = traced.flat, {path: slot for slot, (path, _) in self.owners.items()}
        self._biases = Biases(traced.flat, self.owners)
        count = traced.program.output_tree.num_leaves
        self._regions = Regions(traced.flat, traced.found, self.owners, self.shapes, count)
        self.regions, reasons = by_region(self._regions, self.sites)
        rest = [site for site in self.sites if site.name in reasons]
        if online == "all":
            self.regions, rest = [], self.sites
        self.alone: dict[Path, list[ContractionSite]] = {}
        if online == "never":
            self.left_out += [LeftOut(site.name, site.path, reasons[site.name]) for site in rest]
        else:
            for site in rest:
                self.alone.setdefault(site.path, []).append(site)
        plain = {site.name for site in rest if online == "never"}
        self.run(lambda site: ("magnitude",) if statistics and site.name in plain else statistics)

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

    def of_columns(self, sites: Sequence[ContractionSite], name: str) -> np.ndarray:
        """A statistic of the inputs of one parameter's sites for each channel: the largest, or smallest, of all.

        Args:
            sites: the parameter's.
            name: "largest" or "smallest"; "weights" for the largest magnitude of the weights.
        """
        found = [
            np.abs(self.weights(site)).max(axis=1)
            if name == "weights"
            else on_host(getattr(self.statistics[site.name], name))
            for site in sites
        ]
        of_channels = [
            each.reshape(len(each), columns_of(site), -1) for site, each in zip(sites, found, strict=True)
        ]
        reduce = np.min if name == "smallest" else np.max
        return reduce([reduce(each, axis=(0, 2)) for each in of_channels], axis=0)

    def scale_online(self, sites: Sequence[ContractionSite], factors: np.ndarray) -> Rescaled | LeftOut:
        """Multiply the inputs of one parameter's sites by factors that stay before them, and divide its weights.

        Args:
            sites: the parameter's.
            factors: of its channels, finite and not 0.
        """
        scale = ChannelScale(factors.size)
        scale.put(jnp.asarray(factors, jnp.float32))
        refused = self.keep_online(sites[0], scale)
        if refused:
            return LeftOut(sites[0].name, sites[0].path, refused)
        names = tuple(dict.fromkeys(site.name for site in sites))
        ends = float(factors.min()), float(factors.max())
        return Rescaled(names, (), factors.size, *ends, online=True, unruled=self._unruled(sites))

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
        changes = {
            path: partial(jnp.multiply, jnp.asarray(factors_of(labels, factors)))
            for path, labels in region.parameters.items()
        }
        self.change(region.sinks[0].site.name, changes)
        return self.described(region, factors)

    def described(self, region: Region, factors: np.ndarray) -> Rescaled:
        """What factors do to a region, for the report."""
        own = {site_path(member.site) for member in region.sinks}
        folded = tuple(path for path in map(dotted, region.parameters) if path not in own)
        names = tuple(member.site.name for member in region.sinks)
        ends = float(factors.min()), float(factors.max())
        unruled = self._unruled([member.site for member in region.sinks])
        return Rescaled(names, folded, region.channels, *ends, unruled=unruled)

    def _unruled(self, sites: Sequence[ContractionSite]) -> tuple[str, ...]:
        """The names of sites whose weight no rule quantizes."""
        index, rules = ModelIndex(self.work.model), self.work.rules
        return tuple(dict.fromkeys(site.name for site in sites if not quantizes_weight(site, index, rules)))


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
