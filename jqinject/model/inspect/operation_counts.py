"""Counts the multiply-accumulates of each layer in a traced program."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable

from jqinject.program.jaxpr import Body, Equation


def operations_by(body: Body, mark: re.Pattern[str], outer: str = "") -> Counter[str]:
    """Count the multiply-accumulates of a program's contractions, by named scope.

    A loop body counts once per iteration, or once if the trip count is unknown; of several branches, the one with the
    most counts; see `Equation.times`.

    Args:
        body: a traced program.
        mark: matches a scope of interest in a name stack; its first group is the key. The innermost match counts.
        outer: the key of what has no mark of its own; empty for none.
    """
    found: Counter[str] = Counter()
    for equation in body.equations:
        scope = next(iter(reversed(mark.findall(equation.scopes))), outer)
        counts = COUNTS.get(equation.name)
        if counts is not None:
            if scope:
                found[scope] += counts(equation)
            continue
        inner = [operations_by(part, mark, scope) for part in equation.bodies]
        if equation.branches:
            inner = [functools.reduce(operator.or_, inner)]
        for part in inner:
            found.update({key: equation.times * count for key, count in part.items()})
    return found


def _of_dot(equation: Equation) -> int:
    (summed, _), _ = equation.params["dimension_numbers"]
    lhs = equation.inputs[0]
    return equation.outputs[0].size * math.prod(lhs.shape[axis] for axis in summed)


def _of_convolution(equation: Equation) -> int:
    """Padding counts; the zeros that a transposed convolution puts between its inputs do not."""
    params, kernel = equation.params, equation.inputs[1]
    channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    taps = kernel.size // max(channels, 1)
    return equation.outputs[0].size * taps // math.prod(params["lhs_dilation"])


def _of_ragged_dot(equation: Equation) -> int:
    """Every row meets one group's matrix."""
    (summed, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    lhs = equation.inputs[0]
    return equation.outputs[0].size * math.prod(lhs.shape[axis] for axis in summed)


def _of_kernel(equation: Equation) -> int:
    inner = (operations_by(part, UNMARKED, "kernel") for part in equation.bodies)
    return equation.times * sum(counts.total() for counts in inner)


UNMARKED = re.compile(r"(?!)")
COUNTS: dict[str, Callable[[Equation], int]] = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
    "ragged_dot_general": _of_ragged_dot,
    "pallas_call": _of_kernel,
}
