"""Inlines the calls of a traced program and folds its constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

# Calls whose body takes the operands unchanged; their names vary between versions of JAX.
CALLS = frozenset(
    {
        "checkpoint",
        "closed_call",
        "composite",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vmap_call",
        "jit",
        "one_device",
        "pjit",
        "remat2",
    }
)
# Hints for XLA that do not change any number.
AS_IT_IS = frozenset({"layout_constraint", "optimization_barrier"})
BODY = (core.ClosedJaxpr, core.Jaxpr)

Rule = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]]


def evaluate(program: core.ClosedJaxpr, inputs: Sequence[Any], rules: Mapping[str, Rule]) -> list[Any]:
    """Run a program on tracers: values that depend on none of them are computed now, the rest is traced.

    Calls are inlined; the bodies of loops are kept, with their own calls inlined.

    Args:
        program: with its constants.
        inputs: tracers or arrays.
        rules: name of a primitive -> its replacement, from operands and parameters to results.

    Returns:
        The outputs.
    """
    return _Evaluator(rules).body(program, inputs)


def is_known(*values: Any) -> bool:
    """Whether none of the values is a tracer."""
    return not any(isinstance(value, Tracer) for value in values)


@dataclass(frozen=True)
class _Evaluator:
    """Runs the equations of a program one after the other.

    Args:
        rules: replacements of primitives.
        computes: whether known values are computed now.
    """

    rules: Mapping[str, Rule]
    computes: bool = True

    def body(self, program: Any, inputs: Sequence[Any]) -> list[Any]:
        consts = program.consts if isinstance(program, core.ClosedJaxpr) else ()
        jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in _used(jaxpr):
            results = self.equation(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name in self.rules:
            return self.rules[name](operands, params)
        if name in AS_IT_IS:
            return operands
        if name in CALLS:
            return self.body(next(part for part in params.values() if isinstance(part, BODY)), operands)
        if name == "cond" and is_known(operands[0]):
            branches = params["branches"]
            return self.body(branches[int(np.clip(operands[0], 0, len(branches) - 1))], operands[1:])
        return self.bound(equation, operands)

    def bound(self, equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        primitive = equation.primitive
        if self.computes and is_known(*operands) and _is_sized(equation):
            with jax.ensure_compile_time_eval():
                results = primitive.bind(*operands, **equation.params)
        else:
            params = {name: self.written_out(part) for name, part in equation.params.items()}
            if primitive.name == "scan" and params["reverse"]:
                return _forward_scan(primitive, operands, params)
            results = primitive.bind(*operands, **params)
        return results if primitive.multiple_results else [results]

    def written_out(self, part: Any) -> Any:
        """A parameter; if it is the body of a loop, or a tuple of bodies, with its calls inlined."""
        if isinstance(part, tuple) and part and all(isinstance(body, core.ClosedJaxpr) for body in part):
            return tuple(map(self.written_out, part))
        if not isinstance(part, core.ClosedJaxpr):
            return part
        inside = replace(self, computes=False)
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in part.in_avals]
        return jax.make_jaxpr(lambda *xs: inside.body(part, xs))(*specs)


def _forward_scan(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """A reversed scan as a forward scan between two reversals, since ONNX only has forward scans."""
    kept, carried = params["num_consts"] + params["num_carry"], params["num_carry"]
    flipped = [jnp.flip(scanned, 0) for scanned in operands[kept:]]
    results = primitive.bind(*operands[:kept], *flipped, **{**params, "reverse": False})
    return [*results[:carried], *(jnp.flip(stacked, 0) for stacked in results[carried:])]


def _used(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations that the outputs depend on."""
    needed = {atom for atom in jaxpr.outvars if isinstance(atom, core.Var)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if isinstance(atom, core.Var))
    return kept[::-1]


def _is_sized(equation: core.JaxprEqn) -> bool:
    """Whether the sizes of the results are known."""
    results: list[Any] = [variable.aval for variable in equation.outvars]
    return all(isinstance(size, int) for result in results for size in result.shape)
