"""A parameter on its way to its quantizer's grid, site by site where a loop cuts it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.devices.processes import placed_as
from jqinject.recipes.grid import MatrixGrid, Measure
from jqinject.recipes.journal import Arrays, Journal
from jqinject.recipes.quantized_parameter import QuantizedParameter
from jqinject.recipes.solvers.solver import Problem, Sharing, Solution, Solver
from jqinject.recipes.statistics import Statistics
from jqinject.recipes.stream.site import ContractionSite
from jqinject.recipes.stream.stream import Visit


class Solving:
    """A parameter on its way to the grid, site by site where a loop cuts it.

    Args:
        parameter: of the quantized model.
        original: of the float model.
        update: an array beside it, which the quantized model adds to it; None for none.

    Attributes:
        values: the parameter as it is now, float32.
        taken: for each of its numbers in order, whether a site has put it on the grid.
    """

    def __init__(
        self, parameter: QuantizedParameter, original: jax.Array, update: jax.Array | None = None
    ) -> None:
        self.parameter = parameter
        self._whole = original.astype(jnp.float32)
        self.values = self._whole if update is None else self._whole - update
        self.original = self.values
        self._scale, self._zero_point = parameter.measure(self.values)
        self.taken = np.zeros((original.size,), bool)

    def takes(self, site: ContractionSite) -> bool:
        """Whether numbers that a site contracts are not solved yet."""
        return not site.places.all_in(self.taken)

    def solve(
        self, visit: Visit, solver: Solver, journal: Journal, integers: tuple[int, bool] | None = None
    ) -> Arrays:
        """Solve the numbers that a site contracts, and let the stream go on with them.

        Args:
            visit: of the site.
            solver: the algorithm.
            journal: remembers what it chose.
            integers: see `Problem.input_integers`.

        Returns:
            `nearest` and `solved`, relative errors of the site's output; and `unseen`, how many matrices no sample
            reached.
        """
        site = visit.site
        found = journal.once(site.name, lambda: self._chosen(visit, solver, integers))
        self._write(site, found)
        visit.put(self.values)
        return found

    def finish(self) -> None:
        """Let the quantized model keep what was chosen."""
        self.parameter.put(self.values, self._scale, self._zero_point)

    def _chosen(self, visit: Visit, solver: Solver, integers: tuple[int, bool] | None) -> Arrays:
        site = visit.site
        statistics = visit.statistics("hessian", *(name for name in solver.statistics if name != "hessian"))
        check_finite(statistics)
        matrices, original = site.weights(self.values), site.weights(self.original)
        whole = site.weights(self._whole)
        before = self._nearest(site, matrices)
        seen = statistics.count > 0
        problem = Problem(
            matrices,
            original,
            statistics.where_seen(seen),
            self._measure(site, matrices),
            self.parameter.group_size,
            self._sharing(site),
            integers,
        )
        solution = solver(problem)
        unseen = int((~seen).sum())
        if unseen and not solution.complete:
            solution = self._where_seen(site, before, solution, seen)
        return {
            "values": solution.values,
            "scale": shared(solution.scale),
            "zero_point": shared(solution.zero_point),
            "nearest": output_error(before - original, whole, statistics),
            "solved": output_error(solution.values - original, whole, statistics),
            "unseen": unseen,
        }

    def _measure(self, site: ContractionSite, given: jax.Array) -> Measure:
        """From the matrices of a site to the quantizer's grid for them.

        Args:
            site: the site.
            given: its matrices as they are, which are measured already.
        """
        grid = self.parameter.grid

        def measure(matrices: jax.Array) -> MatrixGrid:
            scale, zero_point = self._scale, self._zero_point
            if matrices is not given:
                scale, zero_point = self.parameter.measure(
                    site.places.put(self.values, site.as_operand(matrices))
                )
            return MatrixGrid(site.weights(scale), site.weights(zero_point), grid)

        return measure

    def _sharing(self, site: ContractionSite) -> Sharing:
        proxy = self.parameter.proxy
        return Sharing(
            lambda: np.asarray(site.weights(self.parameter.owners())),
            self.parameter.group_size,
            restricted=proxy.scale_dtype is not None,
            whole_zero_points=proxy.has_whole_zero_points,
        )

    def _where_seen(
        self, site: ContractionSite, nearest: jax.Array, solution: Solution, seen: jax.Array
    ) -> Solution:
        """A solution with the matrices that no sample reached rounded to nearest."""
        reached = seen[:, None, None]
        scale, zero_point = (site.weights(x) for x in (self._scale, self._zero_point))
        return Solution(
            jnp.where(reached, solution.values, nearest),
            jnp.where(reached, solution.scale, scale),
            jnp.where(reached, solution.zero_point, zero_point),
        )

    def _nearest(self, site: ContractionSite, matrices: jax.Array) -> jax.Array:
        scale, zero_point = (site.weights(x) for x in (self._scale, self._zero_point))
        return self.parameter.grid.nearest(matrices, scale, zero_point)

    def _write(self, site: ContractionSite, found: Arrays) -> None:
        shape = found["values"].shape

        def written(whole: jax.Array, name: str) -> jax.Array:
            operand = site.as_operand(jnp.broadcast_to(found[name], shape))
            # Placed as the parameter, whether it was computed or read: sums over it are then the same to the bit.
            return placed_as(site.places.put(whole, operand), self.original)

        self.values = written(self.values, "values")
        self._scale = written(self._scale, "scale")
        self._zero_point = written(self._zero_point, "zero_point")
        site.places.mark(self.taken)


def shared(x: jax.Array) -> jax.Array:
    """An array with one number along axes where all are equal.

    Example:
        >>> shared(jnp.array([[[1.0, 1.0], [2.0, 2.0]]])).tolist()
        [[[1.0], [2.0]]]
    """
    for axis, same in enumerate(np.asarray(_same_along(x))):
        if same:
            x = jax.lax.slice_in_dim(x, 0, 1, axis=axis)
    return x


@jax.jit
def _same_along(x: jax.Array) -> jax.Array:
    firsts = [jax.lax.slice_in_dim(x, 0, min(1, size), axis=axis) for axis, size in enumerate(x.shape)]
    return jnp.array([(x == first).all() & (x.size > 0) for first in firsts], bool)


def check_finite(statistics: Statistics) -> None:
    """Refuse calibration data that is not finite.

    Raises:
        ValueError: a sum over it is nan or infinite.
    """
    if not all(bool(jnp.isfinite(x).all()) for x in (statistics.hessian, statistics.cross) if x is not None):
        raise ValueError(
            "its inputs in the calibration data hold nan or inf, or are so large that their squares are.\n"
            "  cure: find the batch with jnp.isfinite; a nan may also come from an earlier operation of the model"
        )


def output_error(difference: jax.Array, weights: jax.Array, statistics: Statistics) -> float:
    """`tr(D H D^T) / tr(W H W^T)`: the mean squared error of a site's output, relative to the output.

    Args:
        difference: `D`, of the weights.
        weights: `W`.
        statistics: with the Hessian.
    """
    return float(_relative(difference, weights, statistics.mean("hessian")))


@jax.jit
def _relative(difference: jax.Array, weights: jax.Array, hessian: jax.Array) -> jax.Array:
    def size(w: jax.Array) -> jax.Array:
        # One product of matrices and a sum: an einsum of three operands may choose a far larger intermediate result.
        return (jnp.matmul(w, hessian, precision=jax.lax.Precision.HIGHEST) * w).sum()

    whole = size(weights)
    return size(difference) / jnp.where(whole > 0, whole, 1.0)
