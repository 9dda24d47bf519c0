"""A scale for each channel of an activation: what layers know of their channels, and what becomes of products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.nn import (
    QuantBatchNorm,
    QuantConv,
    QuantConvTranspose,
    QuantEinsum,
    QuantEmbed,
    QuantGroupNorm,
    QuantGRUCell,
    QuantIdentity,
    QuantLayerNorm,
    QuantLinear,
    QuantLinearGeneral,
    QuantLoRALinear,
    QuantMultiHeadAttention,
    QuantRMSNorm,
    QuantScaleBias,
)
from jqinject.quant import (
    Fp8e4m3ActPerChannelFloat2d,
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int16Bias,
)
from jqinject.quant_tensor import IntQuantTensor, as_array

RNGS = {"rngs": nnx.Rngs(0)}


class Largest(Int8ActPerTensorFloat):
    """The largest magnitude of the batch at hand, while it trains."""

    scaling_stats_op = "max"
    collect_stats_steps = 3


class EachChannel(Largest):
    scaling_per_output_type = "channel"


IN = {"input_quant": Largest, "input_scaling_per_output_channel": True}
OUT = {"output_quant": EachChannel}
# What is built, the shape of its input, the slot, and the shape of the scale.
KNOWN = {
    "linear": (lambda: QuantLinear(3, 4, **IN, **RNGS), (2, 5, 3), "input_quant", (3,)),
    "linear of one row": (lambda: QuantLinear(3, 4, **IN, **RNGS), (3,), "input_quant", (3,)),
    "linear, output": (lambda: QuantLinear(3, 4, **OUT, **RNGS), (2, 3), "output_quant", (4,)),
    "one channel": (lambda: QuantLinear(1, 4, **IN, **RNGS), (2, 1), "input_quant", (1,)),
    "lora": (lambda: QuantLoRALinear(3, 4, lora_rank=1, **IN, **RNGS), (2, 3), "input_quant", (3,)),
    "convolution": (lambda: QuantConv(3, 4, (3, 3), **IN, **RNGS), (2, 5, 5, 3), "input_quant", (3,)),
    "convolution, output": (lambda: QuantConv(3, 4, (3,), **OUT, **RNGS), (2, 5, 3), "output_quant", (4,)),
    "transposed": (lambda: QuantConvTranspose(3, 4, (3,), **IN, **RNGS), (2, 5, 3), "input_quant", (3,)),
    "several axes": (
        lambda: QuantLinearGeneral((2, 3), (4, 5), axis=(-2, -1), **IN, **RNGS),
        (6, 2, 3),
        "input_quant",
        (2, 3),
    ),
    "einsum": (
        lambda: QuantEinsum("...td,dnh->...tnh", (3, 2, 4), **IN, **RNGS),
        (5, 2, 3),
        "input_quant",
        (3,),
    ),
    "einsum, output": (
        lambda: QuantEinsum("btd,dnh->bnth", (3, 2, 4), **OUT, **RNGS),
        (5, 6, 3),
        "output_quant",
        (2, 1, 4),
    ),
    "scale and bias": (lambda: QuantScaleBias(3, axis=-2, **IN, **RNGS), (2, 3, 5), "input_quant", (3, 1)),
    "batch norm": (lambda: QuantBatchNorm(3, axis=-2, **OUT, **RNGS), (2, 3, 5), "output_quant", (3, 1)),
    "layer norm": (lambda: QuantLayerNorm(3, **OUT, **RNGS), (2, 3), "output_quant", (3,)),
    "rms norm": (lambda: QuantRMSNorm(3, **OUT, **RNGS), (2, 3), "output_quant", (3,)),
    "group norm": (lambda: QuantGroupNorm(6, 2, **OUT, **RNGS), (5, 6), "output_quant", (6,)),
    "minifloats": (
        lambda: QuantConv(3, 4, (3, 3), input_quant=Fp8e4m3ActPerChannelFloat2d, **RNGS),
        (2, 5, 5, 3),
        "input_quant",
        (3,),
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", KNOWN.values(), ids=KNOWN)
def test_a_layer_knows_its_channels(case):
    make, shape, slot, scale_shape = case
    layer = make()
    layer(jax.random.normal(jax.random.key(0), shape))
    layer.eval()
    found = getattr(layer, slot).scale()
    assert found.shape == scale_shape
    assert np.unique(found).size == found.size


def test_the_scale_of_each_channel_is_its_largest_magnitude():
    x = jax.random.normal(jax.random.key(0), (2, 5, 5, 3)) * jnp.array([1.0, 10.0, 0.1])
    layer = QuantConv(3, 4, (3, 3), **IN, **RNGS)
    np.testing.assert_allclose(layer.input_quant(x).scale, jnp.abs(x).max((0, 1, 2)) / 128, rtol=1e-6)


@pytest.mark.heavy
def test_other_layers_that_know_theirs():
    embed = QuantEmbed(7, 3, **OUT, **RNGS)
    embed(jnp.arange(7))
    assert embed.output_quant.scale().shape == (3,)
    cell = QuantGRUCell(3, 4, gate_acc_quant=EachChannel, **RNGS)
    assert cell.new_acc_quant.scale().shape == (4,)
    attention = QuantMultiHeadAttention(2, 4, in_proj_input_quant=EachChannel, packed_in_proj=True, **RNGS)
    assert attention.in_proj_input_quant.scale().shape == (4,)
    model = jqinject.quantize(nnx.Linear(3, 4, **RNGS), jqinject.Rule(input_quant=EachChannel))
    assert model.input_quant.scale().shape == (3,)


@pytest.mark.heavy
def test_the_user_names_what_a_layer_does_not_know():
    with pytest.raises(ValueError, match=r"does not know how many flow here") as caught:
        QuantIdentity(act_quant=EachChannel)
    assert "cure: per_channel_broadcastable_shape = (4,)" in str(caught.value)
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    for shape, axis in (((5,), 3), ((1, 1, 1, 5), 3), ((3, 1, 1), 1), ((1, 3, 1, 1), 1)):
        layer = QuantIdentity(
            act_quant=EachChannel, per_channel_broadcastable_shape=shape, return_quant_tensor=True
        )
        others = tuple(a for a in range(4) if a != axis)
        np.testing.assert_allclose(layer(x).scale.ravel(), jnp.abs(x).max(others) / 128, rtol=1e-6)
    with pytest.raises(ValueError, match=r"scale of shape \(4,\), one for each channel, does not broadcast"):
        QuantIdentity(act_quant=EachChannel, per_channel_broadcastable_shape=(4,))(x)


def test_a_quantizer_is_shared_by_layers_with_as_many_channels():
    first = QuantLinear(3, 4, **IN, **RNGS)
    assert QuantLinear(3, 5, input_quant=first.input_quant, **RNGS).input_quant is first.input_quant
    with pytest.raises(
        ValueError, match=r"scales of shape \(3,\), one for each channel.*\n.*cure: an injector"
    ):
        QuantLinear(4, 5, input_quant=first.input_quant, **RNGS)


@pytest.mark.heavy
@pytest.mark.parametrize("weight", [None, Int8WeightPerChannelFloat], ids=["one weight scale", "each filter"])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_depthwise_convolution_has_a_scale_for_each_output(multiplier, weight):
    channels, out = 3, 3 * multiplier
    more = {} if weight is None else {"weight_quant": weight}
    layer = QuantConv(
        channels, out, (3,), feature_group_count=channels, bias_quant=Int16Bias, return_quant_tensor=True,
        **IN, **more, rngs=nnx.Rngs(0))  # fmt: skip
    layer.bias[...] = jnp.linspace(-1, 1, out)
    x = jax.random.normal(jax.random.key(0), (2, 5, channels)) * jnp.array([1.0, 10.0, 0.1])
    q, w = layer.input_quant(x), layer.quant_weight()
    step = np.repeat(np.abs(x).max((0, 1)) / 128, multiplier) * np.asarray(w.scale).ravel()
    y = layer(x)
    assert isinstance(y, IntQuantTensor) and y.is_valid
    np.testing.assert_allclose(y.scale.ravel(), step, rtol=1e-6)
    bias = np.clip(np.round(np.linspace(-1, 1, out) / step), -(2**15), 2**15 - 1) * step
    np.testing.assert_allclose(as_array(layer.quant_bias(q, w)), bias, rtol=1e-5)
    filters = jax.lax.conv_general_dilated(
        as_array(q), as_array(w), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=channels)  # fmt: skip
    np.testing.assert_allclose(y.value, filters + bias, rtol=1e-5, atol=1e-6)
    layer.eval()
    np.testing.assert_allclose(jqinject.freeze(layer)(x).value, layer(x).value, rtol=1e-6, atol=1e-6)


@pytest.mark.heavy
def test_an_index_of_both_operands_has_a_scale():
    layer = QuantEinsum(
        "btc,cd->btcd", (3, 4), (3, 4), bias_quant=Int16Bias, return_quant_tensor=True, **IN, **RNGS
    )
    x = jax.random.normal(jax.random.key(0), (2, 5, 3))
    y = layer(x)
    step = np.abs(x).max((0, 1))[:, None] / 128 * np.asarray(layer.quant_weight().scale)
    np.testing.assert_allclose(
        np.broadcast_to(y.scale, (1, 1, 3, 4))[0, 0], np.broadcast_to(step, (3, 4)), rtol=1e-6
    )
    assert y.is_valid


@pytest.mark.heavy
def test_sums_over_channels_have_no_scale():
    x = jnp.ones((2, 3))
    assert isinstance(QuantLinear(3, 4, return_quant_tensor=True, **IN, **RNGS)(x), jax.Array)
    with pytest.raises(ValueError, match=r"needs an input with one scale, got scales of shape \(3,\)"):
        QuantLinear(3, 4, bias_quant=Int16Bias, **IN, **RNGS)(x)
    with pytest.raises(ValueError, match=r"needs an input with one scale"):
        QuantConv(4, 4, (3,), feature_group_count=2, bias_quant=Int16Bias, **IN, **RNGS)(jnp.ones((1, 5, 4)))
