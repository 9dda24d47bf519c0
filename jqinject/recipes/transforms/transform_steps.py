"""What each operation says about factors: equations between the labels of what it reads and what it writes.

Contractions first (what one operand is divided by, the other is multiplied by), then operations that move numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.recipes.stream.flat_program import FlatStep, Slot
from jqinject.recipes.stream.site import CASTS
from jqinject.recipes.transforms.transform_walk import Labels, Walk, varies


def moved(walk: Walk, step: FlatStep, index: int) -> None:
    """Operations that move the numbers of their first operand: slices, transpositions, copies along axes."""
    for slot in step.inputs[1:]:
        walk.refuse(slot, f"numbers are picked by it in {step.name}")
    if all(slot in walk.links.unowned for slot in step.inputs[1:]):
        _moved(walk, step, step.inputs[:1])
    else:
        for slot in (step.inputs[0], *step.outputs):
            walk.refuse(slot, f"which of its numbers are picked by {step.name} depends on the input")


def joined(walk: Walk, step: FlatStep, index: int) -> None:
    """Concatenation and stacking."""
    _moved(walk, step, step.inputs)


def _moved(walk: Walk, step: FlatStep, data: Sequence[int]) -> None:
    outputs = [slot for slot in step.outputs if walk.has(slot)]
    if not outputs and not any(walk.has(slot) for slot in data):
        return
    places = _places(walk, step, data)
    sizes = [int(np.prod(walk.shape(slot))) for slot in data]
    ends = np.cumsum([0, *sizes])
    whole = np.zeros(ends[-1], int)
    if not outputs:
        for slot, start, end in zip(data, ends[:-1], ends[1:], strict=True):
            if walk.has(slot):
                whole[start:end] = np.broadcast_to(walk.labels[slot], walk.shape(slot)).reshape(-1)
        for slot, place in zip(step.outputs, places, strict=True):
            walk.give(slot, whole[place])
        return
    seen = np.zeros(ends[-1], bool)
    for slot, place in zip(step.outputs, places, strict=True):
        if walk.has(slot):
            labels = np.broadcast_to(walk.labels[slot], place.shape)
            whole[place], seen[place] = labels, True
            walk.channels.join(whole[place], labels)
    for slot, start, end in zip(data, ends[:-1], ends[1:], strict=True):
        shape = walk.shape(slot)
        walk.give(slot, whole[start:end].reshape(shape), seen[start:end].reshape(shape))


def _places(walk: Walk, step: FlatStep, data: Sequence[int]) -> list[np.ndarray]:
    """For each output, where its numbers come from in the operands, one after the other."""
    start, operands = 0, []
    for slot in data:
        shape = walk.shape(slot)
        size = int(np.prod(shape))
        operands.append(np.arange(start, start + size, dtype=np.int32).reshape(shape))
        start += size
    simple = moved_by_numpy(step, operands[0])
    if simple is not None:
        return [simple]
    rest = [walk.known(slot) for slot in step.inputs[len(data) :]]
    return [np.asarray(made) for made in step.run(*map(jnp.asarray, operands), *rest)]


def moved_by_numpy(step: FlatStep, x: np.ndarray) -> Any:
    """The commonest moves, without a compilation for each shape, and mostly without a copy; None for others.

    Args:
        step: the move.
        x: what is moved.
    """
    params = step.params
    if step.name == "reshape" and params.get("dimensions") is None:
        return x.reshape(params["new_sizes"])
    if step.name == "transpose":
        return x.transpose(params["permutation"])
    if step.name == "squeeze":
        return x.squeeze(tuple(params["dimensions"]))
    if step.name == "broadcast_in_dim":
        axes, shape = params["broadcast_dimensions"], params["shape"]
        sizes = [1] * len(shape)
        for axis, size in zip(axes, x.shape, strict=True):
            sizes[axis] = size
        return np.broadcast_to(x.reshape(sizes), shape)
    return None


MIXED = "one factor would have to stand in for those of several channels of a contraction"


def dot(walk: Walk, step: FlatStep, index: int) -> None:
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


def _from_result(walk: Walk, step: FlatStep, index: int, sides: list[_Side]) -> None:
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


def convolution(walk: Walk, step: FlatStep, index: int) -> None:
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


def ragged(walk: Walk, step: FlatStep, index: int) -> None:
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


Rule = Callable[[Walk, FlatStep, int], None]


def same(walk: Walk, step: FlatStep, index: int) -> None:
    """Sums, maxima and the like: all operands and the result have the same factors."""
    operands = step.inputs[1:] if step.name == "select_n" else step.inputs
    if step.name == "select_n":
        walk.refuse(step.inputs[0], "a selection depends on it")
    slots = [slot for slot in (*operands, *step.outputs) if not walk.is_zero(slot)]
    known = next((slot for slot in slots if walk.has(slot)), None)
    if known is not None:
        for slot in slots:
            walk.give(slot, walk.labels[known])


def product(walk: Walk, step: FlatStep, index: int) -> None:
    """A product: one of the operands has the factors of the result."""
    (one, other), (made,) = step.inputs, step.outputs
    having = [slot for slot in (one, other) if walk.has(slot)]
    if one == other or len(having) == 2:
        for slot in (one, other):
            walk.refuse(slot, "it is multiplied by itself, or by another value with factors")
        walk.refuse(made, "it is a product of values with factors, or of a value with itself")
    elif having:
        walk.give(made, walk.labels[having[0]])
        walk.give(other if having[0] == one else one, np.zeros((), int))
    elif walk.has(made):
        able = [slot for slot in (one, other) if slot not in walk.links.unowned and not walk.is_settled(slot)]
        able.sort(key=lambda slot: slot not in walk.links.owned)
        if not able:
            return walk.refuse(made, "neither operand of a product can have the factors")
        walk.chosen[index] = tuple(able)
        carrier = able[walk.choices.get(index, 0) % len(able)]
        walk.give(carrier, walk.labels[made])
        walk.give(other if carrier == one else one, np.zeros((), int))


def quotient(walk: Walk, step: FlatStep, index: int) -> None:
    """A quotient: the numerator has the factors of the result."""
    above, below = step.inputs
    walk.refuse(below, "something is divided by it")
    walk.give(below, np.zeros((), int))
    known = next((slot for slot in (above, *step.outputs) if walk.has(slot)), None)
    if known is not None:
        for slot in (above, *step.outputs):
            walk.give(slot, walk.labels[known])


def sign_alone(walk: Walk, step: FlatStep, index: int) -> None:
    """Comparisons with 0, signs: no positive factor changes them."""
    walk.refuse(step.outputs[0], f"it is the result of {step.name}")
    for slot in step.inputs:
        if not all(walk.is_zero(other) for other in step.inputs if other != slot):
            walk.refuse(slot, f"{step.name} compares it with something that is not 0")


def along(axes_of: Callable[[Any], set[int]], *, removed: bool = False) -> Rule:
    """Operations that mix the numbers along some axes, and commute with a factor that is the same along them.

    Args:
        axes_of: from the equation's parameters to the axes.
        removed: whether the result lacks them.
    """

    def rule(walk: Walk, step: FlatStep, index: int) -> None:
        x, made = step.inputs[0], step.outputs[0]
        axes = axes_of(step.params)
        for slot in step.inputs[1:]:
            if not walk.is_zero(slot) and not walk.is_infinite(slot):
                for refused in (x, made, slot):
                    walk.refuse(refused, f"{step.name} has a value of its own")
                return
        if walk.has(x):
            labels = walk.labels[x]
            if varies(labels) & axes:
                return walk.refuse(x, f"{step.name} mixes channels")
            walk.give(made, labels.squeeze(tuple(axes)) if removed else labels)
        elif walk.has(made):
            labels = walk.labels[made]
            if not removed and varies(labels) & axes:
                return walk.refuse(made, f"{step.name} mixes channels")
            walk.give(x, np.expand_dims(labels, tuple(sorted(axes))) if removed else labels)

    return rule


def _window(params: Any) -> set[int]:
    return {axis for axis, size in enumerate(params["window_dimensions"]) if size > 1} | {
        axis for axis, size in enumerate(params["window_strides"]) if size > 1
    }


def _padded(params: Any) -> set[int]:
    return {axis for axis, config in enumerate(params["padding_config"]) if any(config)}


RULES: dict[str, Rule] = (
    dict.fromkeys(
        (*CASTS, "neg", "abs", "add", "add_any", "sub", "max", "min", "select_n", "real", "copy"), same
    )
    | {"mul": product, "div": quotient}
    | dict.fromkeys(("sign", "gt", "ge", "lt", "le", "eq", "ne"), sign_alone)
    | dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min"), along(lambda params: set(params["axes"]), removed=True)
    )
    | dict.fromkeys(("cumsum", "cummax", "cummin"), along(lambda params: {params["axis"]}))
    | dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), along(_window))
    | {"pad": along(_padded)}
    | dict.fromkeys(
        (
            *("reshape", "transpose", "slice", "squeeze", "expand_dims", "broadcast_in_dim", "rev", "split"),
            *("dynamic_slice", "gather", "slice_of_stack"),
            *("sharding_constraint", "layout_constraint", "reshard", "pvary"),
        ),
        moved,
    )
    | dict.fromkeys(("concatenate", "stack"), joined)
    | {"dot_general": dot, "conv_general_dilated": convolution, "ragged_dot_general": ragged}
)
"""What operations say about factors, by name. Any other operation commutes with none."""
