"""A traced call as one flat list of steps, with the sites at which parameters are contracted.

Functions are inlined, and loops that contract parameters are unrolled. `FlatProgram` knows of each value what makes and
reads it, and on which parameters it depends; every transform and every stream asks it.
"""

import collections
import math
from collections.abc import Callable, KeysView, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.program import Program, dotted, moves, operation_of, path_in
from jqinject.program.jaxpr import Body, Equation, Scan
from jqinject.program.operations import CONTRACTIONS, contracts
from jqinject.recipes.stream.matrices import Matrices, Places, Shape, matrices_of, moved_by_numpy

CASTS = ("convert_element_type", "stop_gradient", "copy", "name", "reduce_precision", "optimization_barrier")
#: Operations that move numbers; with `CASTS`, what they do to numbers, they do to the numbers' places.
MOVES = tuple(name for name in moves.MOVES if name not in (*CASTS, "mesh_cast"))

#: Parts of a program that stay one step, as text.
OPAQUE = {
    "cond": "a branch (cond)",
    "while": "a loop of unknown length (while)",
    "shard_map": "a function of shards (shard_map)",
}

Slot = int


@dataclass(frozen=True)
class FlatStep:
    """One operation.

    Attributes:
        equation: of the program; or that of a slice or of a stack in the place of a loop.
        inputs: the slots that it reads.
        outputs: the slots that it writes.
        path: of the module that it belongs to.
        turn: which turn of the loops around it this is.
        kind: of a contraction, the operation by which the quantized program names it; empty for others.
        number: of a contraction, how many of its kind stand before it in its module's program; the same in every turn.
    """

    equation: Equation
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    path: str
    turn: tuple[int, ...]
    kind: str = ""
    number: int = 0

    def run(self, *values: jax.Array) -> list[jax.Array]:
        """From the values of its inputs to those of its outputs."""
        return self.equation.bind(values)

    @property
    def name(self) -> str:
        """The operation's."""
        return self.equation.name

    @property
    def params(self) -> Mapping[str, Any]:
        """Those of its equation."""
        return self.equation.params

    @property
    def data(self) -> tuple[Slot, ...]:
        """Of a move, the inputs whose numbers it moves: all of those that it joins, or the first."""
        if self.name in ("concatenate", "stack"):
            return self.inputs
        return self.inputs[: 2 if self.name == "dynamic_update_slice" else 1]

    @property
    def site(self) -> str:
        """The name of a contraction, as `jqinject.coverage` has it; in a loop, that of every turn."""
        return f"{self.path}.{self.kind}{self.number}".lstrip(".")

    @property
    def where(self) -> str:
        """The module that it belongs to, for messages; empty for the model itself."""
        return f" in {self.path}" if self.path else ""


Run = Callable[[FlatStep, list[jax.Array]], list[jax.Array]]


@dataclass(frozen=True, eq=False)
class ContractionSite:
    """One contraction of a parameter.

    Attributes:
        name: the operation's, as `jqinject.coverage` names it, with the turns of loops around it: unique.
        path: the parameter's path in the model, as text.
        index: of the step.
        step: the contraction.
        place: which operand the parameter is.
        matrices: how it is a product of matrices.
        places: of the operand's numbers in the parameter.
    """

    name: str
    path: str
    index: int
    step: FlatStep
    place: int
    matrices: Matrices
    places: Places = field(repr=False)

    @property
    def weight(self) -> Slot:
        """The slot of the operand that is the parameter."""
        return self.step.inputs[self.place]

    @property
    def activation(self) -> Slot:
        """The slot of the other operand."""
        return self.step.inputs[1 - self.place]

    def contract(self, weight: jax.Array, x: jax.Array, *rest: jax.Array) -> jax.Array:
        """Contract other operands: a parameter, what it is contracted with, and further ones."""
        return self.step.run(*((weight, x) if self.place == 0 else (x, weight)), *rest)[0]

    def same_as(self, site: "ContractionSite") -> bool:
        """Whether another one contracts the same numbers of a parameter in the same layout."""
        if self.path != site.path or self.matrices.weight != site.matrices.weight:
            return False
        return self.places.same_as(site.places)

    def weights(self, parameter: Any) -> Any:
        """The numbers of the parameter that are contracted here, as matrices `(stack, rows, columns)`."""
        return self.matrices.weight.matrices(self.places.taken(parameter))


Fact = str | float | tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True)
class Note:
    """What a pass did, or would do, to a site, a parameter or a module; or why it left it alone.

    Attributes:
        name: the site's, or the path of the parameter or module; several with commas between them.
        path: of the parameter that the site has; empty where the name says it.
        what: as text.
        facts: what was measured, which parameters took something over, which channels were chosen, ..., by name.
        reason: why it was left alone; empty if it was not.
    """

    name: str
    path: str
    what: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict, repr=False)
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.path})' if self.path else ''}: {self.what or self.reason}"


class FlatProgram:
    """A program without programs inside.

    Args:
        program: of a call.

    Attributes:
        arguments: what the program is called with: the model's parameters and state, and the call's arrays.
        inputs, outputs: their slots, and those of the results.
        steps: the operations, in order.
        constants: values of slots that are constants of the program.
        state: values of slots that hold the model's parameters and state.
        values: of these slots, and of those that depend on them alone, as far as they were computed.
        parameters: path of the parameter in each slot that holds one.
        shapes: of all values.
        made_by: slot -> what makes it, and as which of its outputs.
        touching: slot -> the indices of the steps that make or read it.
        unowned: slots that depend on constants alone.
        owners: slots that depend on parameters, state and constants alone -> the slots of the parameters among these.
        discrete: slots of whole numbers and truth values.
        sites: the contractions of parameters that can be solved, in the order in which they run.
        left_out: the other contractions of parameters.
        products: the contractions of two activations.
    """

    def __init__(self, program: Program) -> None:
        self.arguments = tuple(program.inputs)
        self.inputs: tuple[Slot, ...] = tuple(range(len(self.arguments)))
        pairs = list(zip(self.inputs, self.arguments, strict=True))
        self.steps: list[FlatStep] = []
        self.constants: dict[Slot, jax.Array] = {}
        self.state = {slot: x.value for slot, x in pairs if not x.is_activation}
        self.parameters: dict[Slot, str] = {slot: dotted(x.weight_path) for slot, x in pairs if x.is_weight}
        self.shapes: dict[Slot, Shape] = {slot: tuple(np.shape(x.value)) for slot, x in pairs}
        self.made_by: dict[Slot, tuple[FlatStep, int]] = {}
        self.unowned, self.discrete = set[Slot](), set[Slot]()
        self.owners = {slot: frozenset({slot} & self.parameters.keys()) for slot in self.state}
        self.sites: list[ContractionSite] = []
        self.left_out: list[Note] = []
        self.products: list[FlatStep] = []
        self.touching = collections.defaultdict[Slot, list[int]](list)
        self._contractions: collections.Counter[tuple[str, str]] = collections.Counter()
        self.outputs = tuple(self._inline(program.body, self.inputs, ""))
        self.returned = self.outputs[: program.output_tree.num_leaves]
        self.values = {**self.constants, **self.state}
        self._find_sites()

    def readers(self, slot: Slot) -> list[FlatStep]:
        """The steps that read a value."""
        return [self.steps[index] for index in self.touching[slot] if slot in self.steps[index].inputs]

    @property
    def fixed(self) -> KeysView[Slot]:
        """The slots that depend on parameters, state and constants alone."""
        return self.owners.keys()

    def owned(self, slot: Slot) -> bool:
        """Whether a value depends on parameters, and besides them on state and constants alone."""
        return bool(self.owners.get(slot))

    def is_zero(self, slot: Slot) -> bool:
        """Whether a value depends on parameters, state and constants alone, and is 0."""
        return slot in self.fixed and not np.any(np.asarray(self.value(slot)))

    @cached_property
    def slot_of(self) -> dict[str, Slot]:
        """The slot of each parameter, by its path."""
        return {path: slot for slot, path in self.parameters.items()}

    @cached_property
    def ends(self) -> set[Slot]:
        """What the model returns, and its new state."""
        state = self.outputs[len(self.returned) :]
        return {*self.returned, *(slot for slot in state if slot not in self.parameters)}

    @cached_property
    def live(self) -> set[int]:
        """The steps that an output depends on: traces keep operations whose results are not read."""
        needed, live = {*self.outputs}, set[int]()
        for index, step in reversed([*enumerate(self.steps)]):
            if needed & {*step.outputs}:
                live.add(index)
                needed.update(step.inputs)
        return live

    @cached_property
    def last_uses(self) -> dict[Slot, int]:
        """The index of the last step that reads each slot; the number of steps for outputs."""
        last = {slot: index for index, step in enumerate(self.steps) for slot in step.inputs}
        return last | dict.fromkeys(self.outputs, len(self.steps))

    def value(self, slot: Slot) -> jax.Array:
        """The value of a slot that depends on parameters, state and constants alone."""
        return self.evaluated(slot, self.values)

    def forget(self, values: MutableMapping[Slot, jax.Array], end: int) -> None:
        """Let go of values that no step from one on reads: those of parameters are computed again when they are needed.

        Args:
            values: by slot.
            end: index of the step.
        """
        for slot in values.keys() - self.constants.keys() - self.state.keys():
            if self.last_uses.get(slot, -1) < end:
                del values[slot]

    def evaluated(self, slot: Slot, values: dict[Slot, jax.Array], run: Run | None = None) -> jax.Array:
        """The value of a slot.

        Args:
            slot: whose.
            values: of other slots; those that are computed on the way are added.
            run: from a step and its operands to its results; None for its own.
        """
        waiting = [slot]
        while waiting:
            step, _ = self.made_by.get(waiting[-1], (None, 0))
            missing = [] if step is None else [operand for operand in step.inputs if operand not in values]
            if step is None or waiting[-1] in values:
                waiting.pop()
            elif missing:
                waiting += missing
            else:
                operands = [values[x] for x in step.inputs]
                results = step.run(*operands) if run is None else run(step, operands)
                values.update(zip(step.outputs, results, strict=True))
        return values[slot]

    def origin(self, slot: Slot) -> tuple[Slot, list[tuple[FlatStep, int]]]:
        """What a value's numbers were moved from, and the moves with the output that each contributes, last first."""
        chain: list[tuple[FlatStep, int]] = []
        while slot in self.made_by and self.made_by[slot][0].name in (*CASTS, *MOVES):
            chain.append(self.made_by[slot])
            slot = chain[-1][0].inputs[0]
        return slot, chain

    def places(self, source: Slot, chain: Sequence[tuple[FlatStep, int]]) -> np.ndarray:
        """For each number that moves take from a value, its place in the flattened value.

        Args:
            source: slot of the value.
            chain: the moves, last first.
        """
        shape = self.shapes[source]
        where = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        for step, place in reversed(chain):
            if step.name not in CASTS:
                where = self.moved(step, [where])[place]
        return where

    def moved(self, step: FlatStep, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of a move of other numbers.

        Args:
            step: the move.
            operands: instead of its first ones; the others are constants.
        """
        # Without a compilation for each shape, and mostly without a copy.
        simple = moved_by_numpy(step.equation, operands[0])
        if simple is not None:
            return [simple]
        rest = [self.value(slot) for slot in step.inputs[len(operands) :]]
        return [np.asarray(x) for x in step.run(*map(jnp.asarray, operands), *rest)]

    def other_use(self, parameter: Slot, uses: set[int], through: Sequence[str] = ()) -> FlatStep | None:
        """Which step reads a parameter's numbers beyond some uses; None if none does.

        Args:
            parameter: its slot.
            uses: indices of steps.
            through: names of operations besides moves whose results are followed.
        """
        owned = {parameter}
        for index in sorted(self.live - uses):
            step = self.steps[index]
            if owned & {*step.inputs}:
                if step.name not in (*CASTS, *MOVES, *through) or step.outputs[0] not in self.fixed:
                    return step
                owned.update(step.outputs)
        return None

    def _constant(self, value: jax.Array) -> Slot:
        slot = len(self.shapes)
        self.constants[slot], self.shapes[slot] = value, np.shape(value)
        self.owners[slot] = frozenset()
        self.unowned.add(slot)
        return slot

    def _inline(
        self, body: Body, inputs: Sequence[Slot], path: str, turn: tuple[int, ...] = ()
    ) -> list[Slot]:
        def steps(eqn: Equation, inputs: list[Slot]) -> list[Slot]:
            module = path_in(eqn.scopes) or path
            if eqn.call:
                return self._inline(eqn.call, inputs, module, turn)
            if eqn.scan and contracts(eqn.scan.body):
                return self._unroll(eqn.scan, inputs, module, turn)
            return self._append(eqn, inputs, module, turn)

        return body.run(inputs, steps, self._constant)

    def _append(self, eqn: Equation, inputs: list[Slot], path: str, turn: tuple[int, ...]) -> list[Slot]:
        """Append a step, and return the slots of its outputs."""
        kind, number = "", 0
        if eqn.name in CONTRACTIONS:
            kind = operation_of("einsum" if eqn.is_einsum else eqn.name).name
            number = self._contractions[path, kind]
            self._contractions[path, kind] += 1
        outputs = list(range(len(self.shapes), len(self.shapes) + len(eqn.outputs)))
        step = FlatStep(eqn, tuple(inputs), tuple(outputs), path, turn, kind, number)
        for slot in dict.fromkeys((*inputs, *outputs)):
            self.touching[slot].append(len(self.steps))
        self.steps.append(step)
        for place, (slot, x) in enumerate(zip(outputs, eqn.outputs, strict=True)):
            self.shapes[slot], self.made_by[slot] = tuple(x.shape), (step, place)
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                self.discrete.add(slot)
        if all(slot in self.unowned for slot in inputs):
            self.unowned.update(outputs)
        if all(slot in self.owners for slot in inputs):
            owners = frozenset[Slot]().union(*(self.owners[slot] for slot in inputs))
            self.owners |= dict.fromkeys(outputs, owners)
        return outputs

    def _unroll(self, scan: Scan, inputs: list[Slot], path: str, turn: tuple[int, ...]) -> list[Slot]:
        """Every step of a loop: each has its own weights, cut from those of the stack."""
        fixed, carry, stacked = scan.split(inputs)
        length, results, before = scan.options["length"], dict[int, list[Slot]](), self._contractions
        _, _, slices = scan.split(scan.body.inputs)
        stacks = [jax.ShapeDtypeStruct((length, *x.shape), x.dtype) for x in slices]
        for index in reversed(range(length)) if scan.options["reverse"] else range(length):
            self._contractions = before.copy()
            cut = jax.make_jaxpr(lambda *stacks, at=index: [x[at] for x in stacks])(*stacks)
            own = self._inline(Body.of(cut), stacked, path, (*turn, index))
            outputs = self._inline(scan.body, [*fixed, *carry, *own], path, (*turn, index))
            carry, results[index] = outputs[: scan.carries], outputs[scan.carries :]
        for place, piece in enumerate(scan.body.outputs[scan.carries :]):
            pieces = [jax.ShapeDtypeStruct(piece.shape, piece.dtype)] * length
            joined = jax.make_jaxpr(lambda *pieces: jnp.stack(pieces))(*pieces)
            slots = [results[index][place] for index in range(length)]
            carry = [*carry, *self._inline(Body.of(joined), slots, path, turn)]
        return carry

    def _find_sites(self) -> None:
        for index, step in enumerate(self.steps):
            if step.name in CONTRACTIONS:
                owners = [self._owners_of(slot) for slot in step.inputs[:2]]
                among = [place for place in (0, 1) if owners[place]]
                if len(among) == 2:  # rows that the input chose of a table are no weight
                    among = [place for place in among if step.inputs[place] in self.fixed]
                if not any(owners) and not self.fixed & {*step.inputs[:2]}:
                    self.products.append(step)
                if len(among) == 1 and step.inputs[1 - among[0]] not in self.fixed:
                    self._add_site(index, among[0], owners[among[0]])
            elif step.name in OPAQUE and any(map(contracts, step.equation.bodies)):
                owners = frozenset[Slot]().union(*map(self._owners_of, step.inputs))
                reason = f"it is contracted inside {OPAQUE[step.name]}, which is not looked into"
                name = f"{step.path}.{step.name}".lstrip(".")
                self.left_out += [
                    Note(name, self.parameters[owner], reason=reason) for owner in sorted(owners)
                ]

    def _owners_of(self, slot: Slot) -> frozenset[Slot]:
        """The parameters that a value is made from, or that its numbers are picked from."""
        source = slot if slot in self.fixed else self.origin(slot)[0]
        return self.owners.get(source, frozenset())

    def _add_site(self, index: int, place: int, owners: frozenset[Slot]) -> None:
        step = self.steps[index]
        slot, name = step.inputs[place], step.site
        matrices, places = matrices_of(step.equation, place), self._places_of(slot, owners)
        if isinstance(matrices, str) or isinstance(places, str):
            reason = matrices if isinstance(matrices, str) else str(places)
            self.left_out += [Note(name, self.parameters[owner], reason=reason) for owner in sorted(owners)]
            return
        name += "".join(f"[{turn}]" for turn in step.turn)
        path = self.parameters[min(owners)]
        self.sites.append(ContractionSite(name, path, index, step, place, matrices, places))

    def _places_of(self, slot: Slot, owners: frozenset[Slot]) -> Places | str:
        """Where each number of an operand is in the parameter; a sentence if it is not simply one of its numbers."""
        if slot not in self.fixed:
            return "which of the parameter's numbers are contracted depends on the input"
        source, chain = self.origin(slot)
        if source not in owners:
            return f"the parameter goes through {self.made_by[source][0].name} before it is contracted"
        return (
            Places.of(self.places(source, chain)) or "a number of the parameter is contracted more than once"
        )
