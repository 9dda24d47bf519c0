"""GPFQ, and the algorithms that know the inputs of both the float and the quantized model."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jqinject.recipes.grid import MatrixGrid
from jqinject.recipes.solvers.columns import HIGHEST, round_columns
from jqinject.recipes.solvers.gptq import check_factor
from jqinject.recipes.solvers.ordering import by_importance, without_dead_inputs
from jqinject.recipes.solvers.solver import Problem, Solution


@dataclass(frozen=True)
class GPFQ:
    """Rounds column by column so that the sum so far stays near that of the float model.

    With `H` the mean of `y y^T` and `G` the mean of `y x^T`, over inputs `x` of the float and `y` of the quantized
    model, column `t` is `(G_tt w_t + sum_{j<t} (G_tj w0_j - H_tj q_j)) / H_tt`, rounded to nearest.

    Args:
        act_order: round columns with large inputs first.

    Source: Lybrand and Saab, "A Greedy Algorithm for Quantizing Neural Networks", 2021; Brevitas.

    Example:
        >>> GPFQ()
        GPFQ(act_order=False)
    """

    act_order: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian", "cross")

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        hessian, cross = problem.statistics.mean("hessian"), problem.statistics.mean("cross").T
        order = by_importance(hessian, self.act_order)
        grid = problem.measure(problem.weights).spread(problem.weights.shape)
        values = _in_order(
            problem.weights[:, order],
            problem.original[:, order],
            hessian[order][:, order],
            cross[order][:, order],
            grid.columns(order),
        )
        return Solution(values[:, jnp.argsort(order)], grid.scale, grid.zero_point)


@jax.jit
def _in_order(
    weights: jax.Array, original: jax.Array, hessian: jax.Array, cross: jax.Array, grid: MatrixGrid
) -> jax.Array:
    columns = weights.shape[1]

    def one(place: jax.Array, rounded: jax.Array) -> jax.Array:
        seen, wanted = hessian[place], cross[place]
        before = jnp.arange(columns) < place
        float_sum = jnp.matmul(original, jnp.where(before, wanted, 0.0), precision=HIGHEST)
        rounded_sum = jnp.matmul(rounded, jnp.where(before, seen, 0.0), precision=HIGHEST)
        now = jax.lax.dynamic_index_in_dim(weights, place, 1, keepdims=False)
        divisor = jnp.where(seen[place] > 0, seen[place], 1.0)
        target = (wanted[place] * now + float_sum - rounded_sum) / divisor
        target = jnp.where(seen[place] > 0, target, 0.0)
        near = grid.from_column(place, 1).nearest(target[:, None])
        return jax.lax.dynamic_update_slice_in_dim(rounded, near, place, 1)

    return jax.lax.fori_loop(0, columns, one, jnp.zeros_like(weights))


@dataclass(frozen=True)
class Qronos:
    """Corrects the first column for everything before it, then the others for that, then rounds as GPTQ.

    With `H` the mean of `y y^T` and `G` the mean of `x y^T`: `w_0 <- (w0 G_:0 - sum_{j>0} H_0j w_j) / H_00`, rounded to
    `q_0`; then `w_1: <- (w0 (G + d I)_:1: - q_0 H_0,1:) A` with `A` the inverse of the damped `H` without its first row
    and column; then GPTQ from the second column on. Where both models have the same inputs this is GPTQ.

    Args:
        block_size: see `GPTQ`.
        act_order: round columns with large inputs first.
        damping: `d`, as a share of the largest eigenvalue of `H`.

    Source: Zhang et al., "Qronos: Correcting the Past by Shaping the Future in Post-Training Quantization", 2025.

    Example:
        >>> Qronos()
        Qronos(block_size=128, act_order=False, damping=1e-06)
    """

    block_size: int = 128
    act_order: bool = False
    damping: float = 1e-6

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian", "cross")

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        hessian, cross = problem.statistics.mean("hessian"), problem.statistics.mean("cross")
        hessian, weights = without_dead_inputs(hessian, problem.weights)
        order = by_importance(hessian, self.act_order)
        hessian, cross = hessian[order][:, order], cross[order][:, order]
        weights, original = weights[:, order], problem.original[:, order]
        grid = problem.measure(problem.weights).spread(weights.shape).columns(order)
        first = (
            jnp.matmul(original, cross[:, :1], precision=HIGHEST)
            - jnp.matmul(weights[:, 1:], hessian[1:, :1], precision=HIGHEST)
        ) / hessian[0, 0]
        rounded = grid.columns(slice(0, 1)).nearest(first)
        damp = self.damping * jnp.linalg.eigvalsh(hessian)[-1] * jnp.eye(len(hessian), dtype=hessian.dtype)
        inverse = _inverse(hessian + damp)
        rest = inverse[1:, 1:] - inverse[1:, :1] * inverse[:1, 1:] / inverse[0, 0]
        wanted = jnp.matmul(original, (cross + damp)[:, 1:], precision=HIGHEST) - rounded * hessian[:1, 1:]
        corrected = jnp.matmul(wanted, rest, precision=HIGHEST)
        factor = jnp.linalg.cholesky(rest, upper=True)
        check_factor(factor, self.damping)
        return self._rest(problem, grid, rounded, corrected, factor, order)

    def _rest(
        self,
        problem: Problem,
        grid: MatrixGrid,
        rounded: jax.Array,
        corrected: jax.Array,
        factor: jax.Array,
        order: jax.Array,
    ) -> Solution:
        after = grid.columns(slice(1, None))
        values, _ = round_columns(corrected, factor, lambda _: after, block_size=self.block_size)
        back = jnp.argsort(order)
        found = grid.columns(back)
        whole = jnp.concatenate([rounded, values], axis=1)[:, back]
        return Solution(whole, found.scale, found.zero_point)


def _inverse(matrix: jax.Array) -> jax.Array:
    lower = jnp.linalg.cholesky(matrix)
    half = jax.scipy.linalg.solve_triangular(lower, jnp.eye(len(matrix), dtype=matrix.dtype), lower=True)
    return jnp.matmul(half.T, half, precision=HIGHEST)
