"""Learns how one layer's weight is rounded: AdaRound's loss, and Adam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Identity, LearnedRoundSte
from jqinject.core.rounding import LearnedRound
from jqinject.model.running.layer_records import Record
from jqinject.nn.base.weight_layer import QuantWeightLayer
from jqinject.quant.enums import LearnedRoundImplType
from jqinject.quant_tensor import as_array


class RoundingErrors(NamedTuple):
    """The mean squared error of a layer's output, against that of the float model.

    Attributes:
        nearest: with weights rounded to nearest.
        learned: with weights rounded up or down as learned.
    """

    nearest: float
    learned: float


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of one layer's training: static, compared by value."""

    steps: int
    learning_rate: float
    regularization: float
    beta: tuple[float, float]
    warmup: float

    def loss_weights(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weight of the regularization at a step, and its exponent."""
        start = self.warmup * self.steps
        done = jnp.clip((step - start) / max(self.steps - start, 1.0), 0.0, 1.0)
        exponent = self.beta[0] + (self.beta[1] - self.beta[0]) * done
        return jnp.where(step < start, 0.0, self.regularization), exponent


def rounding_of(proxy: Any) -> LearnedRoundSte | None:
    """The learned rounding in a quantizer, or None."""
    for _, node in nnx.iter_modules(proxy, graph=True):
        if isinstance(node, LearnedRoundSte):
            return node
    return None


def learn_layer(
    layer: QuantWeightLayer, records: list[Record], recipe: Recipe, kind: LearnedRoundImplType, seed: int
) -> RoundingErrors:
    """Learn the rounding of one layer, in place.

    Args:
        layer: a private copy, in evaluation mode, with learned rounding.
        records: its arguments, and the float layer's outputs.
        recipe: the hyperparameters.
        kind: of the learned rounding.
        seed: for the order of the batches.
    """
    rounding = rounding_of(layer.weight_quant)
    assert rounding is not None, "inserted before"
    rounding.value[...] = rounding.learned_round_impl.start_at(_fractions(layer))
    error = _error_of(layer, records)
    nearest, kept = error(), rounding.value[...]
    regularized = recipe if kind is not LearnedRoundImplType.IDENTITY else _without(recipe)
    step, frozen = _step_of(layer, rounding, regularized)
    picks = np.random.default_rng(seed).integers(len(records), size=recipe.steps)
    state = Adam(kept, jnp.zeros_like(kept), jnp.zeros_like(kept))
    for count, pick in enumerate(picks):
        state = step(state, frozen, jnp.float32(count), *records[pick])
    rounding.value[...] = state.value
    learned = error()
    if not learned <= nearest:
        rounding.value[...] = kept
        learned = nearest
    return RoundingErrors(nearest, learned)


def _without(recipe: Recipe) -> Recipe:
    return Recipe(recipe.steps, recipe.learning_rate, 0.0, recipe.beta, recipe.warmup)


class _Seen(LearnedRound):
    """Stands in for a learned rounding and keeps what is rounded. Compared by identity."""

    def __init__(self) -> None:
        self.x = jnp.zeros(())

    def __call__(self, value: jax.Array, hard: bool) -> jax.Array:
        """No share."""
        return jnp.zeros_like(value)

    def round_to(self, x: jax.Array, share: jax.Array) -> jax.Array:
        """To nearest."""
        self.x = x
        return jnp.round(x)

    def start_at(self, fraction: jax.Array) -> jax.Array:
        """Anywhere."""
        return fraction


def _fractions(layer: QuantWeightLayer) -> jax.Array:
    """How far each weight lies between two steps, in the weight's shape."""
    copy = nnx.clone(layer, graph=True)
    rounding = rounding_of(copy.weight_quant)
    assert rounding is not None, "inserted before"
    seen = _Seen()
    rounding.learned_round_impl = seen
    copy.quant_weight()
    fractions = seen.x - jnp.floor(seen.x)
    # Back to the weight's shape: the transpose of a view puts every element back in place.
    _, back = jax.vjp(rounding.input_view_impl or Identity(), rounding.value[...])
    return back(fractions)[0]


def _called(layer: Any, given: Any) -> jax.Array:
    args, kwargs = given
    return as_array(layer(*args, **kwargs)).astype(jnp.float32)


def _error_of(layer: QuantWeightLayer, records: list[Record]) -> Callable[[], float]:
    """The current mean squared error of the layer's output, in evaluation mode."""
    graphdef, _ = nnx.split(layer, graph=True)

    @jax.jit
    def squared(state: Any, given: Any, wanted: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(_called(nnx.merge(graphdef, state), given) - wanted))

    def error() -> float:
        _, state = nnx.split(layer, graph=True)
        return float(np.mean([squared(state, given, wanted) for given, wanted in records]))

    return error


class Adam(NamedTuple):
    """Adam's state: the parameter, and the running means of its gradient and of the gradient's square."""

    value: jax.Array
    mean: jax.Array
    square: jax.Array

    def moved(self, gradient: jax.Array, rate: float, count: jax.Array) -> Adam:
        """After one more step; `count` steps came before."""
        mean = 0.9 * self.mean + 0.1 * gradient
        square = 0.999 * self.square + 0.001 * jnp.square(gradient)
        unbiased = mean / (1 - jnp.power(jnp.float32(0.9), count + 1))
        size = jnp.sqrt(square / (1 - jnp.power(jnp.float32(0.999), count + 1)))
        return Adam(self.value - rate * unbiased / (size + 1e-8), mean, square)


def undecided(share: jax.Array, exponent: jax.Array) -> jax.Array:
    """`sum(1 - |2 p - 1|^b)`: how far shares are from 0 and 1.

    Args:
        share: `p`.
        exponent: `b`.
    """
    distance = jnp.abs(2 * share - 1)
    # The derivative of 0 ** b by its base is 0, and nan where it is computed as b * 0 ** b / 0.
    power = jnp.where(distance > 0, jnp.power(jnp.where(distance > 0, distance, 1.0), exponent), 0.0)
    return jnp.sum(1 - power)


def step_of_shares(
    error: Callable[..., tuple[jax.Array, jax.Array]], given: Recipe, adam: Adam, count: jax.Array, *data: Any
) -> Adam:
    """One step of AdaRound's descent: of an error, and of how undecided the shares are.

    Args:
        error: from what is learned, and the data, to the error of the rounded weights and to the shares `p`.
        given: the hyperparameters.
        adam: what is learned.
        count: steps that came before.
        data: for the error.
    """

    def loss(value: jax.Array) -> jax.Array:
        reconstruction, share = error(value, *data)
        weight, exponent = given.loss_weights(count)
        return reconstruction + weight * undecided(share, exponent)

    return adam.moved(jax.grad(loss)(adam.value), given.learning_rate, count)


def _step_of(
    layer: QuantWeightLayer, rounding: LearnedRoundSte, recipe: Recipe
) -> tuple[Callable[..., Adam], Any]:
    """One step of Adam on the rounding of a layer, and the layer's state.

    The step is (Adam's state, the layer's state, count, given, wanted) -> Adam's state.
    """
    rounding.deterministic = False  # soft while it is learned
    graphdef, state = nnx.split(layer, graph=True)
    rounding.deterministic = True

    def error(value: jax.Array, state: Any, given: Any, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        copy = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))
        learned = rounding_of(copy.weight_quant)
        assert learned is not None
        learned.value.set_value(value)
        difference = _called(copy, given) - wanted
        reconstruction = jnp.sum(jnp.square(difference)) / max(difference.size // difference.shape[-1], 1)
        return reconstruction, learned.share()

    @jax.jit
    def step(adam: Adam, state: Any, count: jax.Array, given: Any, wanted: jax.Array) -> Adam:
        return step_of_shares(error, recipe, adam, count, state, given, wanted)

    return step, state
