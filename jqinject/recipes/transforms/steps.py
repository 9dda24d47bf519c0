"""What each operation says about factors: equations between the labels of what it reads and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jqinject.recipes.stream.flat_program import Step
from jqinject.recipes.stream.site import CASTS
from jqinject.recipes.transforms.contracted import convolution, dot, ragged
from jqinject.recipes.transforms.labels import varies
from jqinject.recipes.transforms.moved import joined, moved
from jqinject.recipes.transforms.walk import Walk

Rule = Callable[[Walk, Step, int], None]


def same(walk: Walk, step: Step, index: int) -> None:
    """Sums, maxima and the like: all operands and the result have the same factors."""
    operands = step.inputs[1:] if step.name == "select_n" else step.inputs
    if step.name == "select_n":
        walk.refuse(step.inputs[0], "a selection depends on it")
    slots = [slot for slot in (*operands, *step.outputs) if not walk.is_zero(slot)]
    known = next((slot for slot in slots if walk.has(slot)), None)
    if known is not None:
        for slot in slots:
            walk.give(slot, walk.labels[known])


def product(walk: Walk, step: Step, index: int) -> None:
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


def quotient(walk: Walk, step: Step, index: int) -> None:
    """A quotient: the numerator has the factors of the result."""
    above, below = step.inputs
    walk.refuse(below, "something is divided by it")
    walk.give(below, np.zeros((), int))
    known = next((slot for slot in (above, *step.outputs) if walk.has(slot)), None)
    if known is not None:
        for slot in (above, *step.outputs):
            walk.give(slot, walk.labels[known])


def sign_alone(walk: Walk, step: Step, index: int) -> None:
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

    def rule(walk: Walk, step: Step, index: int) -> None:
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
