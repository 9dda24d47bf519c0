"""Runs a program equation by equation, with quantizers inserted where a policy wants them."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence

from jqinject.dot import DEQUANTIZE
from jqinject.program import handlers, nested, templates
from jqinject.program.cache_writes import opened, written
from jqinject.program.jaxpr import Body, Equation, Function
from jqinject.program.kept_state import READ, WRITTEN
from jqinject.program.operations import FUNCTIONS, operation_of
from jqinject.program.parameters import follow_stored, parameter
from jqinject.program.quantizers import Quantizers
from jqinject.program.run import OperationRun, Run
from jqinject.program.scopes import BEGIN, END, path_in
from jqinject.program.tracked_value import Tracked, plain


class Interpreter(Run):
    """One run of a program: see `Run`."""

    _entered = Tracked(None)

    def run(self, body: Body, inputs: Sequence[Tracked], path: str = "") -> list[Tracked]:
        """See `Run`."""

        def step(eqn: Equation, inputs: list[Tracked]) -> list[Tracked]:
            self.equation = eqn
            where = path_in(eqn.scopes) or path
            if isinstance(eqn, Function) and self.region is None:
                operand = parameter(self, inputs[0])
                return handlers.handle(OperationRun(self, operation_of(eqn.name), where, [operand], eqn))
            outputs = self._run_equation(eqn, inputs, where)
            return self.kept.followed(eqn, inputs, outputs) if self.region is None else outputs

        return templates.with_functions(body).run(inputs, step, Tracked)

    def _run_equation(self, eqn: Equation, inputs: list[Tracked], where: str) -> list[Tracked]:
        if eqn.label.startswith((BEGIN + ":", END + ":")):
            return [self._cross(eqn.label, inputs[0], where)]
        if eqn.label.startswith(READ):
            return [self.kept.read(eqn.label, inputs[0])]
        if eqn.label.startswith(WRITTEN):
            return [self.kept.write(eqn.label, inputs[0], *eqn.is_read)]
        if not any(x.is_activation for x in inputs):
            return self.constant(lambda: self._run_marked(eqn, inputs, where))
        return self._run_marked(eqn, inputs, where)

    def _run_marked(self, eqn: Equation, inputs: list[Tracked], where: str) -> list[Tracked]:
        name = eqn.name
        if self.region is not None:
            return [plain(value, inputs) for value in eqn.bind([x.array for x in inputs])]
        function = eqn.function
        if any(x.form is not None for x in inputs) and (name not in nested.CALLS or function == DEQUANTIZE):
            return follow_stored(OperationRun(self, operation_of(name), where, inputs, eqn))
        if function in FUNCTIONS:
            name = str(function)
        elif name in nested.CALLS:
            with self._mapping(eqn):
                return nested.CALLS[name](self, eqn, list(map(self.kept.newest, inputs)), where)
        cache = written(self, eqn, inputs, where)
        if cache is not None:
            return cache
        operands = [opened(parameter(self, x)) for x in inputs]
        operation = operation_of("einsum" if eqn.is_einsum else name)
        return handlers.handle(OperationRun(self, operation, where, operands, eqn))

    @contextlib.contextmanager
    def _mapping(self, eqn: Equation) -> Iterator[None]:
        """The names of equations within a program do not tell what is around it."""
        before = self.mapped
        self.mapped = self.maps(eqn)
        yield
        self.mapped = before

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

    def within(
        self,
        quantizers: Quantizers,
        counts: collections.Counter[tuple[str, str]] | None = None,
        layers: int = 0,
    ) -> Interpreter:
        """See `Run`."""
        run = Interpreter(self.policy, quantizers, names=self.names)
        run.counts = (self.counts if counts is None else counts).copy()
        run.region, run.mapped, run.equation = self.region, self.mapped, self.equation
        run.kept = self.kept.within()
        run.stack = (*self.stack, layers) if layers else self.stack
        return run
