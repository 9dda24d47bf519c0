"""What a solver is: a pure function from weights, statistics and a grid to numbers of that grid."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jqinject.inject.errors import did_you_mean
from jqinject.ops import Grid, quantize_on_grid

HIGHEST = jax.lax.Precision.HIGHEST
matmul = partial(jnp.matmul, precision=HIGHEST)


@dataclass(frozen=True)
class Expected:
    """What fits an argument of a pass or a solver: a mark of its annotation.

    Attributes:
        text: as text.
        fits: whether a value does; None fits where it is the default.
        example: of what fits; None for the default.
        names: that fit.
    """

    text: str
    fits: Callable[..., bool] = field(repr=False)
    example: object = field(default=None, repr=False)
    names: Sequence[str] = field(default=(), repr=False)

    @classmethod
    def of(cls, hint: object) -> Expected | None:
        """What an annotation says by a mark, or by literals; None if it says nothing."""
        kinds = (hint,) if get_origin(hint) is Literal else get_args(hint)
        marks = [kind for kind in kinds if isinstance(kind, Expected)]
        if marks or Literal not in map(get_origin, kinds):
            return next(iter(marks), None)
        choices = [x for kind in kinds for x in ((True, False) if kind is bool else get_args(kind))]
        *most, last = map(repr, choices)
        names = [choice for choice in choices if isinstance(choice, str)]
        return cls(f"{', '.join(most)} or {last}", choices.__contains__, names=names)


def at_least(least: int, example: int | None = None) -> Expected:
    """A number of at least some integer."""
    return Expected(f"at least {least}", lambda x: least <= x < math.inf, example)


ABOVE_ZERO = Expected("a number above 0", lambda x: 0 < x < math.inf)
#: A share of a diagonal.
Share = Annotated[float, Expected("a number of at least 0", lambda x: 0 <= x < math.inf, 0.01)]


class Checked:
    """Base of passes and solvers that refuse arguments which their annotations do not allow.

    A subclass with postponed annotations that cannot be read, of types within a function, is not checked.

    Raises:
        ValueError: one does not fit.

    Example:
        >>> @dataclass(frozen=True)
        ... class Turns(Checked):
        ...     steps: Annotated[int, at_least(1)] = 10
        >>> Turns(steps=0)
        Traceback (most recent call last):
        ...
        ValueError: Turns: steps must be at least 1, got 0.
          cure: steps=10
    """

    def __post_init__(self) -> None:
        hints: dict[str, object] = {}
        with contextlib.suppress(NameError):
            hints = get_type_hints(type(self), include_extras=True)
        for name, hint in hints.items():
            expected, value = Expected.of(hint), vars(self).get(name)
            default = inspect.getattr_static(type(self), name, None)
            if expected and not (default is None if value is None else expected.fits(value)):
                example = default if expected.example is None else expected.example
                near = did_you_mean(value, expected.names) if isinstance(value, str) else ""
                raise ValueError(
                    f"{type(self).__name__}: {name} must be {expected.text}, got {value!r}"
                    f"{'; ' + near if near else '.'}\n  cure: {name}={example!r}"
                )


SUM = (jnp.add, 0.0)
#: Statistics that are no sums: how two are merged, and their values without samples.
EXTREMES = {"largest": (jnp.maximum, -jnp.inf), "smallest": (jnp.minimum, jnp.inf)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Statistics:
    """Sums over the inputs of a site; `X` are samples of the float model, `Y` of the quantized one.

    All are float32, one matrix or vector for each matrix of the site.

    | name | sum |
    |---|---|
    | "hessian" | of `y y^T`, `(stack, columns, columns)` |
    | "cross" | of `x y^T`, `(stack, columns, columns)` |
    | "magnitude" | of `abs(x)`, `(stack, columns)` |
    | "largest", "smallest" | the largest and the smallest number of `x` in each column, `(stack, columns)` |

    Attributes:
        count: the number of samples, `(stack,)`.
        sums: by name, those that a pass asked for.

    Example:
        >>> x = jnp.array([[[1.0, -2.0], [3.0, 0.0]]])
        >>> once = Statistics.of(x, x, ("hessian", "largest"))
        >>> twice = once.merged(once)
        >>> twice.sums["hessian"].tolist(), twice.sums["largest"].tolist()
        ([[[20.0, -4.0], [-4.0, 8.0]]], [[3.0, 0.0]])
    """

    count: jax.Array
    sums: dict[str, jax.Array]

    @classmethod
    @partial(jax.jit, static_argnums=(0, 3))
    def of(
        cls, x: jax.Array, y: jax.Array, names: tuple[str, ...], own: jax.Array | None = None
    ) -> Statistics:
        """The sums over one batch.

        Args:
            x: samples of the float model, `(stack, samples, columns)`.
            y: the same samples in the quantized model.
            names: of the sums.
            own: 1 for samples that belong to a matrix of the stack, `(stack, samples)`; None if all do.
        """
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        stack, samples = x.shape[:2]
        count = jnp.full((stack,), samples, jnp.float32) if own is None else own.sum(axis=1)
        inside = None if own is None else own[:, :, None] > 0
        compute = {
            "hessian": lambda: jnp.einsum("sni,snj->sij", y, y, precision=HIGHEST),
            "cross": lambda: jnp.einsum("sni,snj->sij", x, y, precision=HIGHEST),
            "magnitude": lambda: jnp.abs(x).sum(axis=1),
            "largest": lambda: jnp.max(x, axis=1, initial=-jnp.inf, where=inside),
            "smallest": lambda: jnp.min(x, axis=1, initial=jnp.inf, where=inside),
        }
        return cls(count, {name: compute[name]() for name in names})

    def merged(self, more: Statistics) -> Statistics:
        """The sums over both."""
        sums = {name: EXTREMES.get(name, SUM)[0](x, more.sums[name]) for name, x in self.sums.items()}
        return Statistics(self.count + more.count, sums)

    def where_reached(self, reached: jax.Array) -> Statistics:
        """The sums with those of one sample for each column, all alike, where no sample reached a matrix.

        Args:
            reached: which matrices were, `(stack,)`.
        """
        if bool(reached.all()):
            return self
        sums = {
            name: jnp.where(reached[:, None, None], x, jnp.eye(x.shape[-1])) if x.ndim == 3 else x
            for name, x in self.sums.items()
        }
        return Statistics(jnp.where(reached, self.count, 1.0), sums)

    def mean(self, name: str) -> jax.Array:
        """A sum divided by the number of samples (at least 1); "largest" and "smallest" as they are."""
        if name in EXTREMES:
            return self.sums[name]
        total, count = self.sums[name], jnp.maximum(self.count, 1.0)
        return total / count.reshape(count.shape + (1,) * (total.ndim - 1))

    def is_finite(self) -> bool:
        """Whether all sums are; where no sample reached a matrix the largest number is -inf, and the smallest inf."""
        return all(
            bool((jnp.isfinite(x) | (x == EXTREMES.get(name, SUM)[1])).all()) for name, x in self.sums.items()
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MatrixGrid:
    """A quantizer's own grid, at given scales.

    Attributes:
        scale: of each number, or broadcasting with the matrices `(stack, rows, columns)`; float32.
        zero_point: likewise.
        grid: the numbers at scale 1: static.
        by_reciprocal: whether the quantizer multiplies by the reciprocal of a scale that numbers share: static.

    Example:
        >>> from jqinject.ops import IntGrid
        >>> grid = MatrixGrid(jnp.float32([[0.5], [1.0]]), jnp.float32(0), IntGrid(4))
        >>> grid.nearest(jnp.array([[0.6, -9.0], [0.6, -9.0]])).tolist()
        [[0.5, -4.0], [1.0, -8.0]]
    """

    scale: jax.Array
    zero_point: jax.Array
    grid: Grid = field(metadata={"static": True})
    by_reciprocal: bool = field(default=False, metadata={"static": True})

    @jax.jit
    def nearest(self, x: jax.Array) -> jax.Array:
        """The nearest numbers of the grid."""
        return quantize_on_grid(x, self.grid, self.scale, self.zero_point, by_reciprocal=self.by_reciprocal)

    def spread(self, shape: tuple[int, ...]) -> MatrixGrid:
        """The grid with a scale and a zero point for each number."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, shape), self)

    def ordered(self, order: jax.Array) -> MatrixGrid:
        """The grid with its columns in another order; scales are for each number.

        Args:
            order: places of columns, `(stack, columns)`.
        """
        return jax.tree.map(lambda x: ordered(x, order), self)

    def from_column(self, start: ArrayLike, size: int) -> MatrixGrid:
        """The grid of `size` columns from a place that may be traced."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, -1), self)


def ordered(x: jax.Array, order: jax.Array) -> jax.Array:
    """Matrices with their columns in another order.

    Args:
        x: `(stack, rows, columns)`.
        order: places of columns, `(stack, columns)`.
    """
    return jnp.take_along_axis(x, order[:, None], axis=-1)


def by_importance(hessian: jax.Array, act_order: bool) -> jax.Array:
    """Places of the columns in the order in which they are rounded, `(stack, columns)`.

    Args:
        hessian: `(stack, columns, columns)`.
        act_order: whether the columns with the largest `hessian[j, j]` come first; as they are otherwise.
    """
    diagonal = diagonal_of(hessian)
    if act_order:
        return jnp.argsort(-diagonal, axis=1, stable=True)
    return jnp.broadcast_to(jnp.arange(diagonal.shape[1]), diagonal.shape)


def diagonal_of(matrices: jax.Array) -> jax.Array:
    """The diagonals of a stack of matrices, `(stack, columns)`."""
    return jnp.diagonal(matrices, axis1=-2, axis2=-1)


def on_diagonal(matrices: jax.Array, more: jax.Array) -> jax.Array:
    """Matrices with something added to each diagonal: a number for each matrix, or one for each place."""
    eye = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    return matrices + eye * (more[:, None, None] if more.ndim == 1 else more[:, None])


def both_ordered(matrices: jax.Array, order: jax.Array) -> jax.Array:
    """Matrices with their rows and their columns in another order, `(stack, columns)`."""
    return ordered(jnp.take_along_axis(matrices, order[:, :, None], axis=1), order)


#: What becomes of the weights of inputs that were always 0 in the calibration data.
DeadInputs = Literal["nearest", "zero"]


def with_dead_inputs(
    hessian: jax.Array, weights: jax.Array, dead_inputs: DeadInputs
) -> tuple[jax.Array, jax.Array]:
    """A Hessian with 1 on its diagonal for inputs that were always 0, and weights as they are, or 0, for these."""
    dead = diagonal_of(hessian) == 0
    full = on_diagonal(hessian, dead.astype(hessian.dtype))
    return full, weights if dead_inputs == "nearest" else jnp.where(dead[:, None], 0.0, weights)


def inverse_factor(hessian: jax.Array) -> jax.Array:
    """The upper triangular `U` with `U^T U = hessian^-1`; nan if a Hessian is not positive definite."""
    # H = R R^T with R upper triangular is the Cholesky factorization of H with its rows and columns reversed; then
    # H^-1 = (R^-1)^T R^-1. H itself is not inverted.
    reversed_factor = jnp.linalg.cholesky(hessian[..., ::-1, ::-1])
    eye = jnp.broadcast_to(jnp.eye(hessian.shape[-1], dtype=hessian.dtype), hessian.shape)
    return jax.lax.linalg.triangular_solve(reversed_factor[..., ::-1, ::-1], eye, left_side=True, lower=False)


#: From matrices to the grid that their quantizer would choose for them.
Measure = Callable[[jax.Array], MatrixGrid]


def as_argument(measure: Measure) -> Measure:
    """The same as an argument of a compiled function, which is compiled once for those that differ in arrays alone.

    Args:
        measure: a pytree; or any function, for which there is a program of its own.
    """
    opaque = jax.tree_util.all_leaves([measure])
    return jax.tree_util.Partial(measure) if opaque else measure


@dataclass(frozen=True, eq=False)
class Sharing:
    """Which numbers of a stack of matrices have the same scale, and what scales may be.

    Attributes:
        owners: makes, for each number, `(stack, rows, columns)`, which scale it has; None: each row has its own, cut
            into groups of columns.
        group_size: of these groups; None for no groups.
        restricted: whether scales are numbers of a format themselves, such as powers of two.
        whole_zero_points: whether zero points are integers.
    """

    owners: Callable[[], np.ndarray] | None = None
    group_size: int | None = None
    restricted: bool = False
    whole_zero_points: bool = True

    def places(self, shape: tuple[int, ...]) -> np.ndarray:
        """For each number of matrices of a shape, which scale it has."""
        if self.owners is not None:
            return self.owners()
        columns = np.arange(shape[2]) // (self.group_size or shape[2])
        rows = np.arange(shape[0] * shape[1])[:, None] * (columns[-1] + 1)
        return (rows + columns).reshape(shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """A stack of matrices to put on a grid: those that one contraction contracts side by side, often a single one.

    Attributes:
        weights: of the quantized model so far, float32 `(stack, rows, columns)`: rows are outputs, columns inputs.
        original: of the float model, likewise.
        statistics: of the inputs of each matrix.
        measure: from matrices to the grid that the quantizer chooses for them, some of whose scales the matrices may
            share; for learned or stored scales always the same grid.
        group_size: consecutive columns that share a scale; None for no groups.
        known_sharing: which numbers share a scale; None: as `measure` and `group_size` say of one row.
        input_integers: bits and sign of the integers that the quantized model contracts the matrices with; None if its
            inputs are no integers.
    """

    weights: jax.Array
    original: jax.Array
    statistics: Statistics
    measure: Measure
    group_size: int | None = field(default=None, metadata={"static": True})
    known_sharing: Sharing | None = field(default=None, repr=False, metadata={"static": True})
    input_integers: tuple[int, bool] | None = field(default=None, metadata={"static": True})

    @property
    def sharing(self) -> Sharing:
        """Which numbers share a scale."""
        return Sharing(group_size=self.group_size) if self.known_sharing is None else self.known_sharing


@runtime_checkable
class Solver(Protocol):
    """An algorithm that chooses the numbers of a stack of matrices.

    Attributes:
        statistics: which sums over the inputs it reads, names of `Statistics`.
    """

    @property
    def statistics(self) -> tuple[str, ...]: ...

    def __call__(self, problem: Problem) -> Solution:
        """Numbers on a grid, and the grid.

        Raises:
            ValueError: the statistics are not usable; the text names no path, which the pass adds.
        """
        ...


@runtime_checkable
class SpreadingSolver(Protocol):
    """A solver that says whether it makes up for the error of one weight by the others of its row.

    It fits the inputs of the calibration data; with fewer of these than columns, it fits them alone.
    """

    @property
    def spreads_errors(self) -> bool: ...


def spreads_errors(algorithm: Solver) -> bool:
    """Whether a solver makes up for the error of one weight by others; False if unstated."""
    return isinstance(algorithm, SpreadingSolver) and algorithm.spreads_errors


@dataclass(frozen=True)
class Solution:
    """What a solver chose.

    Attributes:
        values: numbers on the grid, float32 `(stack, rows, columns)`.
        scale, zero_point: of the grid, broadcasting with the values.
        working: the matrices that were rounded, with what the solver did to them; None if unknown.
        complete: whether matrices that no sample reached are solved too, because the solver keeps a bound for all.
    """

    values: jax.Array
    scale: jax.Array
    zero_point: jax.Array
    working: jax.Array | None = None
    complete: bool = False


def squared_errors(wrong: jax.Array, hessian: jax.Array) -> jax.Array:
    """`tr(D H D^T)` of each matrix, `(stack,)`."""
    # One product of matrices and a sum: an einsum of three operands may choose a far larger intermediate result.
    return jnp.sum(wrong * matmul(wrong, hessian), axis=(1, 2))


@jax.jit
def output_error(difference: jax.Array, weights: jax.Array, statistics: Statistics) -> jax.Array:
    """`tr(D H D^T) / tr(W H W^T)`: the mean squared error of a site's output, relative to the output.

    Args:
        difference: `D`, of the weights.
        weights: `W`.
        statistics: with the Hessian.
    """
    hessian = statistics.mean("hessian")
    total = squared_errors(weights, hessian).sum()
    return squared_errors(difference, hessian).sum() / jnp.where(total > 0, total, 1.0)
