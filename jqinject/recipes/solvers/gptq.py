"""GPTQ, and rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jqinject.recipes.grid import MatrixGrid
from jqinject.recipes.solvers.columns import round_columns
from jqinject.recipes.solvers.ordering import by_importance, inverse_factor, without_dead_inputs
from jqinject.recipes.solvers.scale_rules import ScaleRule
from jqinject.recipes.solvers.solver import Problem, Solution


@dataclass(frozen=True)
class RTN:
    """Rounds every weight to the nearest number of the grid.

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

    It minimizes `tr((Q - W) H (Q - W)^T)` greedily, with `H` the mean of `y y^T` over the inputs `y` of the quantized
    model. Columns of inputs that were always 0 become 0.

    Args:
        block_size: columns that are rounded before the others get their errors; the result does not depend on it.
        damping: this share of the mean of `H`'s diagonal is added to the diagonal.
        act_order: round columns with large inputs first; groups of scales stay those of the original order.
        scales: when scales are measured, see `ScaleRule`.
        damp_dead: whether inputs that were always 0 count, with 1, in the mean that the damping is a share of: yes as
            in Brevitas and llm-compressor, no as in Qwix.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.

    Differs from Brevitas: scales are those of the original weights (there, by default, of the column that is being
    rounded, which is then its own maximum, so that nothing is spread).

    Example:
        >>> GPTQ(act_order=True)
        GPTQ(block_size=128, damping=0.01, act_order=True, scales='original', damp_dead=True)
    """

    block_size: int = 128
    damping: float = 0.01
    act_order: bool = False
    scales: ScaleRule = "original"
    damp_dead: bool = True

    @property
    def statistics(self) -> tuple[str, ...]:
        """See `Solver`."""
        return ("hessian",)

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        raw = problem.statistics.mean("hessian")
        hessian, weights = without_dead_inputs(raw, problem.weights)
        order = by_importance(hessian, self.act_order)
        damped = hessian if self.damp_dead else raw
        damp = self.damping * jnp.mean(jnp.diagonal(damped))
        factor = inverse_factor(
            (hessian + damp * jnp.eye(len(hessian), dtype=hessian.dtype))[order][:, order]
        )
        check_factor(factor, self.damping)
        return in_order(problem, weights, factor, order, self.block_size, self.scales)


def in_order(
    problem: Problem,
    weights: jax.Array,
    factor: jax.Array,
    order: jax.Array,
    block_size: int,
    scales: ScaleRule,
) -> Solution:
    """Columns rounded in some order, with the result in the order of the weights.

    Args:
        problem: whose scales are measured.
        weights: what is rounded, in the order of the weights.
        factor: see `round_columns`, in the order of rounding.
        order: places of the columns.
        block_size: see `round_columns`.
        scales: see `round_columns`.
    """
    back = jnp.argsort(order)

    def measure(working: jax.Array) -> MatrixGrid:
        return problem.measure(working[:, back]).spread(working.shape).columns(order)

    values, grid = round_columns(
        weights[:, order],
        factor,
        measure,
        block_size=block_size,
        scales=scales,
        group_size=problem.group_size,
    )
    found = grid.columns(back)
    return Solution(values[:, back], found.scale, found.zero_point)


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
