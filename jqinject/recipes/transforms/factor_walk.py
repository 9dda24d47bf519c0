"""Follows a factor for each channel through a program: whatever would change the program's function is refused.

A label says which channel a number of a value belongs to: `c` that it is multiplied by the factor of channel `c`, `-c`
that it is divided by it, 0 that it stays. Labels of a value broadcast to it: an axis along which they are all the same
has size 1. `Walk.join` says which channels must have the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from jqinject.program.operations import CONTRACTIONS, multiplies_matrices, operand_axes
from jqinject.recipes.stream.flat_program import CASTS, MOVES, FlatProgram, FlatStep, Slot
from jqinject.recipes.stream.matrices import OTHER_PRODUCT

Labels = np.ndarray
NO_LABELS = np.zeros((), int)
L = TypeVar("L")


def compressed(labels: Labels) -> Labels:
    """Labels with size 1 along the axes along which they are all the same.

    Example:
        >>> compressed(np.array([[1, 2], [1, 2]])).tolist()
        [[1, 2]]
    """
    for axis, size in enumerate(labels.shape):
        first = labels.take([0], axis=axis) if size else labels
        # An axis that numpy has broadcast is known to hold the same numbers, without a look at them.
        if size > 1 and (labels.strides[axis] == 0 or (labels == first).all()):
            labels = first
    return np.asarray(labels, order="C")


def varies(labels: Labels) -> set[int]:
    """The axes along which labels differ."""
    return {axis for axis, size in enumerate(labels.shape) if size > 1}


def _parts(size: int, pairs: np.ndarray) -> np.ndarray:
    """The smallest of the numbers below `size` that each is connected with by pairs, `(2, pairs)`."""
    part = np.arange(size)
    while True:
        new = part.copy()
        for end in pairs:
            np.minimum.at(new, end, part[pairs].min(axis=0))
        new = new[new]
        if (new == part).all():
            return part
        part = new


def factors_of(labels: Labels, factors: np.ndarray) -> np.ndarray:
    """The factor of each number.

    Args:
        labels: of the numbers.
        factors: of channels 1, 2, ....

    Example:
        >>> factors_of(np.array([0, 1, -2]), np.array([2.0, 4.0])).tolist()
        [1.0, 2.0, 0.25]
    """
    own = np.where(labels == 0, 1, factors[np.maximum(np.abs(labels), 1) - 1])
    return np.divide(1, own, out=own, where=labels < 0)


@dataclass(eq=False)
class Follower(Generic[L]):
    """Follows what is done to a value to all that has to have it done too: labels go from value to value.

    Attributes:
        flat: the program.
        rules: for each operation, what the labels of some of its operands and results say about those of the others.
        start: index of the operation that the labels begin at; None if it is none.
        stops: slots beyond which labels are not followed.
        labels: of the values that they have come to.
        done: for messages.
    """

    done: ClassVar[str] = "a factor"
    flat: FlatProgram
    rules: Mapping[str, Callable[[Any, FlatStep], None]]
    start: int | None = None
    stops: Container[Slot] = ()
    labels: dict[Slot, L] = field(default_factory=dict, init=False)
    _waiting: list[Slot] = field(default_factory=list, init=False)

    def refuse(self, slot: Slot, why: str) -> None:
        """Nothing may be done to a value."""
        raise NotImplementedError

    def run(self) -> None:
        """Follow the labels that were given to slots as far as they go."""
        while self._waiting:
            slot = self._waiting.pop()
            if slot in self.stops:
                continue
            self._ends(slot)
            for index in self.flat.touching[slot]:
                step = self.flat.steps[index]
                rule = self.rules.get(step.name)
                if index == self.start or index not in self.flat.live:
                    continue
                if rule is None:
                    self.refuse(slot, f"{step.name}{step.where} does not commute with {self.done}")
                else:
                    rule(self, step)

    def _ends(self, slot: Slot) -> None:
        if slot in self.flat.discrete:
            self.refuse(slot, "it holds whole numbers or truth values")
        elif slot in self.flat.ends:
            self.refuse(slot, "it is part of what the model returns")
        elif slot in self.flat.constants:
            self.refuse(slot, "it is a constant")
        elif slot in self.flat.inputs and slot not in self.flat.parameters:
            self.refuse(slot, "it is an input of the model, or state that is no parameter")


@dataclass(eq=False)
class Walk(Follower[Labels]):
    """Labels of the values of a program, as far as a region's factors reach.

    Each operation is an equation between the labels of what it reads and writes. Labels go from value to value until
    nothing is new; where two ways give a value different labels, those channels must have the same factor, and where
    an operation does not commute with a factor, the factor must be 1. It starts at the operation that makes the
    factors, or nowhere, if values that the program has anyway are multiplied.

    Attributes:
        count: how many channels there are at first.
        choices: result of a product -> which of the operands carries its factor, where either could.
        reasons: why channels must have the same factor, or 1.
        chosen: result of a product -> the operands that could carry its factor, where either could.

    Example:
        >>> walk = Walk(None, {}, count=3)  # of no program
        >>> walk.join(np.array([1]), np.array([2])), walk.join(np.array([3]), np.array([0]))
        (True, True)
        >>> walk.groups().tolist()
        [0, 1, 1, 0]
    """

    count: int = field(kw_only=True)
    choices: Mapping[Slot, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list, init=False)
    chosen: dict[Slot, tuple[Slot, ...]] = field(default_factory=dict, init=False)
    _pairs: list[np.ndarray] = field(default_factory=list, init=False)

    def join(self, first: Labels, second: Labels) -> bool:
        """Say that numbers have the same factor under both labels; whether that says anything.

        Args:
            first, second: labels that broadcast with each other.
        """
        first, second = np.broadcast_arrays(first, second)
        differ = first != second
        if not differ.any():
            return False
        self._pairs.append(np.unique(np.stack([first[differ], second[differ]]), axis=1))
        return True

    def groups(self) -> np.ndarray:
        """The new label of each label from 0 to `count`: 0 if its factor must be 1.

        Channels with the same factor have the same new label; with opposite ones, if one must be the inverse.
        """
        pairs = np.concatenate([np.zeros((2, 0), int), *self._pairs], axis=1)
        part = _parts(2 * self.count + 1, np.concatenate([pairs, -pairs], axis=1) + self.count)
        labels = np.zeros(self.count + 1, int)
        new: dict[int, int] = {}
        for channel in range(1, self.count + 1):
            own, inverse = part[self.count + channel], part[self.count - channel]
            if own == inverse or own == part[self.count]:
                continue
            if inverse in new and own not in new:
                labels[channel] = -new[inverse]
            else:
                labels[channel] = new.setdefault(own, len(new) + 1)
        return labels

    def has(self, slot: Slot) -> bool:
        """Whether some number of a value has a factor."""
        return slot in self.labels and bool(self.labels[slot].any())

    def is_zero(self, slot: Slot) -> bool:
        """Whether a value is known, and 0: every factor leaves it as it is."""
        return slot in self.flat.unowned and self.flat.is_zero(slot)

    def give(self, slot: Slot, labels: Labels, where: np.ndarray | bool = True) -> None:
        """Say which labels a value has.

        Args:
            labels: broadcasting to the value.
            where: the numbers that they are for; others stay, as far as nothing else is known.
        """
        shape = self.flat.shapes[slot]
        if labels.ndim != len(shape):  # those of a scalar, or for one
            first = labels.reshape(-1)[0]
            self.join(labels, first)
            labels = np.full((1,) * len(shape), first)
        for axis, size in enumerate(shape):
            if size == 1 and labels.shape[axis] > 1:  # of a value that is broadcast
                first = labels.take([0], axis=axis)
                self.join(labels, first)
                labels = first
        before = self.labels.get(slot)
        if before is None:
            self.labels[slot] = compressed(np.where(where, labels, 0))
            if self.has(slot):
                self._waiting.append(slot)
            return
        if self.join(before, np.where(where, labels, before)):
            self.reasons.append("values with different factors are added, or one has two factors")

    def refuse(self, slot: Slot, why: str) -> None:
        """The factors of a value must be 1."""
        if slot in self.labels and self.join(self.labels[slot], NO_LABELS):
            self.reasons.append(why)

    def carrier(self, result: Slot, able: Sequence[Slot]) -> Slot:
        """Choose the operand of a product that carries the factors of its result: first those made of parameters.

        Args:
            result: of the product.
            able: the operands that can.
        """
        able = sorted(able, key=lambda slot: not self.flat.owned(slot))
        self.chosen[result] = tuple(able)
        return able[self.choices.get(result, 0) % len(able)]


def move(walk: Walk, step: FlatStep) -> None:
    """Operations that move numbers: slices, transpositions, copies along axes, concatenations."""
    data, rest = step.data, step.inputs[len(step.data) :]
    for slot in rest:
        walk.refuse(slot, f"numbers are picked by it in {step.name}")
    if not all(slot in walk.flat.unowned for slot in rest):
        for slot in (*data, *step.outputs):
            walk.refuse(slot, f"which of its numbers are picked by {step.name} depends on the input")
        return
    outputs = [slot for slot in step.outputs if walk.has(slot)]
    if not outputs and not any(walk.has(slot) for slot in data):
        return
    shapes = [walk.flat.shapes[slot] for slot in data]
    ends = np.cumsum([0, *map(math.prod, shapes)])
    # The numbers of all operands, one after the other, and where those of each output come from.
    numbers = [
        np.arange(start, end, dtype=np.int32).reshape(shape)
        for start, end, shape in zip(ends[:-1], ends[1:], shapes, strict=True)
    ]
    places = walk.flat.moved(step, numbers)
    labels, labelled = np.zeros(ends[-1], int), np.zeros(ends[-1], bool)
    for slot, place in (*zip(data, numbers, strict=True), *zip(step.outputs, places, strict=True)):
        if walk.has(slot):
            spread = np.broadcast_to(walk.labels[slot], place.shape)
            labels[place], labelled[place] = spread, True
            walk.join(labels[place], spread)
    if outputs:
        for slot, own in zip(data, numbers, strict=True):
            walk.give(slot, labels[own], labelled[own])
    else:
        for slot, place in zip(step.outputs, places, strict=True):
            walk.give(slot, labels[place])


MIXED = "one factor would have to stand in for those of several channels of a contraction"


def groups_of(step: FlatStep) -> int:
    """In how many groups a convolution sees its channels; 1 for other contractions."""
    return step.params.get("feature_group_count", 1)


def contraction(walk: Walk, step: FlatStep) -> None:
    """What one operand is divided by, the other is multiplied by; or both operands' factors are the result's."""
    (result,), operands = step.outputs, step.inputs[:2]
    itself = operands[0] == operands[1]
    if itself or not multiplies_matrices(step.equation):
        for slot in (*step.inputs, result):
            walk.refuse(slot, "it is contracted with itself" if itself else OTHER_PRODUCT)
        return None
    if walk.has(result):
        return _from_result(walk, step)
    sides, grouped = operand_axes(step.equation), groups_of(step) > 1
    having = [place for place in (0, 1) if walk.has(operands[place])]
    for place in having[:1] if grouped else having:
        side, slot, partner = sides[place], operands[place], operands[1 - place]
        labels = walk.labels[slot]
        if side.results and not varies(labels) - {*side.results}:
            if len(having) == 1:
                walk.give(partner, NO_LABELS)
            _give_along(walk, result, labels, side.results)
        elif varies(labels) - {*side.partners} or (grouped and place == 1):
            walk.refuse(slot, MIXED)
        else:
            labels, pairs = _of_groups(walk, step, labels) if grouped else (labels, side.partners)
            _give_along(walk, partner, -labels, pairs)
            walk.give(result, NO_LABELS)
    return None


def _of_groups(walk: Walk, step: FlatStep, labels: Labels) -> tuple[Labels, Mapping[int, int]]:
    """Labels of a kernel's rows and columns, each those of its group, from those of an image; and their axes."""
    kernel, groups = operand_axes(step.equation)[1], groups_of(step)
    axes = (*kernel.free, *kernel.summed)
    outs, ins = (walk.flat.shapes[step.inputs[1]][axis] for axis in axes)
    of_groups = np.broadcast_to(labels.reshape(-1), (groups * ins,)).reshape(groups, ins)
    return np.repeat(of_groups, outs // groups, axis=0), dict(enumerate(axes))


def _give_along(walk: Walk, slot: Slot, labels: Labels, pairs: Mapping[int, int]) -> None:
    """Give a value labels whose axes go to its own; axes that go nowhere have size 1."""
    going = sorted(pairs, key=pairs.__getitem__)
    dropped = tuple(axis for axis in range(labels.ndim) if axis not in pairs)
    transposed = labels.transpose((*going, *dropped))
    sizes = [1] * len(walk.flat.shapes[slot])
    for axis in going:
        sizes[pairs[axis]] = labels.shape[axis]
    walk.give(slot, transposed.reshape(sizes))


def _from_result(walk: Walk, step: FlatStep) -> None:
    (result,), operands, sides = step.outputs, step.inputs[:2], operand_axes(step.equation)
    labels = walk.labels[result]
    pairs = zip(operands, sides, strict=True)
    backs = {slot: {place: axis for axis, place in side.results.items()} for slot, side in pairs}
    able = [slot for slot, back in backs.items() if back and varies(labels) <= {*back}]
    if not able:
        return walk.refuse(result, MIXED)
    having = [slot for slot in able if walk.has(slot)]
    carrier = having[0] if having else walk.carrier(result, able)
    _give_along(walk, carrier, labels, backs[carrier])
    walk.give(operands[1 - operands.index(carrier)], NO_LABELS)


Rule = Callable[[Walk, FlatStep], None]


def same(walk: Walk, step: FlatStep) -> None:
    """Sums, maxima and the like: all operands and the result have the same factors."""
    operands = step.inputs[1:] if step.name == "select_n" else step.inputs
    if step.name == "select_n":
        walk.refuse(step.inputs[0], "a selection depends on it")
    slots = [slot for slot in (*operands, *step.outputs) if not walk.is_zero(slot)]
    _give_all(walk, slots)


def _give_all(walk: Walk, slots: Sequence[Slot]) -> None:
    """Give values the labels of the first of them that has some."""
    labels = next((walk.labels[slot] for slot in slots if walk.has(slot)), None)
    if labels is not None:
        for slot in slots:
            walk.give(slot, labels)


def product(walk: Walk, step: FlatStep) -> None:
    """A product: one of the operands has the factors of the result."""
    operands, (result,) = step.inputs, step.outputs
    having = [slot for slot in operands if walk.has(slot)]
    if operands[0] == operands[1] or len(having) == 2:
        for slot in operands:
            walk.refuse(slot, "it is multiplied by itself, or by another value with factors")
        return walk.refuse(result, "it is a product of values with factors, or of a value with itself")
    if having:
        carrier = having[0]
        walk.give(result, walk.labels[carrier])
    else:
        # An operand that has labels, and they are 0, is known to have no factor.
        able = [slot for slot in operands if slot not in walk.flat.unowned and slot not in walk.labels]
        if not able:
            return walk.refuse(result, "neither operand of a product can have the factors")
        carrier = walk.carrier(result, able)
        walk.give(carrier, walk.labels[result])
    walk.give(operands[1 - operands.index(carrier)], NO_LABELS)
    return None


def quotient(walk: Walk, step: FlatStep) -> None:
    """A quotient: the numerator has the factors of the result."""
    above, below = step.inputs
    walk.refuse(below, "something is divided by it")
    walk.give(below, NO_LABELS)
    _give_all(walk, (above, *step.outputs))


def sign_alone(walk: Walk, step: FlatStep) -> None:
    """Comparisons with 0, signs: no positive factor changes them."""
    walk.refuse(step.outputs[0], f"it is the result of {step.name}")
    for slot in step.inputs:
        if not all(walk.is_zero(operand) for operand in step.inputs if operand != slot):
            walk.refuse(slot, f"{step.name} compares it with something that is not 0")


def along(axes_of: Callable[[FlatStep], set[int]], *, removed: bool = False) -> Rule:
    """Operations that mix the numbers along some axes, and commute with a factor that is the same along them.

    Args:
        axes_of: from an operation to the axes.
        removed: whether the result lacks them.
    """

    def rule(walk: Walk, step: FlatStep) -> None:
        x, result = step.inputs[0], step.outputs[0]
        axes = axes_of(step)
        for slot in step.inputs[1:]:
            if not walk.is_zero(slot):
                for refused in (x, result, slot):
                    walk.refuse(refused, f"{step.name} has a value of its own")
                return
        if walk.has(x):
            labels = walk.labels[x]
            if varies(labels) & axes:
                return walk.refuse(x, f"{step.name} mixes channels")
            walk.give(result, labels.squeeze(tuple(axes)) if removed else labels)
        elif walk.has(result):
            labels = walk.labels[result]
            if not removed and varies(labels) & axes:
                return walk.refuse(result, f"{step.name} mixes channels")
            walk.give(x, np.expand_dims(labels, tuple(sorted(axes))) if removed else labels)

    return rule


def _window(step: FlatStep) -> set[int]:
    sizes = zip(step.params["window_dimensions"], step.params["window_strides"], strict=True)
    return {axis for axis, pair in enumerate(sizes) if max(pair) > 1}


def _padded(step: FlatStep) -> set[int]:
    return {axis for axis, config in enumerate(step.params["padding_config"]) if any(config)}


#: What operations say about factors, by name. Any other operation commutes with none.
RULES: dict[str, Rule] = (
    dict.fromkeys(
        (*CASTS, "neg", "abs", "add", "add_any", "sub", "max", "min", "select_n", "real", "copy"), same
    )
    | {"mul": product, "div": quotient}
    | dict.fromkeys(("sign", "gt", "ge", "lt", "le", "eq", "ne"), sign_alone)
    | dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min"), along(lambda step: {*step.params["axes"]}, removed=True)
    )
    | dict.fromkeys(("cumsum", "cummax", "cummin"), along(lambda step: {step.params["axis"]}))
    | dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), along(_window))
    | {"pad": along(_padded)}
    | dict.fromkeys((*MOVES, "concatenate", "stack"), move)
    | dict.fromkeys(CONTRACTIONS, contraction)
)
