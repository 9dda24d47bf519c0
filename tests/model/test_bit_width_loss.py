"""Losses of learned bit widths: against the peer's numbers for the same model, and by their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quantize
from jqinject.model import (
    ActivationBitWidthWeightedBySize,
    QuantLayerOutputBitWidthWeightedByOps,
    WeightBitWidthWeightedBySize,
)
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear, QuantReLU
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat

LEARNED = {"bit_width_impl_type": "parameter", "return_quant_tensor": True}
X = jax.random.normal(jax.random.key(0), (2, 6, 6, 3))


class Model(nnx.Module):
    def __init__(self):
        weights = {
            "use_bias": False,
            "weight_quant": Int8WeightPerTensorFloat,
            "weight_bit_width_impl_type": "parameter",
            "return_quant_tensor": True,
            "rngs": nnx.Rngs(0),
        }
        self.image = QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=6, **LEARNED)
        self.conv = QuantConv(3, 4, (3, 3), padding="VALID", weight_bit_width=5, **weights)
        self.relu = QuantReLU(bit_width=4, **LEARNED)
        self.dense = QuantLinear(64, 7, weight_bit_width=3, **weights)

    def __call__(self, x):
        y = self.relu(self.conv(self.image(x)))
        return self.dense(y.reshape((y.shape[0], -1)))


# What Brevitas 0.13.4 retrieves for this model, and the gradients of the bit widths.
EXPECTED = {
    "weights": (3.388489246, {"conv": 0.1942446083, "dense": 0.8057554364}),
    "activations": (5.255814075, {"image": 0.6279069781, "relu": 0.3720930219}),
    "operations": (
        15.38235378,
        {"image": 0.8067228794, "conv": 0.8197344542, "relu": 0.2196078449, "dense": 0.2352941185},
    ),
}
LOSSES = {
    "weights": lambda model: WeightBitWidthWeightedBySize()(model),
    "activations": lambda model: ActivationBitWidthWeightedBySize()(model, X),
    "operations": lambda model: QuantLayerOutputBitWidthWeightedByOps()(model, X),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_the_peers(name):
    model = Model()
    model(X)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    loss, gradients = nnx.jit(nnx.value_and_grad(LOSSES[name]))(model)
    expected, by_layer = EXPECTED[name]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    offsets = {
        str(path[0]): float(leaf.get_value())
        for path, leaf in nnx.to_flat_state(gradients)
        if path[-1] == "bit_width_offset"
    }
    assert offsets == {path: pytest.approx(by_layer.get(path, 0.0), rel=1e-5) for path in offsets}
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))


@pytest.mark.heavy
def test_a_penalty_gives_up_bits():
    layer = QuantLinear(4, 2, weight_bit_width_impl_type="parameter", rngs=nnx.Rngs(0))
    width = layer.weight_quant.tensor_quant.bit_width_impl.bit_width_offset
    gradient = nnx.grad(WeightBitWidthWeightedBySize())(layer)
    width[...] -= 3 * gradient["weight_quant"]["tensor_quant"]["bit_width_impl"]["bit_width_offset"][...]
    assert float(WeightBitWidthWeightedBySize()(layer)) == 5.0


class Mixed(nnx.Module):
    """A layer, and a contraction that the model does by itself."""

    def __init__(self):
        self.w = nnx.Param(jax.random.normal(jax.random.key(1), (4, 6)))
        self.dense = nnx.Linear(6, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dense(nnx.relu(x @ self.w))


@pytest.mark.heavy
def test_activations_of_a_program_with_layers_count_and_have_gradients():
    rule = Rule(input_quant=Int8ActPerTensorFloat.let(bit_width_impl_type="parameter"))
    x = jax.random.normal(jax.random.key(2), (3, 4))
    model = quantize(Mixed(), rule, inputs=x)
    model(x)
    (site,) = model.op_quant.held.values()
    widths = [proxy.tensor_quant.bit_width_impl for proxy in (site, model.dense.input_quant)]
    for width, bits in zip(widths, (6, 4), strict=True):
        width.bit_width_offset[...] += bits - width()
    loss = ActivationBitWidthWeightedBySize()
    value, gradients = nnx.jit(nnx.value_and_grad(lambda model: loss(model, x)))(model)
    np.testing.assert_allclose(value, (6 * 4 + 4 * 6) / 10, rtol=1e-6)
    found = [
        float(leaf.get_value())
        for path, leaf in nnx.to_flat_state(gradients)
        if path[-1] == "bit_width_offset"
    ]
    assert sorted(found) == [pytest.approx(0.4), pytest.approx(0.6)]
    np.testing.assert_array_equal(loss(model, x), value)


def test_activations_of_a_stack_in_a_loop_count():
    class Looped(nnx.Module):
        def __init__(self):
            def make(rngs):
                return QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width_impl_type="parameter")

            self.stack = nnx.vmap(make)(jnp.arange(3))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.stack
            )

    model = Looped()
    offset = model.stack.act_quant.tensor_quant.bit_width_impl.bit_width_offset
    offset[...] -= jnp.array([0.0, 2.0, 4.0])
    assert float(ActivationBitWidthWeightedBySize()(model, jnp.ones((2, 4)))) == 6.0


@pytest.mark.parametrize(("loss", "arguments", "text"), [
    (WeightBitWidthWeightedBySize(), (), "no weights with a learned bit width to penalize.\n  cure: weight_bit"),
    (ActivationBitWidthWeightedBySize(), (jnp.ones((1, 4)),), "no activations with a learned bit width"),
    (QuantLayerOutputBitWidthWeightedByOps(), (jnp.ones((1, 4)),), "cure: return_quant_tensor=True"),
])  # fmt: skip
def test_nothing_to_penalize_is_an_error(loss, arguments, text):
    with pytest.raises(ValueError, match=text):
        loss(QuantLinear(4, 2, rngs=nnx.Rngs(0)), *arguments)
