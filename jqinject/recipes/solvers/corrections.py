"""What is done to the weights before they are rounded: smaller magnitudes (MagR), corrected inputs (QEP)."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.recipes.solvers import accumulator, greedy, solver
from jqinject.recipes.solvers.solver import DeadInputs, Problem, Solution, Solver, Statistics, at_least


@dataclass(frozen=True)
class MagR(solver.Checked):
    """Makes the largest weights of each row smaller where the output does not feel it, then solves.

    Proximal gradient steps on `|(w - w0) x|^2 + a |w|_inf`: with `H` twice the mean of `y y^T`,
    `eta = 1 / lambda_max(H)` and `a = alpha / (eta |H|_1)`, `v = w - eta (w - w0) H`, `w = v - a P(v / a)`, where `P`
    projects each row onto the unit ball of the 1-norm.

    Args:
        solver: what rounds the result.
        alpha: weight of the largest magnitude.
        steps: how many.
        power_steps: of the power iteration that estimates `lambda_max`, from below: cheap for thousands of inputs, and
            30 in Brevitas. None computes it.

    Raises:
        ValueError: `power_steps` is below 1.

    Source: Zhang et al., "MagR: Weight Magnitude Reduction for Enhancing Post-Training Quantization", 2024.

    Example:
        >>> MagR(alpha=0.001).steps
        200
    """

    solver: Solver = field(default_factory=greedy.GPTQ)
    alpha: float = 0.01
    steps: int = 200
    power_steps: Annotated[int | None, at_least(1, 30)] = None

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian", *self.solver.statistics)

    @property
    def spreads_errors(self) -> bool:
        """See `SpreadingSolver`."""
        return solver.spreads_errors(self.solver)

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        hessian = 2 * problem.statistics.mean("hessian")
        reduced = reduce_magnitudes(problem.weights, hessian, self.alpha, self.steps, self.power_steps)
        return self.solver(replace(problem, weights=reduced))


@partial(jax.jit, static_argnums=(2, 3, 4))
def reduce_magnitudes(
    weights: jax.Array, hessian: jax.Array, alpha: float, steps: int, power_steps: int | None = None
) -> jax.Array:
    """The weights after the steps of `MagR`.

    Args:
        weights: `(stack, rows, columns)`.
        hessian: `(stack, columns, columns)`.
        alpha, steps, power_steps: see `MagR`.
    """
    largest = largest_eigenvalue(hessian, power_steps)[:, None, None]
    eta = 1 / jnp.where(largest > 0, largest, 1.0)
    norm = jnp.abs(hessian).sum(axis=1).max(axis=1)[:, None, None]
    strength = alpha / (eta * jnp.where(norm > 0, norm, 1.0))

    def step(_: jax.Array, now: jax.Array) -> jax.Array:
        moved = now - eta * solver.matmul(now - weights, hessian)
        return moved - strength * accumulator.onto_ball(moved / strength)

    return jax.lax.fori_loop(0, steps, step, weights)


def largest_eigenvalue(matrices: jax.Array, power_steps: int | None) -> jax.Array:
    """The largest eigenvalue of each positive semidefinite matrix.

    Args:
        matrices: `(stack, columns, columns)`.
        power_steps: of a power iteration that estimates it; None computes it.
    """
    if power_steps is None:
        return jnp.linalg.eigvalsh(matrices)[:, -1]
    # Where it begins decides how near it comes: the numbers that torch draws after its seed 42, as in Brevitas.
    drawn = np.random.RandomState(42).randint(0, 2**32, matrices.shape[-1], dtype=np.uint32)
    start = (drawn % 2**24).astype(np.float32) / np.float32(2**24)
    largest = jnp.abs(matrices).max(axis=(1, 2), keepdims=True)
    scaled = matrices / jnp.where(largest > 0, largest, 1.0)

    def moved(x: jax.Array) -> jax.Array:
        return solver.matmul(scaled, x)

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        x = moved(x)
        return x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-12)

    vectors = jnp.broadcast_to(start[None, :, None], (*matrices.shape[:2], 1))
    vectors = jax.lax.fori_loop(0, power_steps, step, vectors)
    return (largest * (vectors * moved(vectors)).sum(axis=1, keepdims=True))[:, 0, 0]


@dataclass(frozen=True)
class QEP(solver.Checked):
    """Corrects the weights for what quantization has done to their inputs, then solves.

    `W + factor * W (G - H) (H + d I)^-1`, with `H` the mean of `y y^T`, `G` the mean of `x y^T` over inputs `x` of the
    float and `y` of the quantized model. With `factor=1` the corrected float weights give the quantized model's inputs
    the outputs nearest to those of the float model.

    Args:
        solver: what rounds the result.
        factor: how much of the correction; 0 for none.
        damping: `d`, as a share of the mean of `H`'s diagonal.
        dead_inputs: see `GPTQ`.

    Source: Arai and Ichikawa, "Quantization Error Propagation", 2025.

    Example:
        >>> QEP(factor=1.0).damping
        0.01
    """

    spreads_errors: ClassVar[bool] = True
    solver: Solver = field(default_factory=greedy.GPTQ)
    factor: float = 0.5
    damping: float = 0.01
    dead_inputs: DeadInputs = "nearest"

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian", "cross", *self.solver.statistics)

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        options = self.factor, self.damping, self.dead_inputs
        corrected = corrected_weights(problem.weights, problem.statistics, *options)
        greedy.check_factor(corrected, self.damping)
        return self.solver(replace(problem, weights=corrected))


@partial(jax.jit, static_argnums=4)
def corrected_weights(
    weights: jax.Array, sums: Statistics, factor: float, damping: float, dead_inputs: DeadInputs
) -> jax.Array:
    """The weights of `QEP`; those of inputs that were always 0 are not corrected.

    Args:
        weights: `(stack, rows, columns)`.
        sums: with `H` and `G`.
        factor, damping, dead_inputs: see `QEP`.
    """
    hessian, cross = sums.mean("hessian"), sums.mean("cross")
    diagonal = solver.diagonal_of(hessian)
    full, weights = solver.with_dead_inputs(hessian, weights, dead_inputs)
    factorized = jnp.linalg.cholesky(solver.on_diagonal(full, damping * jnp.mean(diagonal, axis=1)))
    target = solver.matmul(weights, cross - hessian)
    half = jax.lax.linalg.triangular_solve(factorized, target, left_side=False, lower=True, transpose_a=True)
    correction = jax.lax.linalg.triangular_solve(factorized, half, left_side=False, lower=True)
    return jnp.where((diagonal == 0)[:, None], weights, weights + factor * correction)
