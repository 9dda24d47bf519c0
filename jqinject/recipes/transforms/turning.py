"""Finds what can be rotated together: values and parameters of a program whose blocks of channels one matrix turns."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from jqinject.program.operations import CONTRACTIONS, multiplies_matrices, operand_axes
from jqinject.recipes.stream.flat_program import (
    CASTS,
    ContractionSite,
    FlatProgram,
    FlatStep,
    Slot,
)
from jqinject.recipes.transforms import axes, transform_walk

GAIN = "it is multiplied by numbers that differ, such as a norm's gain, which FoldNorms takes out"
TWO_VALUES = "two values that depend on the channel are multiplied"
SIDE_BY_SIDE = "it is one of several products side by side"
NEIGHBOURS = "a convolution takes neighbours of it"


@dataclass(frozen=True)
class Turned:
    """Blocks of consecutive numbers along an axis are multiplied by the matrix.

    Attributes:
        axis: of the value.
        block: the size of the matrix.
        squared: whether the numbers are squares, of which only sums over whole blocks stay as they are.
    """

    axis: int
    block: int
    squared: bool = False


@dataclass
class TurnedRegion:
    """What turns together.

    Attributes:
        block: the size of the matrix.
        parameters: path -> the axis that turns.
        sinks: names of the sites whose inputs turn.
        normalized: whether a norm takes the values: they are those of a residual stream.
        keeps_sums: whether the matrix has to leave sums of the channels as they are: the program subtracts a mean.
    """

    block: int
    parameters: dict[str, int] = field(default_factory=dict)
    sinks: set[str] = field(default_factory=set)
    normalized: bool = False
    keeps_sums: bool = False

    @property
    def kind(self) -> str:
        """The name of the rotation: "R1" of a residual stream, "R2" of values between two weights."""
        return "R1" if self.normalized else "R2"


def turned_regions(flat: FlatProgram) -> Iterator[tuple[ContractionSite, TurnedRegion | str]]:
    """Each site with what a matrix before its inputs turns, or why nothing can; the first site of each region.

    Args:
        flat: the program.
    """
    taken: set[str] = set()
    for site in flat.sites:
        if site.name not in taken:
            region = _region_of(flat, site)
            taken |= set() if isinstance(region, str) else region.sinks
            yield site, region


def _region_of(flat: FlatProgram, site: ContractionSite) -> TurnedRegion | str:
    summed = _summed(flat, site)
    if not summed:
        return f"{site.operation} is not followed"
    axis = summed[-1]
    block = flat.shapes[site.activation][axis]
    while True:
        try:
            return _Turning(flat, site.activation, Turned(axis, block)).region
        except axes.Refused as refused:
            if refused.block < 2:
                return str(refused)
            block = refused.block


def _summed(flat: FlatProgram, site: ContractionSite) -> tuple[int, ...]:
    """The axes of a site's input that it sums over; none if it is not followed."""
    step = flat.steps[site.step]
    return operand_axes(step.equation)[1 - site.place].summed if _is_followed(step) else ()


def _is_followed(step: FlatStep) -> bool:
    """Whether a contraction sums over what a rotation may go along: not over groups of channels."""
    return multiplies_matrices(step.equation) and axes.groups_of(step) == 1


class _Turning(transform_walk.Follower[Turned]):
    """Follows a rotation from a value through a program, as far as it reaches.

    Args:
        flat: the program.
        slot: of the value.
        label: how it is turned.

    Raises:
        Refused: an operation does not commute with the rotation.
    """

    done = "a rotation"

    def __init__(self, flat: FlatProgram, slot: Slot, label: Turned) -> None:
        super().__init__(flat, TURNS)
        self.region = TurnedRegion(label.block)
        self._give(slot, label)
        self.run()
        for slot, path in flat.parameters.items():
            if slot in self.labels:
                self.region.parameters[path] = self.labels[slot].axis
        for site in flat.sites:
            both = site.activation in self.labels and site.weight in self.labels
            if both and self.labels[site.activation].axis in _summed(flat, site):
                self.region.sinks.add(site.name)

    def refuse(self, slot: Slot, why: str) -> None:
        """See `Follower`."""
        raise axes.Refused(why)

    def _give(self, slot: Slot, label: Turned) -> None:
        before = self.labels.get(slot)
        if before == label or (slot in self.flat.unowned and self.flat.is_zero(slot)):
            return
        if before is not None:
            raise axes.Refused("it would be turned in two ways")
        if slot in self.flat.unowned:
            raise axes.Refused("it is a constant")
        self.labels[slot] = label
        self._waiting.append(slot)

    def _label(self, *slots: Slot) -> Turned | None:
        """The label of the first of some values that has one."""
        return next((self.labels[slot] for slot in slots if slot in self.labels), None)

    def _moved(self, step: FlatStep) -> None:
        if self._label(*step.inputs[len(step.data) :]) is not None:
            raise axes.Refused(f"{step.name} picks numbers by it")
        if step.name == "pad" and not self.flat.is_zero(step.inputs[1]):
            raise axes.Refused("numbers that are not 0 are put around it")
        for slot, result in itertools.product(step.data, step.outputs):
            shapes = self.flat.shapes[slot], self.flat.shapes[result]
            for source, target, back in ((slot, result, False), (result, slot, True)):
                label = self.labels.get(source)
                if label is not None:
                    axis = axes.followed(step, label.axis, label.block, shapes, back)
                    self._give(target, replace(label, axis=axis))

    def _sum(self, step: FlatStep) -> None:
        selects = step.name == "select_n"
        operands = step.inputs[1:] if selects else step.inputs
        slots = (*operands, *step.outputs)
        label = self._label(*slots)
        if label is None:
            return
        if selects and not axes.is_uniform(self.flat, step.inputs[0], label.axis):
            raise axes.Refused("a selection depends on the channel")
        for slot in slots:
            turns = slot in self.labels or slot not in operands or self.flat.owned(slot)
            if self.flat.is_zero(slot):
                continue
            if turns or not axes.is_uniform(self.flat, slot, label.axis):
                self._give(slot, label)
            elif label.squared or selects:
                raise axes.Refused("a number is added to all channels")
            else:
                self.region.keeps_sums = True

    def _product(self, step: FlatStep) -> None:
        operands, result = step.inputs, step.outputs[0]
        if operands[0] == operands[1] and step.name == "mul":
            return self._square(step)
        label = self._label(*operands, result)
        if label is None:
            return None
        carriers = [slot for slot in operands if slot in self.labels]
        if not carriers:
            carriers = [slot for slot in operands if not axes.is_uniform(self.flat, slot, label.axis)]
        if len(carriers) != 1 or (step.name == "div" and carriers[0] != operands[0]):
            raise axes.Refused(TWO_VALUES)
        factor = operands[1 - operands.index(carriers[0])]
        if not axes.is_uniform(self.flat, factor, label.axis):
            gain = axes.is_uniform(self.flat, factor, label.axis, parameters=False)
            raise axes.Refused(GAIN if gain else TWO_VALUES)
        for slot in (carriers[0], result):
            self._give(slot, label)
        return None

    def _square(self, step: FlatStep) -> None:
        slot, result = step.inputs[0], step.outputs[0]
        if result in self.labels and slot not in self.labels:
            raise axes.Refused("it is a square")
        if slot in self.labels:
            if step.params.get("y", 2) != 2 or self.labels[slot].squared:
                raise axes.Refused(f"{step.name} does not commute with a rotation")
            self._give(result, replace(self.labels[slot], squared=True))

    def _sums(self, step: FlatStep) -> None:
        label = self.labels.get(step.inputs[0])
        if label is None or label.axis not in step.params["axes"]:
            self._moved(step)
        elif label.squared:
            self.region.normalized = True
        else:
            self.region.keeps_sums = True

    def _contract(self, step: FlatStep) -> None:
        if not _is_followed(step):
            raise axes.Refused(f"{step.name} does not commute with a rotation")
        operands, (result,), sides = step.inputs[:2], step.outputs, operand_axes(step.equation)
        refused = SIDE_BY_SIDE if step.name == "dot_general" else NEIGHBOURS
        for slot, partner, side in zip(operands, operands[::-1], sides, strict=True):
            label = self.labels.get(slot)
            if label is None:
                continue
            if label.axis in side.summed and not label.squared:
                self._give(partner, replace(label, axis=side.partners[label.axis]))
            elif label.axis in side.free and label.axis in side.results and not label.squared:
                self._give(result, replace(label, axis=side.results[label.axis]))
            else:
                raise axes.Refused(refused)
        label = self.labels.get(result)
        if label is None:
            return
        for slot, side in zip(operands, sides, strict=True):
            for axis in side.free:
                if side.results.get(axis) == label.axis and not label.squared:
                    return self._give(slot, replace(label, axis=axis))
        raise axes.Refused(refused)


TURNS: dict[str, Callable[[_Turning, FlatStep], None]] = {
    **dict.fromkeys((*CASTS, *axes.MOVED, *axes.SAME, "reshape"), _Turning._moved),
    **dict.fromkeys(("add", "add_any", "sub", "select_n"), _Turning._sum),
    **dict.fromkeys(("mul", "div"), _Turning._product),
    **dict.fromkeys(("square", "integer_pow"), _Turning._square),
    **dict.fromkeys(CONTRACTIONS, _Turning._contract),
    "reduce_sum": _Turning._sums,
}
"""What operations do with a rotation, by name; any other operation commutes with none."""
