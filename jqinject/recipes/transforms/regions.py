"""Regions: where a factor for each channel may be put into a model's parameters without changing its function."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import jax
import numpy as np

from jqinject.core.transforms import along
from jqinject.program.operations import operand_axes
from jqinject.recipes.stream.flat_program import ContractionSite, FlatProgram, FlatStep, Slot
from jqinject.recipes.transforms import factor_walk

#: How many ways to carry a factor through products are tried.
TRIES = 16


SiteLabels = Mapping[ContractionSite, factor_walk.Labels]


@dataclass(frozen=True, eq=False)
class Region:
    """Values and parameters that can be multiplied by factors, one for each channel, so that the model stays the same.

    Attributes:
        channels: how many.
        parameters: for each parameter that the factors reach, labels that broadcast to it.
        sinks: sites whose inputs are multiplied by the factors, and whose weights are divided by them -> labels of the
            columns of their matrices, `(stack, columns)`.
        sources: sites whose outputs are multiplied by them -> labels of the rows, `(stack, rows)`.
        gains: parameters that values are multiplied by, number by number: those of norms.
        online: whether nothing that makes the inputs can have the factors, which stay before the sinks.
    """

    channels: int
    parameters: Mapping[str, factor_walk.Labels]
    sinks: SiteLabels
    sources: SiteLabels
    gains: tuple[str, ...]
    online: bool = False

    @property
    def sites(self) -> list[ContractionSite]:
        """The sites whose inputs have the factors."""
        return [*self.sinks]

    @classmethod
    def alone(cls, sites: Sequence[ContractionSite]) -> Region:
        """The inputs of one parameter's sites, whose factors stay before them.

        Args:
            sites: the parameter's.
        """
        channels = np.arange(1, sites[0].matrices.channels + 1)
        sinks: dict[ContractionSite, factor_walk.Labels] = {}
        for site in sites:
            stack, _, columns = site.matrices.weight.sizes
            sinks[site] = np.broadcast_to(channels.repeat(columns // channels.size), (stack, columns))
        return cls(channels.size, {}, sinks, {}, (), online=True)


def region_of(flat: FlatProgram, site: ContractionSite) -> Region | str:
    """The region of a site's inputs; a sentence that says why it has none.

    Args:
        flat: the program.
        site: one of its sites.
    """
    ways: list[dict[Slot, int]] = [{}]
    reason = ""
    columns = _columns_of(flat, site)
    for choices in itertools.islice(ways, TRIES):  # further ways are appended meanwhile
        walk = factor_walk.Walk(flat, factor_walk.RULES, count=int(columns.max()), choices=choices)
        walk.give(site.activation, columns)
        walk.run()
        region = _region(walk, site)
        if region is not None:
            return region
        reason = reason or next(iter(walk.reasons), "nothing can have the factors")
        for slot, able in walk.chosen.items():
            more = [choices | {slot: which} for which in range(1, len(able)) if slot not in choices]
            ways += [way for way in more if way not in ways]
    return reason


def _region(walk: factor_walk.Walk, site: ContractionSite) -> Region | None:
    flat, groups = walk.flat, walk.groups()
    if not groups.any():
        return None
    joined = {slot: np.sign(labels) * groups[np.abs(labels)] for slot, labels in walk.labels.items()}
    labels = {slot: own for slot, own in joined.items() if own.any()}
    sinks: dict[ContractionSite, factor_walk.Labels] = {}
    sources: dict[ContractionSite, factor_walk.Labels] = {}
    for member in flat.sites:
        if member.weight not in labels:
            continue
        spread = np.broadcast_to(labels[member.weight], flat.shapes[member.weight])
        matrices = np.asarray(member.matrices.weight.matrices(spread))
        if member.activation in labels:
            sinks[member] = -matrices[:, 0]
        else:
            sources[member] = matrices[:, :, 0]
    if site not in sinks:
        return None
    slots = [slot for slot in flat.parameters if slot in labels]
    parameters = {flat.parameters[slot]: labels[slot] for slot in slots}
    gains = tuple(flat.parameters[slot] for slot in slots if is_gain(flat, slot))
    return Region(int(np.abs(groups).max()), parameters, sinks, sources, gains)


def is_gain(flat: FlatProgram, slot: Slot) -> bool:
    """Whether values that depend on the input are multiplied by a parameter."""

    def multiplies(step: FlatStep) -> bool:
        is_fixed = step.outputs[0] in flat.fixed
        return any(is_gain(flat, output) for output in step.outputs) if is_fixed else step.name == "mul"

    return any(map(multiplies, flat.readers(slot)))


def _columns_of(flat: FlatProgram, site: ContractionSite) -> factor_walk.Labels:
    """A channel for each input of a site: labels 1, 2, ... along the axes that it contracts, and those of its stack."""
    axes = operand_axes(site.step.equation)[1 - site.place].partners
    shape = flat.shapes[site.activation]
    sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    return np.arange(1, math.prod(sizes) + 1).reshape(sizes)


@dataclass
class RotatedRegion:
    """What is rotated, or permuted, together.

    Attributes:
        block: the size of the matrix.
        parameters: path -> the axis that is rotated.
        sites: those whose inputs are rotated -> the axis of the input.
        normalized: whether a norm takes the values: they are those of a residual stream.
        keeps_sums: whether the matrix has to leave sums of the channels as they are: the program subtracts a mean.
    """

    block: int
    parameters: dict[str, int] = field(default_factory=dict)
    sites: dict[ContractionSite, int] = field(default_factory=dict)
    normalized: bool = False
    keeps_sums: bool = False

    @property
    def kind(self) -> str:
        """The name of the rotation: "R1" of a residual stream, "R2" of values between two weights."""
        return "R1" if self.normalized else "R2"

    def labels(self, site: ContractionSite) -> factor_walk.Labels:
        """The channel of a block, from 1 on, of each column of a site's matrices, `(1, columns)`.

        Args:
            site: one of `sites`.
        """
        axes, shape = site.matrices.input_axes, site.step.equation.inputs[1 - site.place].shape
        channels = np.arange(shape[self.sites[site]]) % self.block + 1
        sizes = [-1 if axis == self.sites[site] else 1 for axis in axes]
        spread = np.broadcast_to(channels.reshape(sizes), [shape[axis] for axis in axes]).reshape(-1)
        return spread.repeat(site.matrices.weight.sizes[2] // spread.size)[None]

    def mapped(self, path: str, apply: Callable[[jax.Array], jax.Array], value: jax.Array) -> jax.Array:
        """Apply a map of blocks along the axis of a parameter that is rotated.

        Args:
            path: of the parameter.
            apply: a map of the last axis, which has the size of a block.
            value: the parameter.
        """

        def in_blocks(x: jax.Array) -> jax.Array:
            return apply(x.reshape(*x.shape[:-1], -1, self.block)).reshape(x.shape)

        return along(in_blocks, value, (self.parameters[path],))


R = TypeVar("R", Region, RotatedRegion)


def by_region(
    flat: FlatProgram, find: Callable[[FlatProgram, ContractionSite], R | str]
) -> Iterator[tuple[ContractionSite, R | str]]:
    """Yield the first site of each region with the region, and each site that has none with why.

    A region has all sites of its parameters, so that one search is enough for those that contract the same numbers: the
    steps of a recurrence.

    Args:
        flat: the program.
        find: from the program and a site to the region of its inputs, or why it has none.
    """
    taken: set[str] = set()
    without: dict[ContractionSite, str] = {}
    for site in flat.sites:
        if site.name not in taken:
            region = next((why for earlier, why in without.items() if site.same_as(earlier)), None)
            region = find(flat, site) if region is None else region
            if not isinstance(region, str):
                taken |= {own.name for own in region.sites}
            elif not any(map(site.same_as, without)):
                without[site] = region
            yield site, region


def per_channel(
    channels: int,
    numbers: Iterable[tuple[factor_walk.Labels, np.ndarray]],
    reduce: np.ufunc = np.maximum,
    start: float = -np.inf,
) -> np.ndarray:
    """One number for each channel: of all that are labelled with it.

    Args:
        channels: how many.
        numbers: labels, of which those above 0 count, and a number for each.
        reduce: what is made of two numbers of a channel.
        start: the result without any.

    Example:
        >>> per_channel(2, [(np.array([1, 2, 1]), np.array([3.0, 4.0, 5.0]))]).tolist()
        [5.0, 4.0]
    """
    total = np.full(channels, start, np.float32)
    for labels, x in numbers:
        own = labels > 0
        reduce.at(total, labels[own] - 1, x[own])
    return total
