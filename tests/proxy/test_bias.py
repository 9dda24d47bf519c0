"""The proxy of biases: a scale from the accumulator, or one of its own."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.nn import QuantConv, QuantLinear
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFloat,
    Int16Bias,
    NoneBiasQuant,
)
from jqinject.quant_tensor import IntQuantTensor

BIAS = jnp.array([0.5, -1.28, 0.0])
OWN = Int8BiasPerTensorFloatInternalScaling


def linear(quantizer, **given):
    layer = QuantLinear(4, 3, bias_quant=quantizer, rngs=nnx.Rngs(0), **given)
    if layer.bias is not None:
        layer.bias = nnx.Param(BIAS)
    return layer


@pytest.mark.heavy
def test_a_scale_of_its_own():
    layer = linear(OWN)
    assert not layer.bias_quant.requires_input_scale
    assert float(layer.bias_quant.scale()) == pytest.approx(0.01)
    assert (layer.bias_quant.bit_width(), float(layer.bias_quant.zero_point())) == (8, 0)
    np.testing.assert_array_equal(layer.quant_bias().int(), [50, -128, 0])


def test_a_scale_that_comes_with_the_input():
    layer = linear(Int16Bias, weight_quant=Int8WeightPerChannelFloat)
    assert layer.bias_quant.requires_input_scale
    assert layer.bias_quant.scale() is None  # nobody knows it before the input comes
    assert (layer.bias_quant.bit_width(), float(layer.bias_quant.zero_point())) == (16, 0)
    x = IntQuantTensor(jnp.ones((2, 4)), 0.5, 0.0, 8, signed=True, training=False)
    bias, weight = layer.quant_bias(x), layer.quant_weight()
    steps = 0.5 * np.asarray(weight.scale).reshape(-1)
    np.testing.assert_allclose(bias.scale, steps, rtol=1e-6)
    np.testing.assert_array_equal(bias.int(), np.clip(np.round(BIAS / steps), -(2**15), 2**15 - 1))


def test_a_scale_for_every_element():
    layer = linear(OWN, bias_scaling_per_output_type="channel", bias_scaling_min_val=1.28)
    np.testing.assert_allclose(layer.bias_quant.scale(), [0.01, 0.01, 0.01], rtol=1e-6)
    layer = linear(OWN, bias_scaling_per_output_type="channel")
    np.testing.assert_allclose(layer.quant_bias().value, np.array([0.5 * 127 / 128, -1.28, 0.0]), rtol=1e-6)


@pytest.mark.parametrize("quantizer", [OWN, Int16Bias, NoneBiasQuant])
@pytest.mark.parametrize("layer", [QuantLinear, QuantConv])
def test_without_a_bias_there_is_nothing_to_quantize(layer, quantizer):
    where = () if layer is QuantLinear else (1,)
    given = {"use_bias": False, "input_quant": Int8ActPerTensorFloat, "rngs": nnx.Rngs(0)}
    built = layer(4, 3, *where, bias_quant=quantizer, **given)
    assert built.quant_bias() is None
    assert built.bias_quant.scale() is None
    x = jnp.ones((2, 5, 4))
    np.testing.assert_array_equal(built(x), layer(4, 3, *where, **{**given, "rngs": nnx.Rngs(0)})(x))


def test_an_input_of_several_scales_is_refused():
    layer = linear(Int16Bias)
    x = IntQuantTensor(jnp.ones((2, 4)), jnp.array([[0.5], [0.25]]), 0.0, 8, signed=True, training=False)
    with pytest.raises(
        ValueError, match=r"Int16Bias needs an input with one scale, got scales of shape \(2, 1\)"
    ):
        layer(x)


def test_a_new_bias_is_learned_from_at_once():
    layer = linear(OWN, bias_scaling_impl_type="parameter_from_stats")
    assert float(layer.quant_bias().scale) == pytest.approx(0.01)
    layer.bias = nnx.Param(2 * BIAS)
    assert float(layer.quant_bias().scale) == pytest.approx(0.02)


def test_two_layers_share_one():
    first = linear(OWN)
    second = linear(first.bias_quant)
    second.bias = nnx.Param(10 * BIAS)
    assert first.bias_quant is second.bias_quant
    for layer in (first, second):
        assert float(layer.quant_bias().scale) == pytest.approx(0.1)
