"""AdaRound: learns whether each weight is rounded up or down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax

from jqinject.core import LearnedRoundHardSigmoid, LearnedRoundIdentity, LearnedRoundSigmoid
from jqinject.core.rounding import LearnedRound
from jqinject.quant.enums import LearnedRoundImplType, as_enum
from jqinject.recipes.rounding_grid import MatrixGrid
from jqinject.recipes.solvers.columns import HIGHEST
from jqinject.recipes.solvers.solver import Problem, Solution, bounded_codes, squared_errors

SHARES: dict[LearnedRoundImplType, LearnedRound] = {
    LearnedRoundImplType.HARD_SIGMOID: LearnedRoundHardSigmoid(),
    LearnedRoundImplType.SIGMOID: LearnedRoundSigmoid(),
    LearnedRoundImplType.IDENTITY: LearnedRoundIdentity(),
}


@dataclass(frozen=True)
class LearnedRounding:
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

    steps: int = 1000
    learning_rate: float = 1e-2
    regularization: float = 0.01
    beta: tuple[float, float] = (20.0, 2.0)
    warmup: float = 0.2
    learned_round_impl_type: str | LearnedRoundImplType = "hard_sigmoid"

    def __post_init__(self) -> None:
        expected = {
            "steps": (isinstance(self.steps, int) and self.steps >= 1, "an int of at least 1"),
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "regularization": (self.regularization >= 0, "at least 0"),
            "beta": (len(self.beta) == 2 and min(self.beta) > 0, "two numbers above 0"),
            "warmup": (0 <= self.warmup <= 1, "between 0 and 1"),
        }
        for name, (fits, what) in expected.items():
            if not fits:
                raise ValueError(f"LearnedRounding: {name} must be {what}, got {getattr(self, name)!r}")
        as_enum(LearnedRoundImplType, self.learned_round_impl_type, name="learned_round_impl_type")

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian", "cross")

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
        slope = jnp.matmul(problem.original, hessian - cross, precision=HIGHEST)
        learned = grid.nearest(_learned(self, grid, problem.weights, problem.original, hessian, slope))
        nearest = grid.nearest(problem.weights)
        error, usual = (_errors(each - problem.original, hessian, slope) for each in (learned, nearest))
        better = (error < usual)[:, None, None]
        return Solution(jnp.where(better, learned, nearest), grid.scale, grid.zero_point)


def _errors(difference: jax.Array, hessian: jax.Array, slope: jax.Array) -> jax.Array:
    """The mean squared error of the output of each matrix, less a constant, `(stack,)`."""
    return squared_errors(difference, hessian) + 2 * jnp.sum(difference * slope, axis=(1, 2))


@partial(jax.jit, static_argnums=0)
def _learned(
    solver: LearnedRounding,
    grid: MatrixGrid,
    weights: jax.Array,
    original: jax.Array,
    hessian: jax.Array,
    slope: jax.Array,
) -> jax.Array:
    """The matrices with each number rounded up or down as learned; one program for all matrices of a shape."""
    kind = as_enum(LearnedRoundImplType, solver.learned_round_impl_type)
    impl, regularization = SHARES[kind], solver.regularization
    if kind is LearnedRoundImplType.IDENTITY:
        regularization = 0.0
    begin = solver.warmup * solver.steps
    steps = weights / grid.scale + grid.zero_point
    fractions: list[jax.Array] = []

    def fraction(x: jax.Array) -> jax.Array:
        fractions.append(x - jnp.floor(x))
        return x

    grid.grid.unbounded(steps, fraction)

    def rounded(value: jax.Array, hard: bool) -> jax.Array:
        codes = grid.grid.unbounded(steps, lambda x: impl.round_to(x, impl(value, hard)))
        return (bounded_codes(codes, grid.grid) - grid.zero_point) * grid.scale

    def loss(value: jax.Array, step: jax.Array) -> jax.Array:
        done = jnp.clip((step - begin) / max(solver.steps - begin, 1.0), 0.0, 1.0)
        exponent = solver.beta[0] + (solver.beta[1] - solver.beta[0]) * done
        weight = jnp.where(step < begin, 0.0, regularization)
        error = jnp.sum(_errors(rounded(value, False) - original, hessian, slope))
        return error + weight * _undecided(impl(value, False), exponent)

    def one(step: jax.Array, state: tuple[jax.Array, optax.OptState]) -> tuple[jax.Array, optax.OptState]:
        value, adam = state
        gradient = jax.grad(loss)(value, step.astype(jnp.float32))
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer count
            updates, adam = optimizer.update(gradient, adam)
        return jax.tree.map(jnp.add, value, updates), adam

    optimizer, start = optax.adam(solver.learning_rate), impl.start_at(fractions[0])
    learned, _ = jax.lax.fori_loop(0, solver.steps, one, (start, optimizer.init(start)))
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
