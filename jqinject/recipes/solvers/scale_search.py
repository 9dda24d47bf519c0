"""Solvers that search scales or zero points, then round to nearest: Clip and HQO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.statistics.half_quadratic_search import half_quadratic, shrink_lp
from jqinject.recipes.solvers.columns import HIGHEST
from jqinject.recipes.solvers.greedy import RTN
from jqinject.recipes.solvers.solver import (
    MatrixGrid,
    Problem,
    Solution,
    Solver,
    above_zero,
    at_least,
    check_arguments,
    squared_errors,
)


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
        smallest = (0 < self.smallest < 1, "between 0 and 1", 0.5)
        check_arguments(self, smallest=smallest, steps=at_least(self.steps, 1, 10))

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian", *self.solver.statistics)

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        weights, hessian = problem.weights, problem.statistics.mean("hessian")
        places = problem.sharing.places(weights.shape)
        own, count = _numbered(places)
        within = hessian * jnp.asarray(places[0, 0][:, None] == places[0, 0][None, :], jnp.float32)
        largest = jax.ops.segment_max(jnp.abs(weights).reshape(-1), own, count)

        def clipped(shares: jax.Array) -> MatrixGrid:
            ends = (shares * largest)[own].reshape(weights.shape)
            return problem.measure(jnp.clip(weights, -ends, ends)).spread(weights.shape)

        def errors(grid: MatrixGrid) -> jax.Array:
            difference = grid.nearest(weights) - weights
            products = difference * jnp.matmul(difference, within, precision=HIGHEST)
            return jax.ops.segment_sum(products.reshape(-1), own, count)

        start = problem.measure(weights).spread(weights.shape)
        best, least = jnp.ones(count), errors(start)
        for share in np.linspace(1, self.smallest, self.steps + 1)[1:]:
            cost = errors(clipped(jnp.full(count, share, jnp.float32)))
            best, least = jnp.where(cost < least, share, best), jnp.minimum(cost, least)
        grids = (clipped(best), start)
        costs = [squared_errors(grid.nearest(weights) - weights, hessian).sum() for grid in grids]
        better = grids[0] if bool(costs[0] < costs[1]) else start
        return self.solver(replace(problem, measure=lambda _: better))


def _numbered(places: np.ndarray) -> tuple[np.ndarray, int]:
    """For each number in order, which scale it has, numbered from 0; and how many there are."""
    scales, own = np.unique(places, return_inverse=True)
    return own.reshape(-1), len(scales)


NORM_OF_ZERO_POINTS, NORM_OF_SCALES = 0.5, 0.7
"""As in the quantizers that search by themselves."""


@dataclass(frozen=True)
class HQO:
    """Finds zero points or scales by half-quadratic optimization, and rounds to nearest (HQQ).

    The error `w - q` is split into a sparse part, found by shrinking it, and the rest, which the next candidate fits:
    a zero point is the mean, a scale the median of what the rest asks for, over the numbers that share it. Zero points
    are searched where they are no integers (`quantize_zero_point = False`), scales everywhere else. Each round
    shrinks less. Each scale begins as the quantizer measures it, and its search ends at the first round that does not
    lessen the mean of `|w - q|`, so that it is never worse than rounding to nearest. No calibration data is read. It is
    the search of quantizers such as `ShiftedUint8WeightPerGroupFloatHQO`, for any quantizer whose scales are free.

    Args:
        beta: at the start; larger values shrink less.
        kappa: growth factor of beta per round.
        lp_norm: p of the error norm, at most 1. None: 0.5 for zero points, 0.7 for scales.
        steps: at most how many rounds.

    Raises:
        ValueError: a number that is not positive; (when called) scales that are numbers of a format themselves, powers
            of two (MX) or minifloats (NVFP4).

    Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

    Differs from HQQ: integer zero points stay, and their scales are searched; each scale or zero point is searched by
    itself, not until the mean over the whole weight gets worse.

    Example:
        >>> HQO(steps=20)
        HQO(beta=1.0, kappa=1.01, lp_norm=None, steps=20)
    """

    beta: float = 1.0
    kappa: float = 1.01
    lp_norm: float | None = None
    steps: int = 1000

    def __post_init__(self) -> None:
        check_arguments(
            self,
            beta=above_zero(self.beta, 1.0),
            kappa=above_zero(self.kappa, 1.01),
            lp_norm=above_zero(self.lp_norm),
            steps=above_zero(self.steps, 1000),
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ()

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        if problem.sharing.restricted:
            raise ValueError(
                "HQO looks for any scale, and the scales of this quantizer are numbers of 8 bits themselves.\n"
                "  cure: GPTQ(), which keeps the scales; or a quantizer with float scales"
            )
        weights = problem.weights
        grid = problem.measure(weights).spread(weights.shape)
        # A grid may have room for zero points that its quantizer never uses.
        shifted = not problem.sharing.whole_zero_points and bool(jnp.any(grid.zero_point != 0))
        norm = NORM_OF_ZERO_POINTS if shifted else NORM_OF_SCALES
        norm = norm if self.lp_norm is None else self.lp_norm
        search = _Search(weights, grid, problem.sharing.places(weights.shape), self, norm)
        grid = search.zero_points() if shifted else search.scales()
        return Solution(grid.nearest(weights), grid.scale, grid.zero_point)


class _Search:
    """The search of one problem.

    Args:
        weights: `(stack, rows, columns)`.
        grid: that the quantizer measures, with a scale for each number.
        places: for each number, which scale it has.
        solver: with the parameters.
        lp_norm: p of the error norm.
    """

    def __init__(
        self, weights: jax.Array, grid: MatrixGrid, places: np.ndarray, solver: HQO, lp_norm: float
    ) -> None:
        self.weights, self.grid, self.solver, self.lp_norm = weights, grid, solver, lp_norm
        self.own, self.count = _numbered(places)

    def zero_points(self) -> MatrixGrid:
        """The grid with the best zero points."""
        sizes = jnp.float32(np.bincount(self.own, minlength=self.count))

        def following(grid: MatrixGrid, rest: jax.Array, values: jax.Array) -> jax.Array:
            fitting = values / grid.scale + grid.zero_point - rest / grid.scale
            return self._sums(fitting) / sizes

        def at(candidate: jax.Array) -> MatrixGrid:
            return replace(self.grid, zero_point=self._spread(candidate))

        return self._best(self._first(self.grid.zero_point), at, following)

    def scales(self) -> MatrixGrid:
        """The grid with the best scales."""
        starts = np.searchsorted(np.sort(self.own), np.arange(self.count))

        def following(grid: MatrixGrid, rest: jax.Array, values: jax.Array) -> jax.Array:
            steps = values / grid.scale
            counts = (steps != 0) & (rest != 0)
            fitting = jnp.where(counts, rest / jnp.where(steps != 0, steps, 1.0), jnp.inf).reshape(-1)
            sizes = self._sums(counts.astype(jnp.int32))
            in_order = fitting[jnp.lexsort((fitting, self.own))]
            median = in_order[starts + jnp.maximum(sizes - 1, 0) // 2]
            fits = (sizes > 0) & jnp.isfinite(median) & (median > 0)
            return jnp.where(fits, median, self._first(grid.scale))

        def at(candidate: jax.Array) -> MatrixGrid:
            return replace(self.grid, scale=self._spread(candidate))

        return self._best(self._first(self.grid.scale), at, following)

    def _best(
        self,
        start: jax.Array,
        at: Callable[[jax.Array], MatrixGrid],
        following: Callable[[MatrixGrid, jax.Array, jax.Array], jax.Array],
    ) -> MatrixGrid:
        solver = self.solver

        def fitted(candidate: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
            grid = at(candidate)
            values = grid.nearest(self.weights)
            error = self.weights - values
            rest = self.weights - shrink_lp(error, self._spread(beta), self.lp_norm)
            return self._sums(jnp.abs(error)), following(grid, rest, values)

        @jax.jit
        def run(start: jax.Array) -> jax.Array:
            beta = jnp.full_like(start, solver.beta)
            return half_quadratic(start, beta, solver.kappa, solver.steps, fitted)[0]

        return at(run(start))

    def _sums(self, x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x.reshape(-1), self.own, self.count)

    def _spread(self, x: jax.Array) -> jax.Array:
        """A number for each scale, where the numbers with that scale are."""
        return x[self.own].reshape(self.weights.shape)

    def _first(self, full: jax.Array) -> jax.Array:
        """One of the equal numbers of those that share a scale."""
        first = np.zeros(self.count, np.int64)
        first[self.own[::-1]] = np.arange(self.own.size)[::-1]
        return full.reshape(-1)[first]
