"""Switching quantizers off within a block, and finding everything as it was after it."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, freeze, quantization_status_manager, quantize
from jqinject.dot import FrozenParam
from jqinject.nn import QuantIdentity, QuantLinear, QuantReLU
from jqinject.quant import Int8AccumulatorAwareWeightQuant, Int8WeightPerTensorFloat, Int32Bias


class Net(nnx.Module):
    def __init__(self):
        weights = {"weight_quant": Int8WeightPerTensorFloat, "weight_bit_width": 2, "bias_quant": Int32Bias}
        self.inp = QuantIdentity(bit_width=3, return_quant_tensor=True)
        self.a = QuantLinear(4, 4, **weights, return_quant_tensor=True, rngs=nnx.Rngs(0))
        self.act = QuantReLU(bit_width=3, return_quant_tensor=True)
        self.b = QuantLinear(4, 2, weight_quant=Int8AccumulatorAwareWeightQuant, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(self.act(self.a(self.inp(x))))


def in_float(net, x):
    hidden = nnx.relu(x @ net.a.kernel[...] + net.a.bias[...])
    return hidden @ net.b.kernel[...] + net.b.bias[...]


@pytest.mark.lengthy
def test_everything_off_is_the_float_model_and_then_all_is_back():
    net, x = Net(), jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
    before, structure = net(x), nnx.graphdef(net)
    off = {"disable_act_quant": True, "disable_weight_quant": True, "disable_bias_quant": True}
    with quantization_status_manager(net, **off):
        np.testing.assert_allclose(net(x), in_float(net, x), rtol=1e-5, atol=1e-6)
    assert nnx.graphdef(net) == structure
    np.testing.assert_array_equal(net(x), before)
    assert float(abs(before - in_float(net, x)).max()) > 1e-3


@pytest.mark.heavy
def test_what_goes_by_the_input_is_off_with_it():
    net, x = Net(), jnp.ones((2, 4))
    with quantization_status_manager(net, disable_act_quant=True):
        on = {name: getattr(net.a, name).is_quant_enabled for name in ("weight_quant", "bias_quant")}
        assert on == {"weight_quant": True, "bias_quant": False}
        assert not net.b.weight_quant.is_quant_enabled
        assert not net.inp.act_quant.is_quant_enabled
        net(x)
    with quantization_status_manager(net, disable_weight_quant=True):
        assert net.inp.act_quant.is_quant_enabled
        net(x)


def test_an_error_in_the_block_leaves_it_as_it_was_too():
    net = Net()
    net.inp.act_quant.disable_quant = True  # the user's own
    with pytest.raises(RuntimeError), quantization_status_manager(net, disable_act_quant=True):
        raise RuntimeError
    assert net.act.act_quant.is_quant_enabled
    assert not net.inp.act_quant.is_quant_enabled
    assert net.a.return_quant_tensor
    with pytest.raises(TypeError, match=r"takes an NNX module, got dict"), quantization_status_manager({}):
        pass


def test_frozen_weights_stay_and_are_named():
    layer = QuantLinear(4, 2, weight_bit_width=2, use_bias=False, rngs=nnx.Rngs(0))
    net = nnx.Sequential(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quantization_status_manager(net, disable_weight_quant=True):
            pass
        freeze(net)
        with quantization_status_manager(net, disable_bias_quant=True):
            pass
    x = jnp.linspace(-1.0, 1.0, 4)
    before = net(x)
    with (
        pytest.warns(
            UserWarning, match=r"no effect on layers\.0\.kernel: frozen weights.*\n  cure: "
        ) as seen,
        quantization_status_manager(net, disable_weight_quant=True),
    ):
        np.testing.assert_array_equal(net(x), before)
    assert [one.filename for one in seen] == [__file__]


def test_frozen_parameters_of_a_program_are_named():
    class Own(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(4))

        def __call__(self, x):
            return x @ self.w

    x = jnp.ones((2, 4))
    model = freeze(quantize(Own(), Rule(weight_quant=Int8WeightPerTensorFloat), inputs=x))
    with (
        pytest.warns(UserWarning, match="no effect on w: "),
        quantization_status_manager(model, disable_weight_quant=True),
    ):
        assert isinstance(model.w, FrozenParam)
