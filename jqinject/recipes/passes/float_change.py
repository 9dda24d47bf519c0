"""A float model whose parameters passes change so that its function stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.transforms import Transform
from jqinject.model.calibration import with_progress
from jqinject.model.walk import ModelIndex
from jqinject.ops.processes import on_host
from jqinject.program import dotted
from jqinject.recipes.online import Online, online_of, stored_for, why_not_online
from jqinject.recipes.solving import finite_statistics
from jqinject.recipes.statistics import Statistics
from jqinject.recipes.stream.flat_program import Slot
from jqinject.recipes.stream.site import ContractionSite, LeftOut, Path
from jqinject.recipes.transforms.sources import values_of
from jqinject.recipes.transforms.transform_walk import DefUse
from jqinject.recipes.transforms.turning import TurnedRegion, Turning
from jqinject.recipes.work import Work, site_path

TOLERANCE = 1e-5
"""How far a float32 model's outputs may move, relative to the largest."""
Change = Callable[[Any], Any]


class FloatChange:
    """A float model on its way to other parameters, or to transforms kept online, with the same function.

    Args:
        work: of the recipe.
        by: the pass, for messages.

    Attributes:
        values: the parameters as they are now.
        sites: of the model, in the order in which they run.
        left_out: contractions that no pass can reach, and why.
        statistics: of the float model's sites, by name.
        done: what was changed: the first site, the changes of parameters, and the transforms kept online.
    """

    def __init__(self, work: Work, by: str) -> None:
        if work.is_quantized:
            raise ValueError(
                f"{by} changes the float model, and a pass before it has made the quantized one.\n"
                f"  cure: Recipe({by}, Solve(GPTQ()))"
            )
        self.work, self.by = work, by
        self.stream = stream = work.float_stream()
        self.traced = traced = stream.traced
        inputs = list(zip(traced.flat.inputs, traced.program.inputs, strict=True))
        weights = [(slot, given) for slot, given in inputs if given.is_weight]
        self.values: dict[Path, Any] = {given.weight_path: jnp.asarray(given.value) for _, given in weights}
        self.shapes: dict[Slot, tuple[int, ...]] = {
            slot: tuple(np.shape(given.value)) for slot, given in inputs
        }
        self.owners = {slot: (given.weight_path, self.shapes[slot]) for slot, given in weights}
        self.state = {slot: given.value for slot, given in inputs if not given.is_activation}
        self.sites = list(stream.sites)
        self.left_out: list[LeftOut] = [*stream.left_out]
        self.statistics: dict[str, Statistics] = {}
        self.done: list[tuple[str, Mapping[Path, Change], Mapping[str, Online]]] = []

    @cached_property
    def links(self) -> DefUse:
        """What makes and reads each value of the program."""
        count = self.traced.program.output_tree.num_leaves
        return DefUse(self.traced.flat, set(self.owners), self.traced.found.fixed, self.shapes, count)

    @cached_property
    def value_of(self) -> Callable[[Slot], Any]:
        """From a slot that depends on parameters alone to its value in the float model."""
        return values_of(self.traced.flat, self.state, self.links)

    def turning(self) -> Iterator[tuple[ContractionSite, TurnedRegion | str]]:
        """Each site with what a matrix before its inputs turns, or why nothing can; the first site of each region."""
        paths = {slot: path for slot, (path, _) in self.owners.items()}
        turning = Turning(self.links, self.traced.flat, self.traced.found, paths, self.value_of)
        taken: set[str] = set()
        for site in self.sites:
            if site.name not in taken:
                region = turning.of(site)
                taken |= set() if isinstance(region, str) else region.sinks
                yield site, region

    def run(self, wanted: Callable[[ContractionSite], Sequence[str]] = lambda site: ()) -> None:
        """Run the data through the model as it is, and note its outputs.

        Args:
            wanted: names of the `Statistics` that are collected at a site; none by default.
        """
        names = [name for site in self.sites for name in wanted(site)]
        with jax.default_matmul_precision("highest"):
            for visit in with_progress(self.stream, "measuring", shown=self.work.progress and bool(names)):
                if wanted(visit.site):
                    self.statistics[visit.site.name] = finite_statistics(visit, *wanted(visit.site))
            self._before = next(self.stream.outputs())[0]

    def weights(self, site: ContractionSite) -> np.ndarray:
        """A site's weights as they are now, float32 `(stack, rows, columns)`."""
        return on_host(site.weights(self.values[site.path].astype(jnp.float32)))

    def change(self, site: str, changes: Mapping[Path, Change], online: Mapping[str, Online] = {}) -> None:
        """Change parameters, in float32, and keep transforms online.

        Args:
            site: the first site that it is for, for messages.
            changes: path -> from the parameter's value in float32 to another.
            online: path of a parameter -> the transform before the other operand of its sites.
        """
        for path, apply in changes.items():
            self.values[path] = _changed(self.values[path], apply)
        self.done.append((site, changes, online))

    def keep_online(self, site: ContractionSite, transform: Transform) -> str:
        """Transform the inputs of the sites of a parameter, and keep the transform beside their quantizer.

        Args:
            site: one of the parameter's.
            transform: of the site's contracted axes.

        Returns:
            Why that is impossible; empty if it was done.
        """
        name = site_path(site)
        sites = [each for each in self.sites if each.path == site.path]
        slot = next(slot for slot, (path, _) in self.owners.items() if path == site.path)
        index, program = ModelIndex(self.work.model), self.traced.flat
        why = why_not_online(index, self.work.rules, program, self.traced.found, sites, slot)
        if not why:
            before = self._online(self.done).get(name)
            online = online_of(site, transform, before)
            self.change(site.name, {site.path: stored_for(sites, transform)}, {name: online})
        return why

    def finish(self) -> list[LeftOut]:
        """Put the parameters into the float model, whose function must be as before.

        Returns:
            The sites that were left out.

        Raises:
            ValueError: the outputs are others; the text names the site that is to blame. The model stays as it was.
        """
        model, online = self._with(self.values), self._online(self.done)
        error, allowed = self.error_of(model, online), self.allowed
        if not error <= allowed:
            raise ValueError(
                f"{self.by}: the float model's outputs moved by {error:.2g} of the largest, and at most {allowed:.2g} "
                f"is rounding; first where the inputs of {self._blamed(allowed)} were changed.\n"
                "  cure: look whether the model's code depends on the numbers of its parameters; or leave this pass out"
            )
        self.work.model, self.work.online = model, online
        return self.left_out

    def _online(self, done: Sequence[tuple[str, Any, Mapping[str, Online]]]) -> dict[str, Online]:
        made = dict(self.work.online)
        for _, _, online in done:
            made |= online
        return made

    def _with(self, values: Mapping[Path, Any]) -> nnx.Module:
        model = nnx.clone(self.work.model, graph=True)
        variables = ModelIndex(model).by_name
        for path in {path for _, changes, _ in self.done for path in changes}:
            variables[dotted(path)].set_value(values[path])
        return model

    def error_of(self, model: nnx.Module, online: dict[str, Online] | None = None) -> float:
        """How far the outputs of a model are from the float model's, relative to the largest.

        Args:
            model: with other parameters.
            online: the transforms before inputs that they are stored for; None for those of the work.
        """
        before = self.work.model, self.work.online
        self.work.model = model
        if online is not None:
            self.work.online = online
        try:
            stream = self.work.float_stream(self.work.calls[:1])
            with jax.default_matmul_precision("highest"):
                for _ in stream:
                    pass
                after = next(stream.outputs())[0]
        finally:
            self.work.model, self.work.online = before
        pairs = zip(self._before, after, strict=True)
        return max(
            (moved_by(*pair) for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.inexact)), default=0.0
        )

    @property
    def allowed(self) -> float:
        """How far they may be: what rounding explains."""
        dtypes = [x.dtype for x in (*self._before, *self.values.values())]
        floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        return max(TOLERANCE, *(8 * float(jnp.finfo(dtype).eps) for dtype in floats))

    def _blamed(self, allowed: float) -> str:
        variables = ModelIndex(self.work.model).by_name
        values = {path: jnp.asarray(variables[dotted(path)].get_value()) for path in self.values}
        for index, (site, changes, _) in enumerate(self.done):
            values |= {path: _changed(values[path], apply) for path, apply in changes.items()}
            if not self.error_of(self._with(values), self._online(self.done[: index + 1])) <= allowed:
                return site
        return "no single site, but of all of them together"


def _changed(value: Any, apply: Change) -> Any:
    return jnp.asarray(apply(value.astype(jnp.float32))).astype(value.dtype)


def moved_by(before: jax.Array, after: jax.Array) -> float:
    """The largest difference between two arrays, relative to the largest number of the first."""
    first, second = (on_host(x).astype(np.float64) for x in (before, after))
    largest = np.abs(first).max(initial=0.0)
    return float(np.abs(first - second).max(initial=0.0) / (largest if largest > 0 else 1.0))
