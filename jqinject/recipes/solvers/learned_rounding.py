"""AdaRound: learns whether each weight is rounded up or down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jqinject.core import LearnedRoundHardSigmoid
from jqinject.model.ptq.round_training import Adam, step_of_shares
from jqinject.model.ptq.round_training import Recipe as Hyperparameters
from jqinject.ops import Grid
from jqinject.recipes.grid import MatrixGrid
from jqinject.recipes.solvers.integers import bounded_codes, integer_grid, squared_errors
from jqinject.recipes.solvers.solver import Problem, Solution


@dataclass(frozen=True)
class LearnedRounding:
    """Learns the share `p` by which each weight is rounded up, which ends at 0 or 1 (AdaRound).

    Adam minimizes `tr((q - w0) H (q - w0)^T) + regularization * sum(1 - |2 p - 1|^b)`, with
    `q = s (clip(floor(w / s + z) + p) - z)` and `H` the mean of `y y^T` over the inputs `y` of the quantized model: the
    mean squared error of the output. `b` falls from `beta[0]` to `beta[1]` after the warm-up. A matrix whose result is
    worse than rounding to nearest is rounded to nearest. Scales stay.

    Args:
        steps: of Adam.
        learning_rate: Adam's.
        regularization: weight of the second term.
        beta: the exponent at the start and at the end.
        warmup: the share of the steps without regularization.

    Raises:
        ValueError: (when called) the quantizer's numbers are not scaled integers.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020.
    `jqinject.learn_rounding` takes the same steps by batches, layer by layer, of a model that is quantized already.

    Example:
        >>> LearnedRounding(steps=500).learning_rate
        0.01
    """

    steps: int = 1000
    learning_rate: float = 1e-2
    regularization: float = 0.01
    beta: tuple[float, float] = (20.0, 2.0)
    warmup: float = 0.2

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian",)

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        grid, integers = integer_grid(problem, "LearnedRounding")
        hessian = problem.statistics.mean("hessian")
        given = Hyperparameters(self.steps, self.learning_rate, self.regularization, self.beta, self.warmup)
        found = grid.nearest(_learned(given, integers, grid, problem.weights, problem.original, hessian))
        nearest = grid.nearest(problem.weights)
        error, usual = (squared_errors(each - problem.original, hessian) for each in (found, nearest))
        return Solution(
            jnp.where((error <= usual)[:, None, None], found, nearest), grid.scale, grid.zero_point
        )


@partial(jax.jit, static_argnums=(0, 1))
def _learned(
    given: Hyperparameters,
    integers: Grid,
    grid: MatrixGrid,
    weights: jax.Array,
    original: jax.Array,
    hessian: jax.Array,
) -> jax.Array:
    """The matrices with each number rounded up or down as learned; one program for all matrices of a shape."""
    shape, places = LearnedRoundHardSigmoid(), weights / grid.scale + grid.zero_point
    below = jnp.floor(places)

    def rounded(value: jax.Array, hard: bool) -> jax.Array:
        codes = bounded_codes(below + shape(value, hard), integers)
        return (codes - grid.zero_point) * grid.scale

    def error(value: jax.Array) -> tuple[jax.Array, jax.Array]:
        errors = squared_errors(rounded(value, False) - original, hessian)
        return jnp.sum(errors), shape(value, False)

    def one(count: jax.Array, state: Adam) -> Adam:
        return step_of_shares(error, given, state, count.astype(jnp.float32))

    start = shape.start_at(places - below)
    first = Adam(start, jnp.zeros_like(start), jnp.zeros_like(start))
    return rounded(jax.lax.fori_loop(0, given.steps, one, first).value, True)
