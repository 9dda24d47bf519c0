"""Straight-through functions: values, gradients, and every transformation."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from jqinject import ops

POINTS = jnp.array([-2.5, -1.5, -0.5, -0.2, -0.0, 0.0, 0.2, 0.5, 1.5, 2.5, 3.7])

TABLE = {
    ops.round_ste: [-2, -2, 0, 0, 0, 0, 0, 0, 2, 2, 4],
    ops.ceil_ste: [-2, -1, 0, 0, 0, 0, 1, 1, 2, 3, 4],
    ops.floor_ste: [-3, -2, -1, -1, 0, 0, 0, 0, 1, 2, 3],
    ops.round_to_zero_ste: [-2, -1, 0, 0, 0, 0, 0, 0, 1, 2, 3],
    ops.dpu_round_ste: [-2, -1, 0, 0, 0, 0, 0, 0, 2, 2, 4],
    ops.binary_sign_ste: [-1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1],
    ops.ternary_sign_ste: [-1, -1, -1, -1, 0, 0, 1, 1, 1, 1, 1],
}
FUNCTIONS = pytest.mark.parametrize("function", TABLE, ids=lambda f: f.__name__)


@FUNCTIONS
def test_values(function):
    np.testing.assert_array_equal(function(POINTS), np.asarray(TABLE[function], np.float32))


@FUNCTIONS
def test_the_gradient_is_that_of_the_identity(function):
    weights = jnp.arange(1.0, 12.0)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(function(x) * weights))(POINTS), weights)


@FUNCTIONS
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint], ids=lambda t: t.__name__)
def test_under_transformations(function, transform):
    value, grad = jax.vmap(
        jax.value_and_grad(transform(function) if transform is not jax.vmap else function)
    )(POINTS)
    np.testing.assert_array_equal(value, TABLE[function])
    np.testing.assert_array_equal(grad, np.ones(11))


@FUNCTIONS
def test_forward_mode(function):
    _, tangent = jax.jvp(function, (POINTS,), (POINTS,))
    np.testing.assert_array_equal(tangent, POINTS)


@FUNCTIONS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_is_kept(function, dtype):
    x = POINTS.astype(dtype)
    assert function(x).dtype == dtype
    assert jax.grad(lambda x: function(x).sum())(x).dtype == dtype


@FUNCTIONS
def test_nan_is_not_hidden(function):
    assert jnp.isnan(function(jnp.float32(jnp.nan)))


def test_abs_has_gradient_one_at_zero():
    grad = jax.grad(lambda x: ops.abs_binary_sign_grad(x).sum())(jnp.array([-2.0, -0.0, 0.0, 3.0]))
    np.testing.assert_array_equal(grad, [-1, 1, 1, 1])


def test_with_gradient_of_keeps_every_bit_and_moves_the_gradient():
    value = jnp.float32(0.1)
    y, grads = jax.value_and_grad(ops.with_gradient_of, argnums=(0, 1))(jnp.float32(1e8), value)
    assert y == value
    assert grads == (1.0, 0.0)


@pytest.mark.heavy
@given(hnp.arrays(np.float32, 20, elements=st.floats(-1e6, 1e6, width=32)), st.integers(0, 99))
def test_stochastic_rounding_goes_to_a_neighbour(x, seed):
    y = np.asarray(ops.stochastic_round_ste(x, jax.random.key(seed)))
    assert np.all((y == np.floor(x)) | (y == np.floor(x) + 1))
    assert np.all(y[x == np.floor(x)] == x[x == np.floor(x)])


def test_stochastic_rounding_has_the_identity_gradient_and_shows_nan():
    x = jnp.array([0.3, -0.3, jnp.nan])
    y, pull = jax.vjp(lambda x: ops.stochastic_round_ste(x, jax.random.key(0)), x)
    assert jnp.isnan(y[2])
    np.testing.assert_array_equal(pull(jnp.ones(3))[0], np.ones(3))


@pytest.mark.parametrize("shape", [(2**10, 2**10), (2**20 + 1,)])
@pytest.mark.parametrize("bits", [16, 8])
def test_uniform_numbers_of_few_bits_are_the_middles_of_equal_parts(shape, bits):
    drawn = np.asarray(ops.ste.coarse_uniform(jax.random.key(0), shape, bits), np.float64)
    assert drawn.shape == shape
    assert drawn.min() == 2.0 ** -(bits + 1) and drawn.min() + drawn.max() == 1
    numbers, counts = np.unique(drawn, return_counts=True)
    np.testing.assert_array_equal(numbers, (np.arange(2**bits) + 0.5) / 2**bits)
    # Numbers of equal probability: chi squared is within four of its standard deviations.
    expected = drawn.size / 2**bits
    chi_squared = ((counts - expected) ** 2).sum() / expected
    assert abs(chi_squared - 2**bits) < 4 * np.sqrt(2 * 2**bits)
