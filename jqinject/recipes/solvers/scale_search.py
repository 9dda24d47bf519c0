"""Solvers that search scales or zero points: Clip, LeastSquaresScales and HQO."""

from dataclasses import dataclass, field, replace
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.statistics.exact_scale import least_squares_scales, levels_of
from jqinject.core.statistics.half_quadratic_search import half_quadratic, shrink_lp
from jqinject.recipes.solvers import greedy, solver
from jqinject.recipes.solvers.solver import Expected, MatrixGrid, Problem, Solution, Solver, at_least


@dataclass(frozen=True)
class Clip(solver.Checked):
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

    solver: Solver = field(default_factory=greedy.RTN)
    smallest: Annotated[float, Expected("between 0 and 1", lambda x: 0 < x < 1)] = 0.5
    steps: Annotated[int, at_least(1)] = 10

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
        weights, hessian = problem.weights, problem.statistics.mean("hessian")
        shared = _Shared(problem)
        row = shared.places[0, 0]
        within = hessian * jnp.asarray(row[:, None] == row[None, :], jnp.float32)
        largest = jax.ops.segment_max(jnp.abs(weights).reshape(-1), shared.own, shared.count)

        def clipped(shares: jax.Array) -> MatrixGrid:
            ends = shared.spread(shares * largest)
            return problem.measure(jnp.clip(weights, -ends, ends)).spread(weights.shape)

        def errors(grid: MatrixGrid) -> jax.Array:
            difference = grid.nearest(weights) - weights
            return shared.sums(difference * solver.matmul(difference, within))

        start = problem.measure(weights).spread(weights.shape)
        best, least = jnp.ones(shared.count), errors(start)
        for share in np.linspace(1, self.smallest, self.steps + 1)[1:]:
            cost = errors(clipped(jnp.full(shared.count, share, jnp.float32)))
            best, least = jnp.where(cost < least, share, best), jnp.minimum(cost, least)
        grids = (clipped(best), start)
        costs = [solver.squared_errors(grid.nearest(weights) - weights, hessian).sum() for grid in grids]
        better = grids[0] if bool(costs[0] < costs[1]) else start
        return self.solver(replace(problem, measure=lambda _: better))


@dataclass(frozen=True)
class LeastSquaresScales(solver.Checked):
    """Gives each scale the value with the least squared error of its weights, then solves on these scales.

    The least `sum_j h_j (w_j - q_j)^2` of all scales, over the weights that share one, not of some that are tried: by
    `jqinject.core.least_squares_scales`. `h` is 1, or the importance of a column: the mean of `y_j^2` over its inputs,
    an importance matrix as of llama.cpp. Whole zero points stay. A scale that the quantizer measures, and that is no
    worse, stays too.

    Args:
        solver: what rounds the weights on these scales.
        importance: whether `h` is the mean of the squared inputs.

    Raises:
        ValueError: (when called) scales that are numbers of a format themselves, powers of two (MX) or minifloats
            (NVFP4); zero points that are no integers; a grid of more than 8 bits.

    Source: Sakr et al., 2022 (OCTAV); llm-compressor's `imatrix_mse`, which tries some scales.

    Example:
        >>> LeastSquaresScales(importance=True)
        LeastSquaresScales(solver=RTN(), importance=True)
    """

    solver: Solver = field(default_factory=greedy.RTN)
    importance: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return (*(("hessian",) if self.importance else ()), *self.solver.statistics)

    @property
    def spreads_errors(self) -> bool:
        """See `SpreadingSolver`."""
        return solver.spreads_errors(self.solver)

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        weights, shared = problem.weights, _Shared(problem)
        if problem.sharing.restricted or not problem.sharing.whole_zero_points:
            what = "scales" if problem.sharing.restricted else "zero points"
            raise ValueError(
                f"LeastSquaresScales computes any scale, beside integer zero points; the {what} of this quantizer are "
                "others.\n  cure: Clip(), which tries scales that the quantizer itself finds"
            )
        start = problem.measure(weights).spread(weights.shape)
        importance = jnp.ones_like(weights)
        if self.importance:
            diagonal = solver.diagonal_of(problem.statistics.mean("hessian"))
            importance = jnp.broadcast_to(diagonal[:, None], weights.shape)
        zero_points = shared.one_of(start.zero_point) if bool(jnp.any(start.zero_point != 0)) else None
        best = least_squares_scales(
            shared.rows(weights), levels_of(start.grid), shared.rows(importance), zero_points
        )
        grid = replace(start, scale=jnp.where(shared.spread(best) > 0, shared.spread(best), start.scale))

        def errors(grid: MatrixGrid) -> jax.Array:
            return shared.sums(importance * jnp.square(grid.nearest(weights) - weights))

        better = shared.spread(errors(grid) < errors(start))
        grid = replace(start, scale=jnp.where(better, grid.scale, start.scale))
        return self.solver(replace(problem, measure=lambda _: grid))


class _Shared:
    """Which of a problem's numbers have the same scale.

    Args:
        problem: the problem.

    Attributes:
        places: see `Sharing`.
        own: for each number in order, which scale it has, numbered from 0.
        first, sizes: for each scale, the place of one of its numbers, and how many there are.
        count: of the scales.
    """

    def __init__(self, problem: Problem) -> None:
        self._shape = problem.weights.shape
        self.places = problem.sharing.places(self._shape)
        _, self.first, own, self.sizes = np.unique(
            self.places, return_index=True, return_inverse=True, return_counts=True
        )
        self.own, self.count = own.reshape(-1), len(self.sizes)

    def rows(self, x: jax.Array) -> jax.Array:
        """The numbers that share a scale as rows, those of smaller groups padded with zeros."""
        order, size = np.argsort(self.own, kind="stable"), int(self.sizes.max())
        place = np.arange(order.size) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        return jnp.zeros((self.count, size), x.dtype).at[self.own[order], place].set(x.reshape(-1)[order])

    def sums(self, x: jax.Array) -> jax.Array:
        """The sum over the numbers that share a scale."""
        return jax.ops.segment_sum(x.reshape(-1), self.own, self.count)

    def spread(self, x: jax.Array) -> jax.Array:
        """A number for each scale, where the numbers with that scale are."""
        return x[self.own].reshape(self._shape)

    def one_of(self, x: jax.Array) -> jax.Array:
        """One of the equal numbers of those that share a scale."""
        return x.reshape(-1)[self.first]


@dataclass(frozen=True)
class HQO(solver.Checked):
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

    statistics = ()
    beta: Annotated[float, solver.ABOVE_ZERO] = 1.0
    kappa: Annotated[float, solver.ABOVE_ZERO] = 1.01
    lp_norm: Annotated[float | None, solver.ABOVE_ZERO] = None
    steps: Annotated[int, solver.ABOVE_ZERO] = 1000

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
        # The norms are those of the quantizers that search by themselves.
        zero_points, scales = ("zero_point", 0.5, _next_zero_points), ("scale", 0.7, _next_scales)
        name, norm, following = zero_points if shifted else scales
        norm = norm if self.lp_norm is None else self.lp_norm
        shared = _Shared(problem)

        def at(candidate: jax.Array) -> MatrixGrid:
            return replace(grid, **{name: shared.spread(candidate)})

        def fitted(candidate: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
            tried = at(candidate)
            values = tried.nearest(weights)
            error = weights - values
            rest = weights - shrink_lp(error, shared.spread(beta), norm)
            return shared.sums(jnp.abs(error)), following(shared, tried, rest, values)

        @jax.jit
        def run(start: jax.Array) -> jax.Array:
            beta = jnp.full_like(start, self.beta)
            return half_quadratic(start, beta, self.kappa, self.steps, fitted)[0]

        grid = at(run(shared.one_of(vars(grid)[name])))
        return Solution(grid.nearest(weights), grid.scale, grid.zero_point)


def _next_zero_points(shared: _Shared, grid: MatrixGrid, rest: jax.Array, values: jax.Array) -> jax.Array:
    """The means of what the rest asks for."""
    return shared.sums(values / grid.scale + grid.zero_point - rest / grid.scale) / jnp.float32(shared.sizes)


def _next_scales(shared: _Shared, grid: MatrixGrid, rest: jax.Array, values: jax.Array) -> jax.Array:
    """The medians of what the rest asks for."""
    steps = values / grid.scale
    counts = (steps != 0) & (rest != 0)
    fitting = jnp.where(counts, rest / jnp.where(steps != 0, steps, 1.0), jnp.inf).reshape(-1)
    sizes = shared.sums(counts.astype(jnp.int32))
    in_order = fitting[jnp.lexsort((fitting, shared.own))]
    starts = np.cumsum(shared.sizes) - shared.sizes
    median = in_order[starts + jnp.maximum(sizes - 1, 0) // 2]
    fits = (sizes > 0) & jnp.isfinite(median) & (median > 0)
    return jnp.where(fits, median, shared.one_of(grid.scale))
