"""A model that was quantized without inputs says, when it is called, what its blocks throw away."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqinject
from jqinject import LostStateWarning, Rule, UncalibratedWarning, quantize
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3WeightPerTensorDelayed,
    Fp8e5m2GradPerTensorDelayed,
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
)

X = jnp.ones((2, 4))
W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
FP8 = Rule(
    weight_quant=Fp8e4m3WeightPerTensorDelayed,
    input_quant=Fp8e4m3ActPerTensorDelayed,
    grad_quant=Fp8e5m2GradPerTensorDelayed,
)


class Model(nnx.Module):
    """Two blocks, of which the second splits itself."""

    def __init__(self, keeps: bool) -> None:
        self.first, self.second = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1))
        self.keeps = keeps

    def __call__(self, x: jax.Array) -> jax.Array:
        COUNT.append(1)
        x = self.first(x)
        if self.keeps:
            return nnx.remat(lambda block, x: block(x))(self.second, x)
        graphdef, state = nnx.split(self.second)
        return jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


COUNT: list[int] = []
LOST = r"Model throws away what its quantizers record in second\.input_quant(.|\n)*cure: quantize\(float_model, rules"


def run(way: str, model: Any) -> None:
    if way == "eager":
        model(X)
    elif way == "jit":
        nnx.jit(lambda model, x: model(x))(model, X)
    else:
        jqinject.value_and_grad(lambda model: model(X).sum())(model)


@pytest.mark.parametrize("way", ["eager", "jit", "gradient"])
def test_the_call_names_what_is_lost(way: str) -> None:
    with pytest.warns(LostStateWarning, match=LOST) as caught:
        run(way, quantize(Model(False), W8A8))
    assert "first" not in str(caught[0].message)


@pytest.mark.parametrize("way", ["eager", "jit", "gradient"])
def test_models_that_keep_it_are_traced_once(way: str) -> None:
    model = quantize(Model(True), W8A8)
    COUNT.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(way, model)
    assert len(COUNT) == 1


def test_one_look_at_the_first_call_and_none_at_compiled_ones() -> None:
    model = quantize(Model(False), W8A8)
    step = nnx.jit(lambda model, x: model(x))
    COUNT.clear()
    with pytest.warns(LostStateWarning):
        step(model, X)
    assert len(COUNT) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, X)
        assert len(COUNT) == 2
    with pytest.warns(LostStateWarning):
        model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
        pickle.loads(pickle.dumps(quantize(Model(True), W8A8)))(X)
        warnings.simplefilter("ignore", UncalibratedWarning)
        evaluated = quantize(Model(False), W8A8)
        evaluated.eval()
        evaluated(X)


class Cut(nnx.Module):
    """A stack of which each layer is cut out by its index."""

    def __init__(self) -> None:
        self.blocks = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(params=key)))(
            jax.random.split(jax.random.key(0), 3)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.blocks)
        for number in range(3):
            one = jax.tree.map(lambda a, i=number: a[i], state)
            x = jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(one, x)
        return x


def test_histories_of_gradients_in_a_stack_that_is_cut() -> None:
    model = quantize(Cut(), FP8, inputs=X)
    with pytest.raises(TypeError, match=r"is cut by index(.|\n)*cure: nnx\.scan"):
        jqinject.value_and_grad(lambda model, x: model(x).sum())(model, X)
