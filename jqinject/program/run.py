"""One run of a program: what it asks of the policy and the quantizers, and the sites that it comes across.

Handlers of operations get a `OperationRun` of a `Run`. Next: `interpreter`, which runs the equations.
"""

from __future__ import annotations

import collections
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import jax

from jqinject.program import jaxpr, kept_state, operations
from jqinject.program.policy import PLAIN, Choice, FoundSites, Occurrence, Policy, Site, SiteNames
from jqinject.program.quantizers import Quantizers
from jqinject.program.tracked_value import Origin, Path, Tracked, shape_of

V = TypeVar("V")


class Run:
    """Abstract: one run of a program.

    Args:
        policy: decides what is quantized.
        quantizers: quantize at a site, and keep its statistics.
        names: of its sites in the model.

    Attributes:
        constants_now: see `Policy`; not in a part of the program.
    """

    #: Of each operand of the equation that is run now: see `Occurrence`.
    sources: tuple[frozenset[str], ...] = ()
    #: The branches and mapped functions around the equations, as in the names of sites: `cond0.branch1`.
    part: str = ""
    #: The axes of the mesh over which the `shard_map`s around the equations map.
    mesh_axes: tuple[str, ...] = ()
    #: Whether a derivative rule of the model's own replaces the derivatives of the equations.
    has_rule: bool = False

    def __init__(self, policy: Policy, quantizers: Quantizers, names: SiteNames = PLAIN) -> None:
        self.policy = policy
        self.quantizers = quantizers
        self.names = names
        self.constants_now = policy.constants_now
        self.counts: collections.Counter[str] = collections.Counter()
        self.recorded = FoundSites()
        self.region: tuple[str, str] | None = None
        self.mapped = False
        self.stack: tuple[int, ...] = ()
        self.kept = kept_state.KeptState()

    @abstractmethod
    def run(self, body: jaxpr.Body, inputs: Sequence[Tracked], path: str = "") -> list[Tracked]:
        """Run a program.

        Args:
            body: the program.
            inputs: its inputs.
            path: of the module that equations without a mark of their own belong to.
        """

    def within(self, quantizers: Quantizers, layers: int) -> Self:
        """A run of a part of the program.

        Args:
            quantizers: for the part.
            layers: the number of its steps if it is a loop over stacked layers.
        """
        run = type(self)(self.policy, quantizers, self.names)
        run.constants_now = False
        run.counts = self.counts.copy()
        run.region, run.mapped, run.sources = self.region, self.mapped, self.sources
        run.part, run.mesh_axes, run.has_rule = self.part, self.mesh_axes, self.has_rule
        run.kept = self.kept.within()
        run.stack = (*self.stack, layers) if layers else self.stack
        return run

    def finder(self, layers: int) -> Self:
        """A run of a part of the program on abstract values, to find its sites; `layers` as for `within`."""
        return self.within(Quantizers(self.quantizers.depths, self.quantizers.again), layers)

    def adopt(self, part: Run) -> None:
        """Take over what the run of a part of the program came across."""
        self.counts |= part.counts
        self.recorded.adopt(part.recorded)

    def constant(self, compute: Callable[[], V]) -> V:
        """The result of `compute`, which depends on no input; computed while tracing if `constants_now`."""
        with jax.ensure_compile_time_eval() if self.constants_now else contextlib.nullcontext():
            return compute()

    def choose(
        self, path: str, operation: operations.Operation, weight_path: Path = (), read: Path = ()
    ) -> tuple[Choice | None, str]:
        """The policy's choice for an operation, and the name of this occurrence of it.

        Args:
            path: of the module.
            operation: the operation.
            weight_path: of the parameter for which there may be a rule.
            read: what tells the place from others; empty for `weight_path`.
        """
        name = self.numbered(path, operation.name)
        self.note(path, operation.name, name, read or weight_path)
        return self.policy.choose(path, operation, weight_path, name), name

    def placed(self, path: str, name: str) -> str:
        """A name below the path of a module, and below the branches and mapped functions around."""
        return ".".join(filter(None, (path, self.part, name)))

    def numbered(self, path: str, name: str) -> str:
        """The name of the next occurrence of an operation, or of a part of the program.

        Args:
            path: of the module.
            name: of the operation, or of the part.
        """
        place = self.placed(path, name)
        number = self.counts[place]
        self.counts[place] += 1
        return f"{place}{number}"

    def numbered_part(self, path: str, name: str) -> str:
        """`part` within the next part of a kind, such as "cond", in the module at a path."""
        return self.numbered(path, name).removeprefix(f"{path}.")

    def note(self, path: str, operation: str, name: str, read: Path) -> None:
        """Note an operation, or the call of a layer; see `Occurrence`."""
        self.recorded.occurrences.append(
            Occurrence(path, operation, read, self.names.prefix + name, self.sources)
        )

    def add(self, site: Site) -> Site:
        """Note a site."""
        self.recorded.sites[site.name] = site
        return site

    def quantized(self, x: Tracked, site: Site) -> Tracked:
        """`x` quantized at a site, once for all operations that use the same quantizer.

        Args:
            x: the value.
            site: its name without the prefix, the quantizer, and the axes that this has to know.
        """
        site, same = self._completed(x, site)
        key = (*same, self.quantizers.mode)
        if key not in x.twins:
            self.add(site)
            twin = x.with_value(self.quantizers.quantize(site, x.array))
            twin.pending, twin.quantized, twin.site = None, True, site.name
            x.twins[key] = twin
        self.quantizers.record(site, x.array, x.twins[key].value)
        return x.twins[key]

    def transformed(self, x: Tracked, site: Site) -> jax.Array:
        """The array that the quantizer of a site sees: `x` through the transform before it."""
        return self.quantizers.transformed(self._completed(x, site)[0], x.array)

    def _completed(self, x: Tracked, site: Site) -> tuple[Site, tuple[object, ...]]:
        """The site of a value, named after the first operation that quantizes it so, and what is the same for these."""
        overrides = site.overrides
        if x.fixed_range is not None and not x.is_weight:
            overrides = {**overrides, "fixed_range": x.fixed_range}
        axes = site.rows, site.transform_axes, site.is_transformed
        same = (site.quantizer, *axes, tuple(sorted(overrides.items())))
        name = next((twin.site for key, twin in x.twins.items() if key[:-1] == same), "")
        site = replace(
            site,
            name=name or self.names.full(site.name),
            overrides=overrides,
            is_weight=x.is_weight,
            shape=shape_of(x),
            weight_path=x.weight_path,
            stack=self.stack,
            mesh_axes=() if x.is_weight else self.mesh_axes,
        )
        return site, same

    def output(
        self, value: jax.Array, choice: Choice | None, name: str, *, inherited: object = None
    ) -> Tracked:
        """An output: its quantizer is left to the next operation, or applied at once."""
        quantizer = inherited if choice is None or choice.output is None else choice.output
        out = Tracked(value, Origin.ACTIVATION)
        if quantizer is None or not out.is_float or (choice is not None and choice.dynamic):
            return out
        if self.policy.delayed:
            out.pending = quantizer
            return out
        return self.quantized(out, Site(f"{name}_output", quantizer))


@dataclass(frozen=True)
class OperationRun:
    """One operation of a run.

    Attributes:
        run: the run.
        operation: its row of the table.
        path: of the module that it belongs to.
        inputs: its operands.
        eqn: its equation.
    """

    run: Run
    operation: operations.Operation
    path: str
    inputs: Sequence[Tracked]
    eqn: jaxpr.Equation

    def choose(self, weight_path: Path = (), read: Path = ()) -> tuple[Choice | None, str]:
        """See `Run.choose`."""
        return self.run.choose(self.path, self.operation, weight_path, read)

    def values(self, operands: Sequence[Tracked] | None = None) -> list[jax.Array]:
        """The outputs for some operands, by default its own, as arrays."""
        return self.eqn.bind([x.array for x in (self.inputs if operands is None else operands)])

    def value(self, operands: Sequence[Tracked] | None = None) -> jax.Array:
        """The only output: see `values`."""
        (value,) = self.values(operands)
        return value
