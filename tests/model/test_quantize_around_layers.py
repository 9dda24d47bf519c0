"""Rules for operations leave alone what layers of ours compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.model import Rule, calibrate, freeze, quantize
from jqinject.nn import (
    QuantAvgPool,
    QuantConcat,
    QuantEltwiseAdd,
    QuantMultiHeadAttention,
    QuantScaledDotProductAttention,
)
from jqinject.quant import (
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorMinMax,
    Int8DynamicActPerRowAbsMax,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelFloat,
)
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


@pytest.mark.heavy
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_operations_within_layers_are_the_layers_own(make):
    rule = Rule(op=("add", "einsum", "dot_general"), input_quant=Int8ActPerTensorMinMax)
    x = jnp.ones((2, 3, 4))
    model = quantize(Around(*make()), rule, inputs=x)
    # What a layer has quantized already is not quantized again.
    assert {"add0_lhs"} <= set(model.op_quant) <= {"add0_lhs", "add0_rhs"}
    assert model(x).shape == x.shape


@pytest.mark.heavy
def test_a_model_that_is_a_layer_is_quantized_once():
    rule, x = (
        Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowAbsMax),
        jnp.eye(4) + 0.3,
    )
    alone, within = (
        quantize(model, rule, inputs=x)
        for model in (nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0))))
    )
    np.testing.assert_array_equal(alone(x), within(x))
    assert not hasattr(alone, "op_quant")


class Residual(nnx.Module):
    def __init__(self):
        self.fc = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return 20 * self.fc(x) + x


SHARED = Rule(op="add", input_quant=Int8ActPerTensorMinMax, share=True)


@pytest.mark.heavy
@pytest.mark.parametrize("output_quant", [None, Int8ActPerTensorAbsMax])
def test_both_operands_of_an_addition_have_one_scale_that_covers_both(output_quant):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    rules = [SHARED, Rule(weight_quant=Int8WeightPerChannelFloat, output_quant=output_quant)]
    model, wide = quantize(Residual(), rules, inputs=(x,)), []
    calibrate(model, [x, 2 * x], progress=False)
    proxy = model.op_quant["add0_inputs"]
    assert list(model.op_quant.held) == ["add0_inputs"] and proxy.scale().size == 1
    for data in (x, 2 * x):
        branch = 20 * Residual().fc(data)
        wide.append((max(branch.max(), data.max()), min(branch.min(), data.min())))
    high, low = np.mean(wide, 0)
    np.testing.assert_allclose(proxy.scale(), (high - low) / 255, rtol=1e-2)
    branch = 20 * model.fc(x)
    expected = proxy(branch).value + proxy(x).value
    np.testing.assert_allclose(model(x), expected, atol=1e-6)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(freeze(model), x), expected, atol=1e-5)


def test_what_cannot_share_a_scale_is_refused():
    for given in ({"op": "multiply", "input_quant": Int8ActPerTensorMinMax}, {"op": "add"}, {}):
        with pytest.raises(
            ValueError, match=r"share=True gives the two operands of add or subtract one scale"
        ):
            Rule(**given, share=True)
    rows = Rule(op="add", input_quant=Int8DynamicActPerRowFloat, share=True)
    with pytest.raises(ValueError, match=r"add0: share=True .* one for each row"):
        quantize(Residual(), rows, inputs=(jnp.ones((4, 8)),))
