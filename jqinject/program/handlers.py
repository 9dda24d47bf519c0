"""Handlers for each kind of operation: they quantize its inputs, its output, both or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jqinject.program.contractions import contraction
from jqinject.program.jaxpr import Equation
from jqinject.program.operations import LOGISTIC_RANGE, OPERATIONS, Kind
from jqinject.program.parameters import follow
from jqinject.program.policy import Choice, Site
from jqinject.program.quantizers import has_row_scales
from jqinject.program.run import OperationRun, Run
from jqinject.program.tracked_value import Masked, Origin, Tracked, joined, plain, shape_of


def handle(step: OperationRun) -> list[Tracked]:
    """Run one operation."""
    kind, inputs = step.operation.kind, step.inputs
    if kind is Kind.CONTRACTION:
        return contraction(step)
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


def _names(name: str, count: int) -> list[str]:
    if count == 1:
        return [name]
    return [f"{name}_lhs", f"{name}_rhs"] if count == 2 else [f"{name}_input{i}" for i in range(count)]


def _with_operands(step: OperationRun, choice: Choice | None, name: str) -> list[Tracked]:
    operation, operands = step.operation, list(step.inputs)
    places = range(len(operands)) if operation.inputs is None else operation.inputs
    for place, label in zip(places, _names(name, len(places)), strict=True):
        x = operands[place]
        # Scalar constants are not quantized.
        if x.is_activation or x.is_weight or shape_of(x) != ():
            quantize = _masked_operand if operation.masked and x.masked is not None else _operand
            operands[place] = quantize(step.run, x, choice, label)
    return operands


def _masked_operand(run: Run, x: Tracked, choice: Choice | None, name: str) -> Tracked:
    """A masked operand, quantized before masking: else the mask's constant would determine the range."""
    assert x.masked is not None
    unmasked = x.masked.kept()
    quantized = _operand(run, unmasked, choice, name)
    return (
        x if quantized is unmasked else replace(quantized, value=x.masked.filled(quantized.array), twins={})
    )


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
    if has_row_scales(choice.inputs):
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
    if step.operation.name == "take" and operands[0].quantized:
        step = replace(step, eqn=_filled_with_zeros(step.eqn))
    out = plain(step.value(operands), operands)
    out.quantized = operands[0].quantized
    return [out]


def _filled_with_zeros(eqn: Equation) -> Equation:
    """A gather whose missing elements are 0 instead of nan, which integers cannot represent."""
    fills = eqn.params.get("fill_value") is None and "FILL" in str(eqn.params["mode"])
    return eqn.replaced(fill_value=0) if fills else eqn


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

    def filled(value: jax.Array) -> jax.Array:
        return selected(value, [x.array for x in cases])

    def kept() -> Tracked:
        array = selected(cases[place].value, [jnp.zeros_like(x.array) for x in cases])
        return Tracked(array, Origin.ACTIVATION, pending=cases[place].pending)

    out.masked = Masked(kept, filled)
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


def enter_region(run: Run, region: str, path: str, x: Tracked) -> Tracked:
    """The input of a module that is one operation."""
    operation = OPERATIONS.get(region)
    if operation is None:
        run.note(path, region, path, (path,))
    if operation is None or not x.is_activation or (region == "batch_norm_op" and x.fusible):
        return x
    choice, name = run.choose(path, operation, read=(path,))
    return _operand(run, x, choice, name)


def leave_region(run: Run, region: str, path: str, entered: Tracked, x: Tracked) -> Tracked:
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
