"""What models that split themselves lose: ranges without inputs=, histories in a stack that is cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, quantize
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

    def __init__(self) -> None:
        self.first, self.second = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        COUNT.append(1)
        graphdef, state = nnx.split(self.second)
        return jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(state, self.first(x))


COUNT: list[int] = []


def test_ranges_that_copies_lost_are_named_before_they_are_frozen() -> None:
    model = quantize(Model(), W8A8)
    assert type(model) is Model
    COUNT.clear()
    nnx.jit(lambda model, x: model(x))(model, X)
    assert len(COUNT) == 1  # training steps are traced once
    with pytest.raises(ValueError, match=r"freeze: second\.input_quant.*never saw data"):
        jqinject.freeze(model)


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


@pytest.mark.heavy
def test_histories_of_gradients_in_a_stack_that_is_cut() -> None:
    model = quantize(Cut(), FP8, inputs=X)
    with pytest.raises(TypeError, match=r"is cut by index(.|\n)*cure: nnx\.scan"):
        jqinject.value_and_grad(lambda model, x: model(x).sum())(model, X)
