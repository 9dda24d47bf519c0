"""Finds what can be rotated together: values and parameters of a program whose blocks of channels one matrix turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jqinject.recipes.stream.flat_program import FlatProgram, FlatStep, Slot
from jqinject.recipes.stream.site import CASTS, ContractionSite, Path, ProgramSites
from jqinject.recipes.transforms.values import (
    MOVED,
    SAME,
    CutBlocks,
    DefUse,
    Refused,
    followed,
    live_steps,
    varies_by_input,
)

GAIN = "it is multiplied by numbers that differ, such as a norm's gain, which FoldNorms takes out"


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
        crosses: whether the values go through a product of two values.
    """

    block: int
    parameters: dict[Path, int] = field(default_factory=dict)
    sinks: set[str] = field(default_factory=set)
    normalized: bool = False
    keeps_sums: bool = False
    crosses: bool = False


def is_plain_convolution(operation: str, params: Any) -> bool:
    """Whether every output channel of a convolution sees every channel of the image.

    Args:
        operation: name of the primitive.
        params: of its equation.
    """
    return (
        operation == "conv_general_dilated"
        and params["feature_group_count"] == 1
        and params["batch_group_count"] == 1
    )


class Turning:
    """Follows a rotation from the inputs of a site through a program, as far as it reaches.

    Args:
        links: what makes and reads each of the program's values.
        flat: the program.
        found: its sites.
        parameters: the slot of each parameter, with its path.
        value_of: the value of a slot that depends on parameters alone.
    """

    def __init__(
        self,
        links: DefUse,
        flat: FlatProgram,
        found: ProgramSites,
        parameters: Mapping[Slot, Path],
        value_of: Callable[[Slot], Any],
    ) -> None:
        self.links, self.steps, self.found = links, flat.steps, found
        self._live = live_steps(flat)
        self.parameters, self.value_of = parameters, value_of

    def of(self, site: ContractionSite) -> TurnedRegion | str:
        """What turns with the inputs of a site; a sentence that says why they cannot.

        Args:
            site: one of the program's.
        """
        contracted = self._contracted(site)
        if not contracted:
            return f"{site.operation} is not followed"
        axis = contracted[-1]
        block, tried = self.links.shapes[site.other][axis], set[int]()
        while True:
            tried.add(block)
            try:
                return self._region(site.other, Turned(axis, block))
            except Refused as refused:
                why = refused.args[0]
                if not isinstance(why, CutBlocks) or why.size in tried or why.size < 2:
                    return str(why)
                block = why.size

    def _region(self, slot: Slot, label: Turned) -> TurnedRegion:
        self._labels: dict[Slot, Turned] = {}
        self._waiting: list[Slot] = []
        self._region_found = region = TurnedRegion(label.block)
        self._give(slot, label)
        while self._waiting:
            slot = self._waiting.pop()
            for index in self.links.touching(slot):
                if index in self._live:
                    self._step(self.steps[index])
        for slot, path in self.parameters.items():
            if slot in self._labels:
                region.parameters[path] = self._labels[slot].axis
        for site in self.found.sites:
            both = site.other in self._labels and site.weight in self._labels
            if both and self._labels[site.other].axis in self._contracted(site):
                region.sinks.add(site.name)
        return region

    def _contracted(self, site: ContractionSite) -> tuple[int, ...]:
        """The axes of a site's input that it contracts; none if it is not followed."""
        params = self.steps[site.step].params
        if site.operation == "dot_general":
            return tuple(params["dimension_numbers"][0][1 - site.place])
        return (
            (params["dimension_numbers"].lhs_spec[1],) if is_plain_convolution(site.operation, params) else ()
        )

    def _give(self, slot: Slot, label: Turned) -> None:
        held = self._labels.get(slot)
        if held == label:
            return
        if held is not None:
            raise Refused("it would be turned in two ways")
        links = self.links
        if slot in links.discrete or slot in links.outputs:
            raise Refused(
                "it is part of what the model returns" if slot in links.outputs else "it is discrete"
            )
        if slot in links.unowned:
            if not np.any(np.asarray(self.value_of(slot))):
                return
            raise Refused("it is a constant")
        if slot in links.inputs and slot not in links.parameters:
            raise Refused("it is an input of the model, or state that is no parameter")
        self._labels[slot] = label
        self._waiting.append(slot)

    def _step(self, step: FlatStep) -> None:
        if step.name == "dot_general":
            return self._dot(step)
        if step.name == "conv_general_dilated" and is_plain_convolution(step.name, step.params):
            return self._convolution(step)
        squares = step.name in ("square", "integer_pow") or (
            step.name == "mul" and step.inputs[0] == step.inputs[1]
        )
        if squares:
            return self._square(step)
        if step.name == "reduce_sum" and self._sums(step):
            return None
        if step.name in ("mul", "div"):
            return self._product(step)
        if step.name in ("add", "add_any", "sub", "select_n"):
            return self._sum(step)
        if step.name in CASTS or step.name in MOVED or step.name in SAME or step.name == "reshape":
            return self._moved(step)
        if any(slot in self._labels for slot in step.inputs) or any(s in self._labels for s in step.outputs):
            raise Refused(f"{step.name} does not commute with a rotation")
        return None

    def _moved(self, step: FlatStep) -> None:
        joins = step.name in ("concatenate", "stack")
        data = step.inputs if joins else step.inputs[:1]
        if any(slot in self._labels for slot in step.inputs[len(data) :]):
            raise Refused(f"{step.name} picks numbers by it")
        for slot in data:
            if slot in self._labels:
                for made in step.outputs:
                    self._give(made, self._through(step, slot, made, self._labels[slot], back=False))
        for made in step.outputs:
            if made in self._labels:
                for slot in data:
                    self._give(slot, self._through(step, slot, made, self._labels[made], back=True))

    def _through(self, step: FlatStep, slot: Slot, made: Slot, label: Turned, back: bool) -> Turned:
        shapes = self.links.shapes[slot], self.links.shapes[made]
        axis = followed(step, label.axis, label.block, shapes, back)
        if isinstance(axis, str):
            raise Refused(axis)
        return Turned(axis, label.block, label.squared)

    def _sum(self, step: FlatStep) -> None:
        operands = step.inputs[1:] if step.name == "select_n" else step.inputs
        slots = (*operands, *step.outputs)
        label = next((self._labels[slot] for slot in slots if slot in self._labels), None)
        if label is None:
            return
        if step.name == "select_n" and not self._is_uniform(step.inputs[0], label.axis):
            raise Refused("a selection depends on the channel")
        for slot in slots:
            held = slot in self._labels or slot not in operands or slot in self.links.owned
            if (held or not self._is_uniform(slot, label.axis)) and not self._is_zero(slot):
                self._give(slot, label)
            elif not self._is_zero(slot):
                if label.squared or step.name == "select_n":
                    raise Refused("a number is added to all channels")
                self._region_found.keeps_sums = True

    def _product(self, step: FlatStep) -> None:
        (one, other), made = step.inputs, step.outputs[0]
        label = next((self._labels[slot] for slot in (one, other, made) if slot in self._labels), None)
        if label is None:
            return
        carriers = [slot for slot in (one, other) if slot in self._labels]
        if not carriers:
            varying = [slot for slot in (one, other) if not self._is_uniform(slot, label.axis)]
            carriers = varying[:1] if len(varying) == 1 else []
        if len(carriers) != 1 or (step.name == "div" and carriers[0] != one):
            raise Refused("two values that depend on the channel are multiplied")
        rest = other if carriers[0] == one else one
        if not self._is_uniform(rest, label.axis):
            gain = not varies_by_input(self.links, self.found.fixed, rest, label.axis)
            raise Refused(GAIN if gain else "two values that depend on the channel are multiplied")
        for slot in (carriers[0], made):
            self._give(slot, label)

    def _square(self, step: FlatStep) -> None:
        slot, made = step.inputs[0], step.outputs[0]
        if made in self._labels and slot not in self._labels:
            raise Refused("it is a square")
        if slot in self._labels:
            power = step.params.get("y", 2)
            if power != 2 or self._labels[slot].squared:
                raise Refused(f"{step.name} does not commute with a rotation")
            self._give(made, Turned(self._labels[slot].axis, self._labels[slot].block, squared=True))

    def _sums(self, step: FlatStep) -> bool:
        """Whether a sum over turned channels was seen to stay as it is."""
        label = self._labels.get(step.inputs[0])
        if label is None or label.axis not in step.params["axes"]:
            return False
        if label.squared:
            self._region_found.normalized = True
        else:
            self._region_found.keeps_sums = True
        return True

    def _dot(self, step: FlatStep) -> None:
        contracted, batch = step.params["dimension_numbers"]
        ranks = [len(self.links.shapes[slot]) for slot in step.inputs]
        free = [
            [axis for axis in range(ranks[which]) if axis not in (*contracted[which], *batch[which])]
            for which in (0, 1)
        ]
        made, start = step.outputs[0], len(batch[0])
        for which, slot in enumerate(step.inputs):
            label = self._labels.get(slot)
            if label is None:
                continue
            if label.squared or label.axis in batch[which]:
                raise Refused("it is one of several products side by side")
            if label.axis in contracted[which]:
                partner = contracted[1 - which][tuple(contracted[which]).index(label.axis)]
                self._crossed(step, slot)
                self._give(step.inputs[1 - which], Turned(partner, label.block))
            else:
                self._crossed(step, step.inputs[1 - which])
                place = start + free[which].index(label.axis) + (len(free[0]) if which else 0)
                self._give(made, Turned(place, label.block))
        label = self._labels.get(made)
        if label is not None:
            if label.axis < start or label.squared:
                raise Refused("it is one of several products side by side")
            place = label.axis - start
            which = int(place >= len(free[0]))
            axis = free[which][place - (len(free[0]) if which else 0)]
            self._give(step.inputs[which], Turned(axis, label.block))

    def _convolution(self, step: FlatStep) -> None:
        spec, (x, kernel), made = step.params["dimension_numbers"], step.inputs, step.outputs[0]
        for slot, axis, other, place in (
            (x, spec.lhs_spec[1], kernel, spec.rhs_spec[1]),
            (made, spec.out_spec[1], kernel, spec.rhs_spec[0]),
        ):
            label = self._labels.get(slot)
            if label is None:
                continue
            if label.squared or label.axis != axis:
                raise Refused("a convolution takes neighbours of it")
            self._give(other, Turned(place, label.block))
        label = self._labels.get(kernel)
        if label is not None:
            if label.axis not in spec.rhs_spec[:2]:
                raise Refused("a convolution takes neighbours of it")
            out = label.axis == spec.rhs_spec[0]
            self._give(made if out else x, Turned((spec.out_spec if out else spec.lhs_spec)[1], label.block))

    def _crossed(self, step: FlatStep, slot: Slot) -> None:
        if not any(each in self.links.owned for each in step.inputs):
            self._region_found.crosses = True

    def _is_zero(self, slot: Slot) -> bool:
        return slot in self.found.fixed and not np.any(np.asarray(self.value_of(slot)))

    def _is_uniform(self, slot: Slot, axis: int, depth: int = 8) -> bool:
        """Whether a value is the same along an axis."""
        if self.links.shapes[slot] == () or self.links.shapes[slot][axis] == 1:
            return True
        if slot in self.found.fixed:
            value = np.asarray(self.value_of(slot), np.float32)
            return bool(np.allclose(value, value.take([0], axis=axis), rtol=1e-6, atol=0))
        if slot not in self.links.made_by or depth == 0:
            return False
        step, _ = self.links.made_by[slot]
        if step.name == "broadcast_in_dim":
            dims = tuple(step.params["broadcast_dimensions"])
            shape = self.links.shapes[step.inputs[0]]
            return axis not in dims or shape[dims.index(axis)] == 1
        if step.name in MOVED or step.name in ("dot_general", "reshape") or not step.inputs:
            return False
        rank = len(self.links.shapes[slot])
        elementwise = all(len(self.links.shapes[each]) in (0, rank) for each in step.inputs)
        return elementwise and all(self._is_uniform(each, axis, depth - 1) for each in step.inputs)
