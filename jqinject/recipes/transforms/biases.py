"""Finds the parameter that is added to what an operation makes, and which of its numbers goes where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.recipes.stream.flat_program import FlatProgram, FlatStep, Slot
from jqinject.recipes.stream.site import CASTS, MOVES, Path, is_known, known_value
from jqinject.recipes.transforms.transform_steps import moved_by_numpy
from jqinject.recipes.transforms.transform_walk import compressed

KEEPING = (*CASTS, "reshape", "transpose", "squeeze", "expand_dims")
"""Operations that keep every number of a value, once."""


@dataclass(frozen=True, eq=False)
class Bias:
    """A parameter that is added to what an operation makes.

    Attributes:
        path: the parameter's path in the model.
        size: how many numbers it has.
        places: for each number of the sum, the place of what is added to it in the flattened parameter; of size 1 along
            axes along which they are all the same.
        moves: what the operation's result goes through before the sum.
    """

    path: Path
    size: int
    places: np.ndarray = field(repr=False)
    moves: tuple[FlatStep, ...] = field(repr=False)

    def means(self, made: jax.Array) -> jax.Array:
        """The mean of the numbers that each number of the parameter is added to, float32 `(size,)`; 0 without any.

        Args:
            made: the operation's result, or a difference of such results.
        """
        moved = self._moved(made.astype(jnp.float32))
        same = tuple(axis for axis, length in enumerate(self.places.shape) if length == 1)
        each = moved.mean(axis=same, keepdims=True).reshape(-1)
        places = self.places.reshape(-1)
        counts = np.maximum(np.bincount(places, minlength=self.size), 1).astype(np.float32)
        return jnp.zeros((self.size,), jnp.float32).at[places].add(each) / counts

    def spread(self, numbers: jax.Array, made: jax.Array) -> jax.Array:
        """The numbers of the parameter, each where it is added, as the operation's result has them.

        Args:
            numbers: flattened.
            made: the operation's result.
        """
        _, back = jax.vjp(self._moved, made.astype(jnp.float32))
        shape = jax.eval_shape(self._moved, jax.ShapeDtypeStruct(made.shape, jnp.float32)).shape
        return back(jnp.broadcast_to(numbers[self.places], shape))[0].astype(made.dtype)

    def _moved(self, x: jax.Array) -> jax.Array:
        for step in self.moves:
            # Casts are left out: means are taken in float32.
            x = x if step.name in CASTS else step.run(x)[0]
        return x


class Biases:
    """The parameters that are added to values of a program.

    Args:
        flat: the program.
        parameters: the slot of each parameter, with its path and shape.
    """

    def __init__(self, flat: FlatProgram, parameters: Mapping[Slot, tuple[Path, tuple[int, ...]]]) -> None:
        self._flat, self._parameters, self._returned = flat, parameters, set(flat.outputs)
        self._readers: dict[Slot, list[FlatStep]] = {}
        self._made_by: dict[Slot, tuple[FlatStep, int]] = {}
        for step in flat.steps:
            for slot in set(step.inputs):
                self._readers.setdefault(slot, []).append(step)
            self._made_by |= {slot: (step, place) for place, slot in enumerate(step.outputs)}

    def of(self, slot: Slot, through: Sequence[str] = ()) -> Bias | None:
        """The parameter that is added to a value, before anything else than a sum reads it; None if there is none.

        Args:
            slot: of the value.
            through: further operations that may stand before the sum; only `Bias.path` has a meaning then.
        """
        moves: list[FlatStep] = []
        while slot not in self._returned and len(self._readers.get(slot, ())) == 1:
            (step,) = self._readers[slot]
            if step.name in ("add", "add_any"):
                one, other = step.inputs
                if one == other:
                    return None
                added = self._added(other if one == slot else one)
                if added is not None:
                    return Bias(*added, tuple(moves))
            elif step.name in through or (step.name in KEEPING and step.inputs == (slot,)):
                moves.append(step)
            else:
                return None
            slot = step.outputs[0]
        return None

    def _added(self, slot: Slot) -> tuple[Path, int, np.ndarray] | None:
        """A parameter, and which of its numbers stands where in a value; None if the value is something else."""
        chain = list(self._back(slot))
        source = chain[-1][0].inputs[0] if chain else slot
        if source not in self._parameters:
            return None
        others = [other for step, _ in chain for other in step.inputs[1:]]
        if not all(is_known(self._flat, other, self._made_by) for other in others):
            return None  # rows of a table, which the inputs choose
        path, shape = self._parameters[source]
        where = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
        for step, place in reversed(chain):
            simple = moved_by_numpy(step, where)
            if simple is not None:
                where = simple
            elif step.name not in CASTS:
                rest = [known_value(self._flat, other, self._made_by) for other in step.inputs[1:]]
                where = np.asarray(step.run(jnp.asarray(where), *rest)[place])
        return path, int(np.prod(shape)), compressed(where)

    def _back(self, slot: Slot) -> Iterator[tuple[FlatStep, int]]:
        """The moves that made a value, the last first."""
        while slot in self._made_by and slot not in self._parameters:
            step, place = self._made_by[slot]
            if step.name not in (*CASTS, *MOVES):
                return
            yield step, place
            slot = step.inputs[0]
