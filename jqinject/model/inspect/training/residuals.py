"""What each site of a program reads of the forward pass in the backward pass: from two traced programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jqinject.program import path_in, weight_in
from jqinject.program.jaxpr import Body, Equation

# An array that one of these makes is stored nowhere if what it was made of is.
VIEWS = frozenset(
    ("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "stop_gradient", "name")
)


class Residual(NamedTuple):
    """Bytes that one site keeps, and reads in place."""

    kept: int
    in_place: int


@dataclass(frozen=True, eq=False)
class _Source:
    """The array that an array is a view of.

    Attributes:
        size: bytes.
        variable: if it is a variable of the model, whether that is a weight.
        stored: whether it is anything but a constant of the program.
    """

    size: int
    variable: bool | None = None
    stored: bool = True


def by_site(forward: Body, backward: Body, variables: Sequence[bool]) -> dict[str, Residual]:
    """What each site reads of the forward pass.

    Args:
        forward: a program that returns the residuals.
        backward: a program whose first inputs they are.
        variables: for each of the first inputs of the forward program, which are the model's variables, whether it is
            a weight.
    """
    readers = _readers(backward)
    types = itertools.zip_longest(forward.inputs, variables)
    sources = forward.run([_Source(size_of(x), variable) for x, variable in types], _viewed, _constant)
    seen: set[_Source] = set()
    found: dict[str, Residual] = {}
    for place, source in enumerate(sources):
        if source is None or place not in readers or source in seen or not source.stored:
            continue
        seen.add(source)
        before = found.get(readers[place], Residual(0, 0))
        if source.variable is None:
            found[readers[place]] = before._replace(kept=before.kept + source.size)
        elif source.variable:
            found[readers[place]] = before._replace(in_place=before.in_place + source.size)
    return found


def _constant(value: Any) -> _Source | None:
    """Nothing for numbers, of which arrays are made when they are needed."""
    return _Source(size_of(value), stored=False) if np.ndim(value) else None


def _viewed(eqn: Equation, inputs: list[_Source | None]) -> list[_Source | None]:
    """The outputs of an operation: new arrays, unless it is a view, or a call that returns an input."""
    given = [inputs[place] for place in eqn.variables]
    if not given:
        return [None] * len(eqn.outputs)
    if eqn.name in VIEWS:
        return [given[0]] * len(eqn.outputs)
    made: list[_Source | None] = [_Source(size_of(x)) for x in eqn.outputs]
    if eqn.call is None or eqn.name == "remat2":
        return made
    inside = eqn.call.run(inputs, _viewed, _constant)
    return [x if x is None or x in inputs else new for x, new in zip(inside, made, strict=True)]


def _readers(backward: Body) -> dict[int, str]:
    """Inputs of a backward pass that its outputs depend on -> the site of the first operation that reads them."""
    found: dict[int, str] = {}

    def read(eqn: Equation, inputs: list[int | None]) -> list[int | None]:
        for place in inputs:
            if place is not None:
                found[place] = found.get(place) or _site(eqn, [x == place for x in inputs])
        return [None] * len(eqn.outputs)

    returned = backward.used().run(range(len(backward.inputs)), read, lambda value: None)
    return {**{place: "" for place in returned if place is not None}, **found}


def _site(eqn: Equation, reads: list[bool]) -> str:
    """The innermost site of an operation that reads an array, also in the programs within it.

    Args:
        eqn: the operation.
        reads: which of its operands are the array.
    """
    for body in eqn.bodies:
        sites: list[str] = []

        def read(inner: Equation, inputs: list[bool], sites: list[str] = sites) -> list[bool]:
            if any(inputs):
                sites.append(_site(inner, inputs))
            return [False] * len(inner.outputs)

        ahead = len(reads) - len(
            body.inputs
        )  # operands that the body does not have, or others that it has first
        body.run([False] * -ahead + reads[max(ahead, 0) :], read, lambda value: False)
        if any(sites):
            return next(filter(None, sites))
    return weight_in(eqn.scopes) or path_in(eqn.scopes) or ""


def size_of(x: Any) -> int:
    """Bytes of an array, or of a number."""
    return math.prod(x.shape) * (x.dtype.itemsize if hasattr(x, "dtype") else np.dtype(type(x)).itemsize)
