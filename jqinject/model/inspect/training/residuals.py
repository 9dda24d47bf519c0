"""What each site of a program reads of the forward pass in the backward pass: from two traced programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from jqinject.model.inspect.operation_counts import programs_in
from jqinject.program import path_in, weight_in

# An array that one of these makes is stored nowhere if what it was made of is.
VIEWS = frozenset(
    ("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "stop_gradient", "name")
)
CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"))


class Kept(NamedTuple):
    """Bytes that one site keeps, and reads in place."""

    kept: int
    in_place: int


def by_site(forward: Any, backward: Any, variables: Mapping[int, bool]) -> dict[str, Kept]:
    """What each site reads of the forward pass.

    Args:
        forward: a program that returns the residuals.
        backward: a program whose first inputs they are.
        variables: ids of the forward program's inputs that are the model's variables -> whether they are weights.
    """
    readers = _readers(backward)
    makers = {id(out): (eqn, place) for eqn in forward.eqns for place, out in enumerate(eqn.outvars)}
    inputs = set(map(id, forward.invars))
    seen: set[int] = set()
    found: dict[str, Kept] = {}
    for kept, read in zip(forward.outvars, backward.invars, strict=False):
        source = _source(kept, makers)
        if source is None or id(read) not in readers or id(source) in seen:
            continue
        if id(source) not in makers and id(source) not in inputs:  # a constant of the program
            continue
        seen.add(id(source))
        before, size = found.get(readers[id(read)], Kept(0, 0)), size_of(source.aval)
        if id(source) not in variables:
            found[readers[id(read)]] = before._replace(kept=before.kept + size)
        elif variables[id(source)]:
            found[readers[id(read)]] = before._replace(in_place=before.in_place + size)
    return found


def _source(x: Any, makers: Mapping[int, tuple[Any, int]]) -> Any:
    """The array that an array is a view of; None for a constant."""
    while isinstance(x, core.Var):
        made = makers.get(id(x))
        if made is None:
            return x
        eqn, place = made
        given = [one for one in eqn.invars if isinstance(one, core.Var)]
        if not given:
            return None
        if eqn.primitive.name in VIEWS:
            x = given[0]
            continue
        through = _passed(eqn, place)
        if through is x:
            return x
        x = through
    return None


def _passed(eqn: Any, place: int) -> Any:
    """The input that a call returns as an output, seen through views; the output itself if it is none."""
    out = eqn.outvars[place]
    if eqn.primitive.name not in CALLS:
        return out
    inner = next(iter(programs_in(list(eqn.params.values()))), None)
    if inner is None or len(inner.invars) != len(eqn.invars):
        return out
    makers = {id(one): (each, at) for each in inner.eqns for at, one in enumerate(each.outvars)}
    source = _source(inner.outvars[place], makers)
    if source is None:
        return None
    places = [at for at, one in enumerate(inner.invars) if one is source]
    return eqn.invars[places[0]] if places else out


def _readers(program: Any) -> dict[int, str]:
    """Inputs of a backward pass that its outputs depend on -> the site of the first operation that reads them."""
    live = {id(out) for out in program.outvars if isinstance(out, core.Var)}
    used = []
    for eqn in reversed(program.eqns):
        if any(id(out) in live for out in eqn.outvars):
            used.append(eqn)
            live |= {id(one) for one in eqn.invars if isinstance(one, core.Var)}
    found: dict[int, str] = {id(one): "" for one in program.invars if id(one) in live}
    named: set[int] = set()
    for eqn in reversed(used):
        for one in eqn.invars:
            if id(one) in found and id(one) not in named:
                site = _site(eqn, one)
                if site:
                    found[id(one)] = site
                    named.add(id(one))
    return found


def _site(eqn: Any, read: Any) -> str:
    """The innermost site of an operation that reads an array, also in the programs within it."""
    for program in programs_in(list(eqn.params.values())):
        ahead = len(eqn.invars) - len(program.invars)
        inner = [
            program.invars[at - ahead] for at, one in enumerate(eqn.invars) if one is read and at >= ahead
        ]
        for each in program.eqns:
            for one in inner:
                if any(given is one for given in each.invars) and (site := _site(each, one)):
                    return site
    stack = eqn.source_info.name_stack
    return weight_in(stack) or path_in(stack) or ""


def size_of(x: Any) -> int:
    """Bytes of an array, or of a number."""
    return math.prod(x.shape) * (x.dtype.itemsize if hasattr(x, "dtype") else np.dtype(type(x)).itemsize)
