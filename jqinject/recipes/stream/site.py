"""Sites of a flat program: where a parameter is contracted, and which of its numbers are contracted there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.program import dotted
from jqinject.recipes.stream.flat_program import (
    CONTRACTIONS,
    FlatProgram,
    FlatStep,
    Matrices,
    Slot,
    matrices_of,
)


@dataclass(frozen=True, eq=False)
class Places:
    """For each number of an operand, its place in the flattened parameter.

    Most operands are a parameter, or a slice of a stack, in the parameter's own order: then a place to start at says it
    all, and nothing is gathered.

    Attributes:
        shape: of the operand.
        start: of a run of numbers in the parameter's order; None if they stand otherwise.
        each: then the place of each number, in the shape of the operand.

    Example:
        >>> stack = jnp.arange(12.0).reshape(2, 2, 3)
        >>> second = Places.of(lambda where: where[1], (2, 2, 3))
        >>> second.start, second.taken(stack).tolist()
        (6, [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]])
        >>> second.put(stack, jnp.zeros((2, 3))).sum() == stack[0].sum()
        Array(True, dtype=bool)
    """

    shape: tuple[int, ...]
    start: int | None
    each: np.ndarray | None = None

    @classmethod
    def of(cls, moved: Callable[[jax.Array], Any], shape: tuple[int, ...]) -> Places | None:
        """The places of what is moved out of a parameter; None if one of its numbers stands in several of them.

        Args:
            moved: from the parameter to the operand, by moves alone.
            shape: of the parameter.
        """
        where = np.asarray(moved(jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)))
        flat = where.reshape(-1)
        if flat.size and np.array_equal(flat, np.arange(flat[0], flat[0] + flat.size, dtype=flat.dtype)):
            return cls(where.shape, int(flat[0]))
        if np.bincount(flat, minlength=1).max(initial=0) > 1:
            return None
        return cls(where.shape, None, where)

    @property
    def size(self) -> int:
        """How many numbers the operand has."""
        return math.prod(self.shape)

    def taken(self, parameter: Any) -> Any:
        """The operand.

        Args:
            parameter: whose numbers it has.
        """
        if self.start is None:
            return parameter.reshape(-1)[self.each]
        if self.size == parameter.size:
            return parameter.reshape(self.shape)
        return parameter.reshape(-1)[self.start : self.start + self.size].reshape(self.shape)

    def put(self, parameter: Any, operand: Any) -> Any:
        """A parameter with the operand's numbers in these places.

        Args:
            parameter: with other numbers there.
            operand: in its shape.
        """
        if self.start is None:
            return parameter.reshape(-1).at[self.each].set(operand).reshape(parameter.shape)
        if self.size == parameter.size:
            return operand.astype(parameter.dtype).reshape(parameter.shape)
        flat = operand.astype(parameter.dtype).reshape(-1)
        return (
            parameter.reshape(-1).at[self.start : self.start + self.size].set(flat).reshape(parameter.shape)
        )

    def mark(self, taken: np.ndarray) -> None:
        """Set the places of a flat array of flags.

        Args:
            taken: one flag for each number of the parameter; it is changed.
        """
        if self.start is None:
            taken[self.each] = True
        else:
            taken[self.start : self.start + self.size] = True

    def all_in(self, taken: np.ndarray) -> bool:
        """Whether the flags of all places are set."""
        if self.start is None:
            return bool(taken[self.each].all())
        return bool(taken[self.start : self.start + self.size].all())


Path = tuple[Any, ...]
# Operations that move numbers or change their dtype; what they do to numbers, they do to the numbers' places.
CASTS = (
    "convert_element_type",
    "stop_gradient",
    "copy",
    "name",
    "reduce_precision",
    "optimization_barrier",
)
MOVES = (
    *("reshape", "transpose", "slice", "squeeze", "expand_dims", "broadcast_in_dim", "rev", "split"),
    *(
        "dynamic_slice",
        "gather",
        "slice_of_stack",
        "sharding_constraint",
        "layout_constraint",
        "reshard",
        "pvary",
    ),
)


@dataclass(frozen=True, eq=False)
class ContractionSite:
    """One contraction of a parameter.

    Attributes:
        name: the operation's, as `jqinject.coverage` names it, with the turns of loops around it: unique.
        operand: the name under which a rule's quantizer of the other operand is held.
        turn: which turn of the loops around it this is.
        path: the parameter's path in the model.
        operation: "dot_general", "conv_general_dilated" or "ragged_dot_general".
        step: index of the step.
        weight: the slot of the operand that is the parameter.
        other: the slot of the other operand.
        rest: slots of further operands.
        place: which operand the parameter is.
        matrices: how it is a product of matrices.
        places: of the operand's numbers in the parameter.
    """

    name: str
    operand: str
    turn: tuple[int, ...]
    path: Path
    operation: str
    step: int
    weight: Slot
    other: Slot
    rest: tuple[Slot, ...]
    place: int
    matrices: Matrices
    places: Places = field(repr=False)

    def weights(self, parameter: Any) -> Any:
        """The numbers of the parameter that are contracted here, as matrices `(stack, rows, columns)`."""
        return self.matrices.weight.matrices(self.places.taken(parameter))

    def as_operand(self, matrices: Any) -> Any:
        """Matrices as the operand."""
        return self.matrices.weight.array(matrices)


@dataclass(frozen=True)
class LeftOut:
    """A contraction that a pass leaves alone.

    Attributes:
        name: the operation's.
        path: the parameter's path; empty if it is a contraction of two activations.
        reason: why.
    """

    name: str
    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.name}{f' ({dotted(self.path)})' if self.path else ''}: {self.reason}"


@dataclass(frozen=True)
class Product:
    """A contraction of two activations.

    Attributes:
        name: the operation's, as `jqinject.coverage` names it; in a loop, that of every turn.
        operation: as rules name it, "einsum" or "dot_general".
        path: of the module.
        step: index of the step.
    """

    name: str
    operation: str
    path: str
    step: int


@dataclass
class ProgramSites:
    """The contractions of parameters in a program, in the order in which they run.

    Attributes:
        sites: those that can be solved.
        left_out: the others.
        fixed: the slots that depend on parameters alone.
        products: contractions of two activations.
    """

    sites: list[ContractionSite] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    fixed: set[Slot] = field(default_factory=set)
    products: list[Product] = field(default_factory=list)


def sites_of(
    flat: FlatProgram, parameters: Mapping[Slot, tuple[Path, tuple[int, ...]]], state: set[Slot]
) -> ProgramSites:
    """The contractions of parameters in a program.

    Args:
        flat: the program.
        parameters: path and shape of the parameter in each slot that holds one.
        state: the slots of the model's state, parameters included.
    """
    found = ProgramSites(fixed={*state, *flat.constants})
    owner: dict[Slot, Slot] = {slot: slot for slot in parameters}
    made_by: dict[Slot, tuple[FlatStep, int]] = {}
    for index, step in enumerate(flat.steps):
        owners = {owner[slot] for slot in step.inputs if slot in owner}
        if all(slot in found.fixed for slot in step.inputs):
            found.fixed.update(step.outputs)
        if len(owners) == 1 and (step.outputs[0] in found.fixed or _moves_owned(step, owner)):
            owner.update(dict.fromkeys(step.outputs, owners.pop()))
        made_by.update({slot: (step, place) for place, slot in enumerate(step.outputs)})
        if step.name in CONTRACTIONS:
            name = f"{step.path}.{step.kind}{step.number}".lstrip(".")
            if not any(slot in owner or slot in found.fixed for slot in step.inputs[:2]):
                found.products.append(Product(name, step.kind, step.path, index))
            _look(flat, found, index, name, owner, made_by, parameters)
    return found


def _moves_owned(step: FlatStep, owner: Mapping[Slot, Slot]) -> bool:
    return step.name in (*CASTS, *MOVES) and step.inputs[0] in owner


def _look(
    flat: FlatProgram,
    found: ProgramSites,
    index: int,
    name: str,
    owner: Mapping[Slot, Slot],
    made_by: Mapping[Slot, tuple[FlatStep, int]],
    parameters: Mapping[Slot, tuple[Path, tuple[int, ...]]],
) -> None:
    step = flat.steps[index]
    among = [place for place in (0, 1) if step.inputs[place] in owner]
    if len(among) == 2:  # rows that the input chose of a table are no weight
        among = [place for place in among if step.inputs[place] in found.fixed]
    if len(among) != 1 or step.inputs[1 - among[0]] in found.fixed:
        return
    place = among[0]
    slot = step.inputs[place]
    path, shape = parameters[owner[slot]]
    if slot not in found.fixed:
        reason = "which of the parameter's numbers are contracted depends on the input"
        found.left_out.append(LeftOut(name, path, reason))
        return
    matrices = matrices_of(step.contraction, place)
    places = _places(flat, slot, owner[slot], shape, made_by)
    if isinstance(matrices, str) or isinstance(places, str):
        reason = matrices if isinstance(matrices, str) else str(places)
        found.left_out.append(LeftOut(name, path, reason))
        return
    swapped = name.rpartition(".")[2].startswith("einsum") and place == 0
    operand = name + ("_lhs" if place == 1 or swapped else "_rhs")
    unique = name + "".join(f"[{turn}]" for turn in step.turn)
    found.sites.append(
        ContractionSite(
            name=unique,
            operand=operand,
            turn=step.turn,
            path=path,
            operation=step.name,
            step=index,
            weight=slot,
            other=step.inputs[1 - place],
            rest=step.inputs[2:],
            place=place,
            matrices=matrices,
            places=places,
        )
    )


def _places(
    flat: FlatProgram,
    slot: Slot,
    source: Slot,
    shape: tuple[int, ...],
    made_by: Mapping[Slot, tuple[FlatStep, int]],
) -> Places | str:
    """Where each number of an operand stands in the parameter; a sentence if it is not simply one of its numbers."""
    chain: list[tuple[FlatStep, int]] = []
    while slot != source:
        step, place = made_by[slot]
        if step.name not in (*CASTS, *MOVES):
            return f"the parameter goes through {step.name} before it is contracted"
        chain.append((step, place))
        slot = step.inputs[0]

    def moved(where: jax.Array) -> Any:
        for step, place in reversed(chain):
            if step.name not in CASTS:
                others = (known_value(flat, other, made_by) for other in step.inputs[1:])
                where = step.run(where, *others)[place]
        return where

    return Places.of(moved, shape) or "a number of the parameter is contracted more than once"


def is_known(flat: FlatProgram, slot: Slot, made_by: Mapping[Slot, tuple[FlatStep, int]]) -> bool:
    """Whether a value depends on neither parameters nor inputs.

    Args:
        flat: the program.
        slot: of the value.
        made_by: slot -> what makes it, and as which of its outputs.
    """
    if slot in flat.constants:
        return True
    return slot in made_by and all(is_known(flat, other, made_by) for other in made_by[slot][0].inputs)


def known_value(flat: FlatProgram, slot: Slot, made_by: Mapping[Slot, tuple[FlatStep, int]]) -> Any:
    """A value that depends on neither parameters nor inputs.

    Args:
        flat: the program.
        slot: of the value.
        made_by: slot -> what makes it, and as which of its outputs.
    """
    if slot in flat.constants:
        return flat.constants[slot]
    step, place = made_by[slot]
    return step.run(*(known_value(flat, other, made_by) for other in step.inputs))[place]
