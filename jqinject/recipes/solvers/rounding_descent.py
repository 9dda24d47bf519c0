"""Solvers that learn how each weight is rounded: AdaRound and AutoRound."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jqinject.ops import tensor_clamp
from jqinject.quant.enums import LearnedRoundImplType, as_enum
from jqinject.quant.solver.roles import LEARNED_ROUND_IMPL
from jqinject.recipes.solvers import solver
from jqinject.recipes.solvers.solver import Expected, MatrixGrid, Problem, Solution


@dataclass(frozen=True)
class LearnedRounding(solver.Checked):
    """Learns the share `p` by which each weight is rounded up, which ends at 0 or 1 (AdaRound).

    optax's Adam minimizes, over the rounding alone,

        mean |q y - w0 x|^2 + regularization * sum(1 - |2 p - 1|^b),    q = s (clip(floor(w / s + z) + p) - z)

    over the inputs `x` of the float and `y` of the quantized model: the mean squared error of the output. The sums
    `y y^T` and `x y^T` are all that it takes. `b` falls from `beta[0]` to `beta[1]` after the warm-up. A matrix whose
    result is worse than rounding to nearest is rounded to nearest. Scales stay.

    Args:
        steps: of Adam.
        learning_rate: Adam's.
        regularization: weight of the second term.
        beta: the exponent at the start and at the end.
        warmup: the share of the steps without regularization.
        learned_round_impl_type: "hard_sigmoid" (AdaRound), "sigmoid" or "identity" (no regularization).

    Raises:
        ValueError: a number out of range; (when called) the quantizer's numbers are those of a table.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020. Differs from the paper:
    sums over all batches instead of one batch a step.

    Example:
        >>> LearnedRounding(steps=500).learning_rate
        0.01
    """

    statistics = ("hessian", "cross")
    steps: Annotated[int, Expected("an int of at least 1", lambda x: isinstance(x, int) and x >= 1)] = 1000
    learning_rate: Annotated[float, Expected("above 0", lambda x: x > 0)] = 1e-2
    regularization: Annotated[float, solver.at_least(0, 0)] = 0.01
    beta: Annotated[
        tuple[float, float], Expected("two numbers above 0", lambda x: len(x) == 2 and min(x) > 0)
    ] = (20.0, 2.0)
    warmup: Annotated[float, Expected("between 0 and 1", lambda x: 0 <= x <= 1)] = 0.2
    learned_round_impl_type: str | LearnedRoundImplType = "hard_sigmoid"

    def __post_init__(self) -> None:
        super().__post_init__()
        as_enum(LearnedRoundImplType, self.learned_round_impl_type, name="learned_round_impl_type")

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        grid = problem.measure(problem.weights)
        if grid.grid.is_table:
            raise ValueError(
                f"LearnedRounding learns whether numbers are rounded up or down, and the quantizer's grid is a "
                f"{type(grid.grid).__name__}.\n  cure: GPTQ(), which serves every grid"
            )
        hessian, cross = (problem.statistics.mean(name) for name in ("hessian", "cross"))
        # The error of the output is (q - w0) y + w0 (y - x), whose last part no rounding changes.
        slope = solver.matmul(problem.original, hessian - cross)
        learned = grid.nearest(_learned(self, grid, problem.weights, problem.original, hessian, slope))
        nearest = grid.nearest(problem.weights)
        error, usual = (_errors(x - problem.original, hessian, slope) for x in (learned, nearest))
        better = (error < usual)[:, None, None]
        return Solution(jnp.where(better, learned, nearest), grid.scale, grid.zero_point)


def _errors(difference: jax.Array, hessian: jax.Array, slope: jax.Array) -> jax.Array:
    """The mean squared error of the output of each matrix, less a constant, `(stack,)`."""
    return solver.squared_errors(difference, hessian) + 2 * jnp.sum(difference * slope, axis=(1, 2))


@partial(jax.jit, static_argnums=0)
def _learned(
    settings: LearnedRounding,
    grid: MatrixGrid,
    weights: jax.Array,
    original: jax.Array,
    hessian: jax.Array,
    slope: jax.Array,
) -> jax.Array:
    """The matrices with each number rounded up or down as learned; one program for all matrices of a shape."""
    kind = as_enum(LearnedRoundImplType, settings.learned_round_impl_type)
    impl, regularization = LEARNED_ROUND_IMPL[kind](), settings.regularization
    if kind is LearnedRoundImplType.IDENTITY:
        regularization = 0.0
    begin = settings.warmup * settings.steps
    steps = weights / grid.scale + grid.zero_point
    fractions: list[jax.Array] = []

    def fraction(x: jax.Array) -> jax.Array:
        fractions.append(x - jnp.floor(x))
        return x

    grid.grid.unbounded(steps, fraction)

    def rounded(value: jax.Array, hard: bool) -> jax.Array:
        codes = grid.grid.unbounded(steps, lambda x: impl.round_to(x, impl(value, hard)))
        return (tensor_clamp(codes, *grid.grid.bounds) - grid.zero_point) * grid.scale

    def loss(value: jax.Array, step: jax.Array) -> jax.Array:
        done = jnp.clip((step - begin) / max(settings.steps - begin, 1.0), 0.0, 1.0)
        exponent = settings.beta[0] + (settings.beta[1] - settings.beta[0]) * done
        weight = jnp.where(step < begin, 0.0, regularization)
        error = jnp.sum(_errors(rounded(value, False) - original, hessian, slope))
        return error + weight * _undecided(impl(value, False), exponent)

    def descend(step: jax.Array, state: tuple[jax.Array, optax.OptState]) -> tuple[jax.Array, optax.OptState]:
        value, adam = state
        gradient = jax.grad(loss)(value, step.astype(jnp.float32))
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer count
            updates, adam = optimizer.update(gradient, adam)
        return jax.tree.map(jnp.add, value, updates), adam

    optimizer, start = optax.adam(settings.learning_rate), impl.start_at(fractions[0])
    learned, _ = jax.lax.fori_loop(0, settings.steps, descend, (start, optimizer.init(start)))
    return rounded(learned, True)


def _undecided(share: jax.Array, exponent: jax.Array) -> jax.Array:
    """`sum(1 - |2 p - 1|^b)`: how far shares are from 0 and 1.

    Args:
        share: `p`.
        exponent: `b`.
    """
    distance = jnp.abs(2 * share - 1)
    # The derivative of 0 ** b by its base is 0, and nan where it is computed as b * 0 ** b / 0.
    power = jnp.where(distance > 0, jnp.power(jnp.where(distance > 0, distance, 1.0), exponent), 0.0)
    return jnp.sum(1 - power)


class Offsets(NamedTuple):
    """What is learned, or its gradient.

    Attributes:
        value: added to each number in steps before it is rounded, `(stack, rows, columns)`.
        low, high: factors of the negative and of the positive numbers of each group when its scale is measured,
            `(stack, rows, groups)`.
    """

    value: jax.Array
    low: jax.Array
    high: jax.Array


@dataclass(frozen=True)
class AutoRound:
    """Learns by signed gradients whether each weight is rounded up or down, and how far each range is cut.

    `q = s (clip(round(w / s + v) + z) - z)`, with the scale `s` and the zero point `z` that the quantizer measures on
    the weights with their negative numbers times `low` and their positive ones times `high`, in [0, 1]. The loss is
    `tr((q - w0) H (q - w0)^T) / rows`, the mean squared error of the output: the sums over the inputs are all that it
    takes. Each step moves every parameter by the learning rate against the sign of its gradient, straight through the
    rounding; the rate falls linearly to 0; the best step is kept, so that the result is never worse than rounding to
    nearest.

    Args:
        steps: how many.
        learning_rate: of the rounding; None for 1 / steps.
        range_rate: of the ranges; None for the learning rate, 0 for ranges that stay. Those of a quantizer whose scale
            has no gradient stay too.

    Raises:
        ValueError: (when called) the quantizer's numbers are not scaled integers.

    Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023.
    Differs from auto-round: site by site, by the Hessian instead of batches of a block's inputs.

    Example:
        >>> AutoRound(steps=100)
        AutoRound(steps=100, learning_rate=None, range_rate=None)
    """

    statistics = ("hessian",)
    steps: int = 200
    learning_rate: float | None = None
    range_rate: float | None = None

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        descent = Descent(problem, self)
        # One program for all matrices of a shape, whose quantizers differ in numbers alone.
        argument = replace(problem, measure=solver.as_argument(problem.measure), known_sharing=None)
        offsets = _best(self, argument)
        grid = descent.measured(offsets)
        return Solution(grid.nearest(descent.quantized(offsets)), grid.scale, grid.zero_point)


class Descent:
    """The descent of one problem.

    Args:
        problem: of integers.
        settings: the hyperparameters.

    Raises:
        ValueError: see `AutoRound`.
    """

    def __init__(self, problem: Problem, settings: AutoRound) -> None:
        grid = problem.measure(problem.weights).grid
        if not grid.is_integer:
            raise ValueError(
                f"AutoRound learns how integers are rounded, and the quantizer's grid is a {type(grid).__name__}.\n"
                "  cure: GPTQ(), which serves every grid, or an integer quantizer"
            )
        self.grid, self.problem, self.settings = grid, problem, settings
        self.hessian = problem.statistics.mean("hessian")
        columns = problem.weights.shape[-1]
        self.group_size = min(problem.group_size or columns, columns)

    def start(self) -> Offsets:
        """Rounding to nearest."""
        weights = self.problem.weights
        groups = (*weights.shape[:2], -(-weights.shape[2] // self.group_size))
        return Offsets(jnp.zeros_like(weights), jnp.ones(groups), jnp.ones(groups))

    def measured(self, offsets: Offsets) -> MatrixGrid:
        """The grid of the cut ranges."""
        weights = self.problem.weights
        factors = jnp.where(weights < 0, self._spread(offsets.low), self._spread(offsets.high))
        return self.problem.measure(weights * factors).spread(weights.shape)

    def _spread(self, factors: jax.Array) -> jax.Array:
        return jnp.repeat(factors, self.group_size, axis=-1)[..., : self.problem.weights.shape[-1]]

    def quantized(self, offsets: Offsets) -> jax.Array:
        """`q`, with gradients straight through the rounding."""
        grid = self.measured(offsets)
        integer = jax.lax.stop_gradient(jnp.round(grid.zero_point))
        steps = self.problem.weights / grid.scale + offsets.value + (grid.zero_point - integer)
        steps = steps + jax.lax.stop_gradient(jnp.round(steps) - steps) + integer
        return (tensor_clamp(steps, *self.grid.bounds) - grid.zero_point) * grid.scale

    def loss(self, offsets: Offsets) -> jax.Array:
        """The mean squared error of the output, added over the stack."""
        wrong = self.quantized(offsets) - self.problem.original
        return jnp.sum(solver.squared_errors(wrong, self.hessian)) / wrong.shape[1]

    def step(self, offsets: Offsets, count: ArrayLike) -> tuple[Offsets, Offsets, jax.Array, Offsets]:
        """One step: what comes next, the offsets within their bounds, and their loss and gradient."""
        steps = self.settings.steps
        rate = 1 / steps if self.settings.learning_rate is None else self.settings.learning_rate
        range_rate = rate if self.settings.range_rate is None else self.settings.range_rate
        bounded = Offsets(offsets.value, jnp.clip(offsets.low, 0, 1), jnp.clip(offsets.high, 0, 1))
        loss, gradient = jax.value_and_grad(self.loss)(bounded)
        left = 1 - jnp.asarray(count, jnp.float32) / steps
        rates = Offsets(*(jnp.float32(x) * left for x in (rate, range_rate, range_rate)))
        after = jax.tree.map(lambda x, g, r: x - r * jnp.sign(g), bounded, gradient, rates)
        return after, bounded, loss, gradient


_State = tuple[Offsets, Offsets, jax.Array]


@partial(jax.jit, static_argnums=0)
def _best(settings: AutoRound, problem: Problem) -> Offsets:
    """The offsets with the least loss on the way."""
    descent = Descent(problem, settings)

    def descend(count: jax.Array, state: _State) -> _State:
        offsets, best, least = state
        after, bounded, loss, _ = descent.step(offsets, count)
        better = loss < least
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), bounded, best)
        return after, best, jnp.where(better, loss, least)

    start = descent.start()
    return jax.lax.fori_loop(0, settings.steps, descend, (start, start, jnp.float32(jnp.inf)))[1]
