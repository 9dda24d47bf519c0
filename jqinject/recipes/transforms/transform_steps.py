"""What each operation says about factors: equations between the labels of what it reads and what it writes.

Contractions first (what one operand is divided by, the other is multiplied by), then operations that move numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jqinject.program.operations import CONTRACTIONS, multiplies_matrices, operand_axes
from jqinject.recipes.stream.flat_program import CASTS, MOVES, FlatStep, Slot
from jqinject.recipes.stream.matrices import OTHER_PRODUCT
from jqinject.recipes.transforms.axes import groups_of
from jqinject.recipes.transforms.transform_walk import Labels, Walk, varies


def moved(walk: Walk, step: FlatStep) -> None:
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
            walk.channels.join(labels[place], spread)
    if outputs:
        for slot, own in zip(data, numbers, strict=True):
            walk.give(slot, labels[own], labelled[own])
    else:
        for slot, place in zip(step.outputs, places, strict=True):
            walk.give(slot, labels[place])


NO_LABELS = np.zeros((), int)
MIXED = "one factor would have to stand in for those of several channels of a contraction"


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
    moved = labels.transpose((*going, *dropped))
    sizes = [1] * len(walk.flat.shapes[slot])
    for axis in going:
        sizes[pairs[axis]] = labels.shape[axis]
    walk.give(slot, moved.reshape(sizes))


def _from_result(walk: Walk, step: FlatStep) -> None:
    (result,), operands, sides = step.outputs, step.inputs[:2], operand_axes(step.equation)
    labels = walk.labels[result]
    backs = [{place: axis for axis, place in side.results.items()} for side in sides]
    able = [place for place in (0, 1) if backs[place] and varies(labels) <= {*backs[place]}]
    if not able:
        return walk.refuse(result, MIXED)
    having = [place for place in able if walk.has(operands[place])]
    able.sort(key=lambda place: not walk.flat.owned(operands[place]))
    if not having and len(able) > 1:
        walk.chosen[result] = tuple(operands[place] for place in able)
    carrier = having[0] if having else able[walk.choices.get(result, 0) % len(able)]
    _give_along(walk, operands[carrier], labels, backs[carrier])
    walk.give(operands[1 - carrier], NO_LABELS)


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
    elif walk.has(result):
        # An operand that has labels, and they are 0, is known to have no factor.
        able = [slot for slot in operands if slot not in walk.flat.unowned and slot not in walk.labels]
        able.sort(key=lambda slot: not walk.flat.owned(slot))
        if not able:
            return walk.refuse(result, "neither operand of a product can have the factors")
        walk.chosen[result] = tuple(able)
        carrier = able[walk.choices.get(result, 0) % len(able)]
        walk.give(carrier, walk.labels[result])
    else:
        return None
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
    | dict.fromkeys((*MOVES, "concatenate", "stack"), moved)
    | dict.fromkeys(CONTRACTIONS, contraction)
)
"""What operations say about factors, by name. Any other operation commutes with none."""
