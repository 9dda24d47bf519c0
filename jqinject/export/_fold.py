"""Inlines the calls of a traced program and folds its constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jqinject.ops.processes import ONE_DEVICE
from jqinject.program.jaxpr import Body, Equation

# Hints for XLA that do not change any number.
AS_IT_IS = frozenset({"layout_constraint", "optimization_barrier"})

Rule = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]]


def evaluate(body: Body, inputs: Sequence[Any], rules: Mapping[str, Rule]) -> list[Any]:
    """Run a program on tracers: values that depend on none of them are computed now, the rest is traced.

    Calls are inlined; the bodies of loops are kept, with their own calls inlined.

    Args:
        body: the program.
        inputs: tracers or arrays.
        rules: name of a primitive -> its replacement, from operands and parameters to results.

    Returns:
        The outputs.
    """
    return _Evaluator(rules).body(body, inputs)


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

    def body(self, body: Body, inputs: Sequence[Any]) -> list[Any]:
        return body.used().run(inputs, self.equation, lambda value: value)

    def equation(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        if equation.name in self.rules:
            return self.rules[equation.name](operands, equation.params)
        if equation.name in AS_IT_IS:
            return operands
        inlined = equation.bodies[0] if equation.name == ONE_DEVICE.name else equation.call
        if inlined is not None:
            return self.body(inlined, operands)
        if equation.branches and is_known(operands[0]):
            number = int(np.clip(operands[0], 0, len(equation.branches) - 1))
            return self.body(equation.branches[number], operands[1:])
        if self.computes and is_known(*operands) and _is_sized(equation):
            with jax.ensure_compile_time_eval():
                return equation.bind(operands)
        equation = equation.with_bodies(replace(self, computes=False).body)
        scan = equation.scan
        if scan is None or not scan.options["reverse"]:
            return equation.bind(operands)
        # ONNX only has forward scans: a reversed one is a forward scan between two reversals.
        constants, carry, slices = scan.split(operands)
        flipped = [jnp.flip(x, 0) for x in slices]
        results = equation.replaced(reverse=False).bind([*constants, *carry, *flipped])
        return [*results[: scan.carries], *(jnp.flip(stacked, 0) for stacked in results[scan.carries :])]


def _is_sized(equation: Equation) -> bool:
    """Whether the sizes of the results are known."""
    return all(isinstance(size, int) for result in equation.outputs for size in result.shape)
