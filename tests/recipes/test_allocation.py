"""Bit widths under a budget: exact, and rules that anyone can read."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, quant
from jqinject.recipes import GPTQ, AllocateBits, Recipe, Solve, cheapest_errors

X = jax.random.normal(jax.random.key(2), (64, 32))
RULE = Rule(weight_quant=quant.Int8WeightPerChannelFloat, input_quant=quant.Int8DynamicActPerRowAbsMax)


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


@pytest.mark.lengthy
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


def squares(candidate: Any, batch: jax.Array) -> jax.Array:
    return jnp.square(candidate(batch)).mean()


def small() -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(4, 4, rngs=nnx.Rngs(1)))


SMALL = jax.random.normal(jax.random.key(3), (32, 8))
PATHS = ("layers.0.kernel", "layers.2.kernel")


def errors_by(kind: str, loss: Any = None) -> dict[str, dict[int, float]]:
    recipe = Recipe(AllocateBits(bits=(3, 8), mean_bits=5.0, sensitivity=kind, loss=loss))  # pyright: ignore
    sites = recipe.apply(small(), RULE, [SMALL], progress=False).report.steps[0].sites
    return {one.path: one.errors for one in sites}


def moved(place: int, bits: int) -> tuple[nnx.Sequential, nnx.Sequential, jax.Array]:
    """The float model, the model with one weight rounded to nearest, and what that added."""
    rule = Rule(weight_quant=quant.Int8WeightPerChannelFloat, weight_bit_width=bits)
    before, after = small(), small()
    layer = after.layers[place]
    rounded = jqinject.quantize(small(), rule).layers[place].quant_weight().value
    difference = rounded - layer.kernel[...]
    layer.kernel[...] = rounded
    return before, after, difference


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["kl", "hessian", "gradient", "fisher"])
def test_sensitivities_are_what_they_are_called(kind: str) -> None:
    found = errors_by(kind, squares if kind in ("gradient", "fisher") else None)
    for place, path in ((0, PATHS[0]), (2, PATHS[1])):
        before, after, difference = moved(place, 3)
        gradient = nnx.grad(squares)(before, SMALL).layers[place].kernel[...]
        y, other = before(SMALL), after(SMALL)
        p = jax.nn.softmax(y)
        if kind == "hessian":  # to first order in the weight: a small step in the same direction
            before.layers[place].kernel[...] += 1e-3 * difference
            other = y + (before(SMALL) - y) * 1e3
        wanted = {
            "kl": (p * (jnp.log(p) - jax.nn.log_softmax(other))).sum(-1).mean(),
            "hessian": jnp.square(other - y).sum() / jnp.square(y).sum(),
            "gradient": abs((gradient * difference).sum()),
            "fisher": (jnp.square(gradient) * jnp.square(difference)).sum() / 2,
        }[kind]
        assert found[path][3] == pytest.approx(float(wanted), rel=2e-3)
        assert found[path][3] > found[path][8] > 0


def test_the_curvature_of_a_loss_is_that_of_finite_differences() -> None:
    found = errors_by("hessian", squares)[PATHS[0]][3]
    before, _, difference = moved(0, 3)
    kernel = before.layers[0].kernel[...]

    def at(step: float) -> float:
        before.layers[0].kernel[...] = kernel + step * difference
        return float(squares(before, SMALL))

    assert found == pytest.approx(abs(at(0.2) - 2 * at(0.0) + at(-0.2)) / 0.04 / 2, rel=0.02)


@pytest.mark.parametrize(
    ("budget", "least"),
    [
        ({"mean_bits": 2.9}, "mean_bits=3.0"),
        ({"max_bytes": 17}, "max_bytes=18.0"),
        # 32 samples, 48 multiply-adds each, weights of 3 bits, inputs of 8
        ({"max_bit_operations": 1000}, "max_bit_operations=36864"),
        ({"max_seconds": 1.0, "seconds": dict.fromkeys(PATHS, (1.0, 2.0))}, "max_seconds=2.0"),
    ],
)
def test_a_budget_that_nothing_fits_is_refused_with_the_least(budget: dict[str, Any], least: str) -> None:
    recipe = Recipe(AllocateBits(bits=(3, 8), **budget))
    with pytest.raises(ValueError, match=f"no assignment fits the budget .*\n  cure: {least}"):
        recipe.explain(small(), RULE, SMALL)
    with pytest.raises(ValueError, match=f"no assignment fits the budget .*\n  cure: {least}"):
        recipe.apply(small(), RULE, [SMALL], progress=False)


@pytest.mark.heavy
def test_measured_seconds_decide() -> None:
    def seconds(path: str, bits: int) -> float:
        return bits if path == PATHS[0] else 0.0

    recipe = Recipe(AllocateBits(bits=(3, 8), max_seconds=4.0, seconds=seconds))
    chosen = recipe.apply(small(), RULE, [SMALL], progress=False).report.steps[0].sites
    assert [one.bits for one in chosen] == [3, 8]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mean_bits": 4.0, "max_bytes": 9}, "takes one budget, got mean_bits=4.0 and max_bytes=9"),
        ({"max_seconds": 4.0}, "max_seconds and seconds belong together"),
        ({"mean_bits": 4.0, "sensitivity": "fischer"}, "did you mean 'fisher'"),
        ({"mean_bits": 4.0, "sensitivity": "fisher"}, "that of a loss, and none is given"),
        ({"mean_bits": 4.0, "loss": squares}, "does not use a loss"),
    ],
)
def test_wrong_allocations_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        AllocateBits(**wrong)


def test_seconds_need_all_weights() -> None:
    table = {"layers.0.kernl": (1.0, 2.0)}
    with pytest.raises(ValueError, match=r"no times for layers\.0\.kernel; did you mean 'layers\.0\.kernl'"):
        Recipe(AllocateBits(bits=(3, 8), max_seconds=1.0, seconds=table)).explain(small(), RULE, SMALL)


def test_a_loss_that_is_not_finite_is_refused_by_path() -> None:
    with pytest.raises(ValueError, match=r"the fisher error of layers\.0\.kernel is not finite"):
        errors_by("fisher", lambda candidate, batch: jnp.sqrt(-jnp.square(candidate(batch))).sum())


@pytest.mark.lengthy
def test_allocation_comes_first() -> None:
    with pytest.raises(TypeError, match="takes one budget"):
        AllocateBits()
    for asked in ("apply", "explain"):
        recipe = Recipe(Solve(GPTQ()), AllocateBits(mean_bits=4.0))
        with pytest.raises(ValueError, match="in this order"):
            recipe.explain(small(), RULE, SMALL) if asked == "explain" else recipe.apply(
                small(), RULE, [SMALL]
            )
