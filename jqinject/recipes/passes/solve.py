"""`Solve`: puts every weight that a rule quantizes on its quantizer's grid, site by site."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.ops.processes import on_host, placed_as
from jqinject.recipes.journal import Arrays, Journal
from jqinject.recipes.quantized_parameter import QuantizedParameter, SiteMeasure
from jqinject.recipes.solvers import solver
from jqinject.recipes.solvers.solver import Solver, spreads_errors
from jqinject.recipes.stream.flat_program import Note
from jqinject.recipes.stream.stream import Stream, Visit
from jqinject.recipes.work import Work

T = TypeVar("T")


class Solving:
    """A parameter on its way to the grid, site by site where a loop cuts it.

    Args:
        parameter: of the quantized model.
        original: of the float model.
        update: an array beside it, which the quantized model adds to it; None if absent.

    Attributes:
        values: the parameter as it is now, float32.
    """

    def __init__(
        self, parameter: QuantizedParameter, original: jax.Array, update: jax.Array | None = None
    ) -> None:
        self.parameter = parameter
        self._float = original.astype(jnp.float32)
        self.values = self.original = self._float if update is None else self._float - update
        # One number for those of an axis that share a scale: it takes as much as the weight otherwise.
        self._grid = shared(parameter.measure(self.values))

    def solve(
        self, visit: Visit, algorithms: Solve, journal: Journal, integers: tuple[int, bool] | None
    ) -> Solved:
        """Solve the numbers that a site contracts, and let the stream go on with them.

        Args:
            visit: of the site.
            algorithms: the pass, with its solver and its fallback.
            journal: remembers what was chosen.
            integers: see `Problem.input_integers`.
        """
        site = visit.site
        chosen = journal.once(site.name, lambda: self._chosen(visit, algorithms, integers))
        shape = chosen["values"].shape

        def written(parameter: jax.Array, name: str) -> jax.Array:
            operand = site.matrices.weight.array(jnp.broadcast_to(chosen[name], shape))
            # Placed as the parameter, whether it was computed or read: sums over it are then the same to the bit.
            return placed_as(site.places.put(parameter, operand), self.original)

        self.values = written(self.values, "values")
        grid = self._grid.spread(self.values.shape)
        scale, zero_point = written(grid.scale, "scale"), written(grid.zero_point, "zero_point")
        self._grid = shared(replace(grid, scale=scale, zero_point=zero_point))
        visit.put(self.values)
        nearest, solved = float(chosen["nearest"]), float(chosen["solved"])
        unseen, short, samples = (int(chosen[name]) for name in ("unseen", "short", "samples"))
        return Solved(site.name, site.path, nearest, solved, unseen, short, samples, shape[-1])

    def finish(self) -> None:
        """Let the quantized model keep what was chosen."""
        self.parameter.put(self.values, self._grid.spread(self.values.shape))

    def _chosen(self, visit: Visit, algorithms: Solve, integers: tuple[int, bool] | None) -> Arrays:
        site, parameter = visit.site, self.parameter
        statistics = visit.total_statistics(*algorithms.collected)
        matrices = site.weights(self.values)
        original = matrices if self.original is self.values else site.weights(self.original)
        floats = original if self._float is self.original else site.weights(self._float)
        reached = statistics.count > 0
        short = reached & (statistics.count < matrices.shape[-1]) & spreads_errors(algorithms.solver)
        grid = shared(jax.tree.map(site.weights, self._grid.spread(self.values.shape)))
        nearest = grid.nearest(matrices)
        quantizer, state = nnx.split(parameter.proxy, graph=True)
        static = quantizer, parameter.depth, parameter.grid, parameter.by_reciprocal, site.matrices.weight
        problem = solver.Problem(
            matrices,
            original,
            statistics.where_reached(reached),
            SiteMeasure(*static, site.places, state, self.values, (matrices, grid)),
            parameter.group_size,
            solver.Sharing(
                lambda: on_host(site.weights(parameter.owners())),
                parameter.group_size,
                restricted=parameter.proxy.scale_dtype is not None,
                whole_zero_points=parameter.proxy.has_whole_zero_points,
            ),
            integers,
        )
        try:
            solution = algorithms.solution(problem, short)
        except ValueError as error:
            raise ValueError(f"{site.name} ({site.path}): {error}") from error
        values, scale, zero_point = solution.values, solution.scale, solution.zero_point
        if not solution.complete and not bool(reached.all()):
            unsolved = solver.Solution(nearest, grid.scale, grid.zero_point)
            values, scale, zero_point = _where(reached, solution, unsolved)
        scale, zero_point = shared((scale, zero_point))
        error = partial(solver.output_error, weights=floats, statistics=statistics)
        if "hessian" not in statistics.sums:
            error = partial(visit.output_error, weights=floats)
        return {
            "values": values,
            "scale": scale,
            "zero_point": zero_point,
            "nearest": error(nearest - original),
            "solved": error(values - original),
            "unseen": int((~reached).sum()),
            "short": int(short.sum()),
            "samples": int(jnp.where(short, statistics.count, jnp.inf).min()) if bool(short.any()) else 0,
        }


def _where(own: jax.Array, here: solver.Solution, elsewhere: solver.Solution) -> Iterator[jax.Array]:
    """Return values, scales and zero points of one solution for some matrices, and of another for the rest."""
    pairs = (
        (here.values, elsewhere.values),
        (here.scale, elsewhere.scale),
        (here.zero_point, elsewhere.zero_point),
    )
    return (jnp.where(own[:, None, None], *pair) for pair in pairs)


def shared(x: T) -> T:
    """Arrays with one number along axes where all are equal.

    Args:
        x: a pytree of them.

    Example:
        >>> shared(jnp.array([[[1.0, 1.0], [2.0, 2.0]]])).tolist()
        [[[1.0], [2.0]]]
    """
    leaves, tree = jax.tree.flatten(x)
    cut = ([slice(0, 1) if same else slice(None) for same in on_host(along)] for along in _same_along(leaves))
    return tree.unflatten([leaf[tuple(places)] for leaf, places in zip(leaves, cut, strict=True)])


@jax.jit
def _same_along(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_same_in(x) for x in arrays]


def _same_in(x: jax.Array) -> jax.Array:
    firsts = [jax.lax.slice_in_dim(x, 0, min(1, size), axis=axis) for axis, size in enumerate(x.shape)]
    return jnp.array([(x == first).all() & (x.size > 0) for first in firsts], bool)


@dataclass(frozen=True)
class Solved:
    """What a solver did to one site.

    Attributes:
        name: the site's.
        path: the parameter's.
        nearest: mean squared error of the site's output with rounding to nearest, relative to the output.
        solved: the same with the solver's numbers.
        unseen: how many matrices of the site no sample reached: experts without tokens. They are rounded to nearest.
        short: how many have fewer samples than columns, with a solver that makes up for the error of one weight by the
            others: it fits these samples alone.
        samples: of these, the least number of a matrix; 0 if there are none.
        columns: of a matrix.
    """

    name: str
    path: str
    nearest: float
    solved: float
    unseen: int = 0
    short: int = 0
    samples: int = 0
    columns: int = 0

    def __str__(self) -> str:
        unseen = f"; {self.unseen} matrices that no sample reached: rounded to nearest" if self.unseen else ""
        short = f"; {self.samples} samples for {self.columns} columns" if self.short else ""
        errors = f"error {self.solved:.3g}, rounded to nearest {self.nearest:.3g}"
        return f"{self.name} ({self.path}): {errors}{unseen}{short}"


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
    cloning, freezing and training. A parameter that several sites contract, as in a recurrence, is solved at the first
    of them, with the inputs of all. What no site contracts is rounded to nearest, with a warning and in the report.

    GPTQ, GPFQ, Qronos and QEP make up for the error of one weight by the others. With fewer samples than columns they
    fit these samples alone, and may lose to rounding to nearest on all other data: `fallback` solves such matrices;
    without a fallback a warning names their sites. A sample is a row of a product, or a position of a convolution.

    Args:
        solver: the algorithm.
        quantize_inputs: whether the inputs of sites are quantized as the rules say while weights are solved.
        fallback: the algorithm for matrices with fewer samples than columns, such as `RTN()`; None for the same.

    Example:
        >>> from jqinject.recipes import GPTQ
        >>> Solve(GPTQ(act_order=True)).quantize_inputs
        True
    """

    solver: Solver
    quantize_inputs: bool = True
    fallback: Solver | None = None

    def __post_init__(self) -> None:
        _check_solver(self.solver, "", "GPTQ")
        if self.fallback is not None:
            _check_solver(self.fallback, "fallback=", "RTN")

    @property
    def collected(self) -> tuple[str, ...]:
        """The names of the `Statistics` that sites are solved with."""
        further = () if self.fallback is None else self.fallback.statistics
        return tuple(dict.fromkeys((*self.solver.statistics, *further)))

    def solution(self, problem: solver.Problem, short: jax.Array) -> solver.Solution:
        """Solve a problem, by the fallback where a matrix has too few samples.

        Args:
            problem: of a site.
            short: which matrices have, `(stack,)`.

        Raises:
            ValueError: see `Solver`; the solver keeps a bound that the fallback does not.
        """
        if self.fallback is None or not bool(short.any()):
            return self.solver(problem)
        # Sums of too few samples may be of no use to the solver at all.
        solution = self.solver(replace(problem, statistics=problem.statistics.where_reached(~short)))
        instead = self.fallback(problem)
        if solution.complete and not instead.complete:
            raise ValueError(
                f"{self.solver!r} bounds what an accumulator sums, and its fallback {self.fallback!r} does not.\n"
                "  cure: a fallback with the same accumulator_bits; or no fallback"
            )
        return solver.Solution(*_where(short, instead, solution), complete=solution.complete)

    def __call__(self, work: Work) -> list[Solved | NotSolved | Note]:
        """See `Pass`.

        Raises:
            ValueError: calibration data that is not finite, or that a solver cannot use; the text names the site.

        Warns:
            UserWarning: parameters that no site solves; sites with fewer samples than columns.
        """
        parameters, inputs = work.parameters(), work.input_quantizers
        stream = work.stream(inputs.quantize if self.quantize_inputs else None)
        plan, left = _planned(parameters, stream)
        if work.explaining:
            return [*self._explained(work, stream, plan), *left]
        solved: list[Solved] = []
        begun: dict[str, Solving] = {}
        for visit in work.bar(stream, "solving"):
            site, path = visit.site, visit.site.path
            if site.name not in plan.get(path, ()):
                continue
            if site.name == plan[path][0]:
                begun[path] = Solving(parameters[path], visit.original, stream.updates.get(path))
            integers = inputs.integers(site, stream.batches[0].quantized[site.activation])
            solved.append(begun[path].solve(visit, self, work.journal, integers))
            if site.name == plan[path][-1]:
                # Nothing is held of a parameter whose last site is solved but what the model holds.
                begun.pop(path).finish()
        if left:
            warnings.warn("Solve:\n" + "\n".join(f"  {reason}" for reason in left), stacklevel=3)
        if self.fallback is None and any(site.short for site in solved):
            warnings.warn(_too_few(self.solver, solved), stacklevel=3)
        return [*solved, *left]

    def _explained(
        self, work: Work, stream: Stream, plan: Mapping[str, list[str]]
    ) -> Iterator[Note | NotSolved]:
        parameters, inputs = work.parameters(), work.input_quantizers
        for site in stream.flat.sites:
            path = site.path
            if site.name in plan.get(path, ()):
                assert parameters[path].grid is not None, "or it has raised"
                stack, rows, columns = site.matrices.weight.sizes
                size = f"{rows} x {columns}" if stack == 1 else f"{stack} x {rows} x {columns}"
                bits = inputs.bits(site) if self.quantize_inputs else None
                operand = "float inputs" if bits is None else f"inputs of {bits} bits"
                quantizer = parameters[path].proxy.binding.base.__name__
                yield Note(site.name, path, f"{size}, {quantizer}, {operand}")
            elif path in plan:
                yield NotSolved(path, f"{site.name} contracts it too, after it is solved")


def _check_solver(algorithm: object, argument: str, example: str) -> None:
    if isinstance(algorithm, type) or not isinstance(algorithm, Solver):
        name = algorithm.__name__ if isinstance(algorithm, type) else example
        raise TypeError(
            f"Solve takes a solver, got {argument}{algorithm!r:.80}.\n  cure: Solve({argument}{name}())"
        )


def _too_few(algorithm: Solver, solved: Sequence[Solved]) -> str:
    """Return the warning about sites with fewer samples than columns."""
    name = type(algorithm).__name__
    sites = [f"  {x.name} ({x.path}): {x.samples} samples for {x.columns} columns" for x in solved if x.short]
    start = (
        f"Solve: {name} fits fewer samples than columns, and may lose to rounding to nearest on other data:"
    )
    cure = (
        f"  cure: more batches; a larger damping if {name} has one, such as 0.1; or Solve({name}(), fallback=RTN()), "
        "which rounds these to nearest"
    )
    return "\n".join([start, *sites, cure])


def _planned(
    parameters: Mapping[str, QuantizedParameter], stream: Stream
) -> tuple[dict[str, list[str]], list[NotSolved]]:
    """The names of the sites that solve each parameter, in order; and the parameters that none solves as a whole."""
    reasons = {site.path: f"{site.name}: {site.reason}" for site in stream.flat.left_out}
    plan: dict[str, list[str]] = {}
    left: list[NotSolved] = []
    for path, parameter in parameters.items():
        if parameter.proxy.served_layers != 1:
            why = "its layer shares the quantizer with others, whose scales cannot be kept for it alone"
            left.append(NotSolved(path, why))
            continue
        taken, plan[path] = np.zeros(parameter.value.size, bool), []
        for site in stream.flat.sites:
            if site.path == path and site.places.mark(taken):
                plan[path].append(site.name)
        if not taken.all():
            why = reasons.get(path, "no call of the calibration data contracts it")
            left.append(NotSolved(path, f"a part of it; {why}" if plan[path] else why))
    return plan, left
