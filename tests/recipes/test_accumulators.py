"""Codes that respect the width of an accumulator: for every input of the input quantizer's format, exactly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jqinject import Rule, quant
from jqinject.ops import IntGrid, TableGrid
from jqinject.recipes import GPFQ, GPTQ, Problem, Qronos, Recipe, Solve
from jqinject.recipes.solvers.solver import MatrixGrid, Statistics

COLUMNS, TOP = 20, 7
SOLVERS = (GPTQ, GPFQ, Qronos)


def measure(matrices: jax.Array) -> MatrixGrid:
    scale = jnp.abs(matrices).max(-1, keepdims=True) / TOP
    return MatrixGrid(scale, jnp.zeros_like(scale), IntGrid(4, narrow_range=True))


def problem(seed: int, inputs: tuple[int, bool] | None) -> Problem:
    keys = jax.random.split(jax.random.key(seed), 3)
    weights = jax.random.normal(keys[0], (2, 3, COLUMNS)) + 0.5
    x = jax.random.normal(keys[1], (2, 60, COLUMNS)) @ jax.random.normal(keys[2], (2, COLUMNS, COLUMNS))
    hessian = jnp.einsum("sni,snj->sij", x, x)
    sums = Statistics(jnp.full(2, 60.0), {"hessian": hessian, "cross": 1.1 * hessian})
    return Problem(weights, weights, sums, measure, input_integers=inputs)


def largest_sum(codes: np.ndarray, bits: int, signed: bool) -> int:
    """The largest magnitude of a product sum over the last axis, in Python's integers."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    found = 0
    for row in codes.reshape(-1, codes.shape[-1]).astype(int).tolist():
        found = max(
            found, sum(max(q * low, q * high) for q in row), -sum(min(q * low, q * high) for q in row)
        )
    return found


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**30),
    st.integers(10, 18),
    st.sampled_from([(4, True), (8, True), (8, False)]),
    st.sampled_from(SOLVERS),
    st.sampled_from([None, 7]),
    st.booleans(),
)
@pytest.mark.lengthy
def test_no_input_overflows(
    seed: int, width: int, inputs: tuple[int, bool], solver: Any, tile: int | None, act_order: bool
) -> None:
    solve = solver(accumulator_bits=width, tile_size=tile, act_order=act_order)
    task = problem(seed, inputs)
    found = solve(task)
    codes = np.asarray(found.values / found.scale)
    np.testing.assert_allclose(codes, np.round(codes), atol=1e-4)
    codes = np.round(codes)
    assert np.abs(codes).max() <= TOP
    size = tile or COLUMNS
    for start in range(0, COLUMNS, size):
        assert largest_sum(codes[..., start : start + size], *inputs) <= 2 ** (width - 1) - 1


@pytest.mark.heavy
@pytest.mark.parametrize("solver", SOLVERS)
def test_an_accumulator_that_is_wide_enough_changes_nothing(solver: Any) -> None:
    task = problem(0, (8, True))
    np.testing.assert_array_equal(solver(accumulator_bits=24)(task).values, solver()(task).values)


def test_a_narrow_accumulator_costs_less_than_cutting_the_nearest_codes() -> None:
    task = problem(1, (8, True))
    bound = GPTQ(accumulator_bits=14)(task)
    hessian = task.statistics.mean("hessian")

    def loss(values: jax.Array) -> float:
        wrong = values - task.weights
        return float(jnp.einsum("sri,sij,srj->", wrong, hessian, wrong))

    grid = measure(task.weights)
    codes = np.asarray(grid.nearest(task.weights) / grid.scale)
    budget = (2**13 - 1) // 255
    sums = np.maximum(np.maximum(codes, 0).sum(-1), np.maximum(-codes, 0).sum(-1))
    assert sums.max() > budget
    cut = np.trunc(codes * np.minimum(1, budget / sums)[..., None])
    assert loss(bound.values) < loss(jnp.asarray(cut) * grid.scale)


def test_what_an_accumulator_needs_is_said() -> None:
    with pytest.raises(ValueError, match=r"GPTQ: accumulator_bits must be within 2 and 32, got 40"):
        GPTQ(accumulator_bits=40)
    with pytest.raises(
        ValueError, match=r"tile_size=8 says what an accumulator sums, and accumulator_bits is None.\n  cure"
    ):
        Qronos(tile_size=8)
    with pytest.raises(ValueError, match=r"scales='live' measures scales later"):
        GPFQ(scales="live", accumulator_bits=16)
    with pytest.raises(ValueError, match=r"no rule makes its inputs integers.\n  cure: input_quant"):
        GPTQ(accumulator_bits=16)(problem(0, None))
    with pytest.raises(
        ValueError, match=r"holds no product with any weight but 0.\n  cure: accumulator_bits=10"
    ):
        GPTQ(accumulator_bits=8)(problem(0, (8, True)))
    table = problem(0, (8, True))
    numbers = TableGrid((-1.0, 0.0, 1.0))
    other = Problem(
        table.weights,
        table.weights,
        table.statistics,
        lambda w: MatrixGrid(measure(w).scale, jnp.float32(0), numbers),
        input_integers=(8, True),
    )
    with pytest.raises(ValueError, match="the weight's numbers are another grid: TableGrid"):
        GPTQ(accumulator_bits=16)(other)


class Experts(nnx.Module):
    """One of three experts gets no rows."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(5), (3, 16, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, self.kernel.get_value(), jnp.array([20, 0, 20]))


@pytest.mark.lengthy
def test_integers_fit_also_where_no_sample_came() -> None:
    weights = quant.Int4WeightPerGroupAbsMax.let(group_size=8)
    rule = Rule(weight_quant=weights, input_quant=quant.Int8ActPerTensorFloat)
    x = jax.random.normal(jax.random.key(6), (40, 16))
    result = Recipe(Solve(GPTQ(accumulator_bits=12))).apply(Experts(), rule, [x], progress=False)
    site = result.model.op_quant.weights["kernel"]  # pyright: ignore
    tensor = site.weight_quant(site.weight.get_value())
    codes = np.asarray(tensor.int()).swapaxes(1, 2).reshape(3, 4, 2, 8)
    assert largest_sum(codes, 8, True) <= 2**11 - 1
    np.testing.assert_array_equal(tensor.value, result.model.kernel.get_value())
