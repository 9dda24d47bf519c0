"""Solvers that round column by column: GPTQ, GPFQ and Qronos; and rounding to nearest."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jqinject.recipes.solvers import accumulator, solver
from jqinject.recipes.solvers.columns import (
    HIGHEST,
    InOrder,
    ScaleRule,
    both_ordered,
    by_importance,
    diagonal_of,
    inverse,
    inverse_factor,
    on_diagonal,
    round_columns,
    without_dead_inputs,
)


@dataclass(frozen=True)
class RTN:
    """Rounds every weight to the nearest number of the grid.

    What a quantizer finds in the weights is kept: with one that searches its zero points by half-quadratic optimization
    (`jqinject.quant.ShiftedUint8WeightPerGroupFloatHQO`) this is HQQ.

    Example:
        >>> RTN()
        RTN()
    """

    statistics = ()

    def __call__(self, problem: solver.Problem) -> solver.Solution:
        """See `Solver`."""
        grid = problem.measure(problem.weights)
        return solver.Solution(grid.nearest(problem.weights), grid.scale, grid.zero_point)


@dataclass(frozen=True)
class GPTQ:
    """Rounds column by column, and spreads each error over the columns that are still to come.

    It minimizes `tr((Q - W) H (Q - W)^T)` greedily, with `H` twice the mean of `y y^T` over the inputs `y` of the
    quantized model. Columns of inputs that were always 0 become 0.

    Args:
        block_size: columns that are rounded before the others get their errors; the result does not depend on it.
        damping: this share of the mean of `H`'s diagonal is added to the diagonal.
        act_order: round columns with large inputs first; groups of scales stay those of the original order.
        scales: when scales are measured, see `ScaleRule`.
        damp_dead: whether inputs that were always 0 count, with 1, in the mean that the damping is a share of: yes as
            in Brevitas and llm-compressor, no as in Qwix.
        singular: what happens to a matrix whose damped Hessian is not positive definite: "refuse", or "nearest" to
            round it to nearest, as llm-compressor does.
        accumulator_bits: of a signed accumulator that no sum of products may overflow (AXE); the inputs must be
            quantized to integers. None for no bound.
        tile_size: columns whose products are summed in it; None for all that share a scale.

    Raises:
        ValueError: `scales="block"` with `act_order`: the columns of a group do not stand side by side then; (when
            called) a Hessian is not positive definite; no bound is possible, see `accumulator_bits`.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.

    Differs from Brevitas: scales are those of the original weights (there, by default, of the column that is being
    rounded, which is then its own maximum, so that nothing is spread).

    Example:
        >>> GPTQ(act_order=True).damping
        0.01
    """

    statistics = ("hessian",)
    block_size: int = 128
    damping: float = 0.01
    act_order: bool = False
    scales: ScaleRule = "original"
    damp_dead: bool = True
    singular: Literal["refuse", "nearest"] = "refuse"
    accumulator_bits: int | None = None
    tile_size: int | None = None

    def __post_init__(self) -> None:
        solver.check_arguments(
            self, block_size=solver.at_least(self.block_size, 1, 128), damping=damping_share(self.damping)
        )
        accumulator.check_accumulator(self, self.scales)
        if self.scales == "block" and self.act_order:
            raise ValueError(
                "GPTQ(scales='block', act_order=True): groups are spread over the blocks, so none begins in one.\n"
                "  cure: GPTQ(scales='original', act_order=True), or 'live'"
            )

    def __call__(self, problem: solver.Problem) -> solver.Solution:
        """See `Solver`."""
        raw = 2 * problem.statistics.mean("hessian")
        weights, order, factor = _prepared(raw, problem.weights, self.damping, self.act_order, self.damp_dead)
        if self.singular == "nearest":
            usable = jnp.isfinite(factor).all(axis=(1, 2), keepdims=True)
            factor = jnp.where(usable, factor, jnp.eye(factor.shape[-1], dtype=factor.dtype))
        check_factor(factor, self.damping)
        columns = InOrder(self, problem, weights, order)
        # Scales that do not change belong to the weights as they were given, dead inputs and all.
        grid = columns.grid if self.scales == "original" else columns.measure(columns.weights)
        rounded = round_columns(
            columns.weights,
            factor,
            grid,
            columns.measure,
            block_size=self.block_size,
            scales=self.scales,
            group_size=problem.group_size,
            room=columns.room,
        )
        return columns.solution(*rounded)


@partial(jax.jit, static_argnums=(3, 4))
def _prepared(
    raw: jax.Array, weights: jax.Array, damping: float, act_order: bool, damp_dead: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weights without dead inputs, the order of the columns, and the factor of the inverse in this order."""
    hessian, weights = without_dead_inputs(raw, weights)
    order = by_importance(hessian, act_order)
    damp = damping * jnp.mean(diagonal_of(hessian if damp_dead else raw), axis=1)
    damped = on_diagonal(hessian, damp)
    return weights, order, inverse_factor(both_ordered(damped, order))


def damping_share(share: float) -> solver.Expected:
    """A share of a diagonal."""
    return 0 <= share < float("inf"), "a number of at least 0", 0.01


def check_factor(factor: jax.Array, damping: float) -> None:
    """Refuse a factor of a matrix that is not positive definite.

    Raises:
        ValueError: it is nan.
    """
    if not bool(jnp.isfinite(factor).all()):
        raise ValueError(
            f"the Hessian of its inputs is not positive definite with damping={damping:g}.\n"
            "  cure: more calibration data, whose samples outnumber the inputs; or a larger damping"
        )


@dataclass(frozen=True)
class GPFQ:
    """Rounds column by column so that the sum so far stays near that of the float model.

    With `H` the mean of `y y^T` and `G` the mean of `y x^T`, over inputs `x` of the float and `y` of the quantized
    model, column `t` is `(G_tt w_t + sum_{j<t} (G_tj w0_j - H_tj q_j)) / H_tt`, rounded to nearest.

    Args:
        act_order: round columns with large inputs first.
        scales: see `ScaleRule`; "original" or "live".
        accumulator_bits, tile_size: see `GPTQ`.

    Raises:
        ValueError: `scales` is "block": there are no blocks.

    Source: Lybrand and Saab, "A Greedy Algorithm for Quantizing Neural Networks", 2021; Brevitas.

    Example:
        >>> GPFQ()
        GPFQ(act_order=False, scales='original', accumulator_bits=None, tile_size=None)
    """

    statistics = ("hessian", "cross")
    act_order: bool = False
    scales: ScaleRule = "original"
    accumulator_bits: int | None = None
    tile_size: int | None = None

    def __post_init__(self) -> None:
        if self.scales not in ("original", "live"):
            raise ValueError(
                f"GPFQ has no blocks: scales={self.scales!r} is neither 'original' nor 'live'.\n"
                "  cure: GPFQ(scales='original')"
            )
        accumulator.check_accumulator(self, self.scales)

    def __call__(self, problem: solver.Problem) -> solver.Solution:
        """See `Solver`."""
        hessian, cross = problem.statistics.mean("hessian"), problem.statistics.mean("cross").mT
        order = by_importance(hessian, self.act_order)
        live, weights = self.scales == "live", problem.weights
        if live:
            _, weights = without_dead_inputs(hessian, weights)
        columns = InOrder(self, problem, weights, order)
        matrices = columns.weights, columns.original, both_ordered(hessian, order), both_ordered(cross, order)
        grid, measure = columns.grid, solver.as_argument(columns.measure) if live else None
        working, values = _in_order(*matrices, grid, columns.room, measure)
        if live:
            grid = columns.measure(working)
            values = grid.nearest(working)
        return columns.solution(values, grid, working)


_State = tuple[jax.Array, jax.Array, accumulator.Room | None]


@jax.jit
def _in_order(
    weights: jax.Array,
    original: jax.Array,
    hessian: jax.Array,
    cross: jax.Array,
    grid: solver.MatrixGrid,
    room: accumulator.Room | None,
    measure: solver.Measure | None,
) -> tuple[jax.Array, jax.Array]:
    """The matrices that are rounded, and what they were rounded to on the way.

    `measure` measures the grid at every column, and is None for the grid that there is.
    """
    columns = weights.shape[-1]

    def column(place: jax.Array, state: _State) -> _State:
        working, done, room = state
        if measure is not None:
            done = measure(working).nearest(working)
        before = jnp.arange(columns) < place
        of_hessian, of_cross = (jax.lax.dynamic_slice_in_dim(x, place, 1, -2) for x in (hessian, cross))
        target = jnp.matmul(original, jnp.where(before, of_cross, 0.0).mT, precision=HIGHEST)
        target = target - jnp.matmul(done, jnp.where(before, of_hessian, 0.0).mT, precision=HIGHEST)
        own, shared = (jax.lax.dynamic_slice_in_dim(x, place, 1, -1) for x in (of_hessian, of_cross))
        now = jax.lax.dynamic_slice_in_dim(working, place, 1, -1)
        target = jnp.where(own > 0, (shared * now + target) / jnp.where(own > 0, own, 1.0), 0.0)
        working = jax.lax.dynamic_update_slice_in_dim(working, target, place, -1)
        if measure is None:
            near, room = accumulator.rounded(target, grid.from_column(place, 1), place, room)
            done = jax.lax.dynamic_update_slice_in_dim(done, near, place, -1)
        return working, done, room

    return jax.lax.fori_loop(0, columns, column, (weights, jnp.zeros_like(weights), room))[:2]


@dataclass(frozen=True)
class Qronos:
    """Corrects the first column for everything before it, then the others for that, then rounds as GPTQ.

    With `H` the mean of `y y^T` and `G` the mean of `x y^T`: `w_0 <- (w0 G_:0 - sum_{j>0} H_0j w_j) / H_00`, rounded to
    `q_0`; then `w_1: <- (w0 (G + d I)_:1: - q_0 H_0,1:) A` with `A` the inverse of the damped `H` without its first row
    and column; then GPTQ from the second column on. Where both models have the same inputs this is GPTQ.

    Args:
        block_size: see `GPTQ`.
        act_order: round columns with large inputs first.
        damping: `d`, as a share of the largest eigenvalue of `H`.
        accumulator_bits, tile_size: see `GPTQ`.

    Source: Zhang et al., "Qronos: Correcting the Past by Shaping the Future in Post-Training Quantization", 2025.

    Example:
        >>> Qronos()
        Qronos(block_size=128, act_order=False, damping=1e-06, accumulator_bits=None, tile_size=None)
    """

    statistics = ("hessian", "cross")
    block_size: int = 128
    act_order: bool = False
    damping: float = 1e-6
    accumulator_bits: int | None = None
    tile_size: int | None = None

    def __post_init__(self) -> None:
        solver.check_arguments(
            self, block_size=solver.at_least(self.block_size, 1, 128), damping=damping_share(self.damping)
        )
        accumulator.check_accumulator(self)

    def __call__(self, problem: solver.Problem) -> solver.Solution:
        """See `Solver`."""
        hessian, cross = problem.statistics.mean("hessian"), problem.statistics.mean("cross")
        hessian, weights = without_dead_inputs(hessian, problem.weights)
        order = by_importance(hessian, self.act_order)
        columns = InOrder(self, problem, weights, order)
        hessian, cross = both_ordered(hessian, order), both_ordered(cross, order)
        weights, original, grid = columns.weights, columns.original, columns.grid
        first = (
            jnp.matmul(original, cross[..., :1], precision=HIGHEST)
            - jnp.matmul(weights[..., 1:], hessian[:, 1:, :1], precision=HIGHEST)
        ) / hessian[:, :1, :1]
        head, room = accumulator.rounded(first, grid.columns(slice(0, 1)), 0, columns.room)
        damp = self.damping * jnp.linalg.eigvalsh(hessian)[:, -1]
        inverted = inverse(on_diagonal(hessian, damp))
        rest = inverted[:, 1:, 1:] - inverted[:, 1:, :1] * inverted[:, :1, 1:] / inverted[:, :1, :1]
        target = jnp.matmul(original, on_diagonal(cross, damp)[..., 1:], precision=HIGHEST)
        corrected = jnp.matmul(target - head * hessian[:, :1, 1:], rest, precision=HIGHEST)
        factor = jnp.linalg.cholesky(rest, upper=True)
        check_factor(factor, self.damping)
        after, left = grid.columns(slice(1, None)), None if room is None else room.after(1)
        values, _, _ = round_columns(
            corrected, factor, after, columns.measure, block_size=self.block_size, room=left
        )
        values, working = (jnp.concatenate([x, values], axis=-1) for x in (head, first))
        return columns.solution(values, grid, working)
