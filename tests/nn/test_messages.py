"""What layers say about wrong inputs, wrong components and forward mode: error texts are an interface."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jqinject.core import Quantized
from jqinject.nn import (
    QuantBatchNorm,
    QuantConv,
    QuantConvTranspose,
    QuantEinsum,
    QuantEmbed,
    QuantGroupNorm,
    QuantGRUCell,
    QuantLayerNorm,
    QuantLinear,
    QuantLinearGeneral,
    QuantLSTM,
    QuantLSTMCell,
    QuantMultiHeadAttention,
    QuantOptimizedLSTMCell,
    QuantRMSNorm,
    QuantRNN,
    QuantScaleBias,
    QuantSimpleCell,
)
from jqinject.ops import IntGrid
from jqinject.quant import (
    Fp8e4m3ActPerTensorCurrent,
    Fp8e4m3WeightPerTensorCurrent,
    Fp8e5m2GradPerTensorCurrent,
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int32Bias,
)

X = jnp.ones((2, 8))


def linear(**given):
    return QuantLinear(8, 16, rngs=nnx.Rngs(0), **given)


def evaluated(**given):
    layer = linear(**given)
    layer.eval()
    return layer


class NoTensor:
    def __call__(self):
        return 1


class PlainArray:
    def __call__(self, x):
        return x


class ThreeScales:
    def __call__(self, x, threshold):
        return jnp.ones((3,))


class NoThreshold:
    def __call__(self, x):
        return jnp.ones(())


class WrongScale:
    def __call__(self, x):
        return Quantized(x, jnp.ones((3,)), None, IntGrid(8))


FEATURES = {
    "linear": (
        linear,
        (3, 7),
        r"QuantLinear got an input of shape \(3, 7\), whose last axis is 7; expected 8, the layer's in_features",
    ),
    "transposed": (linear, (8, 7), r"axis 0 has 8; jnp.moveaxis\(x, 0, -1\)"),
    "scalar": (linear, (), r"QuantLinear got an input of shape \(\), which has no axis -1; expected 8"),
    "integers": (
        lambda: evaluated(
            weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat, contraction="int"
        ),
        (3, 9),
        r"QuantLinear got .* whose last axis is 9; expected 8",
    ),
    "several axes": (
        lambda: QuantLinearGeneral((2, 4), 3, axis=(-2, -1), rngs=nnx.Rngs(0)),
        (1, 3, 4),
        r"QuantLinearGeneral got an input of shape \(1, 3, 4\), whose axis -2 is 3; expected 2",
    ),
    "channels first": (
        lambda: QuantConv(3, 4, (3, 3), rngs=nnx.Rngs(0)),
        (1, 3, 5, 5),
        r"QuantConv .* expected 3(?s:.)*axis 1 has 3; channels come last here: jnp.moveaxis\(x, 1, -1\)",
    ),
    "transposed convolution": (
        lambda: QuantConvTranspose(3, 4, (3, 3), rngs=nnx.Rngs(0)),
        (1, 5, 5, 4),
        r"QuantConvTranspose .* last axis is 4; expected 3",
    ),
}


OTHERS = {
    "einsum": (
        lambda: QuantEinsum("btd,dnh->btnh", (8, 2, 4), rngs=nnx.Rngs(0)),
        (2, 5, 7),
        r"QuantEinsum got .* whose last axis is 7; expected 8, the layer's kernel_shape",
    ),
    "einsum, transposed": (
        lambda: QuantEinsum("...d,dh->...h", (8, 4), input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0)),
        (8, 7),
        r"QuantEinsum got(?s:.)*axis 0 has 8; jnp.moveaxis\(x, 0, -1\)",
    ),
    "einsum of another rank": (
        lambda: QuantEinsum("btd,dnh->btnh", (8, 2, 4), rngs=nnx.Rngs(0)),
        (5, 8),
        r"QuantEinsum\('btd,dnh->btnh'\) got an input of shape \(5, 8\); expected 3 axes, 'btd'",
    ),
    "embedding of floats": (
        lambda: QuantEmbed(10, 4, rngs=nnx.Rngs(0)),
        (3,),
        "QuantEmbed takes indices of rows, integers from 0 to 9, got an array of float32",
    ),
    "scale and bias": (
        lambda: QuantScaleBias(8),
        (2, 7),
        r"QuantScaleBias got .* expected 8, the layer's num_features",
    ),
    "LSTM": (
        lambda: QuantLSTM(8, 4, rngs=nnx.Rngs(0)),
        (3, 2, 7),
        r"QuantLSTM got an input of shape \(3, 2, 7\), whose last axis is 7; expected 8, the layer's input_size",
    ),
    "RNN": (lambda: QuantRNN(8, 4, rngs=nnx.Rngs(0)), (3, 2, 7), "QuantRNN got .* expected 8"),
    "attention": (
        lambda: QuantMultiHeadAttention(
            2, 8, decode=False, in_proj_input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0)
        ),
        (2, 5, 7),
        "QuantMultiHeadAttention got .* expected 8, the layer's in_features",
    ),
    **{
        norm.__name__: (
            lambda norm=norm: norm(
                8, **({"num_groups": 2} if norm is QuantGroupNorm else {}), rngs=nnx.Rngs(0)
            ),
            (2, 7),
            f"{norm.__name__} got an input of .* expected 8, the layer's num_features",
        )
        for norm in (QuantBatchNorm, QuantLayerNorm, QuantRMSNorm, QuantGroupNorm)
    },
}


@pytest.mark.parametrize(
    ("make", "shape", "text"), (FEATURES | OTHERS).values(), ids=(FEATURES | OTHERS).keys()
)
def test_wrong_features_are_told_before_anything_has_moved(make, shape, text):
    layer = make()
    before = jax.tree.leaves(nnx.state(layer))
    with pytest.raises(ValueError, match=text):
        layer(jnp.ones(shape))
    after = jax.tree.leaves(nnx.state(layer))
    assert all(a is b or bool(jnp.all(a == b)) for a, b in zip(before, after, strict=True))


CELLS = [QuantLSTMCell, QuantOptimizedLSTMCell, QuantGRUCell, QuantSimpleCell]


@pytest.mark.parametrize("kind", CELLS)
def test_wrong_features_of_a_cell_and_of_its_carry(kind):
    cell = kind(8, 4, rngs=nnx.Rngs(0))
    carry = cell.initialize_carry((2, 8), nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=rf"{kind.__name__} got an input .* expected 8, the layer's in_features"
    ):
        cell(carry, jnp.ones((2, 7)))
    wrong = jax.tree.map(lambda _: jnp.ones((2, 5)), carry)
    with pytest.raises(
        ValueError, match=rf"{kind.__name__} got a carry .* expected 4, the layer's hidden_features"
    ):
        cell(wrong, jnp.ones((2, 8)))


@pytest.mark.parametrize("weight_quant", [None, Int8WeightPerChannelFloat])
def test_wrong_features_of_a_query_and_of_keys(weight_quant):
    embed = QuantEmbed(10, 4, weight_quant=weight_quant, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"QuantEmbed got a query of .* expected 4, the layer's features"):
        embed.attend(X)
    attention = QuantMultiHeadAttention(2, 8, in_kv_features=6, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="expected 6, the layer's in_kv_features"):
        attention(jnp.ones((2, 5, 8)), jnp.ones((2, 5, 8)))


def test_einsum_broadcasts_axes_of_length_1():
    layer = QuantEinsum("bd,bdh->bh", (1, 8, 4), rngs=nnx.Rngs(0))
    assert layer(X).shape == (2, 4)


OWN = {
    "no argument": ({"weight_tensor_quant": NoTensor}, TypeError, "tensor_quant = NoTensor"),
    "no result": ({"weight_tensor_quant": PlainArray}, TypeError, "must return a Quantized"),
    "a scale of another shape": (
        {"weight_tensor_quant": WrongScale},
        ValueError,
        "tensor_quant = WrongScale",
    ),
    "a scale of another shape, deeper": (
        {"weight_scaling_impl": ThreeScales},
        ValueError,
        "scaling_impl = ThreeScales",
    ),
    "another signature, deeper": (
        {"weight_scaling_impl": NoThreshold},
        TypeError,
        "scaling_impl = NoThreshold",
    ),
}


@pytest.mark.parametrize(("given", "error", "text"), OWN.values(), ids=OWN.keys())
def test_a_component_of_the_users_is_named_with_its_quantizer_and_slot(given, error, text):
    layer = linear(**given)
    with pytest.raises(error) as raised:
        layer(X)
    whole = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert text in whole
    assert "in QuantLinear.weight_quant (Int8WeightPerTensorFloat), with your" in whole


@pytest.mark.parametrize("given", [int, 3, "int8", (1, 2)])
def test_a_tensor_quant_that_cannot_quantize_is_refused_at_once(given):
    with pytest.raises(
        TypeError, match="Int8WeightPerTensorFloat: tensor_quant must be a component that quantizes"
    ):
        linear(weight_tensor_quant=given)


FORWARD_MODE = {
    "8-bit floats": (
        {"weight_quant": Fp8e4m3WeightPerTensorCurrent, "input_quant": Fp8e4m3ActPerTensorCurrent},
        "a contraction of 8-bit floats",
    ),
    "integers": (
        {
            "weight_quant": Int8WeightPerChannelFloat,
            "input_quant": Int8ActPerTensorFloat,
            "contraction": "int",
        },
        "a contraction of integers",
    ),
    "gradients": ({"weight_quant": None, "grad_quant": Fp8e5m2GradPerTensorCurrent}, "a gradient quantizer"),
}


@pytest.mark.parametrize(("given", "what"), FORWARD_MODE.values(), ids=FORWARD_MODE.keys())
def test_forward_mode_is_refused_with_what_there_is(given, what):
    layer = evaluated(**given)
    text = rf"forward-mode .* is not defined for {what}: .*reverse mode \(jax.grad.*\n  cure: .*contraction='float'"
    with pytest.raises(TypeError, match=text):
        jax.jvp(layer, (X,), (X,))


def test_a_bias_quantizer_without_a_quantized_input_says_that_it_can_be_left_out():
    with pytest.raises(
        ValueError, match=r"the input is not quantized.\n  cure: bias_quant=None, which leaves"
    ):
        linear(bias_quant=Int32Bias)(X)
