"""Clamps: values, and where the gradient goes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject import ops

X = jnp.array([-3.0, -1.0, 0.2, 2.0, 5.0])


def test_tensor_clamp_masks_the_gradient_and_gives_it_to_the_bounds():
    y, pull = jax.vjp(ops.tensor_clamp, X, jnp.float32(-1.0), jnp.float32(2.0))
    np.testing.assert_array_equal(y, np.asarray([-1, -1, 0.2, 2, 2], np.float32))
    grads = pull(jnp.array([1.0, 10.0, 100.0, 1000.0, 10000.0]))
    np.testing.assert_array_equal(grads[0], [0, 10, 100, 1000, 0])
    assert (grads[1], grads[2]) == (1.0, 10000.0)


def test_tensor_clamp_ste_passes_it_all_to_x():
    y, pull = jax.vjp(ops.tensor_clamp_ste, X, jnp.float32(-1.0), jnp.float32(2.0))
    np.testing.assert_array_equal(y, np.asarray([-1, -1, 0.2, 2, 2], np.float32))
    grads = pull(jnp.ones(5))
    np.testing.assert_array_equal(grads[0], np.ones(5))
    assert (grads[1], grads[2]) == (0.0, 0.0)


@pytest.mark.parametrize("clamp", [ops.tensor_clamp, ops.tensor_clamp_ste], ids=lambda f: f.__name__)
def test_bounds_may_be_ints_arrays_and_other_dtypes(clamp):
    x = X.astype(jnp.bfloat16)
    assert clamp(x, -1, 2).dtype == jnp.bfloat16
    bounds = jnp.arange(5.0)
    np.testing.assert_array_equal(clamp(X, -bounds, bounds), jnp.clip(X, -bounds, bounds))
    assert jnp.isnan(clamp(jnp.float32(jnp.nan), -1, 2))
    np.testing.assert_array_equal(clamp(jnp.array([jnp.inf, -jnp.inf]), -1, 2), [2, -1])


def test_bounds_may_broadcast_x():
    y, pull = jax.vjp(lambda x: ops.tensor_clamp_ste(x, jnp.zeros((2, 1)), jnp.ones((2, 1))), X)
    assert y.shape == (2, 5)
    np.testing.assert_array_equal(pull(jnp.ones((2, 5)))[0], np.full(5, 2.0))


def test_scalar_clamps():
    np.testing.assert_array_equal(ops.scalar_clamp_ste(X, -1.0, 2.0), ops.tensor_clamp_ste(X, -1.0, 2.0))
    np.testing.assert_array_equal(ops.scalar_clamp_min_ste(X, 0.5), [0.5, 0.5, 0.5, 2, 5])
    np.testing.assert_array_equal(jax.grad(lambda x: ops.scalar_clamp_min_ste(x, 0.5).sum())(X), np.ones(5))


def test_signed_clamp_keeps_the_side_and_the_gradient():
    x = jnp.array([-2.0, -0.1, -0.0, 0.0, 0.1, 2.0, jnp.inf])
    y, pull = jax.vjp(lambda x: ops.signed_clamp_min_ste(x, 0.5), x)
    np.testing.assert_array_equal(y, [-2, -0.5, 0.5, 0.5, 0.5, 2, np.inf])
    np.testing.assert_array_equal(pull(jnp.ones(7))[0], np.ones(7))
    assert jnp.isnan(ops.signed_clamp_min_ste(jnp.float32(jnp.nan), 0.5))
