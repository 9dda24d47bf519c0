"""`Solve`: puts every weight that a rule quantizes on its quantizer's grid, site by site."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.ops.processes import on_host, placed_as
from jqinject.recipes.journal import Arrays, Journal
from jqinject.recipes.quantized_parameter import QuantizedParameter, SiteMeasure
from jqinject.recipes.solvers import solver
from jqinject.recipes.solvers.solver import Solver
from jqinject.recipes.stream.flat_program import Note
from jqinject.recipes.stream.stream import Stream, Visit
from jqinject.recipes.work import Work


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
        self._grid = jax.tree.map(shared, parameter.measure(self.values))

    def solve(
        self, visit: Visit, algorithm: Solver, journal: Journal, integers: tuple[int, bool] | None
    ) -> Solved:
        """Solve the numbers that a site contracts, and let the stream go on with them.

        Args:
            visit: of the site.
            algorithm: the solver.
            journal: remembers what it chose.
            integers: see `Problem.input_integers`.
        """
        site = visit.site
        chosen = journal.once(site.name, lambda: self._chosen(visit, algorithm, integers))
        shape = chosen["values"].shape

        def written(parameter: jax.Array, name: str) -> jax.Array:
            operand = site.matrices.weight.array(jnp.broadcast_to(chosen[name], shape))
            # Placed as the parameter, whether it was computed or read: sums over it are then the same to the bit.
            return placed_as(site.places.put(parameter, operand), self.original)

        self.values = written(self.values, "values")
        grid = self._grid.spread(self.values.shape)
        scale, zero_point = written(grid.scale, "scale"), written(grid.zero_point, "zero_point")
        self._grid = replace(grid, scale=shared(scale), zero_point=shared(zero_point))
        visit.put(self.values)
        nearest, solved = float(chosen["nearest"]), float(chosen["solved"])
        return Solved(site.name, site.path, nearest, solved, int(chosen["unseen"]))

    def finish(self) -> None:
        """Let the quantized model keep what was chosen."""
        self.parameter.put(self.values, self._grid.spread(self.values.shape))

    def _chosen(self, visit: Visit, algorithm: Solver, integers: tuple[int, bool] | None) -> Arrays:
        site, parameter = visit.site, self.parameter
        statistics = visit.statistics(*dict.fromkeys(("hessian", *algorithm.statistics)))
        matrices = site.weights(self.values)
        original = matrices if self.original is self.values else site.weights(self.original)
        floats = original if self._float is self.original else site.weights(self._float)
        reached = statistics.count > 0
        grid = jax.tree.map(lambda x: shared(site.weights(x)), self._grid.spread(self.values.shape))
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
            solution = algorithm(problem)
        except ValueError as error:
            raise ValueError(f"{site.name} ({site.path}): {error}") from error
        values, scale, zero_point = solution.values, solution.scale, solution.zero_point
        if not solution.complete and not bool(reached.all()):
            own = reached[:, None, None]
            values, scale = jnp.where(own, values, nearest), jnp.where(own, scale, grid.scale)
            zero_point = jnp.where(own, zero_point, grid.zero_point)
        return {
            "values": values,
            "scale": shared(scale),
            "zero_point": shared(zero_point),
            "nearest": solver.output_error(nearest - original, floats, statistics),
            "solved": solver.output_error(values - original, floats, statistics),
            "unseen": int((~reached).sum()),
        }


def shared(x: jax.Array) -> jax.Array:
    """An array with one number along axes where all are equal.

    Example:
        >>> shared(jnp.array([[[1.0, 1.0], [2.0, 2.0]]])).tolist()
        [[[1.0], [2.0]]]
    """
    return x[tuple(slice(0, 1) if same else slice(None) for same in on_host(_same_along(x)))]


@jax.jit
def _same_along(x: jax.Array) -> jax.Array:
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
        if isinstance(self.solver, type) or not isinstance(self.solver, Solver):
            name = self.solver.__name__ if isinstance(self.solver, type) else "GPTQ"
            raise TypeError(f"Solve takes a solver, got {self.solver!r:.80}.\n  cure: Solve({name}())")

    def __call__(self, work: Work) -> list[Solved | NotSolved | Note]:
        """See `Pass`.

        Raises:
            ValueError: calibration data that is not finite, or that a solver cannot use; the text names the site.

        Warns:
            UserWarning: parameters that no site solves.
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
            solved.append(begun[path].solve(visit, self.solver, work.journal, integers))
            if site.name == plan[path][-1]:
                # Nothing is held of a parameter whose last site is solved but what the model holds.
                begun.pop(path).finish()
        if left:
            warnings.warn("Solve:\n" + "\n".join(f"  {reason}" for reason in left), stacklevel=3)
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
