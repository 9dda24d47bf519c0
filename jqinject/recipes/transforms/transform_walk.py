"""Follows a factor for each channel through a program: whatever would change the program's function is refused.

A label says which channel a number of a value belongs to: `c` that it is multiplied by the factor of channel `c`, `-c`
that it is divided by it, 0 that it stays. Labels of a value broadcast to it: an axis along which they are all the same
has size 1. `Channels` knows which channels must have the same factor.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from jqinject.recipes.stream.flat_program import FlatProgram, FlatStep, Slot

Labels = np.ndarray
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
    return np.ascontiguousarray(labels)


def varies(labels: Labels) -> set[int]:
    """The axes along which labels differ."""
    return {axis for axis, size in enumerate(labels.shape) if size > 1}


class Channels:
    """The channels of a region, and which of them must have the same factor.

    Args:
        count: how many there are at first.

    Example:
        >>> channels = Channels(3)
        >>> channels.join(np.array([1]), np.array([2]))
        True
        >>> channels.join(np.array([3]), np.array([0]))
        True
        >>> channels.groups().tolist()
        [0, 1, 1, 0]
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pairs: list[np.ndarray] = []

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
        pairs = np.concatenate([pairs, -pairs], axis=1) + self.count
        size = 2 * self.count + 1
        part = _parts(size, *pairs)
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


def _parts(size: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The smallest of the numbers below `size` that each is connected with by pairs."""
    part = np.arange(size)
    while True:
        lowest = np.minimum(part[first], part[second])
        new = part.copy()
        np.minimum.at(new, first, lowest)
        np.minimum.at(new, second, lowest)
        new = new[new]
        if (new == part).all():
            return part
        part = new


def relabelled(labels: Labels, groups: np.ndarray) -> Labels:
    """Labels after channels were joined."""
    return np.sign(labels) * groups[np.abs(labels)]


def factors_of(labels: Labels, factors: np.ndarray) -> np.ndarray:
    """The factor of each number.

    Args:
        labels: of the numbers.
        factors: of channels 1, 2, ....

    Example:
        >>> factors_of(np.array([0, 1, -2]), np.array([2.0, 4.0])).tolist()
        [1.0, 2.0, 0.25]
    """
    own = factors[np.maximum(np.abs(labels), 1) - 1]
    return np.where(labels == 0, 1, np.where(labels > 0, own, 1 / own)).astype(factors.dtype)


class Follower(Generic[L]):
    """Follows what is done to a value to all that has to have it done too: labels go from value to value.

    Args:
        flat: the program.
        rules: for each operation, what the labels of some of its operands and results say about those of the others.
        start: index of the operation that the labels begin at; None if it is none.
        stops: slots beyond which labels are not followed.

    Attributes:
        labels: of the values that they have come to.
        done: for messages.
    """

    done = "a factor"

    def __init__(
        self,
        flat: FlatProgram,
        rules: Mapping[str, Callable[[Any, FlatStep], None]],
        start: int | None = None,
        stops: Container[Slot] = (),
    ) -> None:
        self.flat, self.rules, self._start, self._stops = flat, rules, start, stops
        self.labels: dict[Slot, L] = {}
        self._waiting: list[Slot] = []

    def refuse(self, slot: Slot, why: str) -> None:
        """Nothing may be done to a value."""
        raise NotImplementedError

    def run(self) -> None:
        """Follow the labels that were given to slots as far as they go."""
        while self._waiting:
            slot = self._waiting.pop()
            if slot in self._stops:
                continue
            self._ends(slot)
            for index in self.flat.touching[slot]:
                step = self.flat.steps[index]
                rule = self.rules.get(step.name)
                if index == self._start or index not in self.flat.live:
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


class Walk(Follower[Labels]):
    """Labels of the values of a program, as far as a region's factors reach.

    Each operation is an equation between the labels of what it reads and writes. Labels go from value to value until
    nothing is new; where two ways give a value different labels, those channels must have the same factor, and where
    an operation does not commute with a factor, the factor must be 1.

    Args:
        flat: the program.
        rules: for each operation, the equation between the labels of its operands and results.
        count: of channels.
        choices: result of a product -> which of the operands carries its factor, where either could.
        start: index of the operation that makes the factors; None if values that the program has anyway are multiplied.
        stops: slots beyond which factors are not followed.
    """

    def __init__(
        self,
        flat: FlatProgram,
        rules: Mapping[str, Callable[[Walk, FlatStep], None]],
        count: int,
        choices: Mapping[Slot, int],
        start: int | None = None,
        stops: Container[Slot] = (),
    ) -> None:
        super().__init__(flat, rules, start, stops)
        self.choices = choices
        self.channels = Channels(count)
        self.reasons: list[str] = []
        self.chosen: dict[Slot, tuple[Slot, ...]] = {}

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
        if labels.ndim != len(shape):
            self.channels.join(labels, labels.reshape(-1)[0])
            labels = np.full((1,) * len(shape), labels.reshape(-1)[0])
        for axis, size in enumerate(shape):
            if size == 1 and labels.shape[axis] > 1:
                first = labels.take([0], axis=axis)
                self.channels.join(labels, first)
                labels = first
        before = self.labels.get(slot)
        if before is None:
            self.labels[slot] = compressed(np.where(where, labels, 0))
            if self.has(slot):
                self._waiting.append(slot)
            return
        if self.channels.join(before, np.where(where, labels, before)):
            self.reasons.append("values with different factors are added, or one has two factors")

    def refuse(self, slot: Slot, why: str) -> None:
        """The factors of a value must be 1."""
        if slot in self.labels and self.channels.join(self.labels[slot], np.zeros((), int)):
            self.reasons.append(why)
