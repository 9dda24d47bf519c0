"""A group that would be longer than its axis is the axis: nothing is filled up with zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.nn import QuantConv, QuantEmbed, QuantIdentity, QuantLinear
from jqinject.quant import (
    IntWeightSymmetricGroupQuant,
    MXFloat4e2m1Weight,
    MXFloat8e4m3Act,
    MXInt8Act,
    MXInt8Weight,
    ShiftedUint8WeightGroupQuantFloat,
)
from jqinject.quant_tensor import as_array


def _bytes(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.lengthy
def test_a_patch_stem_shrinks():
    stem = QuantConv(
        3, 8, (4, 4), strides=4, use_bias=False, weight_quant=MXFloat4e2m1Weight, input_quant=MXFloat8e4m3Act,
        rngs=nnx.Rngs(0))  # fmt: skip
    weight = stem.quant_weight()
    assert (weight.value_.shape, weight.scale_.shape) == ((4, 4, 1, 3, 8), (4, 4, 1, 1, 8))
    kernel = np.asarray(stem.kernel[...])
    largest = np.abs(kernel).max(2, keepdims=True)  # OCP: 2^(floor(log2 amax) - 2), 2 the exponent of 6
    np.testing.assert_array_equal(weight.scale_[:, :, 0], 2.0 ** (np.floor(np.log2(largest)) - 2))
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    quantized = stem.input_quant(x)
    assert quantized.grouped.shape == (2, 8, 8, 1, 3)
    stem.eval()
    frozen = jqinject.freeze(stem)
    np.testing.assert_allclose(frozen(x), stem(x), rtol=1e-5, atol=1e-6)
    # A group of 3 numbers takes two bytes at most and a byte for its scale, where floats take twelve.
    assert _bytes(frozen) <= kernel.nbytes / 4


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "quantizer", [MXInt8Weight, IntWeightSymmetricGroupQuant, ShiftedUint8WeightGroupQuantFloat]
)
def test_the_numbers_are_those_of_a_group_filled_up_with_zeros(quantizer):
    size = {} if quantizer is MXInt8Weight else {"weight_group_size": 32}
    short, filled = (QuantLinear(n, 4, weight_quant=quantizer, **size, rngs=nnx.Rngs(0)) for n in (5, 32))
    kernel = jax.random.normal(jax.random.key(1), (5, 4))
    short.kernel[...] = kernel
    filled.kernel[...] = jnp.zeros((32, 4)).at[:5].set(kernel)
    weight, expected = short.quant_weight(), filled.quant_weight()
    assert weight.value_.shape == (1, 5, 4)
    np.testing.assert_allclose(as_array(weight), as_array(expected)[:5], rtol=1e-6)
    np.testing.assert_allclose(weight.scale_, expected.scale_, rtol=1e-6)
    x = jax.random.normal(jax.random.key(2), (3, 5))
    frozen = jqinject.freeze(short)
    np.testing.assert_allclose(frozen(x), x @ as_array(weight) + short.bias[...], rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("size", [32, 10**9])
def test_a_size_beyond_the_axis_costs_nothing(size):
    layer = QuantLinear(
        16, 4, weight_quant=IntWeightSymmetricGroupQuant, weight_group_size=size, input_quant=MXInt8Act,
        input_group_size=size, contraction="int", rngs=nnx.Rngs(0))  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (2, 16))
    floats = as_array(layer.input_quant(x)) @ as_array(layer.quant_weight()) + layer.bias[...]
    np.testing.assert_allclose(layer(x), floats, rtol=1e-5, atol=1e-6)
    assert layer.weight_quant.scale_().shape == (1, 1, 4)


@pytest.mark.heavy
def test_rows_of_a_narrow_table_and_of_activations():
    embed = QuantEmbed(7, 3, weight_quant=MXInt8Weight, return_quant_tensor=True, rngs=nnx.Rngs(0))
    rows = embed(jnp.array([[1, 6]]))
    np.testing.assert_array_equal(rows.value, embed.quant_weight().value[jnp.array([[1, 6]])])
    assert rows.value_.shape == (1, 2, 1, 3)
    act = QuantIdentity(MXFloat8e4m3Act, return_quant_tensor=True)
    assert act(jnp.ones((2, 3))).value_.shape == (2, 1, 3)


def test_without_padding_a_short_axis_is_still_refused():
    with pytest.raises(ValueError, match=r"groups of 32 do not fill an axis of 16 elements"):
        QuantLinear(16, 4, weight_quant=MXInt8Weight, weight_group_padding=False, rngs=nnx.Rngs(0))
