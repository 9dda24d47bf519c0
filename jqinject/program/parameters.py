"""Parameters in a program: quantized in their own shape, and followed to where they are contracted or looked up."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jqinject.dot import DEQUANTIZE, numbers_of_leaves, quant_tensor_of
from jqinject.program.moves import AxesInParameter, StoredNumbers, moved, moves_of, only_moves
from jqinject.program.operations import operation_of
from jqinject.program.policy import Choice, Site, WeightUse, dotted, other_axes
from jqinject.program.run import OperationRun, Run
from jqinject.program.tracked_value import Origin, Tracked, WeightCall, plain, shape_of
from jqinject.quant_tensor import is_quantized

WEIGHTS = "weights"


def parameter(run: Run, x: Tracked) -> Tracked:
    """A parameter that has a quantizer, quantized; once in each part of the program that reads it."""
    name, stored = dotted(x.weight_path), x.form is not None
    if x.origin is not Origin.WEIGHT or x.quantized or stored or name not in run.quantizers.depths:
        return x
    if WEIGHTS not in x.twins:
        site = run.add(Site(name, None, {}, is_weight=True, shape=shape_of(x), weight_path=x.weight_path))
        value = run.constant(lambda: run.quantizers.quantize(site, x.value))
        chosen = run.quantizers.chosen(name)
        original = x.value if chosen is not None or name in run.quantizers.again else None
        x.twins[WEIGHTS] = replace(
            x, value=value, quantized=True, unrounded=original, chosen=chosen, twins={}
        )
    return x.twins[WEIGHTS]


def follow_stored(step: OperationRun) -> list[Tracked]:
    """The outputs of an operation on the arrays of a frozen parameter: its numbers, where it dequantizes them.

    Args:
        step: the operation; one operand at least is such an array.
    """
    inputs = step.inputs
    stored = next(x for x in inputs if x.form is not None)
    form = stored.form
    low_rank = next((x.low_rank for x in inputs if x.low_rank is not None), None)
    looked_up = any(x.is_activation for x in inputs)
    origin = Origin.ACTIVATION if looked_up else Origin.WEIGHT
    if form is None or step.eqn.function != DEQUANTIZE:
        values = step.values()
        if not only_moves(step.eqn.name) or inputs[0] is not stored:
            return [plain(value, inputs) for value in values]
        return [replace(stored.with_value(value), origin=origin) for value in values]
    numbers = numbers_of_leaves([x.array for x in inputs], form)
    value = quant_tensor_of(numbers, form)
    if "zero_point" in form.names and not form.whole_zero_point:
        value = value.value  # a zero point between integers: these are not contracted
    out = Tracked(value, origin, quantized=True, weight_path=stored.weight_path)
    if not looked_up:
        stored_numbers = StoredNumbers(numbers, form, tuple(range(len(value.shape))))
        return [replace(out, low_rank=low_rank, stored=stored_numbers, twins={})]
    take = replace(step, operation=operation_of("take"))
    return [_looked_up(take, out, *take.choose(stored.weight_path))]


def _looked_up(step: OperationRun, rows: Tracked, choice: Choice | None, name: str) -> Tracked:
    """Rows of a parameter, through the output's quantizer, if a rule has one."""
    run = step.run
    quantized = partial(_output, run, rows, choice, name)
    call = WeightCall(dotted(rows.weight_path), step.path, quantized, lambda: rows.floats)
    out = run.quantizers.run(call) if name else quantized()
    # Rows without a quantizer of their own may yet be contracted as a weight, which chooses again.
    return rows if _output_quantizer(choice) is None else out


def _output_quantizer(choice: Choice | None) -> Any:
    return None if choice is None or choice.parameter is None else choice.output


def _output(run: Run, x: Tracked, choice: Choice | None, name: str) -> Tracked:
    quantizer = _output_quantizer(choice)
    array = replace(x, chosen=None, twins={})
    if quantizer is None:
        return array
    return run.quantized(replace(array, quantized=False), Site(f"{name}_output", quantizer))


def follow(step: OperationRun) -> list[Tracked] | None:
    """The outputs of an operation that only moves a parameter's numbers; None for any other."""
    run, eqn = step.run, step.eqn
    if not (run.policy.follows_parameters and only_moves(eqn.name) and _is_followed(step.inputs[0])):
        return None
    x, *others = step.inputs
    rest = [operand.array for operand in others]
    moves = moves_of(eqn, [x.value, *rest])
    if moves is None:
        return None
    choice, name = None, ""
    looked_up = x.origin is Origin.WEIGHT and any(operand.is_activation for operand in others)
    if step.operation.name == "take":
        choice, name = step.choose(x.weight_path)
        if looked_up and x.axes is not None:
            indexed = eqn.params["dimension_numbers"].start_index_map
            note_use(step, choice, name, x, other_axes(indexed, len(shape_of(x))))
    values: Sequence[Any] = [moved(x.value, move) for move in moves] if is_quantized(x.value) else ()
    if not values or any(value is None for value in values):
        values = eqn.bind([replace(x, chosen=None).array, *rest])
    originals: Sequence[Any] = [None] * len(moves) if x.unrounded is None else eqn.bind([x.unrounded, *rest])
    origin = Origin.ACTIVATION if any(operand.is_activation for operand in step.inputs) else x.origin
    lookup = run.names.full(name) if name else ""
    outputs = [
        replace(
            x,
            value=value,
            origin=origin,
            axes=None if x.axes is None else x.axes.moved(move),
            stored=None if x.stored is None else x.stored.moved(eqn, x.value, rest),
            masked=None,
            unrounded=original,
            low_rank=None if x.low_rank is None else x.low_rank.moved(move, lookup),
            state=None,
            twins={},
        )
        for value, move, original in zip(values, moves, originals, strict=True)
    ]
    if looked_up:
        return [_looked_up(step, out, choice, name) for out in outputs]
    quantizer = _output_quantizer(choice)
    return outputs if quantizer is None else [_output(run, out, choice, name) for out in outputs]


def _is_followed(x: Tracked) -> bool:
    is_parameter = x.axes is not None or x.quantized or x.low_rank is not None
    return bool(x.weight_path or x.cache) and x.is_float and is_parameter


def note_use(
    step: OperationRun,
    choice: Choice | None,
    name: str,
    x: Tracked,
    shared: Sequence[int],
    operand: Tracked | None = None,
    free: Sequence[int] = (),
) -> None:
    """Note where a parameter is contracted or looked up, if such places are looked for.

    Args:
        step: the operation.
        choice: its quantizers.
        name: its own.
        x: the parameter's numbers.
        shared: the axes along which they need one scale.
        operand: the other operand of a contraction; None of a look-up.
        free: the axes that are axes of the output, and not of that operand.
    """
    run, eqn = step.run, step.eqn
    frozen = x.axes is None and x.quantized
    axes = AxesInParameter.of(shape_of(x)) if frozen else x.axes
    if axes is None:
        return
    stacked, needing = axes.stacked, axes.along(shared)
    # A `vmap` leaves no other trace than an axis in front that is not summed.
    mapped = operand is not None and (run.mapped or eqn.is_mapped)
    if mapped and stacked not in needing and len(axes.shape) - stacked > 2:
        stacked += 1
    run.recorded.uses.append(
        WeightUse(
            x.weight_path,
            run.names.full(name),
            step.operation.name,
            axes.shape,
            needing,
            stacked,
            quantizer=None if choice is None or frozen else choice.parameter,
            beside=name_of_quantizer(run, choice, name, operand),
            equation=eqn,
            free=axes.along(free),
            rounds_again=choice is not None and choice.rounds_again,
        )
    )


def name_of_quantizer(run: Run, choice: Choice | None, name: str, x: Tracked | None) -> str:
    """The site that quantizes an operand of a contraction, as in `WeightUse.beside`.

    Args:
        run: the run.
        choice: the quantizers of the contraction.
        name: its name.
        x: the operand; None for a look-up.
    """
    if x is not None and x.quantized:
        return x.site or "quantized"
    by_scheme = x is not None and choice is not None and choice.scheme is not None
    return run.names.full(name) if by_scheme else ""


def weight_among(lhs: Tracked, rhs: Tracked) -> int | None:
    """Which operand of a contraction is the weight; None if both are activations, or both are weights.

    Numbers that were looked up in a parameter are a weight beside an activation (the experts that a router chose), and
    an activation beside a weight (the rows of an embedding).
    """
    operands = (lhs, rhs)
    for of_parameter in (
        [x.origin is Origin.WEIGHT for x in operands],
        [bool(x.weight_path) for x in operands],
    ):
        if any(of_parameter):
            place = of_parameter.index(True)
            return place if not all(of_parameter) and operands[1 - place].is_activation else None
    return None


def as_activation(x: Tracked) -> Tracked:
    """Looked-up numbers as an activation that is not quantized yet."""
    if not x.weight_path or not x.is_activation:
        return x
    return Tracked(x.array, Origin.ACTIVATION, pending=x.pending)
