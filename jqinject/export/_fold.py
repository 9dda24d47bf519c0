"""A traced program with its calls written out and what is known computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Calls whose body takes the operands as they are: name of the primitive -> the parameter that holds the body.
BODIES = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "jaxpr",
}

Rule = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]]


def evaluate(program: core.ClosedJaxpr, inputs: Sequence[Any], rules: Mapping[str, Rule]) -> list[Any]:
    """Run a program on tracers: what depends on none of them is computed now, the rest is traced.

    Args:
        program: with its constants.
        inputs: tracers or arrays.
        rules: name of a primitive -> what to do in its place, from operands and parameters to results.

    Returns:
        The outputs.
    """
    return _evaluate(program.jaxpr, program.consts, inputs, rules)


def is_known(*values: Any) -> bool:
    """Whether none of the values is a tracer."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def _evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], rules: Mapping[str, Rule]
) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in _used(jaxpr):
        operands = [read(atom) for atom in equation.invars]
        results = _run(equation, operands, rules)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _used(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations that the outputs depend on."""
    needed = {atom for atom in jaxpr.outvars if isinstance(atom, core.Var)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if isinstance(atom, core.Var))
    return kept[::-1]


def _run(equation: core.JaxprEqn, operands: list[Any], rules: Mapping[str, Rule]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name in rules:
        return rules[name](operands, params)
    if name == "optimization_barrier":
        return operands
    if name in BODIES:
        body = params[BODIES[name]]
        closed = body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())
        return _evaluate(closed.jaxpr, closed.consts, operands, rules)
    if name == "cond" and is_known(operands[0]):
        branch = params["branches"][int(np.clip(operands[0], 0, len(params["branches"]) - 1))]
        return _evaluate(branch.jaxpr, branch.consts, operands[1:], rules)
    return _bound(equation, operands)


def _bound(equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    primitive, params = equation.primitive, equation.params
    if is_known(*operands) and _is_sized(equation):
        with jax.ensure_compile_time_eval():
            results = primitive.bind(*operands, **params)
    else:
        results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def _is_sized(equation: core.JaxprEqn) -> bool:
    """Whether the results have sizes that are known."""
    return all(isinstance(size, int) for variable in equation.outvars for size in variable.aval.shape)
