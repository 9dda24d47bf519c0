"""Parameters in a program: quantized in their own shape, and followed to where they are contracted or looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jqinject.dot import DEQUANTIZE, numbers_of_leaves, quant_tensor_of
from jqinject.program.jaxpr import Equation
from jqinject.program.moved_weight import StoredNumbers, moved
from jqinject.program.moves import MOVES, AxesInParameter, moves_of
from jqinject.program.operations import Operation, operation_of
from jqinject.program.policy import Choice, Site, WeightUse
from jqinject.program.tracked_value import Heard, Origin, Tracked, WeightCall, plain, shape_of
from jqinject.quant_tensor import is_quantized

Evaluate = Callable[[list[Any]], list[Any]]
WEIGHTS = "weights"


def dotted(path: tuple[Any, ...]) -> str:
    """A parameter's path as text, by which its quantizer is held."""
    return ".".join(map(str, path))


def parameter(run: Any, x: Tracked) -> Tracked:
    """A parameter that has a quantizer, quantized; once in each part of the program that reads it."""
    stored = x.form is not None
    if x.origin is not Origin.WEIGHT or x.quantized or stored or not run.quantizers.holds(x.weight_path):
        return x
    if WEIGHTS not in x.twins:
        name = dotted(x.weight_path)
        site = Site(name, None, {}, is_weight=True, shape=shape_of(x), weight_path=x.weight_path)
        run.sites[name] = site
        value = run.constant(lambda: run.quantizers.quantize(site, x.value))
        chosen = run.quantizers.chosen(name)
        original = x.value if chosen is not None or run.quantizers.rounds_again(x.weight_path) else None
        x.twins[WEIGHTS] = replace(
            x, value=value, quantized=True, unrounded=original, chosen=chosen, twins={}
        )
    return x.twins[WEIGHTS]


def follow_stored(
    run: Any, operation: str, path: str, inputs: Sequence[Tracked], evaluate: Evaluate, function: Any
) -> list[Tracked]:
    """The outputs of an operation on the arrays of a frozen parameter: its numbers, where it dequantizes them.

    Args:
        run: the interpreter.
        operation: the primitive's name.
        path: of the module.
        inputs: the operands; one at least is such an array.
        evaluate: runs the operation.
        function: the name of the function that the operation calls, if it calls one.
    """
    known = next(x for x in inputs if x.form is not None)
    low_rank = next((x.low_rank for x in inputs if x.low_rank is not None), None)
    looked_up = any(x.is_activation for x in inputs)
    origin = Origin.ACTIVATION if looked_up else Origin.WEIGHT
    arrays = [x.array for x in inputs]
    if function != DEQUANTIZE:
        found = evaluate(arrays)
        if operation not in MOVES or inputs[0] is not known:
            return [plain(value, inputs) for value in found]
        return [replace(known.with_value(value), origin=origin) for value in found]
    numbers = numbers_of_leaves(arrays, known.form)
    value = quant_tensor_of(numbers, known.form)
    if "zero_point" in known.form.names and not known.form.whole_zero_point:
        value = value.value  # a zero point between integers: these are not contracted
    out = Tracked(
        value, origin, quantized=True, weight_path=known.weight_path, low_rank=None if looked_up else low_rank
    )
    out.stored = None if looked_up else StoredNumbers.of(value, numbers, known.form)
    if not looked_up:
        return [out]
    choice, name = run.choose(path, operation_of("take"), known.weight_path)
    return [_output(run, path, out, choice, name, looked_up=True)]


def _output(
    run: Any, path: str, out: Tracked, choice: Choice | None, name: str, *, looked_up: bool
) -> Tracked:
    """What was looked up, through the output's quantizer if there is one."""
    wanted = None if choice is None or choice.parameter is None else choice.output

    def quantized() -> Tracked:
        rows = replace(out, chosen=None, twins={})
        if wanted is None:
            return rows
        found = run.quantized(replace(rows, quantized=False), wanted, f"{name}_output")
        call.heard.append(Heard("output", found.site, rows.array, found.value))
        return found

    call = WeightCall(dotted(out.weight_path), path, quantized, lambda: out.floats)
    found = run.quantizers.run(call) if looked_up and name else quantized()
    # Rows without a quantizer of their own may yet be contracted as a weight, which chooses again.
    return out if wanted is None else found


def follow(
    run: Any, operation: Operation, path: str, inputs: Sequence[Tracked], eqn: Equation
) -> list[Tracked] | None:
    """The outputs of an operation that only moves a parameter's numbers; None for any other.

    Arguments as for `handlers.handle`.
    """
    if not run.policy.follows_parameters or not inputs or not _is_followed(inputs[0]):
        return None
    x, others = inputs[0], inputs[1:]
    moves = moves_of(eqn, [x.value, *(other.array for other in others)])
    if moves is None:
        return None
    choice, name = None, ""
    looked_up = x.origin is Origin.WEIGHT and any(other.is_activation for other in others)
    if operation.name == "take":
        choice, name = run.choose(path, operation, x.weight_path)
        if looked_up:
            _note_lookup(run, choice, name, x, eqn)
    values: Sequence[Any] = [moved(x.value, move) for move in moves] if is_quantized(x.value) else ()
    if not values or any(value is None for value in values):
        values = eqn.bind([replace(x, chosen=None).array, *(other.array for other in others)])
    originals: Sequence[Any] = (None,) * len(moves)
    if x.unrounded is not None:
        originals = eqn.bind([x.unrounded, *(other.array for other in others)])
    origin = Origin.ACTIVATION if any(one.is_activation for one in inputs) else x.origin
    stored, beside = x.stored_numbers, [other.array for other in others]
    found = [
        replace(
            x,
            value=value,
            origin=origin,
            axes=None if x.axes is None else x.axes.moved(move),
            stored=None if stored is None else stored.moved(eqn, value, beside),
            masked=None,
            unrounded=original,
            low_rank=None
            if x.low_rank is None
            else x.low_rank.moved(move, run.names.full(name) if name else ""),
            state=None,
            twins={},
        )
        for value, move, original in zip(values, moves, originals, strict=True)
    ]
    return [_output(run, path, out, choice, name, looked_up=looked_up) for out in found]


def _is_followed(x: Tracked) -> bool:
    known = x.axes is not None or x.quantized or x.low_rank is not None
    return bool(x.weight_path or x.cache) and x.is_float and known


def _note_lookup(run: Any, choice: Choice | None, name: str, x: Tracked, eqn: Equation) -> None:
    if x.axes is not None:
        looked_up = eqn.params["dimension_numbers"].start_index_map
        others = [axis for axis in range(len(shape_of(x))) if axis not in looked_up]
        note_use(run, choice, name, "take", x, others, eqn)


def note_use(
    run: Any,
    choice: Choice | None,
    name: str,
    operation: str,
    x: Tracked,
    shared: Sequence[int],
    eqn: Equation,
    beside: Tracked | None = None,
    free: Sequence[int] = (),
    *,
    mapped: bool = False,
) -> None:
    """Note where a parameter is contracted or looked up, if such places are looked for.

    Args:
        run: the interpreter.
        choice: the quantizers of the operation.
        name: of the operation.
        operation: what kind it is.
        x: the parameter's numbers.
        shared: the axes along which they need one scale.
        eqn: the equation.
        beside: the other operand of a contraction.
        free: the axes that are axes of the output, and of no other operand.
        mapped: whether it is under `vmap`, which leaves no other trace than an axis in front that is not summed.
    """
    frozen = x.axes is None and x.quantized
    axes = AxesInParameter.of(shape_of(x)) if frozen else x.axes
    if axes is None:
        return
    stacked, needing = axes.stacked, axes.along(shared)
    if mapped and stacked not in needing and len(axes.shape) - stacked > 2:
        stacked += 1
    quantizer = None if choice is None or frozen else choice.parameter
    run.uses.append(
        WeightUse(
            x.weight_path,
            run.names.full(name),
            operation,
            axes.shape,
            needing,
            stacked,
            quantizer,
            name_of_quantizer(run, choice, name, beside),
            eqn,
            axes.along(free),
            choice is not None and choice.rounds_again,
        )
    )


def name_of_quantizer(run: Any, choice: Choice | None, name: str, x: Tracked | None) -> str:
    """The site that quantizes an operand of a contraction, as in `WeightUse.beside`.

    Args:
        run: the interpreter.
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
    for is_one in (lambda x: x.origin is Origin.WEIGHT, lambda x: bool(x.weight_path)):
        found = [place for place, x in enumerate(operands) if is_one(x)]
        if len(found) == 1:
            return found[0] if operands[1 - found[0]].is_activation else None
        if found:
            return None
    return None


def as_activation(x: Tracked) -> Tracked:
    """Looked-up numbers as an activation that is not quantized yet."""
    if not x.weight_path or not x.is_activation:
        return x
    return Tracked(x.array, Origin.ACTIVATION, pending=x.pending)
