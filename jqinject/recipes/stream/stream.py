"""Runs calibration data through a model site by site, as the float model and as the model quantized so far."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core.transforms import along
from jqinject.program import Call, Policy, program_of_call
from jqinject.recipes.online import Online
from jqinject.recipes.solvers.solver import Statistics
from jqinject.recipes.stream.flat_program import ContractionSite, FlatProgram, FlatStep, Run, Slot

QuantizeInput = Callable[[ContractionSite, jax.Array], jax.Array]
Values = dict[Slot, jax.Array]


class Batch:
    """One call on its way through the program.

    Args:
        flat: the program.
        call: with the values of its inputs that are no state.

    Attributes:
        floats, quantized: the values of the float and of the quantized model, above those that depend on parameters
            alone, which batches with a program share.
        at: index of the step that comes next.
    """

    def __init__(self, flat: FlatProgram, call: Call) -> None:
        self.flat, self.at = flat, 0
        slots = [slot for slot in flat.inputs if slot not in flat.state]
        arrays = dict(zip(slots, call.arrays, strict=True))
        self.floats, self.quantized = ChainMap({**arrays}, flat.values), ChainMap(arrays, flat.values)

    def run_to(self, end: int) -> None:
        """Run the steps before one in both models; once, if their inputs are the same."""
        for step in self.flat.steps[self.at : end]:
            if step.outputs and step.outputs[0] in self.flat.fixed:
                self.flat.value(step.outputs[0])
            else:
                floats, quantized = (
                    [values[slot] for slot in step.inputs] for values in (self.floats, self.quantized)
                )
                results = step.run(*floats)
                self.floats.update(zip(step.outputs, results, strict=True))
                if not all(map(operator.is_, floats, quantized)):
                    results = step.run(*quantized)
                self.quantized.update(zip(step.outputs, results, strict=True))
            self.leave()

    def leave(self) -> None:
        """Go on behind the step that comes next, and let go of the call's values that are not read any more."""
        self.at += 1
        for values in (self.floats, self.quantized):
            self.flat.forget(values.maps[0], self.at)

    def copied(self) -> Batch:
        """The call as far as it is, which goes on apart from this one."""
        batch = copy.copy(self)
        batch.floats, batch.quantized = (
            ChainMap({**values.maps[0]}, self.flat.values) for values in (self.floats, self.quantized)
        )
        return batch

    def to_host(self) -> None:
        """Put what waits into the host's memory."""
        for values in (self.floats, self.quantized):
            values.maps[0] = jax.device_get(values.maps[0])


@dataclass
class Stream:
    """Calibration data on its way through a model, at one site at a time.

    The float model's values and those of the quantized model go side by side: at a site, a pass reads the inputs of
    both, and may put other numbers in the parameter's place, with which the quantized model goes on. Between sites
    only the values that later operations read stay.

    Args:
        model: a float NNX module; it is traced in evaluation mode and not changed.
        calls: of the model.
        quantize_input: what the quantized model contracts instead of an input; None for the input itself.
        online: path of a parameter -> the transform of the inputs that the float model contracts with it, and the
            quantized one without `quantize_input`, which transforms them itself.
        updates: path -> array beside a parameter, which the quantized model contracts with inputs that are not
            quantized.
        on_host: whether values that wait between sites are in the host's memory.

    Attributes:
        flat: the program of the first call.
        batches: the calls.
        parameters: path -> array in the place of the model's own parameter, in the quantized model.
    """

    model: InitVar[nnx.Module]
    calls: InitVar[Sequence[Call]]
    quantize_input: QuantizeInput | None = None
    online: Mapping[str, Online] = field(default_factory=dict)
    updates: Mapping[str, jax.Array] = field(default_factory=dict)
    on_host: bool = False

    def __post_init__(self, model: nnx.Module, calls: Sequence[Call]) -> None:
        self.parameters: dict[str, jax.Array] = {}
        programs: dict[object, FlatProgram] = {}
        self.batches: list[Batch] = []
        for call in calls:
            key = (call.frame, tuple((np.shape(x), np.dtype(x.dtype)) for x in call.arrays))
            if key not in programs:
                programs[key] = FlatProgram(program_of_call(model, Policy(), call))
            self.batches.append(Batch(programs[key], call))
        self.flat = self.batches[0].flat
        _check_same_sites(self.batches)

    def __len__(self) -> int:
        """The number of sites."""
        return len(self.flat.sites)

    def __iter__(self) -> Iterator[Visit]:
        """Every site in turn; after each, the values go on to the next."""
        for visit in self.visits(0):
            yield visit
            for batch in self.batches:
                batch.flat.forget(batch.flat.values, batch.at)

    def visits(self, start: int) -> Iterator[Visit]:
        """Every site from one on in turn; what depends on parameters alone is kept.

        Args:
            start: index of a site that the values have not passed.
        """
        for index in range(start, len(self)):
            for batch in self.batches:
                batch.run_to(batch.flat.sites[index].index)
            visit = Visit(self, index)
            yield visit
            for batch in self.batches:
                visit.contract(batch)
                batch.leave()
                if self.on_host:
                    batch.to_host()

    def copied(self) -> Stream:
        """The stream as it is now, which goes on apart from this one."""
        stream = copy.copy(self)
        stream.batches = [batch.copied() for batch in self.batches]
        return stream

    def transformed(self, site: ContractionSite, x: jax.Array) -> jax.Array:
        """The other operand of a site as the float model contracts it."""
        before = self.online.get(site.path)
        return x if before is None else along(before.transform, x, site.matrices.input_axes)

    def outputs(self) -> list[jax.Array]:
        """After the last site: outputs of the float model for the first batch."""
        batch = self.batches[0]
        batch.run_to(len(batch.flat.steps))
        return [batch.floats[slot] for slot in batch.flat.returned]


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
        self.site = stream.flat.sites[index]
        self.correction: Callable[[Batch, jax.Array], jax.Array] | None = None

    @property
    def original(self) -> jax.Array:
        """The float model's parameter."""
        flat = self.stream.flat
        return flat.state[flat.slot_of[self.site.path]]

    def put(self, parameter: jax.Array) -> None:
        """Let the quantized model go on with another parameter.

        Args:
            parameter: in the parameter's shape.
        """
        self.stream.parameters[self.site.path] = parameter

    def site_in(self, batch: Batch) -> ContractionSite:
        """The site in the program that a batch goes through: another one for each shape of the batches."""
        return batch.flat.sites[self.index]

    def again(self) -> Iterator[Visit]:
        """This visit, then those of the later sites that contract the same numbers: the steps of a recurrence.

        Copies of the values go on to these, through the model as it is now; the stream stays where it is.
        """
        yield self
        numbered = enumerate(self.stream.flat.sites)
        later = [n for n, site in numbered if n > self.index and site.same_as(self.site)]
        if later:
            for visit in self.stream.copied().visits(self.index):
                if visit.index in later:
                    yield visit
                if visit.index == later[-1]:
                    return

    def total_statistics(self, *names: str) -> Statistics:
        """Sums over the inputs of all batches at this site, and at the later ones that contract the same numbers.

        Args:
            names: attributes of `Statistics`.

        Raises:
            ValueError: see `statistics`.
        """
        return functools.reduce(Statistics.merged, (visit.statistics(*names) for visit in self.again()))

    def statistics(self, *names: str) -> Statistics:
        """Sums over the inputs of all batches.

        Args:
            names: attributes of `Statistics`.

        Raises:
            ValueError: they are not finite; the text names the site.
        """

        def sums(batch: Batch) -> Statistics:
            site = self.site_in(batch)
            floats, quantized = self._operands(batch, site)
            rest = self._rest(batch)
            if not names:
                shapes, own = jax.eval_shape(site.matrices.samples, floats, *rest)
                if own is None:  # the count alone: no patches of a convolution's input
                    return Statistics(jnp.full(shapes.shape[:1], shapes.shape[1], jnp.float32), {})
            samples, own = site.matrices.samples(floats, *rest)
            return Statistics.of(samples, site.matrices.samples(quantized, *rest)[0], names, own)

        total = functools.reduce(Statistics.merged, map(sums, self.stream.batches))
        self._check_finite(total.is_finite())
        return total

    def _check_finite(self, finite: bool) -> None:
        if not finite:
            raise ValueError(
                f"{self.site.name} ({self.site.path}): its inputs in the calibration data hold nan or inf, or are "
                "so large that their squares are.\n"
                "  cure: find the batch with jnp.isfinite; a nan may also come from an earlier operation of the model"
            )

    def output_error(self, difference: jax.Array, weights: jax.Array) -> jax.Array:
        """The mean squared error of the site's output, relative to the output, with the quantized model's inputs.

        As `solver.output_error` of `total_statistics`, by contractions instead of a Hessian; in a stack each sample
        counts alike, where that counts each matrix alike.

        Args:
            difference: of the weights, `(stack, rows, columns)`.
            weights: likewise.

        Raises:
            ValueError: see `statistics`.
        """
        error = total = jnp.float32(0)
        for visit in self.again():
            for batch in visit.stream.batches:
                error += visit._output_size(batch, difference)
                total += visit._output_size(batch, weights)
        self._check_finite(bool(jnp.isfinite(error + total)))
        return error / jnp.where(total > 0, total, 1.0)

    def _output_size(self, batch: Batch, weights: jax.Array) -> jax.Array:
        """The squared norm of what other weights make of the quantized model's input."""
        site = self.site_in(batch)
        _, quantized = self._operands(batch, site)
        operand = site.matrices.weight.array(weights).astype(batch.floats[site.weight].dtype)
        output = site.contract(operand, quantized, *self._rest(batch))
        return jnp.square(output.astype(jnp.float32)).sum()

    def contract(self, batch: Batch) -> None:
        """Contract the site's operands, in both models."""
        slot = self.site_in(batch).step.outputs[0]
        batch.floats[slot], output = self.outputs(batch, self.stream.parameters.get(self.site.path))
        batch.quantized[slot] = output if self.correction is None else output + self.correction(batch, output)

    def outputs(
        self, batch: Batch, parameter: jax.Array | None, quantize_input: QuantizeInput | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The site's output in the float model, and in the quantized one.

        Args:
            batch: with the inputs.
            parameter: what the quantized model contracts; None for the float model's.
            quantize_input: from the float model's input to the quantized model's; None for its own.
        """
        site = self.site_in(batch)
        floats, quantized = self._operands(batch, site)
        raw = batch.quantized[site.activation]
        if quantize_input is not None:
            raw = batch.floats[site.activation]
            quantized = quantize_input(site, raw)
        before = after = self._contracted(batch, None, floats)
        if parameter is not None or floats is not quantized:
            after = self._contracted(batch, parameter, quantized)
        # An update beside the parameter contracts inputs that are not quantized.
        update = None if parameter is None else self.stream.updates.get(site.path)
        return before, after if update is None else after + self._contracted(batch, update, raw)

    def _contracted(self, batch: Batch, parameter: jax.Array | None, x: jax.Array) -> jax.Array:
        """The output of the site: the contraction of an input with a parameter, None for the float model's."""
        site = self.site_in(batch)
        weight = batch.floats[site.weight]
        if parameter is not None:
            weight = site.places.taken(parameter).astype(weight.dtype)
        return site.contract(weight, x, *self._rest(batch))

    def _rest(self, batch: Batch) -> list[jax.Array]:
        """What the site contracts beside its weight and its input: the sizes of groups of rows."""
        return [batch.floats[slot] for slot in self.site_in(batch).step.inputs[2:]]

    def _operands(self, batch: Batch, site: ContractionSite) -> tuple[jax.Array, jax.Array]:
        x, y = batch.floats[site.activation], batch.quantized[site.activation]
        floats, quantize = self.stream.transformed(site, x), self.stream.quantize_input
        if quantize is None:
            return floats, floats if x is y else self.stream.transformed(site, y)
        return floats, quantize(site, y)


def _check_same_sites(batches: Sequence[Batch]) -> None:
    """Refuse calls that contract other parameters than the first, or the same ones in another order."""
    expected = [(site.name, site.path) for site in batches[0].flat.sites]
    for number, batch in enumerate(batches):
        sites = [(site.name, site.path) for site in batch.flat.sites]
        if sites != expected:
            pairs = itertools.zip_longest(expected, sites, fillvalue=("none", ""))
            first, differs = next((a, b) for a, b in pairs if a != b)
            raise ValueError(
                f"batch {number} of the calibration data runs other contractions than batch 0: {len(sites)} instead of "
                f"{len(expected)}, of which the first to differ is {differs[0]} instead of {first[0]}.\n"
                "  cure: batches for which the model does the same; for a recurrence, sequences of one length"
            )


def module_around(sites: Sequence[ContractionSite]) -> str:
    """The path of the innermost module that runs all of some sites; empty for the model itself.

    Args:
        sites: of a program.
    """
    paths = [site.step.path.split(".") for site in sites]
    same = itertools.takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in same)


class Block:
    """What a module returns when some of its sites contract other weights; each other value is the float model's.

    Args:
        visit: of the first of these sites: what the module reads is there.
        names: of the sites.
        path: of the module.
    """

    def __init__(self, visit: Visit, names: Collection[str], path: str) -> None:
        self._batches: list[tuple[Batch, set[Slot], tuple[Slot, ...], Values]] = []
        self._stream = visit.stream
        for batch in visit.stream.batches:
            flat, floats = batch.flat, dict(batch.floats)
            changed, exits = _reached(visit, flat, names, path)
            for slot in exits:
                flat.evaluated(slot, floats, self._run_in(flat))
            self._batches.append((batch, changed, exits, floats))

    @property
    def reaches(self) -> bool:
        """Whether the sites change anything that the module returns."""
        return all(exits for _, _, exits, _ in self._batches)

    def error(self, weights: Mapping[str, jax.Array]) -> float:
        """The squared error of what the module returns, added over all batches.

        Args:
            weights: name of a site -> the parameter that it contracts instead.
        """
        total = jnp.float32(0)
        for batch, changed, exits, floats in self._batches:
            values = {slot: value for slot, value in floats.items() if slot not in changed}
            for site in batch.flat.sites:
                if site.name in weights:
                    value = site.places.taken(weights[site.name])
                    values[site.weight] = value.astype(floats[site.weight].dtype)
            for slot in exits:
                after = batch.flat.evaluated(slot, values, self._run_in(batch.flat)).astype(jnp.float32)
                total = total + jnp.square(after - floats[slot].astype(jnp.float32)).sum()
        return float(total)

    def _run_in(self, flat: FlatProgram) -> Run:
        """How steps are run: sites contract transformed inputs."""
        sites = {site.step.outputs: site for site in flat.sites}

        def run(step: FlatStep, operands: list[jax.Array]) -> list[jax.Array]:
            site = sites.get(step.outputs)
            if site is not None:
                operands[1 - site.place] = self._stream.transformed(site, operands[1 - site.place])
            return step.run(*operands)

        return run


def _reached(
    visit: Visit, flat: FlatProgram, names: Collection[str], path: str
) -> tuple[set[Slot], tuple[Slot, ...]]:
    """The slots that depend on the weights of sites within a module, and those of them that are read outside.

    Within it are its steps from the visited site on, in the turn of the loops in which the site is.
    """
    begin, turn, inside = flat.sites[visit.index].index, visit.site.step.turn, set[int]()
    weights = {site.weight for site in flat.sites if site.name in names}
    changed = {*weights}
    for index, step in enumerate(flat.steps[begin:], begin):
        if step.turn[: len(turn)] == turn and f"{step.path}.".startswith(f"{path}."):
            inside.add(index)
            changed.update(step.outputs if changed & {*step.inputs} else ())
    changed -= weights
    exits = (slot for slot in changed if slot in flat.outputs or not inside >= {*flat.touching[slot]})
    return changed, tuple(sorted(exits))
