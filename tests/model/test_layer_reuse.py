"""Layers that are alike: what is copied from one to the other, and what must not be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, value
from jqinject.nn import QuantLinear
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int8WeightPerTensorFloat
from jqinject.quant.enums import ScalingImplType

X = jax.random.normal(jax.random.key(0), (4, 8))


class FromTheWeight(Int8WeightPerTensorFloat):
    """A constant scale, read from the numbers of the weight when the quantizer is assembled."""

    scaling_impl_type = ScalingImplType.CONST

    @value
    def scaling_init(module):
        return float(jnp.max(jnp.abs(module.weight[...])))


class Learned(Int8WeightPerTensorFloat):
    scaling_impl_type = ScalingImplType.PARAMETER_FROM_STATS


def four_layers():
    return nnx.Sequential(*[nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(4)])


def alone(plain, quantizer, **more):
    """What the layer is when nothing else is quantized with it."""
    return jqinject.quantize(nnx.clone(plain), Rule(weight_quant=quantizer, **more))


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [Int8WeightPerChannelFloat, FromTheWeight, Learned])
def test_each_is_quantized_as_if_it_were_alone(quantizer):
    plain = four_layers()
    given = {"input_quant": Int8ActPerTensorFloat}
    quantized = jqinject.quantize(plain, Rule(weight_quant=quantizer, **given))
    for layer, single in zip(quantized.layers, plain.layers, strict=True):
        expected = alone(single, quantizer, **given)
        for _ in range(2):
            np.testing.assert_array_equal(layer(X), expected(X))
        np.testing.assert_array_equal(layer.weight_quant.scale(), expected.weight_quant.scale())
        assert nnx.graphdef(layer) == nnx.graphdef(expected)


def test_copies_are_apart_and_know_their_layer():
    quantized = jqinject.quantize(four_layers(), Rule(weight_quant=Int8WeightPerChannelFloat))
    proxies = [layer.weight_quant for layer in quantized.layers]
    assert len({id(proxy) for proxy in proxies}) == 4
    assert len({p.tensor_quant for p in proxies}) == 1  # a value, as it holds no Variables
    last = quantized.layers[3]
    assert proxies[3].tracked_modules == (last,) and type(last) is QuantLinear
    last.weight = nnx.Param(2 * last.weight[...])
    np.testing.assert_allclose(
        proxies[3].scale(), jnp.abs(last.weight[...]).max(0, keepdims=True) / 127, rtol=1e-6
    )
    proxies[3].disable_quant = True
    assert [proxy.is_quant_enabled for proxy in proxies] == [True, True, True, False]


def test_other_shapes_and_rules_get_their_own():
    layers = [nnx.Linear(8, width, rngs=nnx.Rngs(0)) for width in (8, 8, 8)]
    wider = [nnx.Linear(8, 6, rngs=nnx.Rngs(0)) for _ in range(3)]
    model = nnx.Dict(first=nnx.List(layers), second=nnx.List(wider))

    class Both(nnx.Module):
        def __init__(self):
            self.parts = model

    four_bits = Rule("parts.first.*", weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4)
    quantized = jqinject.quantize(Both(), [four_bits, Rule(weight_quant=Int8WeightPerChannelFloat)])
    first, second = quantized.parts["first"], quantized.parts["second"]
    assert [layer.weight_quant.bit_width() for layer in (*first, *second)] == [4, 4, 4, 8, 8, 8]
    assert [layer.weight_quant.scale().shape for layer in (*first, *second)] == [(1, 8)] * 3 + [(1, 6)] * 3


def test_a_proxy_that_a_rule_gives_is_shared_and_not_copied():
    first = QuantLinear(8, 8, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(9))
    quantized = jqinject.quantize(four_layers(), Rule(weight_quant=first.weight_quant))
    assert all(layer.weight_quant is first.weight_quant for layer in quantized.layers)
    largest = max(float(jnp.abs(layer.weight[...]).max()) for layer in (first, *quantized.layers))
    np.testing.assert_allclose(first.weight_quant.scale(), largest / 127, rtol=1e-6)
