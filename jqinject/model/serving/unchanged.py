"""Which outputs of a program are inputs of it that nothing changed, also through loops and rematerialized blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from jqinject.program import scan_counts

INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""What the primitives that run a program once call it: `jit`, `remat`, `custom_jvp_call`, `closed_call`."""


def unchanged_inputs(jaxpr: Any) -> list[int | None]:
    """For each output of a program, the number of the input that it is; None if it is computed.

    Args:
        jaxpr: a program, without its constants.

    Example:
        >>> import jax
        >>> looped = jax.make_jaxpr(lambda w, x: jax.lax.scan(lambda c, _: ((c[0], c[1] + 1), None), (w, x), length=2))
        >>> unchanged_inputs(looped(1.0, 2.0).jaxpr)
        [0, None]
    """
    makers = {id(out): (equation, at) for equation in jaxpr.eqns for at, out in enumerate(equation.outvars)}
    numbers = {id(var): number for number, var in enumerate(jaxpr.invars)}

    def found(var: Any) -> int | None:
        while not isinstance(var, Literal):
            if id(var) in numbers:
                return numbers[id(var)]
            if id(var) not in makers:
                return None  # a constant
            equation, at = makers[id(var)]
            source = _source(equation, at)
            if source is None:
                return None
            var = equation.invars[source]
        return None

    return [found(var) for var in jaxpr.outvars]


def _source(equation: Any, at: int) -> int | None:
    """The operand of an equation that its output number `at` is; None if it is computed."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _of_scan(equation, at)
    if name == "while":
        constants = params["cond_nconsts"] + params["body_nconsts"]
        inner = unchanged_inputs(_open(params["body_jaxpr"]))[at]
        return constants + at if inner == params["body_nconsts"] + at else None
    if name == "cond":
        found = {unchanged_inputs(_open(branch))[at] for branch in params["branches"]}
        one = found.pop()
        return None if found or one is None else one + 1  # the first operand is the index
    for program in _programs(params):
        inner = unchanged_inputs(program)[at] if len(program.outvars) == len(equation.outvars) else None
        return inner if len(program.invars) == len(equation.invars) else None
    return None


def _of_scan(equation: Any, at: int) -> int | None:
    """As `_source`: of a carry that stays, and of slices that are put together again as they were taken apart."""
    constants, carried = scan_counts(equation)
    inner = unchanged_inputs(_open(equation.params["jaxpr"]))[at]
    if inner is None:
        return None
    if at < carried:
        return inner if inner == constants + at else None
    return inner if inner >= constants + carried else None


def _programs(params: Any) -> Iterator[Any]:
    for name in INNER:
        if name in params:
            yield _open(params[name])


def _open(program: Any) -> Any:
    return getattr(program, "jaxpr", program)
