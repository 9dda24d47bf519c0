"""Rules for operations leave alone what layers of ours compute."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.model import Rule, quantize
from jqinject.nn import (
    QuantAvgPool,
    QuantConcat,
    QuantEltwiseAdd,
    QuantMultiHeadAttention,
    QuantScaledDotProductAttention,
)
from jqinject.quant import Int8ActDynamicPerRow, Int8ActPerTensorMinMax, Int8WeightPerChannelFloat
from tests.brevitas_defaults import ATTENTION, WITHIN_ATTENTION

LAYERS = {
    "sum": lambda: (QuantEltwiseAdd(), lambda layer, x: layer(x, x)),
    "concatenation": lambda: (QuantConcat(), lambda layer, x: layer([x, x], axis=0)[:2]),
    "pool": lambda: (QuantAvgPool((1, 1)), lambda layer, x: layer(x)),
    "heads": lambda: (
        QuantMultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0), **ATTENTION),
        lambda layer, x: layer(x),
    ),
    "attention": lambda: (
        QuantScaledDotProductAttention(**WITHIN_ATTENTION),
        lambda layer, x: layer(*[x.reshape(2, 3, 2, 2)] * 3).reshape(x.shape),
    ),
}


class Around(nnx.Module):
    def __init__(self, layer, call):
        self.layer = layer
        self.call = nnx.static(call)

    def __call__(self, x):
        return x + self.call(self.layer, x)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_operations_within_layers_are_the_layers_own(make):
    rule = Rule(op=("add", "einsum", "dot_general"), input_quant=Int8ActPerTensorMinMax)
    x = jnp.ones((2, 3, 4))
    model = quantize(Around(*make()), rule, inputs=x)
    # What a layer has quantized already is not quantized again.
    assert {"add0_lhs"} <= set(model.op_quant) <= {"add0_lhs", "add0_rhs"}
    assert model(x).shape == x.shape


def test_a_model_that_is_a_layer_is_quantized_once():
    rule, x = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActDynamicPerRow), jnp.eye(4) + 0.3
    alone, within = (
        quantize(model, rule, inputs=x)
        for model in (nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0))))
    )
    np.testing.assert_array_equal(alone(x), within(x))
    assert not hasattr(alone, "op_quant")
