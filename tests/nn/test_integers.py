"""The integers of a layer's output are those of an integer contraction, computed here by NumPy in 64 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.nn import QuantConv
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFixedPoint,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    SignedTernaryWeightPerTensorConst,
    Uint8ActPerTensorFloat,
)
from jqinject.quant_tensor import IntQuantTensor

X = jax.random.normal(jax.random.key(1), (2, 3, 4, 6))
WEIGHTS = [
    Int8WeightPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerChannelFixedPoint,
    SignedTernaryWeightPerTensorConst,
]
INPUTS = [Int8ActPerTensorFloat, Uint8ActPerTensorFloat]


def integers(x):
    """The integers of a QuantTensor by definition, without its own `int`."""
    steps = np.asarray(x.value, np.float64) / np.asarray(x.scale, np.float64) + np.asarray(x.zero_point)
    np.testing.assert_allclose(steps, np.round(steps), atol=0.01)
    return np.round(steps).astype(np.int64)


def contraction(x, w):
    """What the layers of `make` compute, on integers: a matmul, or a convolution with a (2, 3) window."""
    if w.ndim == 2:
        return x @ w
    n, height, width, _ = x.shape
    out = np.zeros((n, height - 1, width - 2, w.shape[-1]), np.int64)
    for i in range(height - 1):
        for j in range(width - 2):
            out[:, i, j] = np.einsum("nhwc,hwco->no", x[:, i : i + 2, j : j + 3], w)
    return out


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("input_quant", INPUTS)
@pytest.mark.parametrize("weight_quant", WEIGHTS)
def test_without_a_bias(make, weight_quant, input_quant, jitted):
    layer = make(weight_quant=weight_quant, input_quant=input_quant, use_bias=False, return_quant_tensor=True)
    if jitted:
        layer(X)
        layer.eval()
    y = (jax.jit(layer) if jitted else layer)(X)
    x, w = layer.input_quant(X), layer.quant_weight()
    assert y.is_valid
    assert (y.signed, y.training) == (True, not jitted)
    np.testing.assert_array_equal(y.zero_point, np.zeros_like(y.zero_point))
    np.testing.assert_array_equal(y.int(), contraction(integers(x), integers(w)))
    scale = np.asarray(x.scale) * np.asarray(w.scale).reshape(-1)
    np.testing.assert_allclose(np.asarray(y.scale).reshape(-1), scale, rtol=1e-6)
    biggest = (2**x.bit_width - 1) * (2**w.bit_width - 1) * (w.size // 4)
    assert 2 ** (y.bit_width - 1) < biggest <= 2**y.bit_width


@pytest.mark.parametrize("weight_quant", [Int8WeightPerTensorFloat, Int8WeightPerChannelFloat])
def test_a_bias_in_steps_of_the_accumulator_is_one_more_term(make, weight_quant):
    layer = make(
        weight_quant=weight_quant,
        input_quant=Int8ActPerTensorFloat,
        bias_quant=Int32Bias,
        return_quant_tensor=True,
    )
    layer.bias[...] = jnp.array([0.5, -1.0, 0.25, 2.0])
    y, x, w = layer(X), layer.input_quant(X), layer.quant_weight()
    steps = np.asarray(x.scale, np.float64) * np.asarray(w.scale, np.float64).reshape(-1)
    terms = np.round(np.asarray(layer.bias[...], np.float64) / steps).astype(np.int64)
    total = contraction(integers(x), integers(w)) + terms
    assert y.is_valid and y.bit_width == 33
    # Either way of counting gives the value: with the bias among the integers, or in the zero point.
    np.testing.assert_allclose(y.value, total * steps, rtol=1e-4, atol=1e-5)
    in_zero_point = bool(np.any(np.asarray(y.zero_point)))
    np.testing.assert_array_equal(y.int(), total - in_zero_point * terms)


@pytest.mark.heavy
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("first_channel", "among_integers"), [(1.0, True), (4.0, False)])
def test_a_convolution_counts_the_bias_among_its_integers_if_all_channels_have_one_scale(
    first_channel, among_integers, jitted
):
    layer = QuantConv(
        6,
        4,
        (2, 3),
        weight_quant=Int8WeightPerChannelFixedPoint,
        input_quant=Int8ActPerTensorFloat,
        bias_quant=Int32Bias,
        return_quant_tensor=True,
        rngs=nnx.Rngs(0),
    )
    layer.kernel = nnx.Param(jnp.ones((2, 3, 6, 4)).at[..., 0].set(first_channel))
    layer.bias = nnx.Param(jnp.array([0.5, -1.0, 0.25, 2.0]))
    layer.input_quant(X)
    layer.eval()
    y = (jax.jit(layer) if jitted else layer)(X)
    assert bool(np.any(np.asarray(y.zero_point))) is not among_integers
    assert y.is_valid


@pytest.mark.parametrize("bias_quant", [None, Int8BiasPerTensorFloatInternalScaling])
def test_another_bias_becomes_the_zero_point(make, bias_quant):
    layer = make(
        weight_quant=Int8WeightPerChannelFloat,
        input_quant=Int8ActPerTensorFloat,
        bias_quant=bias_quant,
        return_quant_tensor=True,
    )
    layer.bias[...] = jnp.array([0.5, -1.0, 0.25, 2.0])
    y, x, w = layer(X), layer.input_quant(X), layer.quant_weight()
    np.testing.assert_array_equal(y.int(), contraction(integers(x), integers(w)))
    bias = layer.bias[...] if bias_quant is None else layer.quant_bias().value
    np.testing.assert_allclose(-(y.zero_point * y.scale).reshape(-1), bias, rtol=1e-5)
    np.testing.assert_allclose(
        y.value, (y.int(float_datatype=True) - y.zero_point) * y.scale, rtol=1e-4, atol=1e-5
    )


def test_a_quant_tensor_brings_its_own_scale(make):
    layer = make(use_bias=False, return_quant_tensor=True)
    q = np.random.default_rng(0).integers(-8, 8, X.shape)
    x = IntQuantTensor.from_int(q, scale=0.5, bit_width=4)
    y = layer(x)
    np.testing.assert_array_equal(y.int(), contraction(q, integers(layer.quant_weight())))


def test_an_input_quantizer_quantizes_a_quant_tensor_anew(make):
    layer = make(
        input_quant=Int8ActPerTensorFloat, input_bit_width=3, return_quant_tensor=True, use_bias=False
    )
    x = IntQuantTensor(X, 1e-3, 0.0, 16, signed=True, training=False)
    np.testing.assert_array_equal(layer(x).int(), layer(X).int())


def test_with_an_output_quantizer(make):
    layer = make(output_quant=Int8ActPerTensorFloat, output_bit_width=5, return_quant_tensor=True)
    y = layer(X)
    assert (y.bit_width, y.is_valid) == (5, True)
    floats = make()(X)
    np.testing.assert_array_equal(y.value, layer.output_quant(floats).value)
    layer.return_quant_tensor = False
    np.testing.assert_array_equal(layer(X), y.value)


def test_an_array_comes_back_unless_a_quant_tensor_is_asked_for(make):
    layer = make(input_quant=Int8ActPerTensorFloat, bias_quant=Int32Bias)
    y = layer(X)
    assert isinstance(y, jax.Array)
    layer.return_quant_tensor = True
    np.testing.assert_array_equal(layer(X).value, y)
