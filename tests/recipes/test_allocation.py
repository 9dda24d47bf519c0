"""Bit widths under a budget: exact, and rules that anyone can read."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, quant
from jqinject.recipes import GPTQ, AllocateBits, Recipe, Solve, cheapest_errors

X = jax.random.normal(jax.random.key(2), (64, 32))
RULE = Rule(weight_quant=quant.Int8WeightPerChannelFloat, input_quant=quant.Int8ActDynamicPerRow)


def model() -> nnx.Sequential:
    first, second = nnx.Linear(32, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 64, rngs=nnx.Rngs(1))
    return nnx.Sequential(first, nnx.relu, second, nnx.Linear(64, 4, rngs=nnx.Rngs(2)))


@pytest.mark.parametrize("seed", range(20))
def test_an_allocation_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    errors, costs = random.uniform(0, 9, (6, 3)), random.integers(1, 12, (6, 3))
    budget = int(random.integers(costs.min(axis=1).sum(), costs.max(axis=1).sum() + 1))

    def total(table: np.ndarray, choice: tuple[int, ...]) -> float:
        return sum(row[place] for row, place in zip(table, choice, strict=True))

    fitting = [c for c in itertools.product(range(3), repeat=6) if total(costs, c) <= budget]
    best = min(total(errors, choice) for choice in fitting)
    found = tuple(cheapest_errors(errors, costs, budget))
    assert total(costs, found) <= budget
    assert total(errors, found) == pytest.approx(best, rel=1e-12)


def test_widths_become_rules_that_win() -> None:
    recipe = Recipe(AllocateBits(bits=(2, 4, 8), mean_bits=4.0), Solve(GPTQ()))
    result = recipe.apply(model(), RULE, [X], progress=False)
    sites = result.report.steps[0].sites
    layers = [result.model.layers[place] for place in (0, 2, 3)]
    widths = [int(layer.quant_weight().bit_width) for layer in layers]
    assert widths == [one.bits for one in sites]
    sizes = [layer.kernel.size for layer in layers]
    assert np.dot(widths, sizes) <= 4.0 * sum(sizes)
    assert all(one.errors[2] > one.errors[4] > one.errors[8] for one in sites)
    assert all(layer.input_quant.is_quant_enabled for layer in layers)
    again = jqinject.quantize(model(), [one.rule for one in sites])
    assert [int(again.layers[place].quant_weight().bit_width) for place in (0, 2, 3)] == widths
    assert f"layers.0.kernel: {widths[0]} bits" in str(result.report)


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="no assignment fits the budget: the cheapest choices cost 7168"):
        Recipe(AllocateBits(bits=(4, 8), mean_bits=3.0)).apply(model(), RULE, [X], progress=False)
    with pytest.raises(TypeError, match="takes one budget"):
        AllocateBits()
    with pytest.raises(ValueError, match="in this order"):
        Recipe(Solve(GPTQ()), AllocateBits(mean_bits=4.0)).apply(model(), RULE, [X], progress=False)
