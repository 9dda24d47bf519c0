"""Counts the multiply-accumulates of each layer in a traced program."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def operations_by(jaxpr: Any, mark: re.Pattern[str]) -> Counter[str]:
    """Count the multiply-accumulates of a program's contractions, by named scope.

    A loop body counts once per iteration, or once if the trip count is unknown; of several branches, the one with the
    most counts; see `times_run`.

    Args:
        jaxpr: a traced program.
        mark: matches a scope of interest in a name stack; its first group is the key. The innermost match counts.
    """
    return _count(jaxpr, "", mark)


def _count(jaxpr: Any, outer: str, mark: re.Pattern[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        scopes = mark.findall(str(equation.source_info.name_stack))
        scope = scopes[-1] if scopes else outer
        counts = COUNTS.get(equation.primitive.name)
        if counts is not None:
            if scope:
                found[scope] += counts(equation)
            continue
        inner = [_count(program, scope, mark) for program in programs_in(list(equation.params.values()))]
        if equation.primitive.name == "cond":
            most: Counter[str] = Counter()
            for branch in inner:
                most |= branch
            inner = [most]
        for program in inner:
            found.update({key: times_run(equation) * count for key, count in program.items()})
    return found


def times_run(equation: Any) -> int:
    """Count how often the program within an operation runs.

    A scan's body runs once per iteration, a kernel once per block, a shard once on each device that inputs are split
    over; others count once.
    """
    params = equation.params
    if equation.primitive.name == "scan":
        return params["length"]
    if equation.primitive.name == "pallas_call":
        return math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    if equation.primitive.name == "shard_map":
        axes = {axis for spec in params["in_specs"] for axis in jax.tree.leaves(tuple(spec))}
        return math.prod(params["mesh"].shape[axis] for axis in axes)
    return 1


def programs_in(params: Any) -> Iterator[Any]:
    """The programs among the parameters of an operation: bodies of loops, branches, functions."""
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, core.ClosedJaxpr | core.Jaxpr)):
        if isinstance(leaf, core.ClosedJaxpr):
            yield leaf.jaxpr
        elif isinstance(leaf, core.Jaxpr):
            yield leaf


def _of_dot(equation: Any) -> int:
    (summed, _), _ = equation.params["dimension_numbers"]
    lhs = equation.invars[0].aval
    return equation.outvars[0].aval.size * math.prod(lhs.shape[axis] for axis in summed)


def _of_convolution(equation: Any) -> int:
    """Padding counts; the zeros that a transposed convolution puts between its inputs do not."""
    params, kernel = equation.params, equation.invars[1].aval
    channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    taps = kernel.size // max(channels, 1)
    return equation.outvars[0].aval.size * taps // math.prod(params["lhs_dilation"])


def _of_ragged_dot(equation: Any) -> int:
    """Every row meets one group's matrix."""
    (summed, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    lhs = equation.invars[0].aval
    return equation.outvars[0].aval.size * math.prod(lhs.shape[axis] for axis in summed)


def _of_kernel(equation: Any) -> int:
    inner = programs_in(list(equation.params.values()))
    return times_run(equation) * sum(_count(program, "kernel", UNMARKED).total() for program in inner)


UNMARKED = re.compile(r"(?!)")
COUNTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
    "ragged_dot_general": _of_ragged_dot,
    "pallas_call": _of_kernel,
}
