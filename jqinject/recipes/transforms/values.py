"""The values of a program: what makes and reads them, and where an axis of a value goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.recipes.stream.flat_program import FlatProgram, FlatStep, Slot
from jqinject.recipes.stream.site import CASTS, MOVES, ContractionSite


class Refused(Exception):
    """A gain cannot be taken over, or a value not rotated, and why."""


class DefUse:
    """What makes and what reads each value of a program.

    Args:
        flat: the program.
        parameters: the slots that hold parameters.
        fixed: slots that depend on parameters and constants alone.
        shapes: of the program's inputs.
        count: how many outputs the model returns; the others are its state.
    """

    def __init__(
        self,
        flat: FlatProgram,
        parameters: set[Slot],
        fixed: set[Slot],
        shapes: Mapping[Slot, tuple[int, ...]],
        count: int,
    ) -> None:
        self.parameters, self.fixed = parameters, fixed
        self.inputs = set(flat.inputs)
        returned, state = flat.outputs[:count], flat.outputs[count:]
        self.outputs = {*returned, *(slot for slot in state if slot not in parameters)}
        self.made_by: dict[Slot, tuple[FlatStep, int]] = {}
        self.shapes = dict(shapes) | {slot: np.shape(value) for slot, value in flat.constants.items()}
        self.unowned = set(flat.constants)
        """Slots that depend on constants alone."""
        self.owned = set(parameters)
        """Slots of `fixed` that depend on a parameter."""
        self.discrete: set[Slot] = set()
        """Slots of whole numbers and truth values."""
        self._touching: dict[Slot, list[int]] = {}
        for index, step in enumerate(flat.steps):
            for slot in dict.fromkeys((*step.inputs, *step.outputs)):
                self._touching.setdefault(slot, []).append(index)
            self.made_by |= {slot: (step, place) for place, slot in enumerate(step.outputs)}
            self.shapes |= dict(zip(step.outputs, self._made(step), strict=True))
            if step.equation is not None:
                made = zip(step.outputs, step.equation.outputs, strict=True)
                self.discrete |= {slot for slot, x in made if not jnp.issubdtype(x.dtype, jnp.inexact)}
            if all(slot in self.unowned for slot in step.inputs):
                self.unowned.update(step.outputs)
            elif any(slot in self.owned for slot in step.inputs) and step.outputs[0] in fixed:
                self.owned.update(step.outputs)

    def touching(self, slot: Slot) -> list[int]:
        """The steps that make or read a value."""
        return self._touching.get(slot, [])

    def _made(self, step: FlatStep) -> list[tuple[int, ...]]:
        if step.equation is not None:
            return [tuple(x.shape) for x in step.equation.outputs]
        shape = self.shapes[step.inputs[0]]
        return [shape[1:] if step.name == "slice_of_stack" else (len(step.inputs), *shape)]


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
NONLINEAR = (
    "max",
    "min",
    "tanh",
    "logistic",
    "erf",
    "erfc",
    "exp",
    "sin",
    "cos",
    "log1p",
    "select_n",
    "pow",
    "integer_pow",
)


def values_of(flat: FlatProgram, state: Mapping[Slot, Any], links: DefUse) -> Callable[[Slot], Any]:
    """From a slot that depends on parameters alone to its value.

    Args:
        flat: the program.
        state: the values of the slots that hold the model's state.
        links: what makes each of its values.
    """
    known: dict[Slot, Any] = {**flat.constants, **state}
    made_by = links.made_by

    def value(slot: Slot) -> Any:
        if slot not in known:
            step, _ = made_by[slot]
            made = step.run(*(value(each) for each in step.inputs))
            known.update(zip(step.outputs, made, strict=True))
        return known[slot]

    return value


def live_steps(flat: FlatProgram) -> set[int]:
    """The steps that an output depends on: traces keep operations whose results nobody reads."""
    wanted, live = {*flat.outputs}, set[int]()
    for index in range(len(flat.steps) - 1, -1, -1):
        step = flat.steps[index]
        if wanted & {*step.outputs}:
            live.add(index)
            wanted.update(step.inputs)
    return live


def comes_from_nonlinearity(site: ContractionSite, links: DefUse, fixed: set[Slot]) -> bool:
    """Whether the input of a site is made, number by number, by something that is not linear.

    Args:
        site: of the program.
        links: what makes and reads each of its values.
        fixed: the slots that depend on parameters alone.
    """
    slot = site.other
    while slot in links.made_by:
        step, _ = links.made_by[slot]
        if step.name in NONLINEAR:
            return True
        moving = [each for each in step.inputs if each not in fixed]
        if step.name == "mul" and len(moving) == 2:
            return all(varies_by_input(links, fixed, each) for each in moving)
        if step.name in (*CASTS, *MOVES, "neg", "mul", "add", "sub", "div") and len(moving) == 1:
            slot = moving[0]
            continue
        return False
    return False


def varies_by_input(links: DefUse, fixed: set[Slot], slot: Slot, axis: int = -1, depth: int = 8) -> bool:
    """Whether a value differs along an axis by more than factors that depend on parameters alone.

    Args:
        links: of the program.
        fixed: the slots that depend on parameters alone.
        slot: of the value.
        axis: of the value.
        depth: how many operations are looked back at most.
    """
    shape = links.shapes[slot]
    if slot in fixed or not shape or shape[axis] == 1:
        return False
    if slot not in links.made_by or depth == 0:
        return True
    step, _ = links.made_by[slot]
    if step.name == "broadcast_in_dim":
        dims = tuple(step.params["broadcast_dimensions"])
        before, place = links.shapes[step.inputs[0]], axis % len(shape)
        return place in dims and before[dims.index(place)] != 1
    if step.name in (*CASTS, "mul", "div", "add", "sub"):
        return any(varies_by_input(links, fixed, each, axis, depth - 1) for each in step.inputs)
    return True
