"""Finds the parameters that channels are multiplied by, and those that are added to what an operation makes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

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
from jqinject.recipes.transforms import factor_walk

ADDING = ("add", "add_any")
#: Operations that keep every number of a value, once.
KEEPING = (*CASTS, "reshape", "transpose", "squeeze")


#: What a gain of either sign, or 0, commutes with, besides sums with a bias.
LINEAR = {name: factor_walk.RULES[name] for name in (*CASTS, *MOVES, "neg", "mul", "div", "dot_general")}


def _added(biases: set[Slot], walk: factor_walk.Walk, step: FlatStep) -> None:
    """A sum of products and a bias, of a parameter alone, which is collected."""
    fixed = [slot for slot in step.inputs if slot in walk.flat.fixed]
    if len(fixed) != 1 or len(walk.flat.owners[fixed[0]]) > 1:
        return walk.refuse(step.outputs[0], "it is added to something that is no bias")
    biases.update(fixed)
    return factor_walk.same(walk, step)


@dataclass
class Gain:
    """Numbers that channels are multiplied by in one place.

    Attributes:
        step: index of the multiplication.
        slot: of the gain there.
        parameter: the slot of the parameter that it is made from.
        numbers: of the gain, one for each channel.
        labels: which channel each number of a value belongs to (`Walk`), of all values that the products reach: what
            contracts the products is labelled negatively, and what is added to them positively.
        sinks: the contractions that all of the products go to.
        biases: slots that are added to the products on their way there.
    """

    step: int
    slot: Slot
    parameter: Slot
    numbers: np.ndarray
    labels: dict[Slot, factor_walk.Labels] = field(default_factory=dict)
    sinks: list[ContractionSite] = field(default_factory=list)
    biases: list[Slot] = field(default_factory=list)

    def spread(self, slot: Slot, numbers: np.ndarray | None = None) -> np.ndarray:
        """The gain's number for each number of a value, 1 for those that no product reaches; broadcasts to the value.

        Args:
            slot: of the value.
            numbers: of the channels, instead of those of the gain.
        """
        return factor_walk.factors_of(np.abs(self.labels[slot]), self.numbers if numbers is None else numbers)


def gains_by_parameter(flat: FlatProgram) -> dict[Slot, list[Gain] | str]:
    """For each parameter that is a gain, the places where it is one; why it cannot be taken over, if it cannot.

    Args:
        flat: the program.
    """
    gains: dict[Slot, list[Gain]] = {}
    reasons: dict[Slot, str] = {}
    for index in sorted(flat.live):
        gain = _gain_of(flat, index)
        if gain is not None:
            gains.setdefault(gain.parameter, []).append(gain)
            why = _follow(flat, gain)
            if why:
                reasons.setdefault(gain.parameter, why)
    for slot, own in gains.items():
        reader = flat.other_use(slot, {gain.step for gain in own}, ("add", "sub", "mul"))
        if reader is not None:
            reasons.setdefault(slot, f"{reader.name} reads the parameter too")
    return {slot: reasons.get(slot) or own for slot, own in gains.items()}


def _gain_of(flat: FlatProgram, index: int) -> Gain | None:
    """The gain that an operation multiplies by; None if it does not, or by the same number everywhere."""
    step = flat.steps[index]
    fixed = [slot for slot in step.inputs if slot in flat.fixed]
    if step.name != "mul" or len(fixed) != 1 or len(flat.owners[fixed[0]]) != 1:
        return None
    value = factor_walk.compressed(np.asarray(flat.value(fixed[0]), np.float32))
    if len(factor_walk.varies(value)) != 1:
        return None
    (parameter,) = flat.owners[fixed[0]]
    labels = {step.outputs[0]: np.arange(1, value.size + 1).reshape(value.shape)}
    return Gain(index, fixed[0], parameter, value.reshape(-1), labels)


def _follow(flat: FlatProgram, gain: Gain) -> str:
    """Follow the products to where they are contracted; why these cannot take the gain over, if they cannot."""
    added = set[Slot]()
    rules = LINEAR | dict.fromkeys(ADDING, partial(_added, added))
    walk = factor_walk.Walk(flat, rules, gain.step, flat.fixed, count=gain.numbers.size)
    for product, labels in gain.labels.items():
        walk.give(product, labels)
    walk.run()
    if not np.array_equal(walk.groups(), np.arange(gain.numbers.size + 1)):
        return next(iter(walk.reasons), "its channels lie in two ways")
    gain.labels = {slot: labels for slot, labels in walk.labels.items() if labels.any()}
    gain.sinks = [x for x in flat.sites if x.weight in gain.labels and x.activation in gain.labels]
    gain.biases = sorted(slot for slot in added if not flat.is_zero(slot))
    if {*flat.fixed} & gain.labels.keys() - added - {x.weight for x in gain.sinks}:
        return "it is contracted with something that is no parameter"
    return "" if gain.sinks else "no contraction takes the products"


def affine(flat: FlatProgram, gain: Gain) -> tuple[float, float] | None:
    """`(a, b)` if a gain is `a p + b` of its parameter `p`, number by number; None if it is not.

    Args:
        flat: the program.
        gain: of it.
    """
    others = {slot: x for slot, x in flat.values.items() if gain.parameter not in flat.owners.get(slot, ())}
    numbers = (jnp.full_like(flat.state[gain.parameter], number) for number in (0.0, 1.0))
    at_zero, at_one = (
        np.asarray(flat.evaluated(gain.slot, {**others, gain.parameter: x}), np.float32) for x in numbers
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

    def means(self, result: jax.Array) -> jax.Array:
        """The mean of the numbers that each number of the parameter is added to, float32 `(size,)`; 0 without any.

        Args:
            result: the operation's, or a difference of such results.
        """
        summed = self._through_moves(result.astype(jnp.float32))
        same = tuple(axis for axis, length in enumerate(self.places.shape) if length == 1)
        means = summed.mean(axis=same, keepdims=True).reshape(-1)
        places = self.places.reshape(-1)
        counts = np.maximum(np.bincount(places, minlength=self.size), 1).astype(np.float32)
        return jnp.zeros((self.size,), jnp.float32).at[places].add(means) / counts

    def spread(self, numbers: jax.Array, result: jax.Array) -> jax.Array:
        """The numbers of the parameter, each where it is added, as the operation's result has them.

        Args:
            numbers: flattened.
            result: the operation's.
        """
        _, back = jax.vjp(self._through_moves, result.astype(jnp.float32))
        shape = jax.eval_shape(self._through_moves, jax.ShapeDtypeStruct(result.shape, jnp.float32)).shape
        return back(jnp.broadcast_to(numbers[self.places], shape))[0].astype(result.dtype)

    def _through_moves(self, x: jax.Array) -> jax.Array:
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
        if step.name in ADDING:
            if step.inputs[0] == step.inputs[1]:
                return None
            source, chain = flat.origin(step.inputs[1 - step.inputs.index(slot)])
            chosen = (operand for move, _ in chain for operand in move.inputs[1:])
            # Rows of a table that the inputs choose are no bias.
            if source in flat.parameters and all(operand in flat.unowned for operand in chosen):
                places = flat.places(source, chain)
                size = int(np.prod(flat.shapes[source]))
                return Bias(flat.parameters[source], size, factor_walk.compressed(places), tuple(moves))
        elif step.name in through or (step.name in KEEPING and step.inputs == (slot,)):
            moves.append(step)
        else:
            return None
        slot = step.outputs[0]
    return None
