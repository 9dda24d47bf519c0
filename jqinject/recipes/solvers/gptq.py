"""GPTQ, and rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jqinject.recipes.rounding_grid import MatrixGrid, ordered
from jqinject.recipes.solvers.accumulator import check_accumulator, room_of
from jqinject.recipes.solvers.columns import (
    ScaleRule,
    both_ordered,
    by_importance,
    check_rounding,
    diagonal_of,
    inverse_factor,
    on_diagonal,
    round_columns,
    without_dead_inputs,
)
from jqinject.recipes.solvers.solver import Problem, Solution


@dataclass(frozen=True)
class RTN:
    """Rounds every weight to the nearest number of the grid.

    What a quantizer finds in the weights is kept: with one that searches its zero points by half-quadratic optimization
    (`jqinject.quant.ShiftedUint8WeightPerGroupFloatHQO`) this is HQQ.

    Example:
        >>> RTN()
        RTN()
    """

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ()

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        grid = problem.measure(problem.weights)
        return Solution(grid.nearest(problem.weights), grid.scale, grid.zero_point)


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

    block_size: int = 128
    damping: float = 0.01
    act_order: bool = False
    scales: ScaleRule = "original"
    damp_dead: bool = True
    singular: Literal["refuse", "nearest"] = "refuse"
    accumulator_bits: int | None = None
    tile_size: int | None = None

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian",)

    def __post_init__(self) -> None:
        check_rounding("GPTQ", self.block_size, self.damping)
        check_accumulator("GPTQ", self.accumulator_bits, self.tile_size, self.scales)
        if self.scales == "block" and self.act_order:
            raise ValueError(
                "GPTQ(scales='block', act_order=True): groups are spread over the blocks, so none begins in one.\n"
                "  cure: GPTQ(scales='original', act_order=True), or 'live'"
            )

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        raw = 2 * problem.statistics.mean("hessian")
        weights, order, factor = _prepared(raw, problem.weights, self.damping, self.act_order, self.damp_dead)
        if self.singular == "nearest":
            usable = jnp.isfinite(factor).all(axis=(1, 2), keepdims=True)
            factor = jnp.where(usable, factor, jnp.eye(factor.shape[-1], dtype=factor.dtype))
        check_factor(factor, self.damping)
        return self._in_order(problem, weights, factor, order)

    def _in_order(
        self, problem: Problem, weights: jax.Array, factor: jax.Array, order: jax.Array
    ) -> Solution:
        back = jnp.argsort(order, axis=1)
        # Scales that do not change belong to the weights as they were given, dead inputs and all.
        kept = problem.measure(problem.weights) if self.scales == "original" else None

        def measure(working: jax.Array) -> MatrixGrid:
            found = problem.measure(ordered(working, back)) if kept is None else kept
            whole = found.spread(working.shape)
            return whole.ordered(order) if self.act_order else whole

        room = room_of(self.accumulator_bits, self.tile_size, problem, weights, order, "GPTQ")
        values, grid, working = round_columns(
            ordered(weights, order) if self.act_order else weights,
            factor,
            measure,
            block_size=self.block_size,
            scales=self.scales,
            group_size=problem.group_size,
            room=room,
        )
        same = working is values
        if self.act_order:
            values = ordered(values, back)
            working = values if same else ordered(working, back)
        found = grid.ordered(back) if kept is None else kept
        return Solution(values, found.scale, found.zero_point, working, complete=room is not None)


@partial(jax.jit, static_argnums=(3, 4))
def _prepared(
    raw: jax.Array, weights: jax.Array, damping: float, act_order: bool, damp_dead: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weights without dead inputs, the order of the columns, and the factor of the inverse in this order."""
    hessian, weights = without_dead_inputs(raw, weights)
    order = by_importance(hessian, act_order)
    damp = damping * jnp.mean(diagonal_of(hessian if damp_dead else raw), axis=1)
    damped = on_diagonal(hessian, damp)
    return weights, order, inverse_factor(both_ordered(damped, order) if act_order else damped)


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
