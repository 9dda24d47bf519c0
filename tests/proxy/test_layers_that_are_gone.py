"""What a proxy still answers when its layer was made on the spot, and what an activation may come as."""

import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import quant
from jqinject.nn import QuantConv, QuantEmbed, QuantIdentity, QuantLinear
from jqinject.quant import (
    Fp8e4m3OCPWeightPerTensorFloat,
    Int8AccumulatorAwareWeightQuant,
    Int8ActPerTensorFloat,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    MXInt8Weight,
    ShiftedUint8WeightPerChannelFloat,
)


def linear(**given):
    return QuantLinear(8, 4, **given, rngs=nnx.Rngs(0))


LAYERS = {
    "linear": linear,
    "conv": lambda **given: QuantConv(8, 4, (3,), **given, rngs=nnx.Rngs(0)),
    "embed": lambda **given: QuantEmbed(8, 4, **given, rngs=nnx.Rngs(0)),
    "clone": lambda **given: nnx.clone(linear(**given)),
}
WEIGHTS = [
    Int8WeightPerTensorFloat,
    Int8WeightPerChannelFloat,
    ShiftedUint8WeightPerChannelFloat,
    MXInt8Weight,
    Fp8e4m3OCPWeightPerTensorFloat,
]


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", LAYERS)
def test_the_proxy_of_a_layer_made_on_the_spot(kind):
    proxies = [LAYERS[kind](weight_quant=weight_quant).weight_quant for weight_quant in WEIGHTS]
    gc.collect()
    for weight_quant, proxy in zip(WEIGHTS, proxies, strict=True):
        kept = LAYERS[kind](weight_quant=weight_quant)
        assert proxy.tracked_modules == ()
        for name in ("scale", "zero_point", "bit_width"):
            expected = getattr(kept.weight_quant, name)()
            np.testing.assert_array_equal(getattr(proxy, name)(), expected)


@pytest.mark.heavy
def test_quantizers_that_know_more_of_their_layer():
    given = {"weight_quant": Int8AccumulatorAwareWeightQuant, "input_quant": Int8ActPerTensorFloat}
    kept = linear(**given)
    np.testing.assert_array_equal(linear(**given).weight_quant.scale(), kept.weight_quant.scale())
    bias = {"bias_quant": Int8BiasPerTensorFloatInternalScaling}
    np.testing.assert_array_equal(linear(**bias).bias_quant.scale(), linear(**bias).bias_quant.scale())


def test_the_weight_is_that_at_the_last_read():
    layer = linear(weight_quant=Int8WeightPerTensorFloat)
    layer.kernel = nnx.Param(jnp.full((8, 4), 254.0))
    proxy = layer.weight_quant
    del layer
    np.testing.assert_allclose(proxy.scale(), 2.0)


@pytest.mark.heavy
def test_nothing_is_kept_alive():
    layer = linear(weight_quant=Int8WeightPerTensorFloat)
    found = [weakref.ref(layer), weakref.ref(layer.weight_quant), weakref.ref(layer.kernel.get_value())]
    frozen = linear(weight_quant=Int8WeightPerTensorFloat)
    found.append(weakref.ref(frozen.kernel.get_value()))
    assert frozen.weight_quant is not None
    jqinject.freeze(frozen)
    del layer
    gc.collect()
    assert [reference() for reference in found] == [None] * 4


def test_to_assemble_again_takes_the_layer():
    with pytest.raises(ValueError, match=r"the layer is gone\.(.|\n)*keep the layer in a variable"):
        linear().weight_quant.init_tensor_quant()


@pytest.mark.lengthy
def test_an_activation_may_come_as_a_list():
    array = jnp.array([[0.5, -1.0, 0.25], [2.0, 0.0, 1.0]])
    for name in ("MXInt8Act", "MXFloat8e4m3Act", "Int8ActPerTensorFloat", "Int8DynamicActPerRowFloat"):
        identity = QuantIdentity(getattr(quant, name), return_quant_tensor=True)
        expected, got = nnx.clone(identity)(array), identity(array.tolist())
        assert type(got) is type(expected)
        np.testing.assert_array_equal(got.value, expected.value)
