"""Solvers that round column by column: GPTQ, GPFQ and Qronos; and rounding to nearest.

`InOrder` is a problem whose columns are rounded in another order; a column's error is spread over the columns that are
still to come (`InOrder.rounded`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jqinject.recipes.solvers import accumulator, solver

#: When a solver asks for scales: once, of the weights that it is given ("original"); of the matrix as it stands, at
#: every column ("live"); or for the groups that begin in a block, of the matrix as it stands when the block begins
#: ("block", as in Qwix).
ScaleRule = Literal["original", "live", "block"]


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
class GPTQ(accumulator.Bounded):
    """Rounds column by column, and spreads each error over the columns that are still to come.

    It minimizes `tr((Q - W) H (Q - W)^T)` greedily, with `H` twice the mean of `y y^T` over the inputs `y` of the
    quantized model.

    Args:
        block_size: columns that are rounded before the others get their errors; the result does not depend on it.
        damping: this share of the mean of `H`'s diagonal is added to the diagonal.
        act_order: round columns with large inputs first; groups of scales stay those of the original order.
        scales: when scales are measured, see `ScaleRule`.
        damp_dead: whether inputs that were always 0 count, with 1, in the mean that the damping is a share of: yes as
            in Brevitas and llm-compressor, no as in Qwix.
        dead_inputs: what becomes of the weights of inputs that were always 0: they are rounded to nearest, as other
            data may reach them; or they become 0 ("zero"), as in the paper's code, Brevitas, llm-compressor and Qwix.
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
    rounded, which is then its own maximum, so that nothing is spread); and see `dead_inputs`.

    Example:
        >>> GPTQ(act_order=True).damping
        0.01
    """

    statistics = ("hessian",)
    block_size: Annotated[int, solver.at_least(1)] = 128
    damping: solver.Share = 0.01
    act_order: bool = False
    scales: ScaleRule = "original"
    damp_dead: bool = True
    dead_inputs: solver.DeadInputs = "nearest"
    singular: Literal["refuse", "nearest"] = "refuse"
    accumulator_bits: accumulator.Bits = None
    tile_size: accumulator.TileSize = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scales == "block" and self.act_order:
            raise ValueError(
                "GPTQ(scales='block', act_order=True): groups are spread over the blocks, so none begins in one.\n"
                "  cure: GPTQ(scales='original', act_order=True), or 'live'"
            )

    def __call__(self, problem: solver.Problem) -> solver.Solution:
        """See `Solver`."""
        raw = 2 * problem.statistics.mean("hessian")
        weights, order, factor = _prepared(self, raw, problem.weights)
        if self.singular == "nearest":
            usable = jnp.isfinite(factor).all(axis=(1, 2), keepdims=True)
            factor = jnp.where(usable, factor, jnp.eye(factor.shape[-1], dtype=factor.dtype))
        check_factor(factor, self.damping)
        columns = InOrder.of(self, problem, weights, order, self.scales != "original")
        return columns.solution(*columns.rounded(factor, self.block_size, self.scales, problem.group_size))


@partial(jax.jit, static_argnums=0)
def _prepared(gptq: GPTQ, raw: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weights that are rounded, the order of the columns, and the factor of the inverse in this order."""
    hessian, weights = solver.with_dead_inputs(raw, weights, gptq.dead_inputs)
    order = solver.by_importance(hessian, gptq.act_order)
    damp = gptq.damping * jnp.mean(solver.diagonal_of(hessian if gptq.damp_dead else raw), axis=1)
    damped = solver.on_diagonal(hessian, damp)
    return weights, order, solver.inverse_factor(solver.both_ordered(damped, order))


def check_factor(factor: jax.Array, damping: float) -> None:
    """Refuse a factor of a matrix that is not positive definite, or what was computed by one.

    Raises:
        ValueError: it is nan.
    """
    if not bool(jnp.isfinite(factor).all()):
        raise ValueError(
            f"the Hessian of its inputs is not positive definite with damping={damping:g}.\n"
            "  cure: more calibration data, whose samples outnumber the inputs; or a larger damping"
        )


@dataclass(frozen=True)
class GPFQ(accumulator.Bounded):
    """Rounds column by column so that the sum so far stays near that of the float model.

    With `H` the mean of `y y^T` and `G` the mean of `y x^T`, over inputs `x` of the float and `y` of the quantized
    model, column `t` is `(G_tt w_t + sum_{j<t} (G_tj w0_j - H_tj q_j)) / H_tt`, rounded to nearest.

    Args:
        act_order: round columns with large inputs first.
        scales: see `ScaleRule`; "original" or "live".
        dead_inputs: see `GPTQ`.
        accumulator_bits, tile_size: see `GPTQ`.

    Raises:
        ValueError: `scales` is "block": there are no blocks.

    Source: Lybrand and Saab, "A Greedy Algorithm for Quantizing Neural Networks", 2021; Brevitas.

    Example:
        >>> GPFQ()
        GPFQ(act_order=False, scales='original', dead_inputs='nearest', accumulator_bits=None, tile_size=None)
    """

    statistics = ("hessian", "cross")
    act_order: bool = False
    scales: ScaleRule = "original"
    dead_inputs: solver.DeadInputs = "nearest"
    accumulator_bits: accumulator.Bits = None
    tile_size: accumulator.TileSize = None

    def __post_init__(self) -> None:
        if self.scales not in ("original", "live"):
            raise ValueError(
                f"GPFQ has no blocks: scales={self.scales!r} is neither 'original' nor 'live'.\n"
                "  cure: GPFQ(scales='original')"
            )
        super().__post_init__()

    def __call__(self, problem: solver.Problem) -> solver.Solution:
        """See `Solver`."""
        hessian, cross = problem.statistics.mean("hessian"), problem.statistics.mean("cross").mT
        order = solver.by_importance(hessian, self.act_order)
        _, weights = solver.with_dead_inputs(hessian, problem.weights, self.dead_inputs)
        columns = InOrder.of(self, problem, weights, order, self.scales == "live")
        hessian, cross = (solver.both_ordered(x, order) for x in (hessian, cross))
        return columns.solution(*_in_order(columns, hessian, cross))


_State = tuple[jax.Array, jax.Array, accumulator.Room | None]


#: Values, the grid that they are on, and the matrices that were rounded; None for the values.
_Rounded = tuple[jax.Array, solver.MatrixGrid, jax.Array | None]


@jax.jit
def _in_order(columns: InOrder, hessian: jax.Array, cross: jax.Array) -> _Rounded:
    """Round all columns, with scales that stay or are measured at every column."""
    is_live, size = columns.remeasure is not None, columns.weights.shape[-1]

    def column(place: jax.Array, state: _State) -> _State:
        working, done, room = state
        if is_live:
            done = columns.measure(working).nearest(working)
        before = jnp.arange(size) < place
        of_hessian, of_cross = (jax.lax.dynamic_slice_in_dim(x, place, 1, -2) for x in (hessian, cross))
        target = solver.matmul(columns.original, jnp.where(before, of_cross, 0.0).mT)
        target = target - solver.matmul(done, jnp.where(before, of_hessian, 0.0).mT)
        own, shared = (jax.lax.dynamic_slice_in_dim(x, place, 1, -1) for x in (of_hessian, of_cross))
        now = jax.lax.dynamic_slice_in_dim(working, place, 1, -1)
        target = jnp.where(own > 0, (shared * now + target) / jnp.where(own > 0, own, 1.0), now)
        working = jax.lax.dynamic_update_slice_in_dim(working, target, place, -1)
        if not is_live:
            near, room = accumulator.rounded(target, columns.grid.from_column(place, 1), place, room)
            done = jax.lax.dynamic_update_slice_in_dim(done, near, place, -1)
        return working, done, room

    start = columns.weights, jnp.zeros_like(columns.weights), columns.room
    working, values, _ = jax.lax.fori_loop(0, size, column, start)
    grid = columns.measure(working) if is_live else columns.grid
    return grid.nearest(working) if is_live else values, grid, working


@dataclass(frozen=True)
class Qronos(accumulator.Bounded):
    """Corrects the first column for everything before it, then the others for that, then rounds as GPTQ.

    With `H` the mean of `y y^T` and `G` the mean of `x y^T`: `w_0 <- (w0 G_:0 - sum_{j>0} H_0j w_j) / H_00`, rounded to
    `q_0`; then `w_1: <- (w0 (G + d I)_:1: - q_0 H_0,1:) A` with `A` the inverse of the damped `H` without its first row
    and column; then GPTQ from the second column on. Where both models have the same inputs this is GPTQ.

    Args:
        block_size: see `GPTQ`.
        act_order: round columns with large inputs first.
        damping: `d`, as a share of the largest eigenvalue of `H`.
        dead_inputs: see `GPTQ`.
        accumulator_bits, tile_size: see `GPTQ`.

    Source: Zhang et al., "Qronos: Correcting the Past by Shaping the Future in Post-Training Quantization", 2025.

    Example:
        >>> Qronos(act_order=True).damping
        1e-06
    """

    statistics = ("hessian", "cross")
    block_size: Annotated[int, solver.at_least(1)] = 128
    act_order: bool = False
    damping: solver.Share = 1e-6
    dead_inputs: solver.DeadInputs = "nearest"
    accumulator_bits: accumulator.Bits = None
    tile_size: accumulator.TileSize = None

    def __call__(self, problem: solver.Problem) -> solver.Solution:
        """See `Solver`."""
        raw, cross = (problem.statistics.mean(name) for name in self.statistics)
        hessian, weights = solver.with_dead_inputs(raw, problem.weights, self.dead_inputs)
        order = solver.by_importance(hessian, self.act_order)
        dead = solver.ordered((solver.diagonal_of(raw) == 0)[:, None], order)
        columns = InOrder.of(self, problem, weights, order)
        hessian, cross = solver.both_ordered(hessian, order), solver.both_ordered(cross, order)
        weights, original, grid = columns.weights, columns.original, columns.grid
        before = solver.matmul(weights[..., 1:], hessian[:, 1:, :1])
        first = (solver.matmul(original, cross[..., :1]) - before) / hessian[:, :1, :1]
        first = jnp.where(dead[..., :1], weights[..., :1], first)
        head, room = accumulator.rounded(first, grid.from_column(0, 1), 0, columns.room)
        damp = self.damping * jnp.linalg.eigvalsh(hessian)[:, -1]
        root = solver.inverse_factor(solver.on_diagonal(hessian, damp))
        inverted = solver.matmul(root.mT, root)
        rest = inverted[:, 1:, 1:] - inverted[:, 1:, :1] * inverted[:, :1, 1:] / inverted[:, :1, :1]
        target = solver.matmul(original, solver.on_diagonal(cross, damp)[..., 1:])
        corrected = solver.matmul(target - head * hessian[:, :1, 1:], rest)
        corrected = jnp.where(dead[..., 1:], weights[..., 1:], corrected)
        factor = jnp.linalg.cholesky(rest, upper=True)
        check_factor(factor, self.damping)
        later = None if room is None else replace(room, tiles=room.tiles[:, 1:])
        after = grid.from_column(1, weights.shape[-1] - 1)
        others = replace(columns, weights=corrected, grid=after, room=later)
        values, _, _ = others.rounded(factor, self.block_size)
        values, working = (jnp.concatenate([x, values], axis=-1) for x in (head, first))
        return columns.solution(values, grid, working)


_Blocks = tuple[jax.Array, jax.Array, solver.MatrixGrid, accumulator.Room | None]
_Columns = tuple[jax.Array, jax.Array, jax.Array, accumulator.Room | None]


def _written(matrix: jax.Array, part: jax.Array, column: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(matrix, part, column, -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InOrder:
    """A problem whose columns are rounded in an order.

    Attributes:
        weights, original: the matrices in this order.
        grid: the quantizer's, of the problem's weights as they were given, in this order.
        fixed: the same in the problem's order.
        room: what accumulators hold, for scales that do not change; None for no bound.
        order: places of columns, `(stack, columns)`.
        back: places of the problem's columns in this order.
        remeasure: measures matrices in the problem's order; None for scales that do not change.
    """

    weights: jax.Array
    original: jax.Array
    grid: solver.MatrixGrid
    fixed: solver.MatrixGrid
    room: accumulator.Room | None
    order: jax.Array
    back: jax.Array
    remeasure: solver.Measure | None

    @classmethod
    def of(
        cls,
        algorithm: accumulator.Bounded,
        problem: solver.Problem,
        weights: jax.Array,
        order: jax.Array,
        is_remeasured: bool = False,
    ) -> InOrder:
        """The columns of a problem in an order.

        Args:
            algorithm: that rounds them.
            problem: the problem.
            weights: that are to be rounded, in the problem's order.
            order: places of columns, `(stack, columns)`.
            is_remeasured: whether scales change.
        """
        fixed = problem.measure(problem.weights)
        grid = fixed.spread(weights.shape).ordered(order)
        room = accumulator.room_of(algorithm, problem, weights, order)
        remeasure = solver.as_argument(problem.measure) if is_remeasured else None
        weights, original = solver.ordered(weights, order), solver.ordered(problem.original, order)
        return cls(weights, original, grid, fixed, room, order, jnp.argsort(order, axis=1), remeasure)

    def measure(self, working: jax.Array) -> solver.MatrixGrid:
        """The quantizer's grid of matrices in this order."""
        assert self.remeasure is not None, "scales change"
        grid = self.remeasure(solver.ordered(working, self.back))
        return grid.spread(working.shape).ordered(self.order)

    @partial(jax.jit, static_argnums=(2, 3, 4))
    def rounded(
        self,
        factor: jax.Array,
        block_size: int,
        scales: ScaleRule = "original",
        group_size: int | None = None,
    ) -> _Rounded:
        """Round all columns, in order (Frantar et al., GPTQ).

        `q_j` is `w_j` rounded to nearest, `e = (w_j - q_j) / U_jj`, and `w_k -= e U_jk` for `k > j`. Columns of later
        blocks get the errors of a block at its end: that takes less time, and changes a result only where scales are
        measured on the way.

        Args:
            factor: `U`, upper triangular, `(stack, columns, columns)`.
            block_size: columns in a block.
            scales: when scales are measured; without groups those of "block" are those of the first block.
            group_size: consecutive columns that share a scale; None for no groups.

        Returns:
            Values, the grid that they are on, and the matrices as the last column left them; None where scales are not
            measured on the way, as they are the values then.
        """
        places, weights, is_live = jnp.arange(self.weights.shape[-1]), self.weights, scales == "live"

        def block(start: jax.Array | int, size: int, state: _Blocks) -> _Blocks:
            working, values, grid, room = state
            if scales == "block" and group_size is not None:
                first = places // group_size * group_size
                begins = (first >= start) & (first < start + size)
                grid = jax.tree.map(partial(jnp.where, begins), self.measure(working), grid)
            rows = jax.lax.dynamic_slice_in_dim(factor, start, size, -2)
            within = jax.lax.dynamic_slice_in_dim(rows, start, size, -1)

            def column(place: jax.Array, state: _Columns) -> _Columns:
                block, near, errors, room = state
                own = self.measure(_written(working, block, start)) if is_live else grid
                now = jax.lax.dynamic_slice_in_dim(block, place, 1, -1)
                value, room = accumulator.rounded(now, own.from_column(start + place, 1), start + place, room)
                row = jax.lax.dynamic_slice_in_dim(within, place, 1, -2)
                error = (now - value) / jax.lax.dynamic_slice_in_dim(row, place, 1, -1)
                block = block - error * jnp.where(jnp.arange(size) > place, row, 0.0)
                block, near = _written(block, value, place), _written(near, value, place)
                return block, near, _written(errors, error, place), room

            part = jax.lax.dynamic_slice_in_dim(working, start, size, -1)
            empty = jnp.zeros_like(part)
            part, near, errors, room = jax.lax.fori_loop(0, size, column, (part, empty, empty, room))
            later = jnp.where(places >= start + size, rows, 0.0)
            working = _written(working, part, start) - solver.matmul(errors, later)
            return working, _written(values, near, start), grid, room

        def full_block(number: jax.Array, state: _Blocks) -> _Blocks:
            return block(number * full, full, state)

        full = min(block_size, weights.shape[-1])
        count, left = divmod(weights.shape[-1], full)
        # Scales that do not change belong to the weights as they were given, dead inputs and all.
        grid = self.grid if scales == "original" else self.measure(weights)
        state = weights, jnp.zeros_like(weights), grid, self.room
        state = jax.lax.fori_loop(0, count, full_block, state)
        working, values, grid, _ = block(count * full, left, state) if left else state
        if is_live:
            grid = self.measure(working)
            values = grid.nearest(working)
        is_measured = is_live or (scales == "block" and group_size is not None)
        return values, grid, working if is_measured else None

    def solution(
        self, values: jax.Array, grid: solver.MatrixGrid, working: jax.Array | None
    ) -> solver.Solution:
        """The solution in the problem's order, of arrays in this one."""
        # An array for each number is not stored where fewer scales, or the values themselves, say the same.
        grid = self.fixed if self.remeasure is None else grid.ordered(self.back)
        values = solver.ordered(values, self.back)
        working = values if working is None else solver.ordered(working, self.back)
        return solver.Solution(values, grid.scale, grid.zero_point, working, complete=self.room is not None)
