"""`Solve`: puts every weight that a rule quantizes on its quantizer's grid, site by site."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.model.running.progress import with_progress
from jqinject.program import dotted
from jqinject.recipes.grid import MatrixGrid, Measure
from jqinject.recipes.quantized_parameter import QuantizedParameter
from jqinject.recipes.solvers.solver import Problem, Sharing, Solution, Solver
from jqinject.recipes.statistics import Statistics
from jqinject.recipes.stream.site import ContractionSite
from jqinject.recipes.stream.stream import Stream, Visit
from jqinject.recipes.work import Work, site_path


@dataclass(frozen=True)
class Solved:
    """What a solver did to one site.

    Attributes:
        name: the site's.
        path: the parameter's.
        nearest: mean squared error of the site's output with rounding to nearest, relative to the output.
        solved: the same with the solver's numbers.
        unseen: how many matrices of the site no sample reached: experts without tokens. They are rounded to nearest.
    """

    name: str
    path: str
    nearest: float
    solved: float
    unseen: int = 0

    def __str__(self) -> str:
        unseen = f"; {self.unseen} matrices that no sample reached: rounded to nearest" if self.unseen else ""
        return f"{self.name} ({self.path}): error {self.solved:.3g}, rounded to nearest {self.nearest:.3g}{unseen}"


@dataclass(frozen=True)
class NotSolved:
    """A quantized parameter, or a part of one, that was rounded to nearest.

    Attributes:
        path: the parameter's.
        reason: why no solver chose its numbers.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: rounded to nearest: {self.reason}"


@dataclass(frozen=True)
class Solve:
    """Chooses the low-bit numbers of every weight that a rule quantizes.

    Sites are taken in the order in which they run. The inputs of a site come from the model whose earlier sites are
    solved and whose inputs are quantized as the rules say. Numbers and scales are committed: they survive loading,
    cloning, freezing and training. A parameter that several sites contract is solved at the first. What no site
    contracts is rounded to nearest, with a warning and in the report.

    Args:
        solver: the algorithm.
        quantize_inputs: whether the inputs of sites are quantized as the rules say while weights are solved.

    Example:
        >>> from jqinject.recipes import GPTQ
        >>> Solve(GPTQ(act_order=True)).quantize_inputs
        True
    """

    solver: Solver
    quantize_inputs: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.solver, type) or not hasattr(self.solver, "statistics"):
            name = self.solver.__name__ if isinstance(self.solver, type) else "GPTQ"
            raise TypeError(f"Solve takes a solver, got {self.solver!r:.80}.\n  cure: Solve({name}())")

    def __call__(self, work: Work) -> list[Solved | NotSolved]:
        """See `Pass`.

        Raises:
            ValueError: calibration data that is not finite, or that a solver cannot use; the text names the site.

        Warns:
            UserWarning: parameters that no site solves.
        """
        parameters = work.parameters()
        stream, inputs = work.stream(self.quantize_inputs), work.input_quantizers
        found: list[Solved | NotSolved] = []
        done: dict[str, Any] = {}
        for visit in with_progress(stream, "solving", shown=work.progress):
            name = site_path(visit.site)
            if name not in parameters:
                continue
            state = done.setdefault(name, _Solving(parameters[name], visit.original))
            if state.takes(visit.site):
                try:
                    integers = inputs.integers(visit.site, visit.operand)
                    found.append(state.solve(visit, self.solver, integers))
                except ValueError as error:
                    raise ValueError(f"{visit.site.name} ({name}): {error}") from error
        for name, state in done.items():
            parameters[name].put(state.values, state.scale, state.zero_point)
        left = list(not_solved(parameters, done, stream))
        if left:
            warnings.warn("Solve:\n" + "\n".join(f"  {one}" for one in left), stacklevel=3)
        return [*found, *left]


def not_solved(
    parameters: Mapping[str, QuantizedParameter], done: Mapping[str, _Solving], stream: Stream
) -> Iterator[NotSolved]:
    """The parameters of which some numbers were not solved.

    Args:
        parameters: those that are quantized, by path.
        done: those that sites were found for.
        stream: that went through the model.
    """
    reasons = {dotted(one.path): f"{one.name}: {one.reason}" for one in stream.left_out}
    for name in parameters:
        reason = reasons.get(name, "no call of the calibration data contracts it")
        if name not in done:
            yield NotSolved(name, reason)
        elif not bool(done[name].taken.all()):
            yield NotSolved(name, f"a part of it; {reason}")


class _Solving:
    """A parameter on its way to the grid, site by site where a loop cuts it.

    Args:
        parameter: of the quantized model.
        original: of the float model.
    """

    def __init__(self, parameter: QuantizedParameter, original: jax.Array) -> None:
        self.parameter = parameter
        self.values = original.astype(jnp.float32)
        self.original = self.values
        self.scale, self.zero_point = parameter.measure(self.values)
        self.taken = jnp.zeros((original.size,), bool)

    def takes(self, site: ContractionSite) -> bool:
        """Whether numbers that a site contracts are not solved yet."""
        return not bool(self.taken[site.places.reshape(-1)].all())

    def solve(self, visit: Visit, solver: Solver, integers: tuple[int, bool] | None) -> Solved:
        """Solve the numbers that a site contracts, and let the stream go on with them.

        Args:
            visit: of the site.
            solver: the algorithm.
            integers: see `Problem.input_integers`.
        """
        site = visit.site
        statistics = visit.statistics("hessian", *(name for name in solver.statistics if name != "hessian"))
        check_finite(statistics)
        matrices, original = site.weights(self.values), site.weights(self.original)
        seen = statistics.count > 0
        solution = solver(
            Problem(
                matrices,
                original,
                statistics.where_seen(seen),
                self._measure(site),
                self.parameter.group_size,
                self._sharing(site),
                integers,
            )
        )
        solution = self._where_seen(site, matrices, solution, seen)
        before = self._nearest(site, matrices)
        self._write(site, solution)
        visit.put(self.values)
        after = site.weights(self.values)
        return Solved(
            site.name,
            site_path(site),
            output_error(before - original, original, statistics),
            output_error(after - original, original, statistics),
            int((~seen).sum()),
        )

    def _measure(self, site: ContractionSite) -> Measure:
        """From the matrices of a site to the quantizer's grid for them."""
        grid = self.parameter.grid

        def measure(matrices: jax.Array) -> MatrixGrid:
            flat = self.values.reshape(-1).at[site.places].set(site.as_operand(matrices))
            scale, zero_point = self.parameter.measure(flat.reshape(self.values.shape))
            return MatrixGrid(site.weights(scale), site.weights(zero_point), grid)

        return measure

    def _sharing(self, site: ContractionSite) -> Sharing:
        proxy = self.parameter.proxy
        return Sharing(
            np.asarray(site.weights(self.parameter.owners())),
            self.parameter.group_size,
            restricted=proxy.scale_dtype is not None,
            whole_zero_points=proxy.has_whole_zero_points,
        )

    def _where_seen(
        self, site: ContractionSite, matrices: jax.Array, solution: Solution, seen: jax.Array
    ) -> Solution:
        """A solution with the matrices that no sample reached rounded to nearest."""
        if bool(seen.all()) or solution.complete:
            return solution
        reached = seen[:, None, None]
        scale, zero_point = (site.weights(x) for x in (self.scale, self.zero_point))
        return Solution(
            jnp.where(reached, solution.values, self._nearest(site, matrices)),
            jnp.where(reached, solution.scale, scale),
            jnp.where(reached, solution.zero_point, zero_point),
        )

    def _nearest(self, site: ContractionSite, matrices: jax.Array) -> jax.Array:
        scale, zero_point = (site.weights(x) for x in (self.scale, self.zero_point))
        return self.parameter.grid.nearest(matrices, scale, zero_point)

    def _write(self, site: ContractionSite, solution: Solution) -> None:
        def written(whole: jax.Array, matrices: jax.Array) -> jax.Array:
            full = jnp.broadcast_to(matrices, solution.values.shape)
            return whole.reshape(-1).at[site.places].set(site.as_operand(full)).reshape(whole.shape)

        self.values = written(self.values, solution.values)
        self.scale = written(self.scale, solution.scale)
        self.zero_point = written(self.zero_point, solution.zero_point)
        self.taken = self.taken.at[site.places.reshape(-1)].set(True)


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
    hessian = statistics.mean("hessian")

    def size(w: jax.Array) -> jax.Array:
        return jnp.einsum("sri,sij,srj->", w, hessian, w, precision=jax.lax.Precision.HIGHEST)

    whole = size(weights)
    return float(size(difference) / jnp.where(whole > 0, whole, 1.0))
