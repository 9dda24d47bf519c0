"""How axes of values are related: where an axis goes in operations that move numbers, and what differs along it."""

import math
from collections.abc import Iterable

import numpy as np

from jqinject.program.moves import Shape, moves_of
from jqinject.recipes.stream.flat_program import (
    CASTS,
    MOVES,
    PLACEMENTS,
    ContractionSite,
    FlatProgram,
    FlatStep,
    Slot,
)

NONLINEAR = (
    *("max", "min", "tanh", "logistic", "erf", "erfc", "exp", "sin", "cos", "log1p"),
    *("select_n", "pow", "integer_pow"),
)


class Refused(Exception):
    """A gain cannot be taken over, or a value not rotated, and why.

    Args:
        why: a sentence.
        block: the size of smaller blocks that would stay together; 0 for none.
    """

    def __init__(self, why: str, block: int = 0) -> None:
        super().__init__(why)
        self.block = block


def followed(step: FlatStep, axis: int, block: int, shapes: tuple[Shape, Shape], back: bool) -> int:
    """The axis of the result along which blocks of numbers lie that lie along an axis of the operand; or the reverse.

    Args:
        step: an operation that moves the numbers of its first operand.
        axis: of the operand; with `back`, of the result.
        block: how many consecutive numbers stay together.
        shapes: of the operand, and of the result.
        back: whether the axis is the result's.

    Raises:
        Refused: the axis has no counterpart.
    """
    if step.name in CASTS or step.name in SAME:
        return axis
    if step.name == "reshape":
        return _reshaped(axis, block, (shapes[1], shapes[0]) if back else shapes)
    places = _places(step, len(shapes[0]))
    pairs = {before: after for before, after in places if shapes[0][before] == shapes[1][after]}
    pairs = {after: before for before, after in pairs.items()} if back else pairs
    if axis not in pairs:
        raise Refused(f"{step.name} takes it apart")
    return pairs[axis]


def _reshaped(axis: int, block: int, shapes: tuple[Shape, Shape]) -> int:
    before, after = shapes
    inner = math.prod(before[axis + 1 :])
    for place, size in enumerate(after):
        if size > 1 and math.prod(after[place + 1 :]) == inner:
            if size % block == 0:
                return place
            if block % size == 0:
                raise Refused(f"it is cut into pieces of {size}", size)
            break
    raise Refused(f"{before} is reshaped to {after}")


def _places(step: FlatStep, rank: int) -> Iterable[tuple[int, int]]:
    """The axes of the operand of one of `MOVED`, and which of its result each is; some operations drop axes."""
    params = step.params
    match step.name:
        case "reduce_sum":
            return zip(
                (axis for axis in range(rank) if axis not in params["axes"]), range(rank), strict=False
            )
        case "stack":
            return ((axis, axis + (axis >= params["axis"])) for axis in range(rank))
        case "cumsum":
            return ((axis, axis) for axis in range(rank) if axis != params["axis"])
    moves = moves_of(step.equation, step.equation.inputs)
    if moves is None:  # look-ups in a batch of tables, or an operation whose axes are those of its operand
        return () if step.name == "gather" else ((axis, axis) for axis in range(rank))
    axes = (axis for axis in range(rank) if axis not in moves[0].picks)
    return ((axis, place) for axis in axes for place in moves[0].where(axis))


def groups_of(step: FlatStep) -> int:
    """In how many groups a convolution sees its channels; 1 for other contractions."""
    return step.params.get("feature_group_count", 1)


SAME = ("neg", "add", "add_any", "sub", "real", "mul", "div", "select_n", "copy", *PLACEMENTS)
MOVED = (
    *("transpose", "broadcast_in_dim", "squeeze", "gather", "reduce_sum", "stack"),
    *("slice", "dynamic_slice", "pad", "concatenate", "split", "cumsum", "dynamic_update_slice"),
)
"""Operations each of whose axes is one of the result, if it has its size: others are taken apart."""


def is_uniform(flat: FlatProgram, slot: Slot, axis: int, *, parameters: bool = True, depth: int = 8) -> bool:
    """Whether a value is known to be the same along an axis.

    Args:
        flat: the program.
        slot: of the value.
        axis: of the value.
        parameters: whether differences count that parameters alone make.
        depth: how many operations are looked back at most.
    """
    shape = flat.shapes[slot]
    if not shape or shape[axis] == 1:
        return True
    if slot in flat.fixed:
        if not parameters:
            return True
        value = np.asarray(flat.value(slot), np.float32)
        return bool(np.allclose(value, value.take([0], axis=axis), rtol=1e-6, atol=0))
    if slot not in flat.made_by or depth == 0:
        return False
    step, _ = flat.made_by[slot]
    if step.name == "broadcast_in_dim":
        dims, place = tuple(step.params["broadcast_dimensions"]), axis % len(shape)
        return place not in dims or flat.shapes[step.inputs[0]][dims.index(place)] == 1
    ranks = {len(flat.shapes[operand]) for operand in step.inputs}
    if step.name in (*MOVED, "dot_general", "reshape") or not step.inputs or not ranks <= {0, len(shape)}:
        return False
    return all(
        is_uniform(flat, operand, axis, parameters=parameters, depth=depth - 1) for operand in step.inputs
    )


def comes_from_nonlinearity(flat: FlatProgram, site: ContractionSite) -> bool:
    """Whether the input of a site is made, number by number, by something that is not linear.

    Args:
        flat: the program.
        site: one of its sites.
    """
    slot = site.activation
    while slot in flat.made_by:
        step, _ = flat.made_by[slot]
        if step.name in NONLINEAR:
            return True
        moving = [operand for operand in step.inputs if operand not in flat.fixed]
        if step.name == "mul" and len(moving) == 2:
            return not any(is_uniform(flat, operand, -1, parameters=False) for operand in moving)
        if step.name not in (*CASTS, *MOVES, "neg", "mul", "add", "sub", "div") or len(moving) != 1:
            return False
        slot = moving[0]
    return False
