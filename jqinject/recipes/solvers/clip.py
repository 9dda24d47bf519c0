"""A search for ranges that are cut, by the error of the output."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.recipes.rounding_grid import MatrixGrid
from jqinject.recipes.solvers.columns import HIGHEST
from jqinject.recipes.solvers.gptq import RTN
from jqinject.recipes.solvers.solver import Problem, Solution, Solver, squared_errors


@dataclass(frozen=True)
class Clip:
    """Cuts the range of each scale where the output gets better by it, then solves on these scales.

    Each scale is measured of its weights, clipped to a share of the largest magnitude among them: that share of
    `1, ..., smallest` with the least error `d H d^T`, where `d` are the errors of the numbers of one row that share the
    scale, rounded to nearest, and `H` is the mean of `y y^T`. If all of them together are no better for the matrices of
    a site, its scales stay.

    Args:
        solver: what rounds the weights on the scales that are found.
        smallest: the smallest share.
        steps: how many shares below 1 are tried.

    Raises:
        ValueError: the smallest share is not between 0 and 1, or there is no step.

    Source: Lin et al., "AWQ", 2023 (`auto_clip`); ModelOpt's `awq_clip`.

    Differs from llm-awq: weights themselves are not clipped, so that the outermost integer of two's complement is used.

    Example:
        >>> Clip(smallest=0.6).steps
        10
    """

    solver: Solver = field(default_factory=RTN)
    smallest: float = 0.5
    steps: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.smallest < 1:
            raise ValueError(
                f"Clip: smallest is {self.smallest!r}, must be between 0 and 1.\n  cure: smallest=0.5"
            )
        if self.steps < 1:
            raise ValueError(f"Clip: steps is {self.steps!r}, must be 1 or more.\n  cure: steps=10")

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian", *self.solver.statistics)

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        weights, hessian = problem.weights, problem.statistics.mean("hessian")
        places = problem.sharing.places(weights.shape)
        _, own = np.unique(places, return_inverse=True)
        own = own.reshape(-1)
        count = int(own.max()) + 1
        within = hessian * jnp.asarray(places[0, 0][:, None] == places[0, 0][None, :], jnp.float32)
        largest = jax.ops.segment_max(jnp.abs(weights).reshape(-1), own, count)

        def clipped(shares: jax.Array) -> jax.Array:
            ends = (shares * largest)[own].reshape(weights.shape)
            return jnp.clip(weights, -ends, ends)

        def errors(grid: MatrixGrid) -> jax.Array:
            wrong = grid.nearest(weights) - weights
            return wrong * jnp.matmul(wrong, within, precision=HIGHEST)

        start = problem.measure(weights).spread(weights.shape)
        best = jnp.ones(count)
        least = jax.ops.segment_sum(errors(start).reshape(-1), own, count)
        for share in np.linspace(1, self.smallest, self.steps + 1)[1:]:
            grid = problem.measure(clipped(jnp.full(count, share, jnp.float32)))
            cost = jax.ops.segment_sum(errors(grid.spread(weights.shape)).reshape(-1), own, count)
            best, least = jnp.where(cost < least, share, best), jnp.minimum(cost, least)
        found = problem.measure(clipped(best)).spread(weights.shape)
        costs = [squared_errors(grid.nearest(weights) - weights, hessian).sum() for grid in (found, start)]
        kept = found if bool(costs[0] < costs[1]) else start
        return self.solver(replace(problem, measure=lambda _: kept))
