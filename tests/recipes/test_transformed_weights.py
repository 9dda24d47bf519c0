"""A float model's state does not fit a model whose weights are stored for transforms of their inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.quant import Int8DynamicActPerRowFloat, Int8WeightPerChannelFloat, Int32Bias
from jqinject.recipes import RTN, Recipe, Rotate, Solve

X = jax.random.normal(jax.random.key(1), (6, 8))


class Bare(nnx.Module):
    """A parameter that contracts what comes out of a nonlinearity."""

    def __init__(self) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (8, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bd,df->bf", jnp.tanh(x), self.w[...])


def _layers() -> nnx.Module:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 4, rngs=rngs))


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("made", "named"), [(_layers, "layers.2.input_quant"), (Bare, "einsum0_lhs")], ids=["layers", "bare"]
)
def test_a_float_state_is_told_from_one_of_the_rotated_model(made: Any, named: str) -> None:
    model = made()
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowFloat)
    rotated = Recipe(Rotate("R4"), Solve(RTN())).apply(model, rule, [X], progress=False).model
    y = rotated(X)
    own = jqinject.load_state(rotated, nnx.state(nnx.clone(rotated)))
    assert own.transformed == () and bool((rotated(X) == y).all())
    with pytest.warns(UserWarning, match=f"stored for transforms of their inputs: {named}"):
        report = jqinject.load_state(rotated, nnx.state(model))
    assert report.transformed == (named,)
    assert f"weights are stored for transforms of inputs here: {named}" in str(report)


@pytest.mark.heavy
def test_lora_refuses_quantizers_of_biases() -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, bias_quant=Int32Bias)
    with pytest.raises(
        ValueError, match="lora runs layers as parts of the model's program, where biases have"
    ):
        jqinject.lora(_layers(), rule, rank=2, inputs=X, rngs=nnx.Rngs(0))
