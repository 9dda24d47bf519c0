"""Runs calibration data through a model site by site, as the float model and as the model quantized so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.program import Call, Policy, Program, program_of_call
from jqinject.recipes.solvers.solver import Statistics
from jqinject.recipes.stream.flat_program import FlatProgram, Slot, flatten
from jqinject.recipes.stream.site import ContractionSite, LeftOut, Path, ProgramSites, sites_of

QuantizeInput = Callable[[ContractionSite, jax.Array], jax.Array]


@dataclass
class _Traced:
    """A program and its sites, for all calls with arguments of the same shapes."""

    program: Program
    flat: FlatProgram
    found: ProgramSites
    last: dict[Slot, int]


class Batch:
    """One call on its way through the program.

    Args:
        traced: the program.
        values: slot -> value of its inputs that are no state.
    """

    def __init__(self, traced: _Traced, values: dict[Slot, Any]) -> None:
        self.traced = traced
        self.floats = dict(values)
        self.quantized = dict(values)


class Stream:
    """Calibration data on its way through a model, at one site at a time.

    The float model's values and those of the quantized model go side by side: at a site, a pass reads the inputs of
    both, and may put other numbers in the parameter's place, with which the quantized model goes on. Between sites
    only the values that later operations read are kept.

    Args:
        model: a float NNX module; it is traced in evaluation mode and not changed.
        calls: of the model.
        policy: says which modules are not looked into.
        quantize_input: what the quantized model contracts instead of an input; None for the input itself.
        transform_input: what the float model contracts instead of an input, and the quantized one without
            `quantize_input`, which does so itself; None for the input itself.
        parameters: path -> array in the place of the model's own parameter, in the quantized model.
        updates: path -> array beside such a parameter, which the quantized model contracts with inputs that are not
            quantized.
        on_host: whether values that wait between sites are kept in the host's memory.
    """

    def __init__(
        self,
        model: nnx.Module,
        calls: Sequence[Call],
        policy: Policy,
        *,
        quantize_input: QuantizeInput | None = None,
        transform_input: QuantizeInput | None = None,
        parameters: Mapping[Path, Any] | None = None,
        updates: Mapping[Path, Any] | None = None,
        on_host: bool = False,
    ) -> None:
        self.quantize_input, self.transform_input = quantize_input, transform_input
        self.parameters: dict[Path, Any] = dict(parameters or {})
        self.updates: dict[Path, Any] = dict(updates or {})
        self.on_host = on_host
        self._model, self._policy = model, policy
        self._known: dict[Any, _Traced] = {}
        self._fixed: dict[int, dict[Slot, Any]] = {}
        self.batches = [self._begin(call) for call in calls]
        self.traced = self.batches[0].traced
        self._at = 0
        self._position = {id(traced): 0 for traced in self._known.values()}

    @property
    def sites(self) -> list[ContractionSite]:
        """The sites, in the order in which they run."""
        return self.traced.found.sites

    @property
    def left_out(self) -> list[LeftOut]:
        """Contractions of parameters that no pass can reach."""
        return self.traced.found.left_out

    def _begin(self, call: Call) -> Batch:
        key = (call.frame, tuple((np.shape(x), np.dtype(x.dtype)) for x in call.arrays))
        if key not in self._known:
            program = program_of_call(self._model, self._policy, call)
            flat = flatten(program.body)
            parameters, state = {}, set()
            for slot, given in zip(flat.inputs, program.inputs, strict=True):
                if given.is_activation:
                    continue
                state.add(slot)
                if given.is_weight:
                    parameters[slot] = (given.weight_path, tuple(given.value.shape))
            traced = _Traced(program, flat, sites_of(flat, parameters, state), flat.last_uses())
            self._known[key] = traced
            values = zip(flat.inputs, program.inputs, strict=True)
            self._fixed[id(traced)] = {**flat.constants, **{s: x.value for s, x in values if s in state}}
        traced = self._known[key]
        arrays = [
            slot
            for slot, given in zip(traced.flat.inputs, traced.program.inputs, strict=True)
            if given.is_activation
        ]
        return Batch(traced, dict(zip(arrays, call.arrays, strict=True)))

    def __len__(self) -> int:
        """The number of sites."""
        return len(self.sites)

    def __iter__(self) -> Iterator[Visit]:
        """Every site in turn; after each, the values go on to the next."""
        for index in range(len(self.sites)):
            for traced in self._known.values():
                self._run_to(traced, traced.found.sites[index].step)
            visit = Visit(self, index)
            yield visit
            for batch in self.batches:
                visit.contract(batch)
            for traced in self._known.values():
                self._position[id(traced)] = traced.found.sites[index].step + 1
                self._forget(traced)

    def floats(self, batch: Batch) -> dict[Slot, Any]:
        """The float model's values that later operations read, and those that depend on parameters alone."""
        return {**self._fixed[id(batch.traced)], **batch.floats}

    def outputs(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """After the last site: outputs of the float model and of the quantized one, for each batch."""
        for traced in self._known.values():
            self._run_to(traced, len(traced.flat.steps))
        for batch in self.batches:
            count = batch.traced.program.output_tree.num_leaves
            slots = batch.traced.flat.outputs[:count]
            fixed = self._fixed[id(batch.traced)]
            yield tuple([env.get(s, fixed.get(s)) for s in slots] for env in (batch.floats, batch.quantized))  # pyright: ignore

    def _run_to(self, traced: _Traced, end: int) -> None:
        fixed, found = self._fixed[id(traced)], traced.found
        for index in range(self._position[id(traced)], end):
            step = traced.flat.steps[index]
            if step.outputs and step.outputs[0] in found.fixed:
                made = step.run(*(fixed[slot] for slot in step.inputs))
                fixed.update(zip(step.outputs, made, strict=True))
                continue
            for batch in self.batches:
                if batch.traced is traced:
                    _run(step, batch, fixed)
            self._forget_after(traced, index)
        self._position[id(traced)] = end

    def _forget_after(self, traced: _Traced, index: int) -> None:
        """Let go of values that nothing reads any more."""
        for slot in traced.flat.steps[index].inputs:
            if traced.last.get(slot, index) <= index and slot not in traced.found.fixed:
                for batch in self.batches:
                    if batch.traced is traced:
                        batch.floats.pop(slot, None)
                        batch.quantized.pop(slot, None)

    def _forget(self, traced: _Traced) -> None:
        at = self._position[id(traced)]
        self._forget_after(traced, at - 1)
        fixed = self._fixed[id(traced)]
        for slot in [s for s in fixed if s not in traced.flat.constants and traced.last.get(s, -1) < at]:
            if slot not in traced.flat.inputs:
                del fixed[slot]
        if self.on_host:
            for batch in self.batches:
                batch.floats = jax.device_get(batch.floats)
                batch.quantized = jax.device_get(batch.quantized)


def _run(step: Any, batch: Batch, fixed: Mapping[Slot, Any]) -> None:
    same = all(slot in fixed or batch.floats.get(slot) is batch.quantized.get(slot) for slot in step.inputs)
    made = step.run(*(fixed[s] if s in fixed else batch.floats[s] for s in step.inputs))
    batch.floats.update(zip(step.outputs, made, strict=True))
    if not same:
        made = step.run(*(fixed[s] if s in fixed else batch.quantized[s] for s in step.inputs))
    batch.quantized.update(zip(step.outputs, made, strict=True))


class Visit:
    """A stream that has come to a site.

    Args:
        stream: the stream.
        index: of the site.

    Attributes:
        correction: from a batch and the quantized model's output of the site to what is added to it.
    """

    def __init__(self, stream: Stream, index: int) -> None:
        self.stream, self.index = stream, index
        self.site = stream.sites[index]
        self.correction: Callable[[Batch, jax.Array], jax.Array] | None = None

    @property
    def original(self) -> Any:
        """The float model's parameter."""
        traced = self.stream.traced
        values = zip(traced.flat.inputs, traced.program.inputs, strict=True)
        return next(x.value for _, x in values if x.is_weight and x.weight_path == self.site.path)

    @property
    def parameter(self) -> Any:
        """The parameter of the quantized model so far."""
        return self.stream.parameters.get(self.site.path, self.original)

    @property
    def operand(self) -> jax.Array:
        """What the quantized model contracts in the first batch, before it is quantized."""
        batch = self.stream.batches[0]
        return self._raw(batch, batch.quantized)

    def put(self, parameter: Any) -> None:
        """Let the quantized model go on with another parameter.

        Args:
            parameter: in the parameter's shape.
        """
        self.stream.parameters[self.site.path] = parameter

    def site_in(self, batch: Batch) -> ContractionSite:
        """The site in the program that a batch goes through: another one for each shape of the batches."""
        return batch.traced.found.sites[self.index]

    def outputs(
        self, quantize_input: QuantizeInput | None, weight: Any
    ) -> Iterator[tuple[Batch, jax.Array, jax.Array]]:
        """For each batch: the site's output in the float model, and what the same input gives when it is quantized.

        Args:
            quantize_input: what is contracted instead of the input; None for the input of the quantized model.
            weight: the parameter that it is contracted with.
        """
        for batch in self.stream.batches:
            site = self.site_in(batch)
            floats, quantized = self._operands(batch, site)
            raw = self._raw(batch, batch.quantized)
            if quantize_input is not None:
                raw = self._raw(batch, batch.floats)
                quantized = quantize_input(site, raw)
            made = self._with_update(batch, self._made(batch, weight, quantized), raw)
            yield batch, self._made(batch, None, floats), made

    def inputs(self) -> Iterator[tuple[jax.Array, jax.Array, Any]]:
        """For each batch: samples of the float model and of the quantized one, and which belong to which matrix."""
        for batch in self.stream.batches:
            site = self.site_in(batch)
            floats, quantized = self._operands(batch, site)
            rest = [self._value(batch, batch.floats, slot) for slot in site.rest]
            samples, own = site.matrices.samples(floats, *rest)
            yield samples, site.matrices.samples(quantized, *rest)[0], own

    def statistics(self, *wanted: str) -> Statistics:
        """Sums over the inputs of all batches.

        Args:
            wanted: attributes of `Statistics`.
        """
        total = None
        for floats, quantized, own in self.inputs():
            found = Statistics.of(floats, quantized, wanted, own)
            total = found if total is None else total.merged(found)
        assert total is not None, "a stream has batches"
        return total

    def contract(self, batch: Batch) -> None:
        """Contract the site's operands, in both models."""
        site = self.site_in(batch)
        (slot,) = batch.traced.flat.steps[site.step].outputs
        floats, quantized = self._operands(batch, site)
        batch.floats[slot] = made = self._made(batch, None, floats)
        put = self.stream.parameters.get(site.path)
        if put is not None or floats is not quantized:
            made = self._made(batch, put, quantized)
        if put is not None:
            made = self._with_update(batch, made, self._raw(batch, batch.quantized))
        batch.quantized[slot] = made if self.correction is None else made + self.correction(batch, made)

    def _with_update(self, batch: Batch, made: jax.Array, x: jax.Array) -> jax.Array:
        """An output of the quantized model with that of the update beside its parameter, which contracts `x`."""
        update = self.stream.updates.get(self.site.path)
        return made if update is None else made + self._made(batch, update, x)

    def _made(self, batch: Batch, parameter: Any, x: jax.Array) -> jax.Array:
        """The output of the site: the contraction of an input with a parameter, None for the float model's."""
        site, fixed = self.site_in(batch), self.stream._fixed[id(batch.traced)]
        weight = fixed[site.weight]
        if parameter is not None:
            weight = site.places.taken(parameter).astype(weight.dtype)
        rest = [self._value(batch, batch.floats, slot) for slot in site.rest]
        ordered = (weight, x) if site.place == 0 else (x, weight)
        return batch.traced.flat.steps[site.step].run(*ordered, *rest)[0]

    def _operands(self, batch: Batch, site: ContractionSite) -> tuple[jax.Array, jax.Array]:
        floats, quantized = self._raw(batch, batch.floats), self._raw(batch, batch.quantized)
        quantize, transform = self.stream.quantize_input, self.stream.transform_input
        if quantize is not None:
            quantized = quantize(site, quantized)
        if transform is not None:
            same = floats is quantized
            floats = transform(site, floats)
            quantized = floats if same else quantized if quantize is not None else transform(site, quantized)
        return floats, quantized

    def _raw(self, batch: Batch, env: Mapping[Slot, Any]) -> jax.Array:
        """The other operand, before it is quantized."""
        return self._value(batch, env, self.site_in(batch).other)

    def _value(self, batch: Batch, env: Mapping[Slot, Any], slot: Slot) -> Any:
        fixed = self.stream._fixed[id(batch.traced)]
        return fixed[slot] if slot in fixed else env[slot]


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
