"""A module of the float model, run again with other weights for some of its sites."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.recipes.stream.flat_program import FlatProgram, Slot
from jqinject.recipes.stream.site import ContractionSite
from jqinject.recipes.stream.stream import Batch, Visit


def module_around(sites: Sequence[ContractionSite]) -> str:
    """The path of the innermost module that runs all of some sites; empty for the model itself.

    Args:
        sites: of a program.
    """
    paths = [site.operand.rpartition(".")[0].split(".") for site in sites]
    same = itertools.takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in same)


@dataclass(frozen=True)
class _Plan:
    """Which steps of a program are run.

    Attributes:
        before: those that do not depend on the sites.
        after: those that do.
        exits: slots that are read outside of the module, or returned.
        sites: step -> the site there.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    exits: tuple[Slot, ...]
    sites: Mapping[int, ContractionSite]


class Block:
    """What a module returns when some of its sites contract other weights; each other value is the float model's.

    Args:
        visit: of the first of these sites: what the module reads is there.
        names: of the sites.
        path: of the module.
    """

    def __init__(self, visit: Visit, names: Collection[str], path: str) -> None:
        self._visit, self._names, self._path = visit, names, path
        self._plans: dict[int, _Plan] = {}
        self._known: list[tuple[Batch, _Plan, dict[Slot, Any]]] = []
        for batch in visit.stream.batches:
            plan = self._plans.setdefault(id(batch.traced), self._plan(batch))
            known = visit.stream.floats(batch)
            for index in (*plan.before, *plan.after):
                self._run(batch, plan, index, known)
            self._known.append((batch, plan, known))

    @property
    def reaches(self) -> bool:
        """Whether the sites change anything that the module returns."""
        return all(plan.exits for _, plan, _ in self._known)

    def error(self, weights: Mapping[str, jax.Array]) -> float:
        """The squared error of what the module returns, added over all batches.

        Args:
            weights: name of a site -> the parameter that it contracts instead.
        """
        total = jnp.float32(0)
        for batch, plan, known in self._known:
            changed = dict(known)
            for site in plan.sites.values():
                if site.name in weights:
                    value = site.places.taken(weights[site.name])
                    changed[site.weight] = value.astype(known[site.weight].dtype)
            for index in plan.after:
                self._run(batch, plan, index, changed)
            for slot in plan.exits:
                wrong = changed[slot].astype(jnp.float32) - known[slot].astype(jnp.float32)
                total = total + jnp.square(wrong).sum()
        return float(total)

    def _run(self, batch: Batch, plan: _Plan, index: int, values: dict[Slot, Any]) -> None:
        step = batch.traced.flat.steps[index]
        operands = [values[slot] for slot in step.inputs]
        site, transform = plan.sites.get(index), self._visit.stream.transform_input
        if site is not None and transform is not None:
            operands[1 - site.place] = transform(site, operands[1 - site.place])
        values.update(zip(step.outputs, step.run(*operands), strict=True))

    def _plan(self, batch: Batch) -> _Plan:
        flat, found = batch.traced.flat, batch.traced.found
        chosen = [site for site in found.sites if site.name in self._names]
        turn, begin = self._visit.site.turn, self._visit.site_in(batch).step
        inside = {
            index
            for index, step in enumerate(flat.steps)
            if index >= begin
            and step.turn[: len(turn)] == turn
            and f"{step.path}.".startswith(f"{self._path}.")
        }
        after, exits = _reached(flat, {site.weight for site in chosen}, inside)
        held = self._visit.stream.floats(batch)
        needed, wanted = set[int](), {*exits}
        for index in range(len(flat.steps) - 1, begin - 1, -1):
            step = flat.steps[index]
            if wanted & {*step.outputs} and not all(slot in held for slot in step.outputs):
                needed.add(index)
                wanted.update(step.inputs)
        before = tuple(sorted(needed - after))
        sites = {site.step: site for site in found.sites}
        return _Plan(before, tuple(sorted(needed & after)), exits, sites)


def _reached(
    flat: FlatProgram, weights: Collection[Slot], inside: Collection[int]
) -> tuple[set[int], tuple[Slot, ...]]:
    """The steps inside that depend on some slots, and their results that are read outside."""
    changed, after, exits = {*weights}, set[int](), dict[Slot, None]()
    for index, step in enumerate(flat.steps):
        own = [slot for slot in step.inputs if slot in changed]
        if own and index in inside:
            after.add(index)
            changed.update(step.outputs)
        elif own:
            exits.update(dict.fromkeys(slot for slot in own if slot not in weights))
    exits.update(dict.fromkeys(slot for slot in flat.outputs if slot in changed and slot not in weights))
    return after, tuple(exits)
