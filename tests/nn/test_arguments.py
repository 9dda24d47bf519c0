"""What a layer accepts for a quantizer, and what it says when that is wrong: error texts are an interface."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import ExtendedInjector
from jqinject.core import BinaryQuant, ConstScaling
from jqinject.inject import Binding
from jqinject.nn import QuantIdentity, QuantLinear, QuantReLU, QuantSigmoid
from jqinject.proxy import ActQuantProxyFromInjector, WeightQuantProxyFromInjector
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    NoneWeightQuant,
    Uint8ActPerTensorFloat,
)


class Unsaid(ExtendedInjector):
    tensor_quant = BinaryQuant
    scaling_impl = ConstScaling
    scaling_init = 0.5


class Foreign(Unsaid):
    signed = True
    proxy_class = int


def _linear(**given):
    return QuantLinear(4, 4, rngs=nnx.Rngs(0), **given)


def _switched_off():
    layer = _linear(input_quant=Int8ActPerTensorFloat, return_quant_tensor=True)
    layer.weight_quant.disable_quant = True
    return layer


# what is called, the error, and what the text has to say
WRONG = {
    "misspelt": (
        lambda: _linear(weight_bitwidth=3),
        TypeError,
        [
            "'weight_bitwidth' would have no effect",
            "Int8WeightPerTensorFloat",
            "did you mean 'weight_bit_width'",
        ],
    ),
    "misspelt, of an activation": (
        lambda: QuantReLU(bitwidth=3),
        TypeError,
        ["'bitwidth' would have no effect", "did you mean 'bit_width'"],
    ),
    "misspelt, of an activation's input": (
        lambda: QuantReLU(input_quant=Int8ActPerTensorFloat, input_bitwidth=3),
        TypeError,
        ["'input_bitwidth'", "did you mean 'input_bit_width'"],
    ),
    "misspelt argument of the layer": (
        lambda: _linear(use_bais=False),
        TypeError,
        [
            "QuantLinear takes no argument 'use_bais'",
            "weight_, output_, input_, bias_",
            "did you mean 'use_bias'",
        ],
    ),
    "wrong prefix": (
        lambda: _linear(wieght_bit_width=4),
        TypeError,
        ["QuantLinear takes no argument 'wieght_bit_width'"],
    ),
    "no prefix": (lambda: _linear(bit_width=4), TypeError, ["takes no argument 'bit_width'", "weight_"]),
    "an instance": (
        lambda: _linear(weight_quant=8),
        TypeError,
        ["QuantLinear(weight_quant=...)", "takes an injector", "other_layer.weight_quant", "got int 8"],
    ),
    "a class that is none": (lambda: _linear(weight_quant=dict), TypeError, ["got the class dict"]),
    "an activation's for a weight": (
        lambda: _linear(weight_quant=Int8ActPerTensorFloat),
        TypeError,
        ["QuantLinear(weight_quant=...) quantizes weights", "Int8ActPerTensorFloat is not for these"],
    ),
    "a weight's for an input": (
        lambda: _linear(input_quant=Int8WeightPerTensorFloat),
        TypeError,
        ["quantizes activations", "expected a ActQuantProxyFromInjector"],
    ),
    "a bias's for a weight": (lambda: _linear(weight_quant=Int32Bias), TypeError, ["quantizes weights"]),
    "a weight's for an activation": (
        lambda: QuantIdentity(Int8WeightPerTensorFloat),
        TypeError,
        ["QuantIdentity(act_quant=...) quantizes activations"],
    ),
    "a proxy of another kind": (
        lambda: _linear(output_quant=_linear().weight_quant),
        TypeError,
        ["a proxy is not for these", "WeightQuantProxyFromInjector"],
    ),
    "a proxy_class that is none": (
        lambda: _linear(weight_quant=Foreign),
        TypeError,
        ["proxy_class has to be a class of proxies", "int"],
    ),
    "signed is not said": (
        lambda: _linear(weight_quant=Unsaid),
        ValueError,
        ["Unsaid does not say", "signed = True", "signed = False"],
    ),
    "an override of nothing": (
        lambda: _linear(bias_bit_width=4),
        TypeError,
        [
            "QuantLinear(bias_quant=...)",
            "'bias_bit_width' would have no effect",
            "no quantizer",
            "bias_quant=...",
        ],
    ),
    "an override of a shared one": (
        lambda: _linear(weight_quant=_linear().weight_quant, weight_bit_width=4),
        TypeError,
        ["'weight_bit_width' would have no effect", "shared with another layer"],
    ),
    "nothing to return": (
        lambda: _linear(weight_quant=None, return_quant_tensor=True),
        ValueError,
        ["return_quant_tensor=True", "weight_quant=... and input_quant=..."],
    ),
    "nothing to return, of an activation": (
        lambda: QuantSigmoid(act_quant=None, input_quant=Int8ActPerTensorFloat, return_quant_tensor=True),
        ValueError,
        ["QuantSigmoid(return_quant_tensor=True) needs a quantizer", "act_quant=..."],
    ),
    "two names for one": (
        lambda: _linear(input_quant=Int8ActPerTensorFloat, act_quant=Uint8ActPerTensorFloat),
        TypeError,
        ["act_quant", "input_quant"],
    ),
    "no scale in the input": (
        lambda: _linear(return_quant_tensor=True)(jnp.ones((2, 4))),
        ValueError,
        ["the input is not quantized", "input_quant=...", "feed it a QuantTensor"],
    ),
    "no scale in the weight": (
        lambda: _switched_off()(jnp.ones((2, 4))),
        ValueError,
        ["the weight is not quantized", "weight_quant=..."],
    ),
    "a quantizer of nothing has no scale to return": (
        lambda: _linear(weight_quant=NoneWeightQuant, return_quant_tensor=True),
        ValueError,
        ["return_quant_tensor=True", "weight_quant=... and input_quant=..."],
    ),
    "a bias without an input's scale": (
        lambda: _linear(bias_quant=Int32Bias)(jnp.ones((2, 4))),
        ValueError,
        ["Int32Bias takes its scale from input and weight", "the input is not quantized", "InternalScaling"],
    ),
    "a bias without a weight's scale": (
        lambda: _linear(weight_quant=None, input_quant=Int8ActPerTensorFloat, bias_quant=Int32Bias)(
            jnp.ones((2, 4))
        ),
        ValueError,
        ["the weight is not quantized", "weight_quant=..."],
    ),
    "integers in": (
        lambda: _linear(input_quant=Int8ActPerTensorFloat)(jnp.ones((2, 4), jnp.int32)),
        TypeError,
        ["int32", "expected a float"],
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(case):
    call, error, parts = case
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_every_misspelt_override_is_named_at_once():
    with pytest.raises(TypeError) as caught:
        _linear(weight_bitwidth=3, weight_narow_range=True)
    assert "'weight_bitwidth'" in str(caught.value) and "'weight_narow_range'" in str(caught.value)


@pytest.mark.parametrize(
    "given", [W4 := Int8WeightPerTensorFloat.let(bit_width=4), Binding(W4)], ids=["let", "binding"]
)
def test_three_ways_to_declare_four_bits(given):
    class Inherited(Int8WeightPerTensorFloat):
        bit_width = 4

    for layer in (_linear(weight_quant=given), _linear(weight_quant=Inherited), _linear(weight_bit_width=4)):
        assert layer.quant_weight().bit_width == 4
        np.testing.assert_array_equal(
            layer.quant_weight().int(), _linear(weight_bit_width=4).quant_weight().int()
        )


def test_act_quant_is_another_name_of_input_quant():
    layer, twin = (
        _linear(act_quant=Int8ActPerTensorFloat, input_bit_width=3),
        _linear(input_quant=Int8ActPerTensorFloat, input_bit_width=3),
    )
    assert nnx.graphdef(layer) == nnx.graphdef(twin)
    np.testing.assert_array_equal(layer(jnp.eye(4)), twin(jnp.eye(4)))


@pytest.mark.parametrize(
    ("slot", "kind"),
    [("weight_quant", WeightQuantProxyFromInjector), ("input_quant", ActQuantProxyFromInjector)],
)
def test_an_injector_without_a_proxy_class_gets_the_slots(slot, kind):
    layer = _linear(**{slot: Foreign.let(proxy_class=kind)})
    bare = _linear(**{slot: Unsaid.let(signed=True)})
    assert type(getattr(layer, slot)) is type(getattr(bare, slot)) is kind


def test_overrides_reach_their_own_quantizer_only():
    layer = _linear(
        weight_quant=Int8WeightPerChannelFloat,
        input_quant=Int8ActPerTensorFloat,
        output_quant=Int8ActPerTensorFloat,
        bias_quant=Int8BiasPerTensorFloatInternalScaling,
        weight_bit_width=2,
        input_bit_width=3,
        output_bit_width=5,
        bias_bit_width=6,
    )
    proxies = (layer.weight_quant, layer.input_quant, layer.output_quant, layer.bias_quant)
    assert [proxy.bit_width() for proxy in proxies] == [2, 3, 5, 6]


@pytest.mark.parametrize("name", ["weight_quant", "bias_quant", "input_quant", "output_quant"])
def test_a_quantizer_can_be_taken_away(name):
    layer = _linear(
        input_quant=Int8ActPerTensorFloat,
        output_quant=Int8ActPerTensorFloat,
        bias_quant=Int8BiasPerTensorFloatInternalScaling,
    )
    setattr(layer, name, None)
    assert getattr(layer, name) is None
    assert name not in str(nnx.state(layer))
    layer(jnp.ones((2, 4)))
