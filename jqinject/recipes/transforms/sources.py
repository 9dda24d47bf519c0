"""Values that depend on parameters alone, and what makes the inputs of a site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jqinject.recipes.stream.flat_program import Slot
from jqinject.recipes.stream.site import CASTS, MOVES, ContractionSite
from jqinject.recipes.transforms.walk import Links

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


class Traced(Protocol):
    """A traced float model."""

    @property
    def links(self) -> Links: ...
    @property
    def traced(self) -> Any: ...
    @property
    def state(self) -> Any: ...


def values_of(change: Traced) -> Callable[[Slot], Any]:
    """From a slot that depends on parameters alone to its value.

    Args:
        change: a traced float model.
    """
    known: dict[Slot, Any] = {**change.traced.flat.constants, **change.state}
    made_by = change.links.made_by

    def value(slot: Slot) -> Any:
        if slot not in known:
            step, _ = made_by[slot]
            made = step.run(*(value(each) for each in step.inputs))
            known.update(zip(step.outputs, made, strict=True))
        return known[slot]

    return value


def comes_from_nonlinearity(site: ContractionSite, change: Traced) -> bool:
    """Whether the input of a site is made, number by number, by something that is not linear.

    Args:
        site: of the program.
        change: the traced float model.
    """
    links, fixed = change.links, change.traced.found.fixed
    slot = site.other
    while slot in links.made_by:
        step, _ = links.made_by[slot]
        if step.name in NONLINEAR:
            return True
        moving = [each for each in step.inputs if each not in fixed]
        if step.name == "mul" and len(moving) == 2:
            return all(_varies(links, fixed, each) for each in moving)
        if step.name in (*CASTS, *MOVES, "neg", "mul", "add", "sub", "div") and len(moving) == 1:
            slot = moving[0]
            continue
        return False
    return False


def _varies(links: Links, fixed: set[Slot], slot: Slot, depth: int = 8) -> bool:
    """Whether a value is not, but for factors that depend on parameters alone, one number along its last axis."""
    shape = links.shapes[slot]
    if slot in fixed or not shape or shape[-1] == 1:
        return False
    if slot not in links.made_by or depth == 0:
        return True
    step, _ = links.made_by[slot]
    if step.name == "broadcast_in_dim":
        dims = tuple(step.equation.params["broadcast_dimensions"])
        before, last = links.shapes[step.inputs[0]], len(shape) - 1
        return last in dims and before[dims.index(last)] != 1
    if step.name in (*CASTS, "mul", "div", "add", "sub"):
        return any(_varies(links, fixed, each, depth - 1) for each in step.inputs)
    return True
