"""AWQ compares scales by what the module around the sites returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.quant import Int8WeightPerChannelFloat
from jqinject.recipes import AWQ, RTN, Recipe, Solve
from jqinject.recipes.passes.smoothing import awq_scales, candidates

WIDTH = 16


class Gated(nnx.Module):
    """Two sites with the same inputs, whose outputs are multiplied: the error of the one is weighted by the other."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(WIDTH, 24, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 24, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(24, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gain = nnx.Param(jnp.exp(jax.random.normal(jax.random.key(5), (WIDTH,))))
        self.mlp = Gated(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(jnp.tanh(x) * self.gain[...])


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = Layer(rngs), Layer(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


def _by_hand(layer: Any, x: jax.Array, scales: np.ndarray, rule: Rule) -> float:
    """The squared error of the gated network with both matrices rounded under scales."""
    changed = nnx.clone(layer.mlp)
    for name in ("gate", "up"):
        kernel = getattr(layer.mlp, name).kernel[...] * scales[:, None]
        single = nnx.Linear(WIDTH, 24, use_bias=False, rngs=nnx.Rngs(0))
        single.kernel[...] = kernel
        single = jqinject.quantize(single, Rule(weight_quant=rule.quantizer("weight_quant")))
        single.eval()
        getattr(changed, name).kernel[...] = single.quant_weight().value / scales[:, None]  # pyright: ignore
    given = jnp.tanh(x) * layer.gain[...]
    return float(jnp.square(changed(given) - layer.mlp(given)).sum())


@pytest.mark.heavy
def test_the_scales_with_the_least_error_of_the_module_win() -> None:
    model = Model()
    batches = [jax.random.normal(jax.random.key(seed), (40, WIDTH)) for seed in (1, 2)]
    x = jnp.concatenate(batches)
    rule = Rule(".*gate|.*up", weight_quant=Int8WeightPerChannelFloat.let(bit_width=3))
    found: Any = Recipe(AWQ(grid=8, weights=False)).apply(model, rule, batches, progress=False).model
    given = {"first": x, "second": model.first(x)}
    for name, x in given.items():
        layer = getattr(model, name)
        inputs = np.asarray(jnp.abs(jnp.tanh(x) * layer.gain[...]).mean(0))
        tried = [awq_scales(inputs, None, ratio) for ratio, _ in candidates(8, False)]
        errors = [_by_hand(layer, x, scales, rule) for scales in tried]
        best = tried[int(np.argmin(errors))]
        kept = np.asarray(layer.gain[...] / getattr(found, name).gain[...])
        np.testing.assert_allclose(kept, best, rtol=1e-4)
        assert min(errors) < errors[0]


@pytest.mark.heavy
def test_a_module_alone_is_measured_by_its_sites() -> None:
    layer = Gated(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (40, WIDTH))

    class Gained(nnx.Module):
        def __init__(self) -> None:
            self.gain = nnx.Param(jnp.linspace(0.2, 3.0, WIDTH))
            self.gate, self.up, self.down = layer.gate, layer.up, layer.down

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x * self.gain[...]
            return self.down(nnx.silu(self.gate(x)) * self.up(x))

    rule = Rule("gate|up", weight_quant=Int8WeightPerChannelFloat.let(bit_width=3))
    block, outputs = (
        Recipe(AWQ(grid=8, error=error), Solve(RTN()))
        .apply(Gained(), rule, [x], progress=False)
        .model.gain[...]
        for error in ("block", "outputs")
    )
    np.testing.assert_array_equal(block, outputs)


class AfterNorm(nnx.Module):
    """Contracts one weight as often as it is told, each time with the same numbers but for their sign."""

    def __init__(self, times: int) -> None:
        self.norm = nnx.RMSNorm(32, rngs=nnx.Rngs(0))
        self.fc = nnx.Linear(32, 8, use_bias=False, rngs=nnx.Rngs(1))
        self.times = times

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        return sum(((-1) ** turn * self.fc((-1) ** turn * y) for turn in range(self.times)), jnp.zeros(()))


@pytest.mark.heavy
@pytest.mark.parametrize("error", ["outputs", "block"])
def test_a_weight_that_is_contracted_thrice_has_the_scales_of_one_that_is_contracted_once(error: str) -> None:
    x = jax.random.normal(jax.random.key(2), (64, 32)) * jnp.logspace(-1, 1, 32)
    rule = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=3))
    once, thrice = (
        Recipe(AWQ(error=error), Solve(RTN())).apply(AfterNorm(times), rule, [x], progress=False).model  # pyright: ignore
        for times in (1, 3)
    )
    assert float(jnp.ptp(jnp.log(once.norm.scale[...]))) > 0.1  # channels are scaled at all
    np.testing.assert_allclose(thrice.norm.scale[...], once.norm.scale[...], rtol=1e-5)
    np.testing.assert_allclose(thrice.fc.quant_weight().value, once.fc.quant_weight().value, rtol=1e-5)
