"""HQO: scales or zero points that weigh the outliers of a weight less than a squared error does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.statistics.half_quadratic_search import half_quadratic, shrink_lp
from jqinject.recipes.rounding_grid import MatrixGrid
from jqinject.recipes.solvers.columns import positive
from jqinject.recipes.solvers.solver import Problem, Solution

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
        positive("HQO", beta=self.beta, kappa=self.kappa, lp_norm=self.lp_norm, steps=self.steps)

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
        found = search.zero_points() if shifted else search.scales()
        return Solution(found.nearest(weights), found.scale, found.zero_point)


@dataclass(frozen=True)
class _Search:
    """The search of one problem.

    Attributes:
        weights: `(stack, rows, columns)`.
        grid: that the quantizer measures, with a scale for each number.
        places: for each number, which scale it has.
        solver: with the parameters.
        lp_norm: p of the error norm.
    """

    weights: jax.Array
    grid: MatrixGrid
    places: np.ndarray
    solver: HQO
    lp_norm: float

    def zero_points(self) -> MatrixGrid:
        """The grid with the zero points that are found."""
        own, count = self._numbered()
        sizes = jnp.float32(np.bincount(own, minlength=count))

        def following(grid: MatrixGrid, rest: jax.Array, values: jax.Array) -> jax.Array:
            wanted = values / grid.scale + grid.zero_point - rest / grid.scale
            return jax.ops.segment_sum(wanted.reshape(-1), own, count) / sizes

        def at(candidate: jax.Array) -> MatrixGrid:
            return replace(self.grid, zero_point=candidate[own].reshape(self.weights.shape))

        return self._best(self._first(self.grid.zero_point, own, count), at, following)

    def scales(self) -> MatrixGrid:
        """The grid with the scales that are found."""
        own, count = self._numbered()
        starts = np.searchsorted(np.sort(own), np.arange(count))

        def following(grid: MatrixGrid, rest: jax.Array, values: jax.Array) -> jax.Array:
            steps = values / grid.scale
            counts = (steps != 0) & (rest != 0)
            asked = jnp.where(counts, rest / jnp.where(steps != 0, steps, 1.0), jnp.inf).reshape(-1)
            held = jax.ops.segment_sum(counts.reshape(-1).astype(jnp.int32), own, count)
            inner = asked[jnp.lexsort((asked, own))]
            median = inner[starts + jnp.maximum(held - 1, 0) // 2]
            before = self._first(grid.scale, own, count)
            return jnp.where((held > 0) & jnp.isfinite(median) & (median > 0), median, before)

        def at(candidate: jax.Array) -> MatrixGrid:
            return replace(self.grid, scale=candidate[own].reshape(self.weights.shape))

        return self._best(self._first(self.grid.scale, own, count), at, following)

    def _best(self, start: jax.Array, at: Any, following: Any) -> MatrixGrid:
        solver, (own, count) = self.solver, self._numbered()

        def fitted(candidate: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
            grid = at(candidate)
            values = grid.nearest(self.weights)
            error = self.weights - values
            rest = self.weights - shrink_lp(error, beta[own].reshape(error.shape), self.lp_norm)
            total = jax.ops.segment_sum(jnp.abs(error).reshape(-1), own, count)
            return total, following(grid, rest, values)

        @jax.jit
        def run(start: jax.Array) -> jax.Array:
            beta = jnp.full_like(start, solver.beta)
            return half_quadratic(start, beta, solver.kappa, solver.steps, fitted)[0]

        return at(run(start))

    def _numbered(self) -> tuple[np.ndarray, int]:
        """The scales of these matrices, numbered from 0."""
        found, own = np.unique(self.places, return_inverse=True)
        return own.reshape(-1), len(found)

    def _first(self, full: jax.Array, own: np.ndarray, count: int) -> jax.Array:
        """One of the equal numbers of those that share a scale."""
        first = np.zeros(count, np.int64)
        first[own[::-1]] = np.arange(own.size)[::-1]
        return full.reshape(-1)[first]
