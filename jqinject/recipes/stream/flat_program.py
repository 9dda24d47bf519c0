"""A traced call as one flat list of steps: functions are inlined, and loops that contract parameters are unrolled."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.program import operation_of, path_in
from jqinject.program.jaxpr import Body, Equation, Scan

CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")

Slot = int


@dataclass(frozen=True)
class FlatStep:
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
    equation: Equation | None = None
    turn: tuple[int, ...] = ()
    kind: str = ""
    number: int = 0

    @property
    def contraction(self) -> Equation:
        """The equation of a contraction."""
        assert self.equation is not None, "slices and stacks are no contractions"
        return self.equation

    @property
    def params(self) -> Mapping[str, Any]:
        """Those of its equation; none for a slice or a stack."""
        return {} if self.equation is None else self.equation.params


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
    steps: list[FlatStep] = field(default_factory=list)
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
        self.steps.append(FlatStep(run, tuple(inputs), tuple(outputs), **said))
        return outputs

    def last_uses(self) -> dict[Slot, int]:
        """The index of the last step that reads each slot; the number of steps for outputs."""
        found = {slot: index for index, step in enumerate(self.steps) for slot in step.inputs}
        return found | dict.fromkeys(self.outputs, len(self.steps))


def flatten(body: Body) -> FlatProgram:
    """The body of a traced call as a flat program."""
    flat = FlatProgram()
    flat.inputs = tuple(flat.new_slot() for _ in body.inputs)
    flat.outputs = tuple(_inline(flat, body, flat.inputs, ""))
    return flat


def _inline(
    flat: FlatProgram, body: Body, inputs: Sequence[Slot], path: str, turn: tuple[int, ...] = ()
) -> list[Slot]:
    def steps(eqn: Equation, inputs: list[Slot]) -> list[Slot]:
        where = path_in(eqn.scopes) or path
        if eqn.call:
            return _inline(flat, eqn.call, inputs, where, turn)
        if eqn.scan and contracts(eqn.scan.body):
            return _unroll(flat, eqn.scan, inputs, where, turn)
        return _step(flat, eqn, inputs, where, turn)

    return body.run(inputs, steps, flat.constant)


def _step(
    flat: FlatProgram, eqn: Equation, inputs: list[Slot], path: str, turn: tuple[int, ...]
) -> list[Slot]:
    def run(*values: Any) -> list[Any]:
        return eqn.bind(values)

    kind, number = "", 0
    if eqn.name in CONTRACTIONS:
        kind = operation_of("einsum" if eqn.is_einsum else eqn.name).name
        number = flat.contractions[path, kind]
        flat.contractions[path, kind] += 1
    said = {"path": path, "equation": eqn, "turn": turn, "kind": kind, "number": number}
    return flat.add(run, inputs, len(eqn.outputs), name=eqn.name, **said)


def contracts(body: Body) -> bool:
    """Whether a program, or one that it runs on its operands, contracts anything."""
    return any(
        eqn.name in CONTRACTIONS or (eqn.body is not None and contracts(eqn.body)) for eqn in body.equations
    )


def _unroll(
    flat: FlatProgram, scan: Scan, inputs: list[Slot], path: str, turn: tuple[int, ...]
) -> list[Slot]:
    """Every step of a loop: each has its own weights, cut from those of the stack."""
    fixed, carry, stacked = scan.split(inputs)
    steps = range(scan.options["length"])
    made: dict[int, list[Slot]] = {}
    before = flat.contractions
    for index in reversed(steps) if scan.options["reverse"] else steps:
        flat.contractions = before.copy()
        each = [
            flat.add(_slice_at(index), [slot], 1, name="slice_of_stack", path=path)[0] for slot in stacked
        ]
        outputs = _inline(flat, scan.body, [*fixed, *carry, *each], path, (*turn, index))
        carry, made[index] = outputs[: scan.carries], outputs[scan.carries :]
    count = len(scan.body.outputs) - scan.carries
    columns = [[made[index][place] for index in steps] for place in range(count)]
    return [*carry, *(flat.add(_stack, column, 1, name="stack", path=path)[0] for column in columns)]


def _slice_at(index: int) -> Callable[[Any], list[Any]]:
    return lambda stack: [jax.lax.index_in_dim(stack, index, 0, keepdims=False)]


def _stack(*values: Any) -> list[Any]:
    return [jnp.stack(values)]
