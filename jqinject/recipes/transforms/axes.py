"""Where an axis of a value goes in operations that move numbers, and where an axis of the result comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jqinject.recipes.stream.flat_program import FlatStep
from jqinject.recipes.stream.site import CASTS

Shape = tuple[int, ...]
Mapped = int | str
"""The axis, or why there is none."""


def followed(step: FlatStep, axis: int, block: int, shapes: tuple[Shape, Shape], back: bool) -> Mapped:
    """The axis of the result along which blocks of numbers lie that lie along an axis of the operand; or the reverse.

    Args:
        step: an operation that moves the numbers of its first operand.
        axis: of the operand; with `back`, of the result.
        block: how many consecutive numbers stay together.
        shapes: of the operand, and of the result.
        back: whether the axis is the result's.
    """
    if step.name in CASTS or step.name in SAME:
        return axis
    if step.name == "reshape":
        return _reshaped(axis, block, (shapes[1], shapes[0]) if back else shapes)
    if step.name not in MOVED:
        return f"{step.name} mixes it"
    places = MOVED[step.name](step, *shapes)
    pairs = {one: other for one, other in places.items() if shapes[0][one] == shapes[1][other]}
    pairs = {other: one for one, other in pairs.items()} if back else pairs
    if axis not in pairs:
        return f"{step.name} takes it apart"
    return pairs[axis]


def _reshaped(axis: int, block: int, shapes: tuple[Shape, Shape]) -> Mapped:
    before, after = shapes
    inner = int(np.prod(before[axis + 1 :]))
    for place in range(len(after)):
        if after[place] > 1 and int(np.prod(after[place + 1 :])) == inner:
            if after[place] % block == 0:
                return place
            return (
                CutBlocks(after[place]) if block % after[place] == 0 else f"{before} is reshaped to {after}"
            )
    return f"{before} is reshaped to {after}"


class CutBlocks(str):
    """A reshape cuts blocks: smaller ones would stay together.

    Args:
        size: of these.
    """

    size: int

    def __new__(cls, size: int) -> CutBlocks:
        made = super().__new__(cls, f"it is cut into pieces of {size}")
        made.size = size
        return made


def _transposed(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    return {axis: place for place, axis in enumerate(step.params["permutation"])}


def _broadcast(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    return dict(enumerate(step.params["broadcast_dimensions"]))


def _squeezed(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    gone = {axis % len(one) for axis in step.params["dimensions"]}
    return {axis: place for place, axis in enumerate(axis for axis in range(len(one)) if axis not in gone)}


def _expanded(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    new = {axis % len(other) for axis in step.params["dimensions"]}
    return dict(enumerate(axis for axis in range(len(other)) if axis not in new))


def _gathered(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    numbers = step.params["dimension_numbers"]
    dropped = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = [axis for axis in range(len(one)) if axis not in dropped]
    return dict(zip(kept, numbers.offset_dims, strict=True))


def _summed(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    gone = set(step.params["axes"])
    return {axis: place for place, axis in enumerate(axis for axis in range(len(one)) if axis not in gone)}


def _of_same(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    return {axis: axis for axis in range(len(one))}


def _inner(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    return {axis: axis - 1 for axis in range(1, len(one))}


def _outer(step: FlatStep, one: Shape, other: Shape) -> dict[int, int]:
    return {axis: axis + 1 for axis in range(len(one))}


SAME = (
    *("neg", "add", "add_any", "sub", "real", "mul", "div", "select_n", "copy"),
    *("sharding_constraint", "layout_constraint", "reshard", "pvary"),
)
MOVED: dict[str, Callable[[Any, Shape, Shape], dict[int, int]]] = {
    "transpose": _transposed,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "expand_dims": _expanded,
    "gather": _gathered,
    "reduce_sum": _summed,
    **dict.fromkeys(
        ("slice", "dynamic_slice", "pad", "concatenate", "split", "cumsum", "dynamic_update_slice"), _of_same
    ),
    "slice_of_stack": _inner,
    "stack": _outer,
}
"""For each operation, which axis of its operand is which of its result; axes of other sizes are taken apart."""
