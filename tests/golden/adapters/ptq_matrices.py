"""Drives algorithms on one matrix at a time: MagR, llm-compressor's GPTQ, Qwix's GPTQ and QEP, bit allocation."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule, quant
from jqinject.ops import IntGrid
from jqinject.ops.power import divide
from jqinject.recipes import GPTQ, QEP, RTN, MagR, Problem, Recipe, Solution, Solve, cheapest_errors
from jqinject.recipes.solvers.solver import MatrixGrid, Statistics
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.ptq_cases import said
from tests.golden.adapters.ptq_layerwise import convolution, images, kernel_of, weight_of

Arrays = dict[str, np.ndarray]


class Kept:
    """Rounds to nearest, and keeps the problem."""

    statistics = ("hessian", "cross")

    def __init__(self) -> None:
        self.problem: Problem | None = None

    def __call__(self, problem: Problem) -> Solution:
        """See `Solver`."""
        self.problem = problem
        return RTN()(problem)


def summed(x: np.ndarray, y: np.ndarray | None = None) -> Statistics:
    """The statistics of samples `(samples, columns)`."""
    pair = (jnp.asarray(each)[None] for each in (x, x if y is None else y))
    return Statistics.of(*pair, ("hessian", "cross"))


def problem_of(
    weight: np.ndarray, statistics: Statistics, measure: Any, group_size: int | None = None
) -> Problem:
    """A problem of one matrix."""
    matrix = jnp.asarray(weight)[None]
    return Problem(matrix, matrix, statistics, measure, group_size)


@dataclass(frozen=True)
class Magnitudes:
    """What a config of MagR says."""

    alpha: float
    steps: int
    power_steps: int
    conv: dict[str, int] | None


def magr_of(config: dict[str, Any]) -> Magnitudes:
    """Read a config of MagR."""
    with reading(config, "MagR") as given:
        given.choose("peer", {"brevitas": None})
        given.choose("algorithm", {"magr": None})
        said(given, "hessian", {"H = (2/n) sum x x^T, no damping": None})
        power_steps = said(given, "lambda_max", {"30 power iterations": 30})
        given.take("seed")
        found = Magnitudes(given.take("alpha"), given.take("num_steps"), power_steps, given.take("conv"))
    if found.conv is not None:
        with reading(found.conv, "a convolution") as stated:
            for key in ("dilation", "groups", "kernel", "padding", "stride"):
                stated.take(key)
    return found


def magr(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """A layer through a recipe whose inner solver keeps the reduced weight."""
    stated, weight = magr_of(case["config"]), inputs["weight"]
    if stated.conv is None:
        layer: Any = nnx.Linear(weight.shape[1], weight.shape[0], rngs=nnx.Rngs(0))
    else:
        layer = convolution(inputs["x"].shape[1], weight.shape[0], stated.conv)
    layer.kernel.set_value(jnp.asarray(kernel_of(weight)))
    kept = Kept()
    solver = MagR(kept, alpha=stated.alpha, steps=stated.steps, power_steps=stated.power_steps)
    recipe = Recipe(Solve(solver))
    rule = Rule(weight_quant=quant.Int8WeightPerChannelFloat)
    recipe.apply(nnx.Sequential(layer), rule, [images(inputs["x"])], progress=False)
    assert kept.problem is not None
    hessian = 2 * np.asarray(kept.problem.statistics.mean("hessian"))
    return {
        "hessian": hessian,
        "weight": np.asarray(kept.problem.weights).reshape(weight_of(kernel_of(weight)).shape),
    }


def ranges(matrices: jax.Array, group_size: int | None, strategy: str) -> tuple[jax.Array, jax.Array]:
    """The least and the largest number of each group, at most and at least 0, for each number."""
    stack, rows, columns = matrices.shape
    if strategy == "tensor":
        cut = matrices.reshape(stack, 1, 1, -1)
    else:
        cut = matrices.reshape(stack, rows, -1, group_size or columns)
    low, high = jnp.minimum(cut.min(-1), 0), jnp.maximum(cut.max(-1), 0)

    def full(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.repeat(x, columns // x.shape[2], axis=2), matrices.shape)

    return full(low), full(high)


@dataclass(frozen=True)
class Compressor:
    """What a config of llm-compressor says."""

    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    solver: GPTQ
    sequences: int

    def measure(self, matrices: jax.Array) -> MatrixGrid:
        """The grid of compressed-tensors."""
        low, high = ranges(matrices, self.group_size, self.strategy)
        levels = 2.0**self.bits - 1
        grid = IntGrid(self.bits)
        if self.symmetric:
            return MatrixGrid(divide(jnp.maximum(-low, high), levels / 2), jnp.zeros_like(low), grid)
        scale = divide(high - low, levels)
        return MatrixGrid(
            scale,
            jnp.round(jnp.clip(grid.bounds[0] - divide(low, scale), grid.bounds[0], grid.bounds[1])),
            grid,
        )


ACT_ORDERS = {None: False, "weight": True, "static": True}
STRATEGIES = {name: name for name in ("group", "channel", "tensor")}


def compressor_of(config: dict[str, Any]) -> Compressor:
    """Read a config of llm-compressor's GPTQ; one with a Hessian states less."""
    with reading(config, "llm-compressor's GPTQ") as given:
        given.choose("peer", {"llmcompressor": None})
        given.choose("algorithm", {"gptq": None})
        given.take("seed", None)
        given.take("dead_inputs", None)
        text = str(given.take("hessian", "H = (2/S) sum x x^T, S = number of sequences (here 1 of"))
        count = re.match(r"H = \(2/S\) sum x x\^T, S = number of sequences \(here (\d+) of", text)
        if count is None:
            raise CannotDrive(f"hessian: {text!r} has no meaning")
        if "scale_rule" in given:
            said(given, "scale_rule", {"frozen: ": None})
        solver = GPTQ(
            act_order=given.choose("actorder", ACT_ORDERS, False),
            block_size=given.take("block_size", 128),
            damping=given.take("percdamp", 0.01),
            singular="nearest",
            dead_inputs="zero",
        )
        strategy, group_size = given.choose("strategy", STRATEGIES), given.take("group_size", None)
        symmetric = given.choose("symmetric", {True: True, False: False})
        return Compressor(given.take("bits"), symmetric, strategy, group_size, solver, int(count[1]))


def compressor(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """GPTQ on one matrix."""
    stated = compressor_of(case["config"])
    with reading(inputs, "the arrays of llm-compressor's GPTQ") as arrays:
        weight, x, hessian = arrays.take("weight"), arrays.take("x", None), arrays.take("hessian", None)
    if x is None:
        statistics = Statistics(jnp.ones(1), {"hessian": jnp.asarray(hessian)[None]})
    else:
        # A sequence is a batch, and counts once; llm-compressor puts the 2 of its Hessian into the numbers.
        parts = (summed(np.float32(2**0.5) * part) for part in np.split(x, stated.sequences))
        statistics = replace(
            functools.reduce(Statistics.merged, parts), count=jnp.full(1, float(stated.sequences))
        )
    solution = stated.solver(problem_of(weight, statistics, stated.measure, stated.group_size))
    cut = {
        "group": (slice(None), slice(None, None, stated.group_size)),
        "channel": np.s_[:, :1],
        "tensor": np.s_[:1, :1],
    }
    scale, zero_point = (np.asarray(x)[0] for x in (solution.scale, solution.zero_point))
    values = np.asarray(solution.values)[0]
    return {
        "hessian": np.asarray(statistics.sums["hessian"])[0] / stated.sequences,
        "quant": values,
        "int": np.round(values / scale + zero_point).astype(np.int8),
        "scale": scale[cut[stated.strategy]],
        "zero_point": zero_point[cut[stated.strategy]].astype(np.int8),
    }


@dataclass(frozen=True)
class QwixGptq:
    """What a config of Qwix's GPTQ says."""

    bits: int
    group_size: int | None
    solver: GPTQ

    def measure(self, matrices: jax.Array) -> MatrixGrid:
        """Qwix's grid of absolute maxima."""
        low, high = ranges(matrices, self.group_size, "group")
        top = 2.0 ** (self.bits - 1) - 0.5
        return MatrixGrid(jnp.maximum(-low, high) / top, jnp.zeros_like(low), IntGrid(self.bits))


def qwix_gptq_of(config: dict[str, Any]) -> QwixGptq:
    """Read a config of Qwix's GPTQ."""
    with reading(config, "Qwix's GPTQ") as given:
        given.choose("peer", {"qwix": None})
        given.choose("algorithm", {"gptq": None})
        given.take("seed")
        given.take("dead_inputs")
        said(given, "hessian", {"H = X X^T (no 2, no 1/n); damp = percdamp*mean(diag H) before dead": None})
        said(
            given,
            "scale_rule",
            {"absmax/(2^(b-1)-0.5) at the first column of each group, from the matrix": None},
        )
        solver = GPTQ(
            block_size=given.take("block_size"),
            damping=given.take("percdamp"),
            scales="block",
            damp_dead=False,
            dead_inputs="zero",
        )
        return QwixGptq(given.take("bits"), given.take("group_size"), solver)


def qwix_gptq(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """GPTQ on one matrix."""
    stated, statistics = qwix_gptq_of(case["config"]), summed(inputs["x"])
    weight = inputs["weight"]
    solution = stated.solver(problem_of(weight, statistics, stated.measure, stated.group_size))
    hessian = np.asarray(statistics.sums["hessian"])[0]
    values, scale = (np.asarray(x)[0] for x in (solution.values, solution.scale))
    return {
        "hessian": hessian,
        "quant": values,
        "int": np.round(values / scale).astype(np.int8),
        "scale": scale[:, :: stated.group_size or weight.shape[1]],
        "loss": losses(weight, values, hessian, stated.solver.damping),
    }


def losses(weight: np.ndarray, values: np.ndarray, hessian: np.ndarray, damping: float) -> np.ndarray:
    """`e^2 / 2` of every number, from the result: `w - q = e U`."""
    diagonal = np.diagonal(hessian)
    whole = hessian.astype(np.float64) + np.diag((diagonal == 0) + damping * diagonal.mean())
    upper = np.linalg.cholesky(np.linalg.inv(whole)).T
    left = np.where(diagonal == 0, 0.0, weight) - values
    return np.linalg.solve(upper.T, left.T).T ** 2 / 2


def qep_of(config: dict[str, Any]) -> Callable[[Any], QEP]:
    """Read a config of QEP."""
    with reading(config, "QEP") as given:
        given.choose("peer", {"qwix": None})
        given.choose("algorithm", {"qep": None})
        given.take("seed")
        said(given, "hessian", {"H = Xq Xq^T, delta = (X - Xq) Xq^T": None})
        factor, damping = given.take("correction_factor"), given.take("damping_factor")
    return lambda solver: QEP(solver, factor=factor, damping=damping, dead_inputs="zero")


def qep(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """The corrected weight, as the solver gets it."""
    kept, statistics = Kept(), summed(inputs["x"], inputs["x_quantized"])
    measure = QwixGptq(8, None, GPTQ()).measure
    qep_of(case["config"])(kept)(problem_of(inputs["weight"], statistics, measure))
    assert kept.problem is not None
    delta = np.asarray(statistics.sums["cross"] - statistics.sums["hessian"])[0]
    hessian = np.asarray(statistics.sums["hessian"])[0]
    return {"weight": np.asarray(kept.problem.weights)[0], "hessian": hessian, "hessian_delta": delta}


def budget_of(config: dict[str, Any]) -> tuple[list[int], int]:
    """Read a config of bit allocation: the widths and the budget."""
    with reading(config, "bit allocation") as given:
        given.choose("algorithm", {"mixed precision bit allocation": None})
        given.choose("source", {"exhaustive": None})
        given.take("seed", None)
        return given.take("bits"), given.take("budget_bytes")


def allocation(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """The widths that are chosen."""
    bits, budget = budget_of(case["config"])
    chosen = cheapest_errors(inputs["sensitivity"], inputs["cost_bytes"], budget)
    return {"bits": np.array([bits[place] for place in chosen], np.int32)}
