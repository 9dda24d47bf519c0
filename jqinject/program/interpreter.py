"""Runs a program equation by equation, with quantizers inserted where a policy wants them.

Some functions have no name in a program: `jax.nn.softmax` is five to nine equations. Such a function is traced for the
actual shape, and the program's equations are compared with that trace but for the layout of the arrays, so the pattern
follows the versions of the library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot import DEQUANTIZE
from jqinject.program import handlers, nested
from jqinject.program.cache_writes import opened, written
from jqinject.program.jaxpr import Body, Equation, Function, Skeleton
from jqinject.program.kept_state import READ, WRITTEN
from jqinject.program.operations import FUNCTIONS, operation_of
from jqinject.program.parameters import follow_stored, parameter
from jqinject.program.run import OperationRun, Run
from jqinject.program.scopes import BEGIN, END, path_in
from jqinject.program.tracked_value import Tracked, plain

OPERATIONS_OF_JIT = FUNCTIONS | {DEQUANTIZE}
"""Compiled functions that are one operation."""


class Interpreter(Run):
    """One run of a program: see `Run`."""

    _entered = Tracked(None)

    def run(self, body: Body, inputs: Sequence[Tracked], path: str = "") -> list[Tracked]:
        """See `Run`."""

        def step(eqn: Equation, inputs: list[Tracked]) -> list[Tracked]:
            self.sources = tuple(x.sources for x in inputs)
            places = self.recorded.occurrences
            before, where = len(places), path_in(eqn.scopes) or path
            inlined = (
                self.region is None and nested.runs_inside(eqn) and eqn.function not in OPERATIONS_OF_JIT
            )
            outputs = self._run_equation(eqn, inputs, where)
            if inlined:
                return outputs
            own = frozenset(place.name for place in places[before:])
            sources = own or own.union(*(x.sources for x in inputs))
            outputs = [replace(x, sources=sources) for x in outputs]
            return self.kept.followed(eqn, inputs, outputs) if self.region is None else outputs

        return with_functions(body).run(inputs, step, Tracked)

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
            # The names of equations within a program do not tell what is around it.
            before, self.mapped = self.mapped, self.maps(eqn)
            outputs = nested.CALLS[name](self, eqn, list(map(self.kept.newest, inputs)), where)
            self.mapped = before
            return outputs
        cache = written(self, eqn, inputs, where)
        if cache is not None:
            return cache
        operands = [opened(parameter(self, x)) for x in inputs]
        operation = operation_of("einsum" if eqn.is_einsum else name)
        return handlers.handle(OperationRun(self, operation, where, operands, eqn))

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


def _average_pool(x: jax.Array, **window: tuple[int, ...]) -> jax.Array:
    return jax.lax.reduce_window_sum_p.bind(x, **window) / float(np.prod(window["window_dimensions"]))


Template = tuple[Callable[..., jax.Array], dict[str, object]]
"""A function of one array, and its further arguments: hashable, so that it is traced once for each shape."""
_WINDOW = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")


def _templates(first: Equation) -> tuple[str, list[Template]]:
    """The name of the function that may begin with an equation, and what it may be."""
    match first.name:
        case "reduce_max":
            return "softmax", [(jax.nn.softmax, {})]
        case "reduce_sum":
            return "mean", [(jnp.mean, {"axis": tuple(first.params["axes"])})]
        case "reduce_window_sum":
            return "avg_pool", [(_average_pool, {name: tuple(first.params[name]) for name in _WINDOW})]
        case "integer_pow" | "mul" | "square" | "neg" | "div" | "pow" | "sqrt":
            return "gelu", [(jax.nn.gelu, {"approximate": approximate}) for approximate in (True, False)]
    return "", []


def with_functions(body: Body) -> Body:
    """A body in which the equations that make up a known function are one."""
    equations: list[Equation] = []
    index = 0
    while index < len(body.equations):
        function = _function_at(body, index)
        equations.append(function or body.equations[index])
        index += 1 if function is None else function.length
    return body.with_equations(equations)


def _function_at(body: Body, start: int) -> Function | None:
    """The known function that begins at an equation, if any."""
    first = body.equations[start]
    name, templates = _templates(first)
    floats = (at for at in first.variables if jnp.issubdtype(first.inputs[at].dtype, jnp.floating))
    place = next(floats, None) if templates else None
    if place is None:
        return None
    operand = first.inputs[place]
    # What a function is traced to depends on these settings.
    settings = jnp.result_type(float), jax.sharding.get_abstract_mesh()
    patterns = (
        _traced(function, tuple(arguments.items()), operand.shape, operand.dtype, settings)
        for function, arguments in templates
    )
    functions = (body.matched(start, place, name, pattern) for pattern in patterns)
    return next((function for function in functions if function is not None), None)


@functools.lru_cache(maxsize=256)  # of programs of a few equations
def _traced(
    function: Callable[..., jax.Array],
    arguments: tuple[tuple[str, object], ...],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    settings: object,
) -> Skeleton:
    jaxpr = jax.make_jaxpr(functools.partial(function, **dict(arguments)))(jax.ShapeDtypeStruct(shape, dtype))
    return Body.of(jaxpr).skeleton()
