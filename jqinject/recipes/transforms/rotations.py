"""Finds what can be rotated together: values and parameters of a program whose blocks of channels one matrix rotates.

Where an axis goes in operations that move numbers, and what differs along it; then the walk of a rotation.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jqinject.program.moves import Shape, moves_of
from jqinject.program.operations import CONTRACTIONS, multiplies_matrices, operand_axes
from jqinject.recipes.stream.flat_program import (
    CASTS,
    MOVES,
    ContractionSite,
    FlatProgram,
    FlatStep,
    Slot,
)
from jqinject.recipes.transforms import factor_walk
from jqinject.recipes.transforms.regions import RotatedRegion, by_region

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
        case name if name in REDUCTIONS:
            left = (axis for axis in range(rank) if axis not in params["axes"])
            return zip(left, range(rank), strict=False)
        case "stack":
            return ((axis, axis + (axis >= params["axis"])) for axis in range(rank))
        case "cumsum":
            return ((axis, axis) for axis in range(rank) if axis != params["axis"])
    moves = moves_of(step.equation, step.equation.inputs)
    if moves is None:  # look-ups in a batch of tables, or an operation whose axes are those of its operand
        return () if step.name == "gather" else ((axis, axis) for axis in range(rank))
    axes = (axis for axis in range(rank) if axis not in moves[0].picks)
    return ((axis, place) for axis in axes for place in moves[0].where(axis))


#: Operations whose result lacks the axes that they go along.
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
#: Operations each of whose axes is one of the result, if it has its size: others are taken apart.
MOVED = (
    *("transpose", "broadcast_in_dim", "squeeze", "gather", "reduce_sum", "stack"),
    *("slice", "dynamic_slice", "pad", "concatenate", "split", "cumsum", "dynamic_update_slice"),
)


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


GAIN = "it is multiplied by numbers that differ, such as a norm's gain, which FoldNorms takes out"
TWO_VALUES = "two values that depend on the channel are multiplied"
SIDE_BY_SIDE = "it is one of several products side by side"
NEIGHBOURS = "a convolution takes neighbours of it"


class Rotated(NamedTuple):
    """Blocks of consecutive numbers along an axis are multiplied by the matrix.

    Attributes:
        axis: of the value.
        squared: whether the numbers are squares, of which only sums over full blocks stay as they are.
    """

    axis: int
    squared: bool = False


def rotated_regions(flat: FlatProgram) -> Iterator[tuple[ContractionSite, RotatedRegion | str]]:
    """Each site with what a matrix before its inputs rotates, or why nothing can; the first site of each region.

    Args:
        flat: the program.
    """
    return by_region(flat, region_of)


def region_of(
    flat: FlatProgram, site: ContractionSite, walk: "type[RotationWalk] | None" = None
) -> RotatedRegion | str:
    """What a map of blocks of channels before a site's inputs maps, or why nothing can be.

    Args:
        flat: the program.
        site: one of its sites.
        walk: says what commutes with the map; None for a rotation.
    """
    walk, summed = walk or RotationWalk, _summed(site)
    if not summed:
        return f"{site.step.name} is not followed"
    axis = summed[-1]
    block = flat.shapes[site.activation][axis]
    while True:
        try:
            return walk(flat, site.activation, axis, block).region
        except Refused as refused:
            if refused.block < 2:
                return str(refused)
            block = refused.block


def _summed(site: ContractionSite) -> tuple[int, ...]:
    """The axes of a site's input that it sums over; none if it is not followed."""
    return operand_axes(site.step.equation)[1 - site.place].summed if _is_followed(site.step) else ()


def _is_followed(step: FlatStep) -> bool:
    """Whether a contraction sums over what a rotation may go along: not over groups of channels."""
    return multiplies_matrices(step.equation) and factor_walk.groups_of(step) == 1


class RotationWalk(factor_walk.Follower[Rotated]):
    """Follows a rotation from a value through a program, as far as it reaches.

    Attributes:
        region: what is rotated.

    Args:
        flat: the program.
        slot: of the value.
        axis, block: of the value.
        rules: what operations do with it, by name; None for those of a rotation.

    Raises:
        Refused: an operation does not commute with the rotation.
    """

    done = "a rotation"

    def __init__(
        self,
        flat: FlatProgram,
        slot: Slot,
        axis: int,
        block: int,
        rules: Mapping[str, Callable[..., None]] | None = None,
    ) -> None:
        super().__init__(flat, RULES if rules is None else rules)
        self.region = RotatedRegion(block)
        self._give(slot, Rotated(axis))
        self.run()
        for slot, path in flat.parameters.items():
            if slot in self.labels:
                self.region.parameters[path] = self.labels[slot].axis
        for site in flat.sites:
            both = site.activation in self.labels and site.weight in self.labels
            if both and self.labels[site.activation].axis in _summed(site):
                self.region.sites[site] = self.labels[site.activation].axis

    def refuse(self, slot: Slot, why: str) -> None:
        """See `Follower`."""
        raise Refused(why)

    def _give(self, slot: Slot, label: Rotated) -> None:
        before = self.labels.get(slot)
        if before == label or (slot in self.flat.unowned and self.flat.is_zero(slot)):
            return
        if before is not None:
            raise Refused("it would be turned in two ways")
        if slot in self.flat.unowned:
            raise Refused("it is a constant")
        self.labels[slot] = label
        self._waiting.append(slot)

    def _label(self, slots: Iterable[Slot]) -> Rotated:
        """The label of the first of some values that has one; a rule is called for steps with such values alone."""
        return next(self.labels[slot] for slot in slots if slot in self.labels)

    def _move(self, step: FlatStep) -> None:
        if self.labels.keys() & {*step.inputs[len(step.data) :]}:
            raise Refused(f"{step.name} picks numbers by it")
        if step.name == "pad" and not self.flat.is_zero(step.inputs[1]):
            raise Refused("numbers that are not 0 are put around it")
        for slot, result in itertools.product(step.data, step.outputs):
            shapes = self.flat.shapes[slot], self.flat.shapes[result]
            for source, target, back in ((slot, result, False), (result, slot, True)):
                label = self.labels.get(source)
                if label is not None:
                    axis = followed(step, label.axis, self.region.block, shapes, back)
                    self._give(target, label._replace(axis=axis))

    def _sum(self, step: FlatStep) -> None:
        selects = step.name == "select_n"
        operands = step.inputs[1:] if selects else step.inputs
        slots = (*operands, *step.outputs)
        label = self._label(slots)
        if selects and not is_uniform(self.flat, step.inputs[0], label.axis):
            raise Refused("a selection depends on the channel")
        for slot in slots:
            rotated = slot in self.labels or slot not in operands or self.flat.owned(slot)
            if self.flat.is_zero(slot):
                continue
            if rotated or not is_uniform(self.flat, slot, label.axis):
                self._give(slot, label)
            elif label.squared or selects:
                raise Refused("a number is added to all channels")
            else:
                self.region.keeps_sums = True

    def _product(self, step: FlatStep) -> None:
        operands, result = step.inputs, step.outputs[0]
        if operands[0] == operands[1] and step.name == "mul":
            self._square(step)
            return
        label = self._label((*operands, result))
        carriers = [slot for slot in operands if slot in self.labels]
        if not carriers:
            carriers = [slot for slot in operands if not is_uniform(self.flat, slot, label.axis)]
        if len(carriers) != 1 or (step.name == "div" and carriers[0] != operands[0]):
            raise Refused(TWO_VALUES)
        factor = operands[1 - operands.index(carriers[0])]
        if not is_uniform(self.flat, factor, label.axis):
            gain = is_uniform(self.flat, factor, label.axis, parameters=False)
            raise Refused(GAIN if gain else TWO_VALUES)
        for slot in (carriers[0], result):
            self._give(slot, label)

    def _square(self, step: FlatStep) -> None:
        label = self.labels.get(step.inputs[0])
        if label is None:
            raise Refused("it is a square")
        if step.params.get("y", 2) != 2 or label.squared:
            raise Refused(f"{step.name} does not commute with a rotation")
        self._give(step.outputs[0], label._replace(squared=True))

    def _sums(self, step: FlatStep) -> None:
        label = self.labels.get(step.inputs[0])
        if label is None or label.axis not in step.params["axes"]:
            self._move(step)
        elif label.squared:
            self.region.normalized = True
        else:
            self.region.keeps_sums = True

    def _contract(self, step: FlatStep) -> None:
        if not _is_followed(step):
            raise Refused(f"{step.name} does not commute with a rotation")
        (lhs, rhs), (result,), sides = step.inputs[:2], step.outputs, operand_axes(step.equation)
        same = [((lhs, axis), (rhs, sides[0].partners[axis])) for axis in sides[0].summed]
        for slot, side in zip((lhs, rhs), sides, strict=True):
            free = (axis for axis in side.free if axis in side.results)
            same += [((slot, axis), (result, side.results[axis])) for axis in free]
        for slot in (lhs, rhs, result):
            label = self.labels.get(slot)
            if label is None:
                continue
            ends = [end for pair in same for start, end in (pair, pair[::-1]) if start == (slot, label.axis)]
            if label.squared or not ends:
                raise Refused(SIDE_BY_SIDE if step.name == "dot_general" else NEIGHBOURS)
            for end, axis in ends:
                self._give(end, label._replace(axis=axis))


#: What operations do with a rotation, by name; any other operation commutes with none.
RULES: dict[str, Callable[[RotationWalk, FlatStep], None]] = {
    **dict.fromkeys((*CASTS, *MOVES, *MOVED, "neg", "real"), RotationWalk._move),
    **dict.fromkeys(("add", "add_any", "sub", "select_n"), RotationWalk._sum),
    **dict.fromkeys(("mul", "div"), RotationWalk._product),
    **dict.fromkeys(("square", "integer_pow"), RotationWalk._square),
    **dict.fromkeys(CONTRACTIONS, RotationWalk._contract),
    "reduce_sum": RotationWalk._sums,
}
