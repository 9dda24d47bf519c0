"""`Solve`: puts every weight that a rule quantizes on its quantizer's grid, site by site."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.model.running.batches import with_progress
from jqinject.ops.processes import on_host, placed_as
from jqinject.program import dotted
from jqinject.recipes.journal import Arrays, Journal
from jqinject.recipes.online import InputQuantizers, site_path
from jqinject.recipes.quantized_parameter import QuantizedParameter, SiteMeasure
from jqinject.recipes.solvers.solver import (
    MatrixGrid,
    Measure,
    Problem,
    Sharing,
    Solution,
    Solver,
    Statistics,
)
from jqinject.recipes.stream.site import ContractionSite
from jqinject.recipes.stream.stream import Stream, Visit
from jqinject.recipes.work import Work


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
        # One number for those that share a scale, if they are a whole axis: it takes as much as the weight otherwise.
        self._scale, self._zero_point = map(shared, parameter.measure(self.values))
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
        self.parameter.put(self.values, *self._spread())

    def _chosen(self, visit: Visit, solver: Solver, integers: tuple[int, bool] | None) -> Arrays:
        site = visit.site
        statistics = visit.statistics("hessian", *(name for name in solver.statistics if name != "hessian"))
        check_finite(statistics)
        matrices = site.weights(self.values)
        original = matrices if self.original is self.values else site.weights(self.original)
        whole = original if self._whole is self.original else site.weights(self._whole)
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
        before = self._grid(site).nearest(matrices)
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
        return SiteMeasure.of(self.parameter, site, self.values, (given, self._grid(site)))

    def _sharing(self, site: ContractionSite) -> Sharing:
        proxy = self.parameter.proxy
        return Sharing(
            lambda: on_host(site.weights(self.parameter.owners())),
            self.parameter.group_size,
            restricted=proxy.scale_dtype is not None,
            whole_zero_points=proxy.has_whole_zero_points,
        )

    def _where_seen(
        self, site: ContractionSite, nearest: jax.Array, solution: Solution, seen: jax.Array
    ) -> Solution:
        """A solution with the matrices that no sample reached rounded to nearest."""
        reached = seen[:, None, None]
        grid = self._grid(site)
        return Solution(
            jnp.where(reached, solution.values, nearest),
            jnp.where(reached, solution.scale, grid.scale),
            jnp.where(reached, solution.zero_point, grid.zero_point),
        )

    def _grid(self, site: ContractionSite) -> MatrixGrid:
        """The grid of a site's matrices as it is now."""
        scale, zero_point = (shared(site.weights(x)) for x in self._spread())
        return MatrixGrid(scale, zero_point, self.parameter.grid, self.parameter.by_reciprocal)

    def _spread(self) -> tuple[jax.Array, jax.Array]:
        """Scale and zero point of each number of the parameter."""
        shape = self.values.shape
        return jnp.broadcast_to(self._scale, shape), jnp.broadcast_to(self._zero_point, shape)

    def _write(self, site: ContractionSite, found: Arrays) -> None:
        shape = found["values"].shape

        def written(whole: jax.Array, name: str) -> jax.Array:
            operand = site.as_operand(jnp.broadcast_to(found[name], shape))
            # Placed as the parameter, whether it was computed or read: sums over it are then the same to the bit.
            return placed_as(site.places.put(whole, operand), self.original)

        self.values = written(self.values, "values")
        scale, zero_point = self._spread()
        self._scale = shared(written(scale, "scale"))
        self._zero_point = shared(written(zero_point, "zero_point"))
        site.places.mark(self.taken)


def shared(x: jax.Array) -> jax.Array:
    """An array with one number along axes where all are equal.

    Example:
        >>> shared(jnp.array([[[1.0, 1.0], [2.0, 2.0]]])).tolist()
        [[[1.0], [2.0]]]
    """
    for axis, same in enumerate(on_host(_same_along(x))):
        if same:
            x = jax.lax.slice_in_dim(x, 0, 1, axis=axis)
    return x


@jax.jit
def _same_along(x: jax.Array) -> jax.Array:
    firsts = [jax.lax.slice_in_dim(x, 0, min(1, size), axis=axis) for axis, size in enumerate(x.shape)]
    return jnp.array([(x == first).all() & (x.size > 0) for first in firsts], bool)


def finite_statistics(visit: Visit, *wanted: str) -> Statistics:
    """Sums over the inputs of a site.

    Raises:
        ValueError: they are not finite; the text names the site.
    """
    found = visit.statistics(*wanted)
    try:
        check_finite(found)
    except ValueError as error:
        raise ValueError(f"{visit.site.name} ({dotted(visit.site.path)}): {error}") from error
    return found


def check_finite(statistics: Statistics) -> None:
    """Refuse calibration data that is not finite.

    Raises:
        ValueError: a sum over it is nan or infinite.
    """
    sums = [statistics.hessian, statistics.cross, statistics.magnitude]
    # Where no sample reached a matrix the largest number is -inf, and the smallest inf.
    ends = [(statistics.largest, -jnp.inf), (statistics.smallest, jnp.inf)]
    sums += [jnp.where(x == empty, 0.0, x) for x, empty in ends if x is not None]
    if not all(bool(jnp.isfinite(x).all()) for x in sums if x is not None):
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
class Solvable:
    """A site whose weights `Solve` would choose.

    Attributes:
        name: the site's.
        path: the parameter's.
        matrices: `(stack, rows, columns)` of what it contracts.
        quantizer: the class name of the weight's quantizer.
        input_bits: of its input while it is solved; None for float.
    """

    name: str
    path: str
    matrices: tuple[int, ...]
    quantizer: str
    input_bits: int | None

    def __str__(self) -> str:
        stack, rows, columns = self.matrices
        size = f"{rows} x {columns}" if stack == 1 else f"{stack} x {rows} x {columns}"
        inputs = "float inputs" if self.input_bits is None else f"inputs of {self.input_bits} bits"
        return f"{self.name} ({self.path}): {size}, {self.quantizer}, {inputs}"


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
        parameters, shared = unshared(work.parameters())
        stream, inputs = work.stream(self.quantize_inputs), work.input_quantizers
        last = {site_path(site): site.name for site in stream.sites}
        found: list[Solved | NotSolved] = []
        begun: dict[str, Solving] = {}
        whole: dict[str, bool] = {}
        for visit in with_progress(stream, "solving", shown=work.progress):
            name = site_path(visit.site)
            if name not in parameters:
                continue
            if name not in begun:
                begun[name] = Solving(parameters[name], visit.original, stream.updates.get(visit.site.path))
            if begun[name].takes(visit.site):
                found.append(self._solved(visit, name, begun[name], work, inputs))
            if last[name] == visit.site.name:
                # Nothing is held of a parameter whose last site is solved but what the model holds.
                whole[name] = bool(begun[name].taken.all())
                begun.pop(name).finish()
        left = [*shared, *not_solved(parameters, whole, stream)]
        if left:
            warnings.warn("Solve:\n" + "\n".join(f"  {one}" for one in left), stacklevel=3)
        return [*found, *left]

    def explain(self, work: Work) -> list[Solvable | NotSolved]:
        """See `Pass`."""
        parameters, shared = unshared(work.parameters())
        stream, inputs = work.stream(self.quantize_inputs), work.input_quantizers
        found: list[Solvable | NotSolved] = []
        taken: dict[str, np.ndarray] = {}
        for site in stream.sites:
            name = site_path(site)
            if name not in parameters:
                continue
            parameter = parameters[name]
            assert parameter.grid is not None, "or it has raised"
            flags = taken.setdefault(name, np.zeros(parameter.value.size, bool))
            if site.places.all_in(flags):
                found.append(NotSolved(name, f"{site.name} contracts it too, after it is solved"))
                continue
            site.places.mark(flags)
            operand = jax.ShapeDtypeStruct(site.places.shape, jnp.float32)
            shape = jax.eval_shape(site.matrices.weight.matrices, operand).shape
            bits = inputs.bits(site) if self.quantize_inputs else None
            quantizer = parameter.proxy.binding.base.__name__
            found.append(Solvable(site.name, name, shape, quantizer, bits))
        whole = {name: bool(flags.all()) for name, flags in taken.items()}
        return [*found, *shared, *not_solved(parameters, whole, stream)]

    def _solved(self, visit: Visit, name: str, state: Solving, work: Work, inputs: InputQuantizers) -> Solved:
        try:
            integers = inputs.integers(visit.site, visit.operand)
            made = state.solve(visit, self.solver, work.journal, integers)
        except ValueError as error:
            raise ValueError(f"{visit.site.name} ({name}): {error}") from error
        return Solved(
            visit.site.name, name, float(made["nearest"]), float(made["solved"]), int(made["unseen"])
        )


def unshared(
    parameters: Mapping[str, QuantizedParameter],
) -> tuple[dict[str, QuantizedParameter], list[NotSolved]]:
    """The parameters whose quantizer is their own, and the others.

    Args:
        parameters: those that are quantized, by path.
    """
    own = {name: each for name, each in parameters.items() if each.proxy.served_layers == 1}
    why = "its layer shares the quantizer with others, whose scales cannot be kept for it alone"
    return own, [NotSolved(name, why) for name in parameters if name not in own]


def not_solved(
    parameters: Mapping[str, QuantizedParameter], whole: Mapping[str, bool], stream: Stream
) -> Iterator[NotSolved]:
    """The parameters of which some numbers were not solved.

    Args:
        parameters: those that are quantized, by path.
        whole: of those that sites were found for, whether these contract all of them.
        stream: that went through the model.
    """
    reasons = {dotted(one.path): f"{one.name}: {one.reason}" for one in stream.left_out}
    for name in parameters:
        reason = reasons.get(name, "no call of the calibration data contracts it")
        if name not in whole:
            yield NotSolved(name, reason)
        elif not whole[name]:
            yield NotSolved(name, f"a part of it; {reason}")
