"""Runs a program equation by equation, with quantizers inserted where a policy wants them."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jqinject.dot import DEQUANTIZE
from jqinject.program import handlers, nested, templates
from jqinject.program.cache_writes import opened, written
from jqinject.program.operations import FUNCTIONS, Operation, operation_of
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
from jqinject.program.tracing.kept_state import MARK, KeptState
from jqinject.program.tracing.scopes import BEGIN, END, path_in
from jqinject.program.tracked_value import Origin, Tracked, plain
from jqinject.program.weights.parameters import follow_stored, parameter

EINSUM = re.compile(r"(?:^|[/(])[A-Za-z.]*(?:,[A-Za-z.]*)+->[A-Za-z.]*\)*$")


def is_einsum(eqn: Any) -> bool:
    """Whether a `dot_general` comes from `jnp.einsum`."""
    return EINSUM.search(str(eqn.source_info.name_stack)) is not None


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

    def run(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Tracked], path: str = ""
    ) -> list[Tracked]:
        """Run a program.

        Args:
            jaxpr: the program.
            consts: values of its constants.
            inputs: its inputs.
            path: of the module that equations without a mark of their own belong to.
        """
        env: dict[Any, Tracked] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {
            var: c if isinstance(c, Tracked) else Tracked(c)
            for var, c in zip(jaxpr.constvars, consts, strict=True)
        }
        last = _last_use(jaxpr)
        index = 0
        while index < len(jaxpr.eqns):
            match = (
                None
                if self.region
                else templates.find(jaxpr.eqns, index, lambda var, end: last.get(var, -1) >= end)
            )
            if match is not None:
                self._run_function(jaxpr.eqns[index : index + match.length], match, env, path)
                index += match.length
                continue
            eqn = jaxpr.eqns[index]
            inputs = [self._read(env, var) for var in eqn.invars]
            outputs = self._run_equation(eqn, inputs, path)
            if self.region is None:
                outputs = self.kept.followed(eqn, inputs, outputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
            for var, out in zip(eqn.outvars, outputs, strict=True):
                if out.state is not None and var not in last:
                    self.kept.thrown_away(out)
            index += 1
        return [self._read(env, var) for var in jaxpr.outvars]

    def _read(self, env: dict[Any, Tracked], var: Any) -> Tracked:
        return self.kept.current(_read(env, var))

    def _run_function(self, equations: Sequence[Any], match: templates.Match, env: Any, path: str) -> None:
        where = path_in(equations[0].source_info.name_stack) or path
        self._equation = equations[0]
        x = parameter(self, self._read(env, match.input))

        def evaluate(value: Any) -> list[Any]:
            local: dict[Any, Any] = {match.input: value}
            for eqn in equations:
                values = [_local(local, env, var) for var in eqn.invars]
                local.update(zip(eqn.outvars, bind(eqn, values), strict=True))
            return [local[var] for var in match.outputs]

        operation = operation_of(match.name)
        outputs = handlers.handle(self, operation, where, [x], lambda values: evaluate(*values))
        env.update(zip(match.outputs, outputs, strict=True))

    def _run_equation(self, eqn: Any, inputs: list[Tracked], path: str) -> list[Tracked]:
        name = eqn.primitive.name
        self._equation = eqn
        where = path_in(eqn.source_info.name_stack) or path
        if name == "name" and self._marks_region(eqn.params["name"]):
            return [self._cross(eqn.params["name"], inputs[0], where)]
        if name == "name" and eqn.params["name"].startswith(MARK):
            return [self.kept.marked(eqn.params["name"], inputs[0])]
        if not any(x.is_activation for x in inputs):
            return self.constant(lambda: self._run_marked(eqn, inputs, where))
        return self._run_marked(eqn, inputs, where)

    def _run_marked(self, eqn: Any, inputs: list[Tracked], where: str) -> list[Tracked]:
        name = eqn.primitive.name
        if self.region is not None:
            return [plain(value, inputs) for value in bind(eqn, [x.array for x in inputs])]
        function = nested.name_of_function(eqn)
        if any(x.form is not None for x in inputs) and (name not in nested.CALLS or function == DEQUANTIZE):
            return follow_stored(self, name, where, inputs, lambda values: bind(eqn, values), function)
        if function in FUNCTIONS:
            name = str(function)
        elif name in nested.CALLS:
            with self._mapping(eqn):
                return nested.CALLS[name](self, eqn, inputs, where)
        cache = written(self, eqn, inputs, where)
        if cache is not None:
            return cache
        inputs = [opened(parameter(self, x)) for x in inputs]
        operation = self._einsum_or(operation_of(name), eqn)
        return handlers.handle(
            self, operation, where, inputs, lambda values: bind(eqn, values), eqn=eqn, unknown_name=name
        )

    @contextlib.contextmanager
    def _mapping(self, eqn: Any) -> Iterator[None]:
        """The names of equations within a program do not tell what is around it."""
        before = self.mapped
        self.mapped = self.maps(eqn)
        yield
        self.mapped = before

    def maps(self, eqn: Any) -> bool:
        """Whether an equation is under `vmap`."""
        return self.mapped or "vmap(" in str(eqn.source_info.name_stack)

    @staticmethod
    def _einsum_or(operation: Operation, eqn: Any) -> Operation:
        return operation_of("einsum") if operation.name == "dot_general" and is_einsum(eqn) else operation

    # --- modules that are one operation

    def _marks_region(self, label: str) -> bool:
        return label.startswith((BEGIN + ":", END + ":"))

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

    @staticmethod
    def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
        """The outputs of one equation."""
        return bind(eqn, values)

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


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of one equation."""
    # Newer versions of JAX have functions among the parameters.
    parts = eqn.primitive.get_bind_params(eqn.params)
    functions, parameters = parts if isinstance(parts, tuple) else ((), parts)
    scope = str(eqn.source_info.name_stack)
    with jax.named_scope(scope) if scope else contextlib.nullcontext():
        found = eqn.primitive.bind(*functions, *values, **parameters)
    return list(found) if eqn.primitive.multiple_results else [found]


def _read(env: dict[Any, Tracked], var: Any) -> Tracked:
    if isinstance(var, core.Literal):
        dtype = var.aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
        # Of NumPy: each array of JAX would be put on a device, to become a constant of the new program.
        return Tracked(np.asarray(var.val, dtype))
    return env[var]


def _local(local: dict[Any, Any], env: dict[Any, Tracked], var: Any) -> Any:
    inside = not isinstance(var, core.Literal) and var in local
    return local[var] if inside else _read(env, var).array


def _last_use(jaxpr: Any) -> dict[Any, int]:
    """The index of the last equation that reads each variable; the number of equations for outputs."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last.update({var: index for var in eqn.invars if not isinstance(var, core.Literal)})
    last.update({var: len(jaxpr.eqns) for var in jaxpr.outvars if not isinstance(var, core.Literal)})
    return last
