"""Finds the parameters that channels are multiplied by, and those that are added to what an operation makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.recipes.stream.flat_program import (
    CASTS,
    MOVES,
    ContractionSite,
    FlatProgram,
    FlatStep,
    Slot,
)
from jqinject.recipes.transforms.axes import MOVED, Refused, followed
from jqinject.recipes.transforms.transform_walk import compressed

KEEPING = (*CASTS, "reshape", "transpose", "squeeze", "expand_dims")
"""Operations that keep every number of a value, once."""
COLLECTING = ("reduce_sum", "concatenate", "stack", "pad", "dynamic_update_slice", "cumsum")
"""Moves whose results hold more than the numbers of one operand."""


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
        axis: of the gain, along which its numbers lie.
        numbers: of the gain, one for each channel.
        sinks: the contractions that all of the products go to.
        biases: slots that are added to the products on their way there.
    """

    step: FlatStep
    slot: Slot
    parameter: Slot
    axis: int
    numbers: np.ndarray
    sinks: list[Sink] = field(default_factory=list)
    biases: list[Slot] = field(default_factory=list)


class Gains:
    """The gains of a program.

    Args:
        flat: the program.
    """

    def __init__(self, flat: FlatProgram) -> None:
        self.flat = flat
        self._sites = {site.step: site for site in flat.sites}

    def by_parameter(self) -> dict[Slot, list[Gain] | str]:
        """For each parameter that is a gain, the places where it is one; why it cannot be taken over, if it cannot."""
        gains: dict[Slot, list[Gain]] = {}
        reasons: dict[Slot, str] = {}
        for index, step in enumerate(self.flat.steps):
            gain = self._gain_of(step) if index in self.flat.live else None
            if gain is not None:
                gains.setdefault(gain.parameter, []).append(gain)
                try:
                    self._follow(gain)
                except Refused as refused:
                    reasons[gain.parameter] = str(refused)
        return {
            slot: reasons.get(slot) or self._read_elsewhere(slot, {gain.slot for gain in own}) or own
            for slot, own in gains.items()
        }

    def _gain_of(self, step: FlatStep) -> Gain | None:
        """The gain that an operation multiplies by; None if it does not, or by the same number everywhere."""
        fixed = [slot for slot in step.inputs if slot in self.flat.fixed]
        if step.name != "mul" or len(fixed) != 1 or len(self.flat.owners[fixed[0]]) != 1:
            return None
        value = np.asarray(self.flat.value(fixed[0]), np.float32)
        varying = [axis for axis in range(value.ndim) if not np.all(value == value.take([0], axis=axis))]
        if len(varying) != 1:
            return None
        (axis,), (parameter,) = varying, self.flat.owners[fixed[0]]
        numbers = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])[0]
        return Gain(step, fixed[0], parameter, axis, numbers)

    def _follow(self, gain: Gain) -> None:
        """Follow the products to where they are contracted."""
        product = gain.step.outputs[0]
        waiting, axes = [product], {product: gain.axis}
        while waiting:
            slot = waiting.pop()
            if slot in self.flat.ends:
                raise Refused("the model returns what it multiplies")
            for index in self.flat.touching(slot):
                step = self.flat.steps[index]
                if slot not in step.inputs or index not in self.flat.live:
                    continue
                for result, axis in self._through(gain, step, index, slot, axes):
                    if axes.get(result, axis) != axis:
                        raise Refused("its channels lie in two ways")
                    if result not in axes:
                        axes[result] = axis
                        waiting.append(result)

    def _through(
        self, gain: Gain, step: FlatStep, index: int, slot: Slot, axes: dict[Slot, int]
    ) -> Iterator[tuple[Slot, int]]:
        """The results that have the gain, and the axis of its channels there."""
        axis, two = axes[slot], len(step.inputs) == 2 and step.inputs[0] != step.inputs[1]
        partner = step.inputs[1 - step.inputs.index(slot)] if two else slot
        if step.name == "dot_general":
            self._sink(gain, step, index, slot, axis)
        elif step.name == "mul" and two:
            if partner in axes:
                raise Refused("products of it are multiplied")
            yield step.outputs[0], axis
        elif step.name in ("add", "add_any") and two:
            if partner not in self.flat.fixed or len(self.flat.owners[partner]) > 1:
                raise Refused("it is added to something that is no bias")
            if np.any(np.asarray(self.flat.value(partner))):
                gain.biases.append(partner)
            yield step.outputs[0], axis
        elif step.name == "div" and two and slot == step.inputs[0]:
            yield step.outputs[0], axis
        elif step.name in COLLECTING:
            raise Refused(f"{step.name} takes what it multiplies")
        elif step.name in (*CASTS, "neg") or (step.name in (*MOVED, "reshape") and slot == step.inputs[0]):
            for result in step.outputs:
                shapes = self.flat.shapes[slot], self.flat.shapes[result]
                place = followed(step, axis, gain.numbers.size, shapes, False)
                if isinstance(place, str):
                    raise Refused(place)
                yield result, place
        else:
            raise Refused(f"{step.name} takes what it multiplies")

    def _sink(self, gain: Gain, step: FlatStep, index: int, slot: Slot, axis: int) -> None:
        site = self._sites.get(index)
        if site is None or site.activation != slot:
            raise Refused("it is contracted with something that is no parameter")
        contracted, _ = step.params["dimension_numbers"]
        mine, its = contracted[1 - site.place], contracted[site.place]
        if axis not in mine:
            raise Refused("a contraction leaves its channels as they are")
        gain.sinks.append(Sink(site, its[tuple(mine).index(axis)]))

    def _read_elsewhere(self, slot: Slot, gains: set[Slot]) -> str:
        """Which step reads a parameter other than through its gains; empty if none does."""
        owned = {slot}
        for index, step in enumerate(self.flat.steps):
            if not owned & {*step.inputs} or index not in self.flat.live:
                continue
            if step.outputs[0] in self.flat.fixed and step.name in (*CASTS, *MOVES, "add", "sub", "mul"):
                owned.update(step.outputs)
            elif not (owned & {*step.inputs}) <= gains:
                return f"{step.name} reads the parameter too"
        return ""

    def affine(self, gain: Gain) -> tuple[float, float] | None:
        """`(a, b)` if the gain is `a p + b` of its parameter `p`, number by number; None if it is not."""
        at_zero, at_one = (
            np.asarray(self.flat.value_with(gain.slot, gain.parameter, number), np.float32)
            for number in (0.0, 1.0)
        )
        slope = at_one - at_zero
        if np.ptp(slope) > 1e-6 or np.ptp(at_zero) > 1e-6 or abs(slope.flat[0]) < 1e-6:
            return None
        return float(slope.flat[0]), float(at_zero.flat[0])


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

    path: str
    size: int
    places: np.ndarray = field(repr=False)
    moves: tuple[FlatStep, ...] = field(repr=False)

    @cached_property
    def numbers(self) -> np.ndarray:
        """The places of all numbers of the parameter that are added."""
        return np.unique(self.places)

    def means(self, result: jax.Array) -> jax.Array:
        """The mean of the numbers that each number of the parameter is added to, float32 `(size,)`; 0 without any.

        Args:
            result: the operation's, or a difference of such results.
        """
        moved = self._moved(result.astype(jnp.float32))
        same = tuple(axis for axis, length in enumerate(self.places.shape) if length == 1)
        means = moved.mean(axis=same, keepdims=True).reshape(-1)
        places = self.places.reshape(-1)
        counts = np.maximum(np.bincount(places, minlength=self.size), 1).astype(np.float32)
        return jnp.zeros((self.size,), jnp.float32).at[places].add(means) / counts

    def spread(self, numbers: jax.Array, result: jax.Array) -> jax.Array:
        """The numbers of the parameter, each where it is added, as the operation's result has them.

        Args:
            numbers: flattened.
            result: the operation's.
        """
        _, back = jax.vjp(self._moved, result.astype(jnp.float32))
        shape = jax.eval_shape(self._moved, jax.ShapeDtypeStruct(result.shape, jnp.float32)).shape
        return back(jnp.broadcast_to(numbers[self.places], shape))[0].astype(result.dtype)

    def _moved(self, x: jax.Array) -> jax.Array:
        for step in self.moves:
            # Casts are left out: means are taken in float32.
            x = x if step.name in CASTS else step.run(x)[0]
        return x


def bias_of(flat: FlatProgram, slot: Slot, through: Sequence[str] = ()) -> Bias | None:
    """The parameter that is added to a value, before anything else than a sum reads it; None if absent.

    Args:
        flat: the program.
        slot: of the value.
        through: further operations that may come before the sum; only `Bias.path` has a meaning then.
    """
    moves: list[FlatStep] = []
    while slot not in flat.outputs and len(flat.readers(slot)) == 1:
        (step,) = flat.readers(slot)
        if step.name in ("add", "add_any"):
            if step.inputs[0] == step.inputs[1]:
                return None
            source, chain = flat.origin(step.inputs[1 - step.inputs.index(slot)])
            chosen = (operand for move, _ in chain for operand in move.inputs[1:])
            # Rows of a table that the inputs choose are no bias.
            if source in flat.parameters and all(operand in flat.unowned for operand in chosen):
                places = flat.places(source, chain)
                size = int(np.prod(flat.shapes[source]))
                return Bias(flat.parameters[source], size, compressed(places), tuple(moves))
        elif step.name in through or (step.name in KEEPING and step.inputs == (slot,)):
            moves.append(step)
        else:
            return None
        slot = step.outputs[0]
    return None
