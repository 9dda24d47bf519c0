"""Runs a program equation by equation, with quantizers inserted where a policy wants them.

Some functions have no name in a program: `jax.nn.softmax` is five to nine equations. Such a function is traced for the
actual shape, and the program's equations are compared with that trace but for the layout of the arrays, so the pattern
follows the versions of the library.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot import DEQUANTIZE
from jqinject.program import cache_writes, contractions, kept_state, parts, quantizers
from jqinject.program.jaxpr import Body, Equation, Function, Skeleton
from jqinject.program.operations import FUNCTIONS, LOGISTIC_RANGE, OPERATIONS, Kind, operation_of
from jqinject.program.parameters import follow, follow_stored, parameter
from jqinject.program.policy import Choice, Site
from jqinject.program.run import OperationRun, Run
from jqinject.program.scopes import BEGIN, END, path_in
from jqinject.program.tracked_value import Origin, Tracked, joined, plain, shape_of


class Interpreter(Run):
    """One run of a program: see `Run`."""

    _entered = Tracked(None)
    _ran_inside = False

    def run(self, body: Body, inputs: Sequence[Tracked], path: str = "") -> list[Tracked]:
        """See `Run`."""

        def step(eqn: Equation, inputs: list[Tracked]) -> list[Tracked]:
            self.sources = tuple(x.sources for x in inputs)
            places = self.recorded.occurrences
            before, where, self._ran_inside = len(places), path_in(eqn.scopes) or path, False
            outputs = self._run_equation(eqn, inputs, where)
            if self._ran_inside and eqn.function != DEQUANTIZE:
                return outputs
            own = frozenset(place.name for place in places[before:])
            sources = own or own.union(*(x.sources for x in inputs))
            outputs = [replace(x, sources=sources) for x in outputs]
            return self.kept.followed(eqn, inputs, outputs) if self.region is None else outputs

        return with_functions(body).run(inputs, step, Tracked)

    def _run_equation(self, eqn: Equation, inputs: list[Tracked], where: str) -> list[Tracked]:
        if eqn.label.startswith((BEGIN + ":", END + ":")):
            return [self._cross(eqn.label, inputs[0], where)]
        if eqn.label.startswith(kept_state.READ):
            return [self.kept.read(eqn.label, inputs[0])]
        if eqn.label.startswith(kept_state.WRITTEN):
            return [self.kept.write(eqn.label, inputs[0], *eqn.is_read)]
        if not any(x.is_activation for x in inputs):
            return self.constant(lambda: self._run_marked(eqn, inputs, where))
        return self._run_marked(eqn, inputs, where)

    def _run_marked(self, eqn: Equation, inputs: list[Tracked], where: str) -> list[Tracked]:
        name = eqn.name
        if self.region is not None:
            return [plain(value, inputs) for value in eqn.bind([x.array for x in inputs])]
        function, is_part = eqn.function, name in parts.PARTS
        if any(x.form is not None for x in inputs) and (not is_part or function == DEQUANTIZE):
            return follow_stored(OperationRun(self, operation_of(name), where, inputs, eqn))
        if function in FUNCTIONS:
            name = str(function)
        elif is_part:
            inputs = list(map(self.kept.newest, inputs))
            if parts.runs_inside(eqn):
                # The names of equations within a program do not tell what is around it.
                before, self.mapped = self.mapped, self.mapped or eqn.is_mapped
                outputs = parts.CALLS[name](self, eqn, inputs, where)
                self.mapped, self._ran_inside = before, outputs is not None
                if outputs is not None:
                    return outputs
            self.kept.check_unchanged_part(eqn)
        step = OperationRun(self, operation_of("einsum" if eqn.is_einsum else name), where, inputs, eqn)
        cache = cache_writes.written(step)
        if cache is not None:
            return cache
        return _handle(replace(step, inputs=[parameter(self, x) for x in inputs]))

    def _cross(self, label: str, x: Tracked, path: str) -> Tracked:
        """Enter or leave a module that is one operation, of which only the input and the output are quantized.

        Args:
            label: of the mark; a Linen module's holds its path within its wrapper.
            x: the marked value.
            path: of the module within the model.
        """
        edge, region, own = label.split(":", 2)
        if edge == BEGIN and self.region is None:
            self.region, self._entered = (region, own), x
            return _enter_region(self, region, path, x)
        if edge == END and self.region == (region, own):
            self.region = None
            return _leave_region(self, region, path, self._entered, x)
        return x  # of one module of this kind within another


def _average_pool(x: jax.Array, **window: tuple[int, ...]) -> jax.Array:
    return jax.lax.reduce_window_sum_p.bind(x, **window) / float(np.prod(window["window_dimensions"]))


#: A function of one array, and its further arguments: hashable, so that it is traced once for each shape.
Template = tuple[Callable[..., jax.Array], dict[str, object]]
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
    operand = jax.ShapeDtypeStruct(first.inputs[place].shape, first.inputs[place].dtype)
    # What a function is traced to depends on these settings.
    settings = jnp.result_type(float), jax.sharding.get_abstract_mesh()
    patterns = (
        _traced(function, tuple(arguments.items()), operand, settings) for function, arguments in templates
    )
    matches = (body.matched(start, place, name, pattern) for pattern in patterns)
    return next((function for function in matches if function is not None), None)


@functools.lru_cache(maxsize=256)  # of programs of a few equations
def _traced(
    function: Callable[..., jax.Array],
    arguments: tuple[tuple[str, object], ...],
    operand: jax.ShapeDtypeStruct,
    settings: object,
) -> Skeleton:
    return Body.of(jax.make_jaxpr(functools.partial(function, **dict(arguments)))(operand)).skeleton()


# --- how each kind of operation is run: its inputs, its output, both or neither are quantized


def _handle(step: OperationRun) -> list[Tracked]:
    """Run one operation."""
    kind = step.operation.kind
    if kind is Kind.CONTRACTION:
        return contractions.contraction(step)
    inputs = [cache_writes.opened(x) for x in step.inputs]
    step = replace(step, inputs=inputs)
    followed = follow(step)
    if followed is not None:
        return followed
    if kind is Kind.TRANSPARENT:
        return [joined(value, inputs) for value in step.values()]
    if not any(x.is_activation for x in inputs):
        return [Tracked(value) for value in step.values()]
    return HANDLERS[kind](step)


def _unknown(step: OperationRun) -> list[Tracked]:
    outputs = [plain(value, step.inputs) for value in step.values()]
    # Integers and booleans are not quantized.
    if any(x.is_float and x.is_activation for x in step.inputs) and any(out.is_float for out in outputs):
        step.run.policy.unknown(step.path, step.eqn.name)
    return outputs


def _operand(run: Run, x: Tracked, choice: Choice | None, name: str) -> Tracked:
    """An operand, quantized with the quantizer pending from its producer, or else with this operation's."""
    if choice is None or x.quantized or not x.is_float:
        return x
    if x.is_weight:
        # Treat a weight that is not contracted like an activation with a known range.
        quantizer = choice.inputs if choice.weight is not None else None
        return x if quantizer is None else run.quantized(x, Site(name, quantizer, {"static": False}))
    quantizer = x.pending or choice.inputs
    if choice.inputs is None or quantizer is None or choice.dynamic:
        return x
    return run.quantized(x, Site(name, quantizer))


def _with_operands(step: OperationRun, choice: Choice | None, name: str) -> list[Tracked]:
    operation, operands = step.operation, list(step.inputs)
    places = range(len(operands)) if operation.inputs is None else operation.inputs
    count = len(places)
    suffixes = {1: [""], 2: ["_lhs", "_rhs"]}.get(count, [f"_input{i}" for i in range(count)])
    for place, suffix in zip(places, suffixes, strict=True):
        x = operands[place]
        # Scalar constants are not quantized.
        if x.is_activation or x.is_weight or shape_of(x) != ():
            quantize = functools.partial(_operand, step.run, choice=choice, name=name + suffix)
            operands[place] = x.masked(quantize) if operation.masked and x.masked else quantize(x)
    return operands


def _quantized(step: OperationRun) -> list[Tracked]:
    choice, name = step.choose()
    operands = _with_operands(step, choice, name)
    if step.operation.name == "silu" and choice is not None and choice.inputs is not None:
        values = [_silu(step.run, operands[0], choice, name)]
    else:
        values = step.values(operands)
    outputs = [step.run.output(value, choice, name) for value in values]
    for out in outputs:
        out.fixed_range = step.operation.output_range
    return outputs


def _silu(run: Run, x: Tracked, choice: Choice, name: str) -> jax.Array:
    """`x * sigmoid(x)`, with the sigmoid quantized."""
    sigmoid = Tracked(jax.nn.sigmoid(x.array), Origin.ACTIVATION, fixed_range=LOGISTIC_RANGE)
    return x.array * _operand(run, sigmoid, choice, f"{name}_sigmoid").array


def _arithmetic(step: OperationRun) -> list[Tracked]:
    run, operation, inputs = step.run, step.operation, step.inputs
    choice, name = step.choose()
    activations = [x for x in inputs if x.is_activation]
    scaled = activations[0] if len(activations) == 1 else None
    if scaled is not inputs[0] and operation.name == "truediv":
        scaled = None  # a constant divided by an activation is not a scaling of it
    fuses = scaled is not None and scaled.fusible and operation.fuses
    if scaled is not None and (fuses or choice is None):
        out = run.output(step.value(), choice, name, inherited=scaled.pending)
        out.fusible = fuses or out.fusible
        return [out]
    if choice is not None and choice.share and len(activations) == 2:
        operands = _sharing_operands(run, inputs, choice, name)
    else:
        operands = _with_operands(step, choice, name)
    return [run.output(run.policy.arithmetic(operation.name, operands, step.eqn.bind), choice, name)]


def _sharing_operands(run: Run, inputs: Sequence[Tracked], choice: Choice, name: str) -> list[Tracked]:
    """Two operands of one shape, quantized together, so that they have one scale.

    Raises:
        ValueError: the quantizer has a scale for each row.
    """
    if quantizers.has_row_scales(choice.inputs):
        raise ValueError(
            f"{name}: share=True gives both operands one scale, and the quantizer makes one for each row of each.\n"
            "  cure: a quantizer with one scale for the tensor, such as Int8ActPerTensorMinMax"
        )
    # Along another axis than the batch, which may be distributed over devices.
    axis = min(1, len(shape_of(inputs[0])))
    both = Tracked(jnp.stack([x.array for x in inputs], axis), Origin.ACTIVATION)
    quantized = run.quantized(both, Site(f"{name}_inputs", choice.inputs))
    parts = jnp.unstack(quantized.array, axis=axis)
    return [
        replace(x.with_value(part), quantized=True, site=quantized.site)
        for x, part in zip(inputs, parts, strict=True)
    ]


def _input_only(step: OperationRun) -> list[Tracked]:
    choice, name = step.choose()
    operands = _with_operands(step, choice, name)
    params, eqn = step.eqn.params, step.eqn
    if operands[0].quantized and params.get("fill_value", 0) is None and "FILL" in str(params["mode"]):
        eqn = eqn.replaced(fill_value=0)  # instead of nan, which integers cannot represent
    out = plain(replace(step, eqn=eqn).value(operands), operands)
    out.quantized = operands[0].quantized
    return [out]


def _output_only(step: OperationRun) -> list[Tracked]:
    choice, name = step.choose()
    x = step.inputs[0]
    out = step.run.output(step.value(), choice, name, inherited=x.pending)
    # Quantized numbers stay on the grid when some are set to 0 or moved.
    out.quantized = out.quantized or (x.quantized and not step.run.policy.delayed)
    return [out]


def _joining(step: OperationRun) -> list[Tracked]:
    choice, name = step.choose()
    operands = list(step.inputs)
    if choice is not None and choice.output is None:
        operands = [_operand(step.run, x, choice, f"{name}_input{i}") for i, x in enumerate(operands)]
    out = joined(step.value(operands), operands)
    if choice is None or choice.output is None:
        return [out]
    quantized = step.run.output(out.value, choice, name)
    quantized.fixed_range = out.fixed_range
    return [quantized]


def _float(step: OperationRun) -> list[Tracked]:
    step.choose()
    return [plain(value, step.inputs) for value in step.values()]


def _selecting(step: OperationRun) -> list[Tracked]:
    step.choose()
    out = plain(step.value(), step.inputs)
    which, *cases = step.inputs
    places = [place for place, x in enumerate(cases) if x.is_activation]
    if len(places) != 1 or which.is_float or any(x.is_weight for x in cases):
        return [out]
    (place,) = places

    def selected(value: jax.Array, constants: list[jax.Array]) -> jax.Array:
        (array,) = step.eqn.bind([which.array, *constants[:place], value, *constants[place + 1 :]])
        return array

    def masked(quantize: Callable[[Tracked], Tracked]) -> Tracked:
        """Quantize with zeros, which widen no range, in the place of the constants, and put these back."""
        array = selected(cases[place].value, [jnp.zeros_like(x.array) for x in cases])
        unmasked = Tracked(array, Origin.ACTIVATION, pending=cases[place].pending)
        quantized = quantize(unmasked)
        if quantized is unmasked:
            return out
        return replace(quantized, value=selected(quantized.array, [x.array for x in cases]), twins={})

    out.masked = masked
    return [out]


HANDLERS: dict[Kind, Callable[[OperationRun], list[Tracked]]] = {
    Kind.UNKNOWN: _unknown,
    Kind.QUANTIZED: _quantized,
    Kind.ARITHMETIC: _arithmetic,
    Kind.INPUT_ONLY: _input_only,
    Kind.OUTPUT_ONLY: _output_only,
    Kind.JOINING: _joining,
    Kind.FLOAT: _float,
    Kind.SELECTING: _selecting,
}


def _enter_region(run: Run, region: str, path: str, x: Tracked) -> Tracked:
    """The input of a module that is one operation."""
    operation = OPERATIONS.get(region)
    if operation is None:
        run.note(path, region, path, (path,))
    if operation is None or not x.is_activation or (region == "batch_norm_op" and x.fusible):
        return x
    choice, name = run.choose(path, operation, read=(path,))
    return _operand(run, x, choice, name)


def _leave_region(run: Run, region: str, path: str, entered: Tracked, x: Tracked) -> Tracked:
    """The output of a module that is one operation, whose input was `entered`."""
    operation = OPERATIONS.get(region)
    if not x.is_activation:
        return x
    if operation is None:
        if region == "dropout":
            return entered.with_value(x.value)
        return Tracked(x.value, Origin.ACTIVATION, quantized=region == "quantized_layer")
    if region == "batch_norm_op" and entered.fusible:
        out = run.output(x.value, None, path, inherited=entered.pending)
        out.fusible = True
        return out
    choice = run.policy.choose(path, operation)
    return run.output(x.value, choice, f"{path}.{region}0")
