"""ReLU and pooling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.quant_tensor import (
    FloatQuantTensor,
    IntQuantTensor,
    adaptive_avg_pool,
    avg_pool,
    max_pool,
    relu,
)

INTEGERS = np.random.default_rng(0).integers(0, 255, (2, 4, 6, 3))


def tensor(zero_point=0.0, scale=0.5):
    return IntQuantTensor.from_int(jnp.array(INTEGERS), scale, zero_point, signed=False)


@pytest.mark.heavy
@pytest.mark.parametrize("strides", [None, (2, 2), (1, 3)])
@pytest.mark.parametrize("padding", ["VALID", "SAME", ((1, 0), (0, 1))])
def test_pools_agree_with_flax(strides, padding):
    x = tensor()
    for ours, theirs in [(max_pool, nnx.max_pool), (avg_pool, nnx.avg_pool)]:
        y = ours(x, (2, 3), strides, padding)
        with jax.numpy_dtype_promotion("standard"):
            expected = theirs(x.value, (2, 3), strides, padding)
        np.testing.assert_allclose(y.value, expected, rtol=1e-6)
        assert y.is_valid
        np.testing.assert_array_equal(ours(x.value, (2, 3), strides, padding), y.value)


@pytest.mark.parametrize("zero_point", [0.0, 7.0])
def test_the_integers_of_an_average_are_sums(zero_point):
    y = avg_pool(tensor(zero_point), (2, 2), strides=(2, 2))
    assert (y.bit_width, float(y.scale)) == (10, 0.125)
    np.testing.assert_array_equal(y.int(), INTEGERS.reshape(2, 2, 2, 3, 2, 3).sum((2, 4)))
    assert float(y.zero_point) == 4 * zero_point


@pytest.mark.heavy
def test_per_channel_scales_pass_and_spatial_ones_are_refused():
    per_channel = tensor(scale=jnp.array([0.5, 1.0, 2.0]))
    assert max_pool(per_channel, (2, 2)).is_valid
    assert avg_pool(per_channel, (2, 2)).is_valid
    spatial = tensor(scale=jnp.arange(1.0, 7.0)[:, None])
    for pool in (max_pool, avg_pool):
        with pytest.raises(ValueError, match=r"scale of shape \(6, 1\) varies along an axis that is pooled"):
            pool(spatial, (2, 2))


def test_adaptive_average():
    y = adaptive_avg_pool(tensor(), (2, 3))
    np.testing.assert_array_equal(y.value, avg_pool(tensor(), (2, 2), strides=(2, 2)).value)
    with pytest.raises(ValueError, match=r"\(3, 3\) does not divide the spatial shape \(4, 6\)"):
        adaptive_avg_pool(tensor(), (3, 3))


def test_a_window_with_too_many_axes_is_refused():
    with pytest.raises(ValueError, match=r"window_shape \(2, 2, 2, 2\).*one entry for every spatial axis"):
        max_pool(tensor(), (2, 2, 2, 2))


def test_relu_keeps_the_format():
    x = tensor(zero_point=100.0)
    y = relu(x)
    np.testing.assert_array_equal(y.int(), np.maximum(INTEGERS, 100))
    assert isinstance(relu(x.value), jax.Array)


@pytest.mark.heavy
def test_minifloats_keep_their_format():
    values = jnp.array([[-0.5, 4.0], [1.5, -2.0], [0.25, 8.0]]).reshape(1, 3, 2)
    scale = jnp.array([0.25, 0.5])
    x = FloatQuantTensor(values, scale, jnp.float8_e4m3fn)
    positive, largest = relu(x), max_pool(x, (2,))
    for y, expected in (
        (positive, jnp.maximum(values, 0)),
        (largest, jnp.array([[[1.5, 4.0], [1.5, 8.0]]])),
    ):
        assert isinstance(y, FloatQuantTensor)
        np.testing.assert_array_equal(y.payload().astype(jnp.float32) * scale, expected)
    with pytest.raises(ValueError, match=r"scale of shape \(3, 1\) varies along an axis that is pooled"):
        max_pool(x.set(scale=jnp.ones((3, 1))), (2,))


def test_gradients():
    gradient = jax.grad(lambda x: max_pool(x, (2, 3), strides=(2, 3)).value.sum())(tensor())
    assert float(gradient.value.sum()) == 2 * 2 * 2 * 3
