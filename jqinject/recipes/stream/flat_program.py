"""A traced call as one flat list of steps: functions are inlined, and loops that contract parameters are unrolled."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jqinject.program import bind, is_einsum, operation_of, path_in, scan_counts

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
# The parameter of each equation that holds the program which it calls.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

Slot = int


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        run: from the values of its inputs to those of its outputs.
        inputs: the slots that it reads.
        outputs: the slots that it writes.
        name: of the operation.
        path: of the module that it belongs to.
        equation: of the program; None for a slice or a stack that a loop made necessary.
        turn: which turn of the loops around it this is.
        kind: of a contraction, the operation by which the quantized program names it; empty for others.
        number: of a contraction, how many of its kind stand before it in its module's program; the same in every turn.
    """

    run: Callable[..., list[Any]]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    name: str
    path: str
    equation: Any = None
    turn: tuple[int, ...] = ()
    kind: str = ""
    number: int = 0


@dataclass
class FlatProgram:
    """A program without programs inside.

    Attributes:
        inputs: slots of the inputs.
        outputs: slots of the outputs.
        constants: values of slots that are known.
        steps: the operations, in order.
    """

    inputs: tuple[Slot, ...] = ()
    outputs: tuple[Slot, ...] = ()
    constants: dict[Slot, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    count: int = 0
    contractions: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    def new_slot(self) -> Slot:
        """A slot that nothing has written."""
        self.count += 1
        return self.count - 1

    def constant(self, value: Any) -> Slot:
        """The slot of a known value."""
        slot = self.new_slot()
        self.constants[slot] = value
        return slot

    def add(
        self, run: Callable[..., list[Any]], inputs: Sequence[Slot], count: int, **said: Any
    ) -> list[Slot]:
        """Append a step with `count` outputs, and return their slots."""
        outputs = [self.new_slot() for _ in range(count)]
        self.steps.append(Step(run, tuple(inputs), tuple(outputs), **said))
        return outputs

    def last_uses(self) -> dict[Slot, int]:
        """The index of the last step that reads each slot; the number of steps for outputs."""
        found = {slot: index for index, step in enumerate(self.steps) for slot in step.inputs}
        return found | dict.fromkeys(self.outputs, len(self.steps))


def flatten(closed: Any) -> FlatProgram:
    """A closed jaxpr as a flat program.

    Args:
        closed: of a traced call.
    """
    flat = FlatProgram()
    flat.inputs = tuple(flat.new_slot() for _ in closed.jaxpr.invars)
    flat.outputs = tuple(_inline(flat, closed.jaxpr, closed.consts, flat.inputs, ""))
    return flat


def _inline(
    flat: FlatProgram,
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Slot],
    path: str,
    turn: tuple[int, ...] = (),
) -> list[Slot]:
    env: dict[Any, Slot] = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= {var: flat.constant(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

    def read(var: Any) -> Slot:
        if isinstance(var, core.Literal):
            return flat.constant(jnp.asarray(var.val, var.aval.dtype))  # pyright: ignore
        return env[var]

    for eqn in jaxpr.eqns:
        where = path_in(eqn.source_info.name_stack) or path
        outputs = _equation(flat, eqn, [read(var) for var in eqn.invars], where, turn)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _equation(
    flat: FlatProgram, eqn: Any, inputs: list[Slot], path: str, turn: tuple[int, ...]
) -> list[Slot]:
    name = eqn.primitive.name
    if name in INLINED:
        inner = eqn.params[INLINED[name]]
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        return _inline(flat, jaxpr, consts, inputs, path, turn)
    if name == "scan" and contracts(eqn.params["jaxpr"].jaxpr):
        return _unroll(flat, eqn, inputs, path, turn)

    def run(*values: Any) -> list[Any]:
        return bind(eqn, values)

    kind, number = "", 0
    if name in CONTRACTIONS:
        kind = "einsum" if name == "dot_general" and is_einsum(eqn) else operation_of(name).name
        number = flat.contractions[path, kind]
        flat.contractions[path, kind] += 1
    said = {"path": path, "equation": eqn, "turn": turn, "kind": kind, "number": number}
    return flat.add(run, inputs, len(eqn.outvars), name=name, **said)


def contracts(jaxpr: Any) -> bool:
    """Whether a program, or one inside it, contracts anything."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CONTRACTIONS:
            return True
        inner = eqn.params.get(INLINED.get(eqn.primitive.name, "jaxpr"))
        program = getattr(inner, "jaxpr", inner)
        if hasattr(program, "eqns") and contracts(program):
            return True
    return False


def _unroll(flat: FlatProgram, eqn: Any, inputs: list[Slot], path: str, turn: tuple[int, ...]) -> list[Slot]:
    """Every step of a loop: each has its own weights, cut from those of the stack."""
    count, carries = scan_counts(eqn)
    closed, length = eqn.params["jaxpr"], eqn.params["length"]
    fixed, carry, stacked = inputs[:count], inputs[count : count + carries], inputs[count + carries :]
    order = range(length - 1, -1, -1) if eqn.params["reverse"] else range(length)
    made: dict[int, list[Slot]] = {}
    before = flat.contractions
    for index in order:
        flat.contractions = before.copy()
        each = [
            flat.add(_slice_at(index), [slot], 1, name="slice_of_stack", path=path)[0] for slot in stacked
        ]
        outputs = _inline(flat, closed.jaxpr, closed.consts, [*fixed, *carry, *each], path, (*turn, index))
        carry, made[index] = outputs[:carries], outputs[carries:]
    columns = [[made[index][place] for index in range(length)] for place in range(len(eqn.outvars) - carries)]
    return [*carry, *(flat.add(_stack, column, 1, name="stack", path=path)[0] for column in columns)]


def _slice_at(index: int) -> Callable[[Any], list[Any]]:
    return lambda stack: [jax.lax.index_in_dim(stack, index, 0, keepdims=False)]


def _stack(*values: Any) -> list[Any]:
    return [jnp.stack(values)]
