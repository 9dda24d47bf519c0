"""Low-rank products beside quantized weights: exact at full rank, run, solved around, trained and served."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, quant, quantize
from jqinject.recipes import GPTQ, RTN, CorrectBiases, LowRank, Recipe, SmoothQuant, Solve

INT3 = quant.Int8WeightPerChannelFloat.let(bit_width=3)
X = jax.random.normal(jax.random.key(2), (48, 12)) @ jax.random.normal(jax.random.key(3), (12, 12))


class Mixed(nnx.Module):
    """A layer, experts, a scanned stack, and a weight that is contracted twice."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self.norm = nnx.LayerNorm(12, rngs=nnx.Rngs(0))
        self.fc = nnx.Linear(12, 12, rngs=nnx.Rngs(0))
        self.experts = nnx.Param(jax.random.normal(keys[0], (2, 12, 12)) / 4)
        self.stack = nnx.Param(jax.random.normal(keys[1], (2, 12, 12)) / 4)
        self.head = nnx.Param(jax.random.normal(keys[2], (12, 12)) / 4)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.tanh(self.fc(self.norm(x)))
        x = x + jnp.einsum("bd,edf->ebf", x, self.experts.get_value()).sum(0)
        x, _ = jax.lax.scan(lambda x, w: (x + nnx.tanh(x @ w), None), x, self.stack.get_value())
        return nnx.tanh(x @ self.head.get_value()) @ self.head.get_value()


PATHS = {"fc.kernel", "experts", "stack", "head"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "layer",
    [nnx.Linear(12, 8, rngs=nnx.Rngs(0)), nnx.Conv(12, 8, (3,), feature_group_count=2, rngs=nnx.Rngs(1))],
    ids=["linear", "grouped convolution"],
)
def test_full_rank_is_exact(layer: Any) -> None:
    x = X[None]
    result = Recipe(LowRank(rank=100)).apply(layer, Rule(weight_quant=INT3), [x], progress=False)
    (site,) = result.report.steps[0].sites
    assert site.facts["rest"] < 1e-5
    np.testing.assert_allclose(result.model(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.lengthy
def test_it_composes_is_solved_around_trained_and_served() -> None:
    rule = Rule(weight_quant=INT3, input_quant=quant.Int8ActPerTensorAbsMax)
    recipe = Recipe(SmoothQuant(), LowRank(rank=2), Solve(GPTQ()))
    result = recipe.apply(Mixed(), rule, [X], progress=False)
    model, wanted = result.model, Mixed()(X)
    assert all(each.facts["error"] < 1 for each in result.report.steps[1].sites)
    solved = result.report.steps[2].sites
    assert {each.path for each in solved} == PATHS
    assert sum(each.solved for each in solved) < sum(each.nearest for each in solved)
    served = jqinject.freeze(nnx.clone(model))
    np.testing.assert_allclose(served(X), model(X), rtol=1e-4, atol=1e-4)
    state = nnx.to_flat_state(nnx.state(served, nnx.LoRAParam))
    assert {".".join(map(str, path[2:-1])) for path, _ in state} == PATHS
    _, gradients = jqinject.value_and_grad(lambda each: jnp.square(each(X) - wanted).mean())(served)
    assert all(float(jnp.abs(each).max()) > 0 for each in jax.tree.leaves(gradients))


def test_more_iterations_lessen_the_error() -> None:
    layer, rule = nnx.Linear(12, 12, rngs=nnx.Rngs(0)), Rule(weight_quant=INT3)

    def error(iterations: int) -> float:
        found = Recipe(LowRank(2, iterations)).apply(layer, rule, [X], progress=False)
        kernel, adapter = found.model.op_quant.weights["kernel"], found.model.op_quant.adapters["kernel"]  # pyright: ignore
        stored = kernel.weight_quant(kernel.weight.get_value()).value
        wrong = stored + adapter.a.get_value() @ adapter.b.get_value() - layer.kernel.get_value()
        usual = quantize(layer, rule).quant_weight().value - layer.kernel.get_value()
        ratio = float(jnp.square(wrong).sum() / jnp.square(usual).sum())
        np.testing.assert_allclose(found.report.steps[0].sites[0].facts["error"], ratio, rtol=1e-3)
        return ratio

    assert error(4) < 0.98 * error(1)


@pytest.mark.heavy
def test_a_merged_product_is_quantized_with_the_weight_by_its_rule() -> None:
    layer, rule = nnx.Linear(12, 12, rngs=nnx.Rngs(0)), Rule(weight_quant=INT3)
    model = Recipe(LowRank(3), Solve(RTN())).apply(layer, rule, [X], progress=False).model
    adapter = model.op_quant.adapters["kernel"]  # pyright: ignore
    kernel = model.kernel.get_value() + adapter.a.get_value() @ adapter.b.get_value()
    merged = nnx.clone(layer)
    merged.kernel.set_value(kernel)
    wanted = quantize(merged, rule)(X)
    np.testing.assert_allclose(jqinject.merge_lora(model)(X), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("inputs", ["float", "quantized"])
def test_biases_are_corrected_for_what_weight_and_product_make(inputs: Any) -> None:
    layer = nnx.Linear(12, 4, rngs=nnx.Rngs(0))
    rule = Rule(weight_quant=INT3, input_quant=quant.Int8ActPerTensorAbsMax)
    recipe = Recipe(LowRank(2), CorrectBiases(inputs=inputs))
    result = recipe.apply(layer, rule, [X + 1], progress=False)
    np.testing.assert_allclose(result.model(X + 1).mean(0), layer(X + 1).mean(0), atol=1e-4)


@pytest.mark.heavy
def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"LowRank: rank must be at least 1, got 0.\n  cure"):
        LowRank(rank=0)
    layer = nnx.Linear(12, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"LowRank splits float weights.*\n  cure: Recipe\(SmoothQuant"):
        Recipe(Solve(RTN()), LowRank(2)).apply(layer, Rule(weight_quant=INT3), [X], progress=False)
    biased = Rule(weight_quant=INT3, bias_quant=quant.Int8Bias)
    with pytest.raises(ValueError, match=r"where biases have no quantizer: Rule.*\n  cure: a rule without"):
        Recipe(LowRank(2)).apply(layer, biased, [X], progress=False)
    with pytest.raises(ValueError, match=r"LowRank finds the contractions.*\n  cure: .*Recipe.apply"):
        Recipe(LowRank(2)).apply(
            layer, Rule(weight_quant=INT3), [X], call=lambda model, x: model(x), progress=False
        )


@pytest.mark.heavy
def test_adapters_may_begin_with_the_rounding_error() -> None:
    layer, rule = nnx.Linear(12, 8, rngs=nnx.Rngs(0)), Rule(weight_quant=INT3)
    made = {
        start: jqinject.lora(layer, rule, rank=8, alpha=4.0, start=start, inputs=X, rngs=nnx.Rngs(0))
        for start in ("zeros", "error")
    }
    np.testing.assert_allclose(made["error"](X), layer(X), rtol=1e-4, atol=1e-4)
    assert float(jnp.abs(made["zeros"](X) - layer(X)).max()) > 0.01
    with pytest.raises(ValueError, match="lora: start is 'zeros' or 'error', got 'ones'"):
        jqinject.lora(layer, rule, rank=2, start="ones", inputs=X, rngs=nnx.Rngs(0))  # pyright: ignore
