"""Values that depend on parameters alone, and what makes the inputs of a site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jqinject.recipes.stream.flat_program import FlatProgram, Slot
from jqinject.recipes.stream.site import CASTS, MOVES, ContractionSite
from jqinject.recipes.transforms.transform_walk import DefUse

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
