"""Regions: where a factor for each channel may be put into a model's parameters without changing its function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jqinject.recipes.stream.flat_program import FlatProgram, Slot
from jqinject.recipes.stream.site import ContractionSite, Path, ProgramSites
from jqinject.recipes.transforms.transform_steps import RULES
from jqinject.recipes.transforms.transform_walk import Labels, Walk, relabelled
from jqinject.recipes.transforms.values import DefUse

TRIES = 16
"""How many ways to carry a factor through products are tried."""


@dataclass(frozen=True)
class Member:
    """A site of a region.

    Attributes:
        site: the site.
        labels: of the columns of its matrices, for a site whose inputs have the factors; of the rows, for a site whose
            outputs have them: `(stack, columns)` or `(stack, rows)`.
    """

    site: ContractionSite
    labels: Labels = field(repr=False)


@dataclass(frozen=True)
class Region:
    """Values and parameters that can be multiplied by factors, one for each channel, so that the model stays the same.

    Attributes:
        channels: how many.
        parameters: for each parameter that the factors reach, labels that broadcast to it.
        sinks: sites whose inputs are multiplied by the factors, and whose weights are divided by them.
        sources: sites whose outputs are multiplied by them.
        gains: parameters that values are multiplied by, number by number: those of norms.
    """

    channels: int
    parameters: Mapping[Path, Labels]
    sinks: tuple[Member, ...]
    sources: tuple[Member, ...]
    gains: tuple[Path, ...]


class Regions:
    """The regions of a program.

    Args:
        flat: the program.
        found: its sites.
        parameters: the slot of each parameter, with its path and shape.
        shapes: of the program's inputs.
        count: how many outputs the model returns; the others are its state.
    """

    def __init__(
        self,
        flat: FlatProgram,
        found: ProgramSites,
        parameters: Mapping[Slot, tuple[Path, tuple[int, ...]]],
        shapes: Mapping[Slot, tuple[int, ...]],
        count: int,
    ) -> None:
        self.flat, self.found, self.parameters = flat, found, parameters
        self.links = DefUse(flat, set(parameters), found.fixed, shapes, count)

    def of(self, site: ContractionSite) -> Region | str:
        """The region of a site's inputs; a sentence that says why there is none.

        Args:
            site: one of the program's.
        """
        waiting: list[dict[int, int]] = [{}]
        seen: list[dict[int, int]] = []
        reason = ""
        while waiting and len(seen) < TRIES:
            choices = waiting.pop(0)
            seen.append(choices)
            walk = self._walk(site, choices)
            region = self._region(walk, site)
            if region is not None:
                return region
            reason = reason or next(iter(walk.reasons), "nothing can have the factors")
            for step, able in walk.chosen.items():
                more = [choices | {step: which} for which in range(1, len(able)) if step not in choices]
                waiting += [each for each in more if each not in seen and each not in waiting]
        return reason

    def _walk(self, site: ContractionSite, choices: Mapping[int, int]) -> Walk:
        columns = _columns_of(site, self.links.shapes[site.other], self.flat)
        walk = Walk(self.flat, self.links, RULES, int(columns.max()), choices)
        walk.give(site.other, columns)
        walk.run()
        return walk

    def _region(self, walk: Walk, site: ContractionSite) -> Region | None:
        groups = walk.channels.groups()
        if not groups.any():
            return None
        labels = {slot: relabelled(each, groups) for slot, each in walk.labels.items()}
        sinks, sources = [], []
        for each in self.found.sites:
            if each.weight not in labels or not labels[each.weight].any():
                continue
            whole = np.broadcast_to(labels[each.weight], self.links.shapes[each.weight])
            matrices = np.asarray(each.matrices.weight.matrices(whole))
            if each.other in labels and labels[each.other].any():
                sinks.append(Member(each, -matrices[:, 0]))
            else:
                sources.append(Member(each, matrices[:, :, 0]))
        if not any(member.site is site for member in sinks):
            return None
        parameters = {
            path: labels[slot]
            for slot, (path, _) in self.parameters.items()
            if slot in labels and labels[slot].any()
        }
        gains = tuple(
            path for slot, (path, _) in self.parameters.items() if path in parameters and self._is_gain(slot)
        )
        return Region(int(np.abs(groups).max()), parameters, tuple(sinks), tuple(sources), gains)

    def _is_gain(self, slot: Slot) -> bool:
        """Whether values that depend on the input are multiplied by a parameter."""
        for index in self.links.touching(slot):
            step = self.flat.steps[index]
            if slot in step.inputs and step.outputs[0] in self.links.fixed:
                if any(self._is_gain(made) for made in step.outputs):
                    return True
            elif slot in step.inputs and step.name == "mul":
                return True
        return False


def _columns_of(site: ContractionSite, shape: tuple[int, ...], flat: FlatProgram) -> Labels:
    """A channel for each input of a site: labels 1, 2, ... along the axes that it contracts, and those of its stack."""
    params: Any = flat.steps[site.step].params
    if site.operation == "conv_general_dilated":
        axes: Sequence[int] = (params["dimension_numbers"].lhs_spec[1],)
    elif site.operation == "dot_general":
        contracted, batch = params["dimension_numbers"]
        axes = (*batch[1 - site.place], *contracted[1 - site.place])
    else:
        axes = (1,)
    sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    return np.arange(1, int(np.prod(sizes)) + 1).reshape(sizes)


def by_region(regions: Regions, sites: Sequence[ContractionSite]) -> tuple[list[Region], dict[str, str]]:
    """The regions of sites, each once; and for each other site why it has none.

    Args:
        regions: of the program.
        sites: of the program.
    """
    found: list[Region] = []
    reasons: dict[str, str] = {}
    taken: set[str] = set()
    for site in sites:
        if site.name in taken:
            continue
        region = regions.of(site)
        if isinstance(region, str):
            reasons[site.name] = region
            continue
        found.append(region)
        taken |= {member.site.name for member in region.sinks}
    return found, reasons
