"""Finds the parameters that channels are multiplied by, and those that are added to what an operation makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.recipes.stream.flat_program import FlatProgram, FlatStep, Slot
from jqinject.recipes.stream.site import (
    CASTS,
    MOVES,
    ContractionSite,
    Path,
    ProgramSites,
    is_known,
    known_value,
)
from jqinject.recipes.transforms.transform_steps import moved_by_numpy
from jqinject.recipes.transforms.transform_walk import compressed
from jqinject.recipes.transforms.values import MOVED, DefUse, Refused, followed, live_steps


@dataclass(frozen=True)
class Sink:
    """A contraction that takes a gain over.

    Attributes:
        site: of the program.
        axis: of the weight, as it is contracted, that the gain's channels lie along.
    """

    site: ContractionSite
    axis: int


@dataclass
class Gain:
    """Numbers that channels are multiplied by in one place.

    Attributes:
        step: the multiplication.
        slot: of the gain there.
        parameter: the slot of the parameter that it is made from.
        numbers: of the gain, one for each channel.
        sinks: the contractions that all of the products go to.
        biases: slots that are added to the products on their way there.
    """

    step: FlatStep
    slot: Slot
    parameter: Slot
    numbers: np.ndarray
    sinks: list[Sink] = field(default_factory=list)
    biases: list[Slot] = field(default_factory=list)


class Gains:
    """The gains of a program.

    Args:
        flat: the program.
        found: its sites.
        links: what makes and reads each of its values.
        parameters: the slots of parameters.
        value_of: the value of a slot that depends on parameters alone.
    """

    def __init__(
        self,
        flat: FlatProgram,
        found: ProgramSites,
        links: DefUse,
        parameters: set[Slot],
        value_of: Callable[[Slot], Any],
    ) -> None:
        self.flat, self.found, self.links, self.value_of = flat, found, links, value_of
        self._live = live_steps(flat)
        self._sites = {site.step: site for site in found.sites}
        self.owners: dict[Slot, frozenset[Slot]] = {slot: frozenset({slot}) for slot in parameters}
        for step in flat.steps:
            if step.outputs and step.outputs[0] in found.fixed:
                owners = frozenset[Slot]().union(
                    *(self.owners.get(slot, frozenset()) for slot in step.inputs)
                )
                self.owners.update(dict.fromkeys(step.outputs, owners))

    def by_parameter(self) -> dict[Slot, list[Gain] | str]:
        """For each parameter that is a gain, the places where it is one; why it cannot be taken over, if it cannot."""
        made: dict[Slot, list[Gain] | str] = {}
        for index, step in enumerate(self.flat.steps):
            gain = self._gain_of(step) if index in self._live else None
            if gain is None:
                continue
            before = made.setdefault(gain.parameter, [])
            try:
                self._follow(gain)
            except Refused as refused:
                before = made[gain.parameter] = str(refused)
            if isinstance(before, list):
                before.append(gain)
        for slot, gains in made.items():
            if isinstance(gains, list):
                made[slot] = self._read_elsewhere(slot, {gain.slot for gain in gains}) or gains
        return made

    def _gain_of(self, step: FlatStep) -> Gain | None:
        """The gain that an operation multiplies by; None if it does not, or by the same number everywhere."""
        if step.name != "mul":
            return None
        fixed = [slot for slot in step.inputs if slot in self.found.fixed]
        if len(fixed) != 1 or len(self.owners.get(fixed[0], ())) != 1:
            return None
        value = np.asarray(self.value_of(fixed[0]), np.float32)
        varying = [
            axis for axis, size in enumerate(value.shape) if not np.all(value == value.take([0], axis=axis))
        ]
        if len(varying) != 1:
            return None
        (axis,) = varying
        numbers = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])[0]
        (parameter,) = self.owners[fixed[0]]
        return Gain(step, fixed[0], parameter, numbers)

    def _follow(self, gain: Gain) -> None:
        """Follow the products to where they are contracted."""
        size = gain.numbers.size
        shape = self.links.shapes[gain.step.outputs[0]]
        gained = np.asarray(self.links.shapes[gain.slot])
        axis = next(
            a for a in range(len(shape)) if gained[a] == size and shape[a] == size and self._lies(gain, a)
        )
        waiting, labels = [gain.step.outputs[0]], {gain.step.outputs[0]: axis}
        while waiting:
            slot = waiting.pop()
            if slot in self.links.outputs:
                raise Refused("the model returns what it multiplies")
            for index in self.links.touching(slot):
                step = self.flat.steps[index]
                if slot not in step.inputs or index not in self._live:
                    continue
                for made, place in self._through(gain, step, index, slot, labels[slot], labels):
                    if labels.get(made, place) != place:
                        raise Refused("its channels lie in two ways")
                    if made not in labels:
                        labels[made] = place
                        waiting.append(made)

    def _lies(self, gain: Gain, axis: int) -> bool:
        value = np.asarray(self.value_of(gain.slot), np.float32)
        return not np.all(value == value.take([0], axis=axis))

    def _through(
        self, gain: Gain, step: FlatStep, index: int, slot: Slot, axis: int, labels: dict[Slot, int]
    ) -> Iterator[tuple[Slot, int]]:
        """The results that have the gain, and the axis of its channels there."""
        size = gain.numbers.size
        if step.name == "dot_general":
            self._sink(gain, step, index, slot, axis)
            return
        if step.name == "mul" and step.inputs[0] != step.inputs[1]:
            other = step.inputs[1 - step.inputs.index(slot)]
            if other in labels:
                raise Refused("products of it are multiplied")
            yield step.outputs[0], axis
        elif step.name in ("add", "add_any") and step.inputs[0] != step.inputs[1]:
            other = step.inputs[1 - step.inputs.index(slot)]
            if other not in self.found.fixed or len(self.owners.get(other, ())) > 1:
                raise Refused("it is added to something that is no bias")
            if np.any(np.asarray(self.value_of(other))):
                gain.biases.append(other)
            yield step.outputs[0], axis
        elif step.name == "div" and slot == step.inputs[0] and slot != step.inputs[1]:
            yield step.outputs[0], axis
        elif (
            step.name in CASTS
            or step.name == "neg"
            or (step.name in (*MOVED, "reshape") and slot == step.inputs[0])
        ):
            if step.name in ("reduce_sum", "concatenate", "stack", "pad", "dynamic_update_slice", "cumsum"):
                raise Refused(f"{step.name} takes what it multiplies")
            for made in step.outputs:
                place = followed(step, axis, size, (self.links.shapes[slot], self.links.shapes[made]), False)
                if isinstance(place, str):
                    raise Refused(place)
                yield made, place
        else:
            raise Refused(f"{step.name} takes what it multiplies")

    def _sink(self, gain: Gain, step: FlatStep, index: int, slot: Slot, axis: int) -> None:
        site = self._sites.get(index)
        if site is None or site.other != slot:
            raise Refused("it is contracted with something that is no parameter")
        contracted, _ = step.params["dimension_numbers"]
        mine, its = contracted[1 - site.place], contracted[site.place]
        if axis not in mine:
            raise Refused("a contraction leaves its channels as they are")
        gain.sinks.append(Sink(site, its[tuple(mine).index(axis)]))

    def _read_elsewhere(self, slot: Slot, gains: set[Slot]) -> str:
        """Who reads a parameter beside its gains."""
        owned = {slot}
        for index, step in enumerate(self.flat.steps):
            if not owned & {*step.inputs} or index not in self._live:
                continue
            if step.outputs[0] in self.found.fixed and (step.name in (*CASTS, *MOVES, "add", "sub", "mul")):
                owned.update(step.outputs)
            elif not (owned & {*step.inputs}) <= gains:
                return f"{step.name} reads the parameter too"
        return ""

    def affine(self, gain: Gain) -> tuple[float, float] | None:
        """`(a, b)` if the gain is `a p + b` of its parameter `p`, number by number; None if it is not."""
        zero, one = (self._with(gain, number) for number in (0.0, 1.0))
        slope, start = one - zero, zero
        if np.ptp(slope) > 1e-6 or np.ptp(start) > 1e-6 or abs(slope.flat[0]) < 1e-6:
            return None
        return float(slope.flat[0]), float(start.flat[0])

    def _with(self, gain: Gain, number: float) -> np.ndarray:
        """The gain if all numbers of its parameter were the same."""
        like = np.asarray(self.value_of(gain.parameter))
        known: dict[Slot, Any] = {gain.parameter: np.full(like.shape, number, like.dtype)}

        def value(slot: Slot) -> Any:
            if gain.parameter not in self.owners.get(slot, ()):
                return self.value_of(slot)
            if slot not in known:
                step, _ = self.links.made_by[slot]
                known.update(zip(step.outputs, step.run(*map(value, step.inputs)), strict=True))
            return known[slot]

        return np.asarray(value(gain.slot), np.float32)


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
