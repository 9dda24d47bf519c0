"""Finds what can be rotated together: values and parameters of a program whose blocks of channels one matrix turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from jqinject.recipes.stream.flat_program import CASTS, ContractionSite, FlatProgram, FlatStep, Slot
from jqinject.recipes.transforms.axes import MOVED, SAME, CutBlocks, Refused, dot_axes, followed, is_uniform

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
    contracted = _contracted(flat, site)
    if not contracted:
        return f"{site.operation} is not followed"
    axis = contracted[-1]
    block, tried = flat.shapes[site.activation][axis], set[int]()
    while True:
        tried.add(block)
        try:
            return _Turning(flat, site.activation, Turned(axis, block)).region
        except Refused as refused:
            why = refused.args[0]
            if not isinstance(why, CutBlocks) or why.size in tried or why.size < 2:
                return str(why)
            block = why.size


def _contracted(flat: FlatProgram, site: ContractionSite) -> tuple[int, ...]:
    """The axes of a site's input that it contracts; none if it is not followed."""
    step = flat.steps[site.step]
    if step.name == "dot_general":
        return tuple(step.params["dimension_numbers"][0][1 - site.place])
    return (step.params["dimension_numbers"].lhs_spec[1],) if _is_plain_convolution(step) else ()


def _is_plain_convolution(step: FlatStep) -> bool:
    """Whether every output channel of a convolution sees every channel of the image."""
    if step.name != "conv_general_dilated":
        return False
    return step.params["feature_group_count"] == 1 and step.params["batch_group_count"] == 1


class _Turning:
    """Follows a rotation from a value through a program, as far as it reaches.

    Args:
        flat: the program.
        slot: of the value.
        label: how it is turned.

    Raises:
        Refused: an operation does not commute with the rotation.
    """

    def __init__(self, flat: FlatProgram, slot: Slot, label: Turned) -> None:
        self.flat, self.region = flat, TurnedRegion(label.block)
        self._labels: dict[Slot, Turned] = {}
        self._waiting: list[Slot] = []
        self._give(slot, label)
        while self._waiting:
            for index in flat.touching(self._waiting.pop()):
                if index in flat.live:
                    self._step(flat.steps[index])
        for slot, path in flat.parameters.items():
            if slot in self._labels:
                self.region.parameters[path] = self._labels[slot].axis
        for site in flat.sites:
            both = site.activation in self._labels and site.weight in self._labels
            if both and self._labels[site.activation].axis in _contracted(flat, site):
                self.region.sinks.add(site.name)

    def _give(self, slot: Slot, label: Turned) -> None:
        before, flat = self._labels.get(slot), self.flat
        if before == label:
            return
        if before is not None:
            raise Refused("it would be turned in two ways")
        if slot in flat.ends:
            raise Refused("it is part of what the model returns")
        if slot in flat.discrete:
            raise Refused("it is discrete")
        if slot in flat.unowned:
            if self._is_zero(slot):
                return
            raise Refused("it is a constant")
        if slot in flat.inputs and slot not in flat.parameters:
            raise Refused("it is an input of the model, or state that is no parameter")
        self._labels[slot] = label
        self._waiting.append(slot)

    def _label(self, *slots: Slot) -> Turned | None:
        """The label of the first of some values that has one."""
        return next((self._labels[slot] for slot in slots if slot in self._labels), None)

    def _step(self, step: FlatStep) -> None:
        if step.name == "dot_general":
            self._dot(step)
        elif _is_plain_convolution(step):
            self._convolution(step)
        elif step.name in ("square", "integer_pow") or (
            step.name == "mul" and step.inputs[0] == step.inputs[1]
        ):
            self._square(step)
        elif step.name == "reduce_sum" and self._sums(step):
            return
        elif step.name in ("mul", "div"):
            self._product(step)
        elif step.name in ("add", "add_any", "sub", "select_n"):
            self._sum(step)
        elif step.name in (*CASTS, *MOVED, *SAME, "reshape"):
            self._moved(step)
        elif self._label(*step.inputs, *step.outputs) is not None:
            raise Refused(f"{step.name} does not commute with a rotation")

    def _moved(self, step: FlatStep) -> None:
        data = step.inputs if step.name in ("concatenate", "stack") else step.inputs[:1]
        if self._label(*step.inputs[len(data) :]) is not None:
            raise Refused(f"{step.name} picks numbers by it")
        for back in (False, True):
            for slot in data:
                for result in step.outputs:
                    source, target = (result, slot) if back else (slot, result)
                    label = self._labels.get(source)
                    if label is None:
                        continue
                    shapes = self.flat.shapes[slot], self.flat.shapes[result]
                    axis = followed(step, label.axis, label.block, shapes, back)
                    if isinstance(axis, str):
                        raise Refused(axis)
                    self._give(target, replace(label, axis=axis))

    def _sum(self, step: FlatStep) -> None:
        selects = step.name == "select_n"
        operands = step.inputs[1:] if selects else step.inputs
        slots = (*operands, *step.outputs)
        label = self._label(*slots)
        if label is None:
            return
        if selects and not is_uniform(self.flat, step.inputs[0], label.axis):
            raise Refused("a selection depends on the channel")
        for slot in slots:
            turns = slot in self._labels or slot not in operands or self.flat.owned(slot)
            if self._is_zero(slot):
                continue
            if turns or not is_uniform(self.flat, slot, label.axis):
                self._give(slot, label)
            elif label.squared or selects:
                raise Refused("a number is added to all channels")
            else:
                self.region.keeps_sums = True

    def _product(self, step: FlatStep) -> None:
        operands, result = step.inputs, step.outputs[0]
        label = self._label(*operands, result)
        if label is None:
            return
        carriers = [slot for slot in operands if slot in self._labels]
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
        slot, result = step.inputs[0], step.outputs[0]
        if result in self._labels and slot not in self._labels:
            raise Refused("it is a square")
        if slot in self._labels:
            if step.params.get("y", 2) != 2 or self._labels[slot].squared:
                raise Refused(f"{step.name} does not commute with a rotation")
            self._give(result, replace(self._labels[slot], squared=True))

    def _sums(self, step: FlatStep) -> bool:
        """Whether a sum over turned channels was seen to stay as it is."""
        label = self._labels.get(step.inputs[0])
        if label is None or label.axis not in step.params["axes"]:
            return False
        if label.squared:
            self.region.normalized = True
        else:
            self.region.keeps_sums = True
        return True

    def _dot(self, step: FlatStep) -> None:
        sides, result = dot_axes(self.flat, step), step.outputs[0]
        for side, partner in (sides, sides[::-1]):
            label = self._labels.get(side.slot)
            if label is None:
                continue
            if label.axis in side.contracted and not label.squared:
                self._give(partner.slot, Turned(side.partners[label.axis], label.block))
            elif label.axis in side.free and not label.squared:
                self._give(result, Turned(side.results[label.axis], label.block))
            else:
                raise Refused(SIDE_BY_SIDE)
        label = self._labels.get(result)
        if label is None:
            return
        for side in sides:
            for axis in side.free:
                if side.results[axis] == label.axis and not label.squared:
                    return self._give(side.slot, Turned(axis, label.block))
        raise Refused(SIDE_BY_SIDE)

    def _convolution(self, step: FlatStep) -> None:
        spec, (x, kernel), result = step.params["dimension_numbers"], step.inputs, step.outputs[0]
        ends = ((x, spec.lhs_spec[1], spec.rhs_spec[1]), (result, spec.out_spec[1], spec.rhs_spec[0]))
        for slot, axis, of_kernel in ends:
            label = self._labels.get(slot)
            if label is not None:
                if label.squared or label.axis != axis:
                    raise Refused(NEIGHBOURS)
                self._give(kernel, Turned(of_kernel, label.block))
        label = self._labels.get(kernel)
        if label is not None:
            if label.axis not in spec.rhs_spec[:2]:
                raise Refused(NEIGHBOURS)
            for slot, axis, of_kernel in ends:
                if label.axis == of_kernel:
                    self._give(slot, Turned(axis, label.block))

    def _is_zero(self, slot: Slot) -> bool:
        return slot in self.flat.fixed and not np.any(np.asarray(self.flat.value(slot)))
