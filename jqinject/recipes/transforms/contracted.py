"""Factors of values that are contracted: what one operand is divided by, the other is multiplied by."""

from __future__ import annotations

from typing import Any

import numpy as np

from jqinject.recipes.stream.flat_program import Slot, Step
from jqinject.recipes.transforms.labels import Labels, varies
from jqinject.recipes.transforms.walk import Walk

MIXED = "one factor would have to stand in for those of several channels of a contraction"


def dot(walk: Walk, step: Step, index: int) -> None:
    """`dot_general`."""
    contracted, batch = step.params["dimension_numbers"]
    sides = [
        _Side(slot, tuple(contracted[which]), tuple(batch[which]), len(walk.shape(slot)))
        for which, slot in enumerate(step.inputs)
    ]
    made = step.outputs[0]
    if step.inputs[0] == step.inputs[1]:
        return walk.refuse(step.inputs[0], "it is contracted with itself")
    if walk.has(made):
        return _from_result(walk, step, index, sides)
    having = [side for side in sides if walk.has(side.slot)]
    for side in having:
        other = sides[1 - sides.index(side)]
        labels = walk.labels[side.slot]
        if varies(labels) & set(side.contracted):
            if varies(labels) & set(side.free):
                walk.refuse(side.slot, MIXED)
                continue
            walk.give(other.slot, -_placed(labels, side, other))
            walk.give(made, np.zeros((1,) * len(walk.shape(made)), int))
        else:
            if len(having) == 1:
                walk.give(other.slot, np.zeros((1,) * other.rank, int))
            walk.give(made, _as_result(labels, side, sides, len(walk.shape(made))))


class _Side:
    """The axes of one operand of `dot_general`."""

    def __init__(self, slot: Slot, contracted: tuple[int, ...], batch: tuple[int, ...], rank: int) -> None:
        self.slot, self.contracted, self.batch, self.rank = slot, contracted, batch, rank
        self.free = tuple(axis for axis in range(rank) if axis not in (*contracted, *batch))


def _placed(labels: Labels, side: _Side, other: _Side) -> Labels:
    """Labels along contracted and batch axes, on the other operand."""
    pairs = dict(zip((*side.contracted, *side.batch), (*other.contracted, *other.batch), strict=True))
    return _onto(labels, pairs, other.rank)


def _onto(labels: Labels, pairs: dict[int, int], rank: int) -> Labels:
    """Labels whose axes go to others; axes that go nowhere have size 1."""
    going = sorted(pairs, key=pairs.__getitem__)
    dropped = tuple(axis for axis in range(labels.ndim) if axis not in pairs)
    moved = labels.transpose((*going, *dropped))
    sizes = [1] * rank
    for axis in going:
        sizes[pairs[axis]] = labels.shape[axis]
    return moved.reshape(sizes)


def _result_axes(side: _Side, sides: list[_Side]) -> dict[int, int]:
    """Where the batch and free axes of an operand are in the result."""
    start = len(side.batch) + (0 if side is sides[0] else len(sides[0].free))
    pairs = {axis: place for place, axis in enumerate(side.batch)}
    return pairs | {axis: start + place for place, axis in enumerate(side.free)}


def _as_result(labels: Labels, side: _Side, sides: list[_Side], rank: int) -> Labels:
    return _onto(labels, _result_axes(side, sides), rank)


def _from_result(walk: Walk, step: Step, index: int, sides: list[_Side]) -> None:
    made = step.outputs[0]
    labels = walk.labels[made]
    able = []
    for side in sides:
        others = set(range(labels.ndim)) - set(_result_axes(side, sides).values())
        if not varies(labels) & others:
            able.append(side)
    if not able:
        return walk.refuse(made, MIXED)
    having = [side for side in able if walk.has(side.slot)]
    able.sort(key=lambda side: side.slot not in walk.links.owned)
    if not having and len(able) > 1:
        walk.chosen[index] = tuple(side.slot for side in able)
    carrier = having[0] if having else able[walk.choices.get(index, 0) % len(able)]
    other = sides[1 - sides.index(carrier)]
    back = {place: axis for axis, place in _result_axes(carrier, sides).items()}
    walk.give(carrier.slot, _onto(labels, back, carrier.rank))
    walk.give(other.slot, np.zeros((1,) * other.rank, int))


def convolution(walk: Walk, step: Step, index: int) -> None:
    """`conv_general_dilated`: factors of input and output channels."""
    params: Any = step.params
    spec, groups = params["dimension_numbers"], params["feature_group_count"]
    (x, kernel), made = step.inputs, step.outputs[0]
    outs, ins = (walk.shape(kernel)[axis] for axis in spec.rhs_spec[:2])
    if params["batch_group_count"] != 1 or x == kernel:
        for slot in (x, kernel, made):
            walk.refuse(slot, "the convolution groups its batch, or convolves a value with itself")
        return
    rank = len(walk.shape(kernel))

    def on_kernel(labels: Labels, row: int, column: int) -> Labels:
        """Labels `(outputs, inputs)` on the kernel."""
        return _onto(labels, {0: row, 1: column}, rank)

    rows, columns = spec.rhs_spec[:2]
    none = np.zeros((1,) * rank, int)
    if walk.has(made):
        labels = walk.labels[made]
        if varies(labels) - {spec.out_spec[1]}:
            return walk.refuse(made, MIXED)
        walk.give(kernel, on_kernel(labels.reshape(-1, 1), rows, columns))
        walk.give(x, none)
    elif walk.has(x):
        labels = walk.labels[x]
        if varies(labels) - {spec.lhs_spec[1]}:
            return walk.refuse(x, MIXED)
        each = np.broadcast_to(labels.reshape(-1), (groups * ins,)).reshape(groups, ins)
        walk.give(kernel, -on_kernel(np.repeat(each, outs // groups, axis=0), rows, columns))
        walk.give(made, none)
    elif walk.has(kernel):
        labels = walk.labels[kernel]
        if varies(labels) - {rows}:
            return walk.refuse(
                kernel, "the kernel has factors of its input channels or of places in its window"
            )
        walk.give(made, _onto(labels, {rows: spec.out_spec[1]}, rank))
        walk.give(x, none)


def ragged(walk: Walk, step: Step, index: int) -> None:
    """`ragged_dot_general`, of rows in groups, each with a matrix of its own."""
    x, weight, *rest = step.inputs
    made = step.outputs[0]
    numbers = step.params["ragged_dot_dimension_numbers"]
    (left, right), (rows_batch, _) = numbers.dot_dimension_numbers
    plain = (tuple(left), tuple(right), tuple(rows_batch)) == ((1,), (1,), ())
    if not plain or any(walk.has(slot) for slot in rest):
        for slot in step.inputs:
            walk.refuse(slot, "it is a ragged product of another kind than rows in groups")
        return walk.refuse(made, "it is a ragged product of another kind than rows in groups")
    if walk.has(made):
        labels = walk.labels[made]
        if varies(labels) - {1}:
            return walk.refuse(made, MIXED)
        walk.give(weight, labels.reshape(1, 1, -1))
        walk.give(x, np.zeros((1, 1), int))
    elif walk.has(x):
        labels = walk.labels[x]
        if varies(labels) - {1}:
            return walk.refuse(x, MIXED)
        walk.give(weight, -labels.reshape(1, -1, 1))
        walk.give(made, np.zeros((1, 1), int))
    elif walk.has(weight):
        walk.refuse(weight, "other numbers of the parameter have factors")
