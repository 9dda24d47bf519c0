"""AutoRound: signed gradient descent on how each weight is rounded, and on the ranges of its scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqinject.recipes.rounding_grid import MatrixGrid, Measure, as_argument
from jqinject.recipes.solvers.solver import Problem, Solution, bounded_codes, integer_grid, squared_errors
from jqinject.recipes.statistics import Statistics


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

    steps: int = 200
    learning_rate: float | None = None
    range_rate: float | None = None

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian",)

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        descent = Descent(problem, self)
        return descent.solution(descent.best())


class Descent:
    """The descent of one problem.

    Args:
        problem: of integers.
        solver: the hyperparameters.

    Raises:
        ValueError: see `AutoRound`.
    """

    def __init__(self, problem: Problem, solver: AutoRound) -> None:
        _, self.grid = integer_grid(problem, "AutoRound")
        self.problem, self.solver = problem, solver
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
        factors = jnp.where(weights < 0, self._each(offsets.low), self._each(offsets.high))
        return self.problem.measure(weights * factors).spread(weights.shape)

    def _each(self, factors: jax.Array) -> jax.Array:
        return jnp.repeat(factors, self.group_size, axis=-1)[..., : self.problem.weights.shape[-1]]

    def quantized(self, offsets: Offsets) -> jax.Array:
        """`q`, with gradients straight through the rounding."""
        grid = self.measured(offsets)
        whole = jax.lax.stop_gradient(jnp.round(grid.zero_point))
        steps = self.problem.weights / grid.scale + offsets.value + (grid.zero_point - whole)
        steps = steps + jax.lax.stop_gradient(jnp.round(steps) - steps) + whole
        return (bounded_codes(steps, self.grid) - grid.zero_point) * grid.scale

    def loss(self, offsets: Offsets) -> jax.Array:
        """The mean squared error of the output, added over the stack."""
        wrong = self.quantized(offsets) - self.problem.original
        return jnp.sum(squared_errors(wrong, self.hessian)) / wrong.shape[1]

    def step(self, offsets: Offsets, count: Any) -> tuple[Offsets, Offsets, jax.Array, Offsets]:
        """One step: what comes next, the offsets within their bounds, and their loss and gradient."""
        steps = self.solver.steps
        rate = 1 / steps if self.solver.learning_rate is None else self.solver.learning_rate
        range_rate = rate if self.solver.range_rate is None else self.solver.range_rate
        here = Offsets(offsets.value, jnp.clip(offsets.low, 0, 1), jnp.clip(offsets.high, 0, 1))
        loss, gradient = jax.value_and_grad(self.loss)(here)
        left = 1 - jnp.asarray(count, jnp.float32) / steps
        rates = Offsets(*(jnp.float32(x) * left for x in (rate, range_rate, range_rate)))
        after = jax.tree.map(lambda x, g, r: x - r * jnp.sign(g), here, gradient, rates)
        return after, here, loss, gradient

    def best(self) -> Offsets:
        """The offsets with the least loss on the way."""

        problem = self.problem
        fixed = (self.solver, problem.group_size)
        return _best(
            *fixed, as_argument(problem.measure), problem.weights, problem.original, problem.statistics
        )

    def solution(self, offsets: Offsets) -> Solution:
        """The numbers and their grid."""
        grid = self.measured(offsets)
        values = grid.nearest(self.quantized(offsets))
        return Solution(values, grid.scale, grid.zero_point)


@partial(jax.jit, static_argnums=(0, 1))
def _best(
    solver: AutoRound,
    group_size: int | None,
    measure: Measure,
    weights: jax.Array,
    original: jax.Array,
    statistics: Statistics,
) -> Offsets:
    """See `Descent.best`; one program for all matrices of a shape, whose quantizers differ in numbers alone."""
    descent = Descent(Problem(weights, original, statistics, measure, group_size), solver)

    def one(count: jax.Array, state: Any) -> Any:
        offsets, best, least = state
        after, here, loss, _ = descent.step(offsets, count)
        better = loss < least
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), here, best)
        return after, best, jnp.where(better, loss, least)

    start = descent.start()
    return jax.lax.fori_loop(0, solver.steps, one, (start, start, jnp.float32(jnp.inf)))[1]
