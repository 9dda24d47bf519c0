"""Handlers for each kind of operation: they quantize its inputs, its output, both or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.program.contractions import contraction
from jqinject.program.jaxpr import Equation
from jqinject.program.operations import LOGISTIC_RANGE, OPERATIONS, Kind, Operation
from jqinject.program.parameters import follow
from jqinject.program.policy import Choice
from jqinject.program.quantizers import has_row_scales
from jqinject.program.tracked_value import Masked, Origin, Tracked, joined, plain, shape_of


def handle(
    run: Any, operation: Operation, path: str, inputs: Sequence[Tracked], eqn: Equation
) -> list[Tracked]:
    """Run one operation.

    Args:
        run: the interpreter.
        operation: its row of the table.
        path: of the module it belongs to.
        inputs: its operands.
        eqn: its equation.
    """
    if operation.kind is Kind.CONTRACTION:
        return contraction(run, operation, path, inputs, eqn)
    followed = follow(run, operation, path, inputs, eqn)
    if followed is not None:
        return followed
    if operation.kind is Kind.TRANSPARENT:
        return [joined(value, inputs) for value in eqn.bind([x.array for x in inputs])]
    if not any(x.is_activation for x in inputs):
        return [Tracked(value) for value in eqn.bind([x.array for x in inputs])]
    if operation.kind is Kind.UNKNOWN:
        return _unknown(run, path, inputs, eqn)
    return HANDLERS[operation.kind](run, operation, path, inputs, eqn)


def _unknown(run: Any, path: str, inputs: Sequence[Tracked], eqn: Equation) -> list[Tracked]:
    outputs = [plain(value, inputs) for value in eqn.bind([x.array for x in inputs])]
    # Integers and booleans are not quantized.
    if any(x.is_float and x.is_activation for x in inputs) and any(out.is_float for out in outputs):
        run.policy.unknown(path, eqn.name)
    return outputs


def _operand(run: Any, x: Tracked, choice: Choice | None, name: str) -> Tracked:
    """An operand, quantized with the quantizer pending from its producer, or else with this operation's."""
    if choice is None or x.quantized or not x.is_float:
        return x
    if x.is_weight:
        # Treat a weight that is not contracted like an activation with a known range.
        wanted = choice.inputs if choice.weight is not None else None
        return x if wanted is None else run.quantized(x, wanted, name, static=False)
    wanted = x.pending or choice.inputs
    if choice.inputs is None or wanted is None or choice.dynamic:
        return x
    return run.quantized(x, wanted, name)


def _names(name: str, count: int) -> list[str]:
    if count == 1:
        return [name]
    return [f"{name}_lhs", f"{name}_rhs"] if count == 2 else [f"{name}_input{i}" for i in range(count)]


def _with_operands(
    run: Any, operation: Operation, inputs: Sequence[Tracked], choice: Choice | None, name: str
) -> list[Tracked]:
    places = range(len(inputs)) if operation.inputs is None else operation.inputs
    taken = list(inputs)
    for place, label in zip(places, _names(name, len(places)), strict=True):
        x = taken[place]
        # Scalar constants are not quantized.
        if x.is_activation or x.is_weight or shape_of(x) != ():
            taker = _masked_operand if operation.masked and x.masked is not None else _operand
            taken[place] = taker(run, x, choice, label)
    return taken


def _masked_operand(run: Any, x: Tracked, choice: Choice | None, name: str) -> Tracked:
    """A masked operand, quantized before masking: else the mask's constant would determine the range."""
    assert x.masked is not None
    kept = x.masked.kept()
    taken = _operand(run, kept, choice, name)
    return x if taken is kept else replace(taken, value=x.masked.filled(taken.array), twins={})


def _quantized(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    eqn: Equation,
) -> list[Tracked]:
    choice, name = run.choose(path, operation)
    taken = _with_operands(run, operation, inputs, choice, name)
    if operation.name == "silu" and choice is not None and choice.inputs is not None:
        values = [_silu(run, taken[0], choice, name)]
    else:
        values = eqn.bind([x.array for x in taken])
    return [_ranged(run.output, value, choice, name, operation) for value in values]


def _ranged(output: Any, value: Any, choice: Choice | None, name: str, operation: Operation) -> Tracked:
    out = output(value, choice, name)
    out.fixed_range = operation.output_range
    return out


def _silu(run: Any, x: Tracked, choice: Choice, name: str) -> jax.Array:
    """`x * sigmoid(x)`, with the sigmoid quantized."""
    sigmoid = Tracked(jax.nn.sigmoid(x.array), Origin.ACTIVATION, fixed_range=LOGISTIC_RANGE)
    return x.array * _operand(run, sigmoid, choice, f"{name}_sigmoid").array


def _arithmetic(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    eqn: Equation,
) -> list[Tracked]:
    choice, name = run.choose(path, operation)
    activations = [x for x in inputs if x.is_activation]
    one = activations[0] if len(activations) == 1 else None
    if one is not None and one is not inputs[0] and operation.name == "truediv":
        one = None  # a constant divided by an activation is not a scaling of it
    if one is not None and one.fusible and operation.fuses:
        out = run.output(_only(eqn, inputs), choice, name, inherited=one.pending)
        out.fusible = True
        return [out]
    if one is not None and choice is None:
        out = run.output(_only(eqn, inputs), None, name, inherited=one.pending)
        return [out]
    if choice is not None and choice.share and len(activations) == 2:
        taken = _sharing_operands(run, inputs, choice, name)
    else:
        taken = _with_operands(run, operation, inputs, choice, name)
    return [run.output(run.quantizers.arithmetic(operation.name, taken, eqn.bind), choice, name)]


def _sharing_operands(run: Any, inputs: Sequence[Tracked], choice: Choice, name: str) -> list[Tracked]:
    """Two operands of one shape, quantized together, so that they have one scale.

    Raises:
        ValueError: the quantizer has a scale for each row.
    """
    if has_row_scales(choice.inputs):
        raise ValueError(
            f"{name}: share=True gives both operands one scale, and the quantizer makes one for each row of each.\n"
            "  cure: a quantizer with one scale for the tensor, such as Int8ActPerTensorMinMax"
        )
    # Beside the batch axis, which may be distributed over devices.
    axis = min(1, len(shape_of(inputs[0])))
    both = Tracked(jnp.stack([x.array for x in inputs], axis), Origin.ACTIVATION)
    found = run.quantized(both, choice.inputs, f"{name}_inputs")
    parts = jnp.unstack(found.array, axis=axis)
    return [
        replace(x.with_value(part), quantized=True, site=found.site)
        for x, part in zip(inputs, parts, strict=True)
    ]


def _only(eqn: Equation, inputs: Sequence[Tracked]) -> Any:
    (value,) = eqn.bind([x.array for x in inputs])
    return value


def _input_only(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    eqn: Equation,
) -> list[Tracked]:
    choice, name = run.choose(path, operation)
    taken = _with_operands(run, operation, inputs, choice, name)
    if operation.name == "take" and taken[0].quantized:
        eqn = _filled_with_zeros(eqn)
    out = plain(_only(eqn, taken), taken)
    out.quantized = taken[0].quantized
    return [out]


def _filled_with_zeros(eqn: Equation) -> Equation:
    """A gather whose missing elements are 0 instead of nan, which integers cannot represent."""
    fills = eqn.params.get("fill_value") is None and "FILL" in str(eqn.params["mode"])
    return eqn.replaced(fill_value=0) if fills else eqn


def _output_only(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    eqn: Equation,
) -> list[Tracked]:
    choice, name = run.choose(path, operation)
    out = run.output(_only(eqn, inputs), choice, name, inherited=inputs[0].pending)
    # Quantized numbers stay on the grid when some are set to 0 or moved.
    out.quantized = out.quantized or (inputs[0].quantized and not run.policy.delayed)
    return [out]


def _joining(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    eqn: Equation,
) -> list[Tracked]:
    choice, name = run.choose(path, operation)
    taken = list(inputs)
    if choice is not None and choice.output is None:
        taken = [_operand(run, x, choice, f"{name}_input{i}") for i, x in enumerate(inputs)]
    out = joined(_only(eqn, taken), taken)
    if choice is None or choice.output is None:
        return [out]
    quantized = run.output(out.value, choice, name)
    quantized.fixed_range = out.fixed_range
    return [quantized]


def _float(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    eqn: Equation,
) -> list[Tracked]:
    run.choose(path, operation)
    return [plain(value, inputs) for value in eqn.bind([x.array for x in inputs])]


def _selecting(
    run: Any,
    operation: Operation,
    path: str,
    inputs: Sequence[Tracked],
    eqn: Equation,
) -> list[Tracked]:
    run.choose(path, operation)
    out = plain(_only(eqn, inputs), inputs)
    which, *cases = inputs
    places = [place for place, x in enumerate(cases) if x.is_activation]
    if len(places) != 1 or which.is_float or any(x.is_weight for x in cases):
        return [out]

    def filled(value: Any) -> Any:
        (found,) = eqn.bind([which.array, *(value if p in places else x.array for p, x in enumerate(cases))])
        return found

    def kept() -> Tracked:
        given = [x.value if p in places else jnp.zeros_like(x.array) for p, x in enumerate(cases)]
        (found,) = eqn.bind([which.array, *given])
        return Tracked(found, Origin.ACTIVATION, pending=cases[places[0]].pending)

    out.masked = Masked(kept, filled)
    return [out]


HANDLERS: dict[Kind, Callable[..., list[Tracked]]] = {
    Kind.QUANTIZED: _quantized,
    Kind.ARITHMETIC: _arithmetic,
    Kind.INPUT_ONLY: _input_only,
    Kind.OUTPUT_ONLY: _output_only,
    Kind.JOINING: _joining,
    Kind.FLOAT: _float,
    Kind.SELECTING: _selecting,
}


def enter_region(run: Any, region: str, path: str, x: Tracked) -> Tracked:
    """The input of a module that is one operation."""
    operation = OPERATIONS.get(region)
    if operation is None:
        run.note(path, region, path, (path,))
    if operation is None or not x.is_activation or (region == "batch_norm_op" and x.fusible):
        return x
    choice, name = run.choose(path, operation, read=(path,))
    return _operand(run, x, choice, name)


def leave_region(run: Any, region: str, path: str, entered: Tracked, x: Tracked) -> Tracked:
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
