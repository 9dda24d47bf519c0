"""Runs a program equation by equation, with quantizers inserted where a policy wants them."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jqinject.dot import DEQUANTIZE
from jqinject.program import handlers, nested, templates
from jqinject.program.cache_writes import opened, written
from jqinject.program.jaxpr import Body, Equation, Function
from jqinject.program.kept_state import MARK, KeptState
from jqinject.program.operations import FUNCTIONS, Operation, operation_of
from jqinject.program.parameters import follow_stored, parameter
from jqinject.program.policy import (
    NO_AXES,
    ActivationProduct,
    Choice,
    Policy,
    Site,
    SummedAxes,
    WeightUse,
    site_of,
)
from jqinject.program.quantizers import Quantizers
from jqinject.program.same_places import PLAIN, Occurrence, SiteNames
from jqinject.program.scopes import BEGIN, END, path_in
from jqinject.program.tracked_value import Origin, Tracked, plain


class Interpreter:
    """One run of a program.

    Args:
        policy: decides what is quantized.
        quantizers: quantize at a site, and keep its statistics.
        constants_now: whether values that depend on no input are computed while the program is traced.
        names: of its sites in the model.
    """

    def __init__(
        self,
        policy: Policy,
        quantizers: Quantizers,
        constants_now: bool = False,
        names: SiteNames = PLAIN,
    ) -> None:
        self.policy = policy
        self.quantizers = quantizers
        self.constants_now = constants_now
        self.names = names
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.sites: dict[str, Site] = {}
        self.uses: list[WeightUse] = []
        self.adapted: set[tuple[tuple[Any, ...], str]] = set()
        self.products: list[ActivationProduct] = []
        self.occurrences: list[Occurrence] = []
        self.region: tuple[str, str] | None = None
        self.mapped = False
        self.stack: tuple[int, ...] = ()
        self._entered = Tracked(None)
        self._equation: Any = None
        self.kept = KeptState()

    # --- programs

    def run(self, body: Body, inputs: Sequence[Tracked], path: str = "") -> list[Tracked]:
        """Run a program.

        Args:
            body: the program.
            inputs: its inputs.
            path: of the module that equations without a mark of their own belong to.
        """

        def step(eqn: Equation, inputs: list[Tracked]) -> list[Tracked]:
            inputs = list(map(self.kept.current, inputs))
            if isinstance(eqn, Function) and self.region is None:
                return self._run_function(eqn, parameter(self, inputs[0]), path)
            outputs = self._run_equation(eqn, inputs, path)
            if self.region is None:
                outputs = self.kept.followed(eqn, inputs, outputs)
            for out, is_read in zip(outputs, eqn.is_read, strict=True):
                if out.state is not None and not is_read:
                    self.kept.thrown_away(out)
            return outputs

        return list(map(self.kept.current, templates.with_functions(body).run(inputs, step, Tracked)))

    def _run_function(self, eqn: Function, x: Tracked, path: str) -> list[Tracked]:
        self._equation = eqn
        where = path_in(eqn.scopes) or path
        return handlers.handle(self, operation_of(eqn.name), where, [x], eqn)

    def _run_equation(self, eqn: Equation, inputs: list[Tracked], path: str) -> list[Tracked]:
        self._equation = eqn
        where = path_in(eqn.scopes) or path
        if eqn.label.startswith((BEGIN + ":", END + ":")):
            return [self._cross(eqn.label, inputs[0], where)]
        if eqn.label.startswith(MARK):
            return [self.kept.marked(eqn.label, inputs[0])]
        if not any(x.is_activation for x in inputs):
            return self.constant(lambda: self._run_marked(eqn, inputs, where))
        return self._run_marked(eqn, inputs, where)

    def _run_marked(self, eqn: Equation, inputs: list[Tracked], where: str) -> list[Tracked]:
        name = eqn.name
        if self.region is not None:
            return [plain(value, inputs) for value in eqn.bind([x.array for x in inputs])]
        function = eqn.function
        if any(x.form is not None for x in inputs) and (name not in nested.CALLS or function == DEQUANTIZE):
            return follow_stored(self, name, where, inputs, eqn.bind, function)
        if function in FUNCTIONS:
            name = str(function)
        elif name in nested.CALLS:
            with self._mapping(eqn):
                return nested.CALLS[name](self, eqn, inputs, where)
        cache = written(self, eqn, inputs, where)
        if cache is not None:
            return cache
        inputs = [opened(parameter(self, x)) for x in inputs]
        operation = operation_of("einsum" if eqn.is_einsum else name)
        return handlers.handle(self, operation, where, inputs, eqn)

    @contextlib.contextmanager
    def _mapping(self, eqn: Equation) -> Iterator[None]:
        """The names of equations within a program do not tell what is around it."""
        before = self.mapped
        self.mapped = self.maps(eqn)
        yield
        self.mapped = before

    def maps(self, eqn: Equation) -> bool:
        """Whether an equation is under `vmap`."""
        return self.mapped or "vmap(" in eqn.scopes

    # --- modules that are one operation

    def _cross(self, label: str, x: Tracked, path: str) -> Tracked:
        """Enter or leave a module that is one operation, of which only the input and the output are quantized.

        Args:
            label: of the mark; a Linen module's holds its path within its wrapper.
            x: the marked value.
            path: of the module within the model.
        """
        edge, region, own = label.split(":", 2)
        if edge == BEGIN:
            if self.region is not None:  # one module of this kind within another
                return x
            self.region = (region, own)
            self._entered = x
            return handlers.enter_region(self, region, path, x)
        if self.region != (region, own):
            return x
        self.region = None
        return handlers.leave_region(self, region, path, self._entered, x)

    # --- programs within: see `nested` and `carrying`

    def within(self, quantizers: Quantizers, counts: Any = None, layers: int = 0) -> Interpreter:
        """An interpreter for a part of the program.

        Args:
            quantizers: for the part.
            counts: of operations before it; None for the current ones.
            layers: the number of its steps if it is a loop over stacked layers.
        """
        run = Interpreter(self.policy, quantizers, names=self.names)
        run.counts = (self.counts if counts is None else counts).copy()
        run.region, run.mapped, run._equation = self.region, self.mapped, self._equation
        run.kept = self.kept.within()
        run.stack = (*self.stack, layers) if layers else self.stack
        return run

    # --- for the handlers

    def constant(self, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, which depends on no input; computed while tracing if `constants_now`."""
        with jax.ensure_compile_time_eval() if self.constants_now else contextlib.nullcontext():
            return compute()

    def choose(
        self,
        path: str,
        operation: Operation,
        weight_path: tuple[Any, ...] = (),
        read: tuple[Any, ...] = (),
    ) -> tuple[Choice | None, str]:
        """The policy's choice for an operation, and the name of this occurrence of it.

        Args:
            path: of the module.
            operation: the operation.
            weight_path: of the parameter for which there may be a rule.
            read: what tells the place from others; None for `weight_path`.
        """
        number = self.counts[path, operation.name]
        self.counts[path, operation.name] += 1
        name = f"{path}.{operation.name}{number}" if path else f"{operation.name}{number}"
        self.note(path, operation.name, name, read or weight_path)
        return self.policy.choose(path, operation, weight_path, name), name

    def note(self, path: str, operation: str, name: str, read: tuple[Any, ...]) -> None:
        """Note an operation, or the call of a layer; see `Occurrence`."""
        self.occurrences.append(Occurrence(path, operation, read, self._equation, self.names.prefix + name))

    def quantized(
        self, x: Tracked, quantizer: Any, name: str, axes: SummedAxes = NO_AXES, **overrides: Any
    ) -> Tracked:
        """`x` quantized at the site `name`, once for all operations that use the same quantizer.

        Args:
            x: the value.
            quantizer: the injector.
            name: of the site, without the prefix.
            axes: see `Site`.
            overrides: names that the injector redeclares here.
        """
        overrides |= _known_range(x)
        same = (quantizer, axes, tuple(sorted(overrides.items())))
        key = (*same, self.quantizers.mode)
        if key not in x.twins:
            full = self._site_name(x, same, name)
            site = site_of(x, full, quantizer, overrides, axes, self.stack)
            self.sites[site.name] = site
            twin = x.with_value(self.quantizers.quantize(site, x.array))
            twin.pending, twin.quantized, twin.site = None, True, site.name
            x.twins[key] = twin
        return x.twins[key]

    def _site_name(self, x: Tracked, same: tuple[Any, ...], name: str) -> str:
        """The name of the site where a value was first quantized so; else the name given."""
        known = next((twin.site for other, twin in x.twins.items() if other[:3] == same), "")
        return known or self.names.full(name)

    def transformed(self, x: Tracked, quantizer: Any, name: str, axes: SummedAxes) -> Any:
        """The array that the quantizer of a site sees: `x` through the transform before it.

        Arguments as for `quantized`.
        """
        if not axes.transformed or axes.turned:
            return x.array
        overrides = _known_range(x)
        same = (quantizer, axes, tuple(sorted(overrides.items())))
        site = site_of(x, self._site_name(x, same, name), quantizer, overrides, axes)
        return self.quantizers.transformed(site, x.array)

    def output(self, value: Any, choice: Choice | None, name: str, *, inherited: Any = None) -> Tracked:
        """An output: its quantizer is left to the next operation, or applied at once."""
        wanted = inherited if choice is None or choice.output is None else choice.output
        out = Tracked(value, Origin.ACTIVATION)
        if wanted is None or not out.is_float or (choice is not None and choice.dynamic):
            return out
        if self.policy.delayed:
            out.pending = wanted
            return out
        return self.quantized(out, wanted, f"{name}_output")


def _known_range(x: Tracked) -> dict[str, Any]:
    return {"fixed_range": x.fixed_range} if x.fixed_range is not None and not x.is_weight else {}
