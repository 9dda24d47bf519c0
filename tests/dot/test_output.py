"""Metadata of a contraction's output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.dot import contraction_bit_width, contraction_output
from jqinject.quant_tensor import IntQuantTensor

RNG = np.random.default_rng(0)
X = RNG.integers(-128, 128, (2, 3, 6))
W = RNG.integers(-8, 8, (6, 4))
BIAS = RNG.integers(-1000, 1000, (4,))
PER_CHANNEL = np.array([[0.125, 0.25, 0.5, 1.0]], np.float32)


def quantize(integers, scale, bit_width=8, zero_point=0.0, signed=True, training=False):
    return IntQuantTensor.from_int(
        jnp.array(integers), scale, zero_point, bit_width, signed=signed, training=training
    )


def linear(x, w, bias=None, **kwargs):
    value = x.value @ w.value
    if bias is not None:
        value = value + (bias.value if isinstance(bias, IntQuantTensor) else bias)
    return contraction_output(value, x, w, terms=w.shape[0], bias=bias, **kwargs)


@pytest.mark.heavy
@pytest.mark.parametrize("scale", [0.25, PER_CHANNEL], ids=["tensor", "channel"])
def test_the_integers_are_the_accumulator(scale):
    y = linear(quantize(X, 0.5), quantize(W, scale, 4))
    assert y.scale.shape == (1, 1, np.size(scale))
    np.testing.assert_allclose(y.scale, np.reshape(0.5 * np.asarray(scale), (1, 1, -1)))
    assert (y.bit_width, y.signed, y.scale.dtype) == (15, True, jnp.float32)
    assert y.is_valid
    np.testing.assert_array_equal(y.int(), X @ W)


@pytest.mark.parametrize("scale", [0.25, PER_CHANNEL], ids=["tensor", "channel"])
def test_a_bias_on_the_grid_is_added_to_the_accumulator(scale):
    bias_scale = np.reshape(0.5 * np.asarray(scale), -1) if np.size(scale) > 1 else 0.125
    bias = quantize(BIAS, bias_scale, 16)
    y = linear(quantize(X, 0.5), quantize(W, scale, 4), bias)
    assert y.bit_width == 17
    np.testing.assert_array_equal(y.zero_point, np.zeros((1, 1, 4)))
    np.testing.assert_array_equal(y.int(), X @ W + BIAS)


@pytest.mark.parametrize("jit", [False, True])
def test_a_bias_off_the_grid_becomes_the_zero_point_along_the_channel_axis(jit):
    x, w, bias = quantize(X, 0.5), quantize(W, PER_CHANNEL, 4), quantize(BIAS, 0.03, 16)
    y = (jax.jit(linear) if jit else linear)(x, w, bias)
    assert y.bit_width == 17
    assert y.zero_point.shape == (1, 1, 4)
    np.testing.assert_allclose(y.zero_point, -bias.value / (0.5 * PER_CHANNEL[None]), rtol=1e-6)
    np.testing.assert_array_equal(y.int(), X @ W)


def test_a_float_bias_becomes_the_zero_point_and_costs_no_bits():
    bias = jnp.array([0.1, -0.2, 0.3, 0.0])
    y = linear(quantize(X, 0.5), quantize(W, 0.25, 4), bias)
    assert (y.bit_width, y.zero_point.shape) == (15, (1, 1, 4))
    np.testing.assert_array_equal(y.int(), X @ W)


@pytest.mark.parametrize(("scale", "zero"), [(0.125, True), (0.3, False)])
def test_under_tracing_scales_of_bias_and_accumulator_are_compared_in_the_computation(scale, zero):
    y = jax.jit(linear)(quantize(X, 0.5), quantize(W, 0.25, 4), quantize(BIAS, scale, 16))
    assert bool(jnp.all(y.zero_point == 0)) is zero
    assert y.is_valid


@pytest.mark.parametrize("on_grid", [True, False])
def test_the_caller_may_know_where_the_bias_lies(on_grid):
    y = linear(quantize(X, 0.5), quantize(W, 0.25, 4), quantize(BIAS, 0.125, 16), bias_on_grid=on_grid)
    assert bool(jnp.all(y.zero_point == 0)) is on_grid
    np.testing.assert_array_equal(y.int(), X @ W + (BIAS if on_grid else 0))


def test_convolution_channels_last_with_groups():
    x = RNG.integers(0, 256, (2, 5, 5, 4))
    kernel = RNG.integers(-8, 8, (3, 3, 2, 6))
    scale = jnp.arange(1.0, 7.0).reshape(1, 1, 1, 6) / 8
    a, w = quantize(x, 0.5, signed=False), quantize(kernel, scale, 4)

    def convolve(lhs, rhs):
        return jax.lax.conv_general_dilated(
            lhs, rhs, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        )

    y = contraction_output(convolve(a.value, w.value), a, w, terms=18)
    assert (y.scale.shape, y.bit_width, y.signed) == ((1, 1, 1, 6), 17, True)
    expected = convolve(jnp.array(x, jnp.float32), jnp.array(kernel, jnp.float32))
    np.testing.assert_array_equal(y.int(), expected)


def test_other_layouts():
    w = quantize(W.T, PER_CHANNEL.reshape(4, 1), 4)
    x = quantize(X, 0.5)
    value = jnp.moveaxis(x.value @ w.value.T, -1, 0)
    y = contraction_output(value, x, w, terms=6, rhs_channel_axis=0, out_channel_axis=0)
    assert y.scale.shape == (4, 1, 1)
    assert y.is_valid


def test_a_scale_per_row_of_the_input_survives_where_the_caller_says_so():
    x = quantize(X, jnp.array([0.5, 0.25]).reshape(2, 1, 1))
    w = quantize(W, PER_CHANNEL, 4)
    assert isinstance(linear(x, w), jax.Array)
    y = linear(x, w, lhs_free_axes=(0, 1))
    assert y.scale.shape == (2, 1, 4)
    np.testing.assert_array_equal(y.int(), X @ W)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (quantize(X, jnp.linspace(0.1, 0.6, 6)), quantize(W, 0.5)),
        (quantize(X, 0.5), quantize(W, jnp.linspace(0.1, 0.6, 6)[:, None])),
    ],
    ids=["input channels", "kernel rows"],
)
def test_no_integer_output_gives_a_plain_array(x, w):
    assert isinstance(linear(x, w), jax.Array)


def test_plain_operands_give_a_plain_array():
    value = jnp.zeros((2, 4))
    assert contraction_output(value, jnp.ones((2, 6)), quantize(W, 0.5), terms=6) is value
    assert contraction_output(value, quantize(X[0], 0.5), jnp.ones((6, 4)), terms=6) is value


def test_unknown_zero_points_still_give_a_valid_tensor():
    x, w = quantize(X + 128, 0.5, zero_point=128.0, signed=False), quantize(W, 0.5, 4)
    y = jax.jit(linear)(x, w)
    assert y.is_valid
    np.testing.assert_array_equal(y.int(), X @ W)


def test_the_dtype_of_the_value_is_kept_and_training_is_passed_on():
    x, w = quantize(X, 0.5, training=True), quantize(W, 0.25, 4)
    y = contraction_output((x.value @ w.value).astype(jnp.bfloat16), x, w, terms=6)
    assert (y.dtype, y.scale.dtype, y.training) == (jnp.bfloat16, jnp.float32, True)


def test_bit_widths():
    assert contraction_bit_width(8, 8, 6) == 19
    assert contraction_bit_width(1, 1, 1) == 1
    bias = quantize(BIAS, 0.5, 32)
    assert contraction_bit_width(8, 8, 6, bias) == 33
    learned = contraction_bit_width(jnp.float32(8.0), 4, 6, quantize(BIAS, 0.5, 8))
    assert float(learned) == contraction_bit_width(8, 4, 6, quantize(BIAS, 0.5, 8)) == 16
    gradient = jax.grad(lambda b: contraction_bit_width(b, 4, 6))(jnp.float32(8.0))
    np.testing.assert_allclose(gradient, 256 / 255, rtol=1e-5)


def test_gradients_of_scale_and_zero_point():
    x, w = quantize(X, 0.5), quantize(W, PER_CHANNEL, 4)

    def loss(x, w, bias):
        y = linear(x, w, bias)
        return jnp.sum(y.scale) + jnp.sum(y.zero_point)

    bias = jnp.ones(4)
    grads = jax.grad(loss, argnums=(0, 1, 2))(x, w, bias)
    np.testing.assert_allclose(grads[2], -1 / (0.5 * PER_CHANNEL[0]), rtol=1e-6)
    assert float(grads[0].scale) != 0
    assert grads[1].scale.shape == (1, 4)
