"""Exact powers of two and logarithms, division, integer ranges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject import ops


@pytest.fixture
def optimized():
    """Rewrites of divisions are among what tests compile without."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


EXPONENTS = np.arange(-126, 128, dtype=np.float32)
POWERS = np.ldexp(np.float32(1), EXPONENTS.astype(np.int32)).astype(np.float32)


@pytest.mark.heavy
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_exact_at_every_normal_power_of_two(wrap):
    np.testing.assert_array_equal(wrap(ops.exp2)(EXPONENTS), POWERS)
    np.testing.assert_array_equal(wrap(ops.log2)(POWERS), EXPONENTS)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_logarithms_below_a_power_of_two_are_below_its_own(wrap):
    below = np.nextafter(POWERS[1:], np.float32(0))
    np.testing.assert_array_equal(np.floor(wrap(ops.log2)(below)), EXPONENTS[:-1])
    assert np.floor(wrap(ops.log2)(np.finfo(np.float32).max)) == 127


def test_close_everywhere_else():
    x = np.linspace(-20, 20, 4001, dtype=np.float32)
    np.testing.assert_allclose(ops.exp2(x), np.exp2(x.astype(np.float64)), rtol=3e-7)
    y = np.geomspace(1e-30, 1e30, 4001).astype(np.float32)
    np.testing.assert_allclose(ops.log2(y), np.log2(y.astype(np.float64)), rtol=3e-7, atol=1e-7)


def test_special_numbers():
    np.testing.assert_array_equal(
        ops.exp2(np.array([-np.inf, np.inf, np.nan, 128, -400], np.float32)), [0, np.inf, np.nan, np.inf, 0]
    )
    np.testing.assert_array_equal(
        ops.log2(np.array([0, np.inf, np.nan, -1], np.float32)), [-np.inf, np.inf, np.nan, np.nan]
    )


def test_derivatives():
    x = jnp.float32(1.7)
    np.testing.assert_allclose(jax.grad(ops.exp2)(x), np.log(2) * 2**1.7, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(ops.log2)(x), 1 / (1.7 * np.log(2)), rtol=1e-6)


def largest(x):
    return np.abs(x).max(1, keepdims=True)


DIVISIONS = {
    # (with what divides, with numpy)
    "constant": (lambda x, by: by(x, 127), lambda x: x / np.float32(127)),
    "scalar": (
        lambda x, by: by(x, by(jnp.max(jnp.abs(x)), 127.5)),
        lambda x: x / (np.abs(x).max() / np.float32(127.5)),
    ),
    "rows": (
        lambda x, by: by(x, by(jnp.max(jnp.abs(x), 1, keepdims=True), 127.5)),
        lambda x: x / (largest(x) / np.float32(127.5)),
    ),
    "then_added": (
        lambda x, by: by(x, by(jnp.max(jnp.abs(x), 1, keepdims=True), 255)) + 3.0,
        lambda x: x / (largest(x) / np.float32(255)) + np.float32(3),
    ),
}


@pytest.mark.parametrize("case", DIVISIONS)
def test_a_division_is_a_division_in_every_program(case, optimized):
    divided, expected = DIVISIONS[case]
    x = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
    by_us, by_jax = (lambda x: divided(x, ops.divide)), (lambda x: divided(x, jnp.divide))
    assert np.any(jax.jit(by_jax)(x) != expected(x))  # else there is nothing to see here
    np.testing.assert_array_equal(by_us(x), expected(x))
    np.testing.assert_array_equal(jax.jit(by_us)(x), expected(x))
    np.testing.assert_array_equal(jax.jit(jax.vmap(by_us))(np.stack([x, x]))[1], expected(x))
    np.testing.assert_array_equal(jax.jit(lambda x: jax.vjp(by_us, x)[0])(x), expected(x))


def test_gradients_of_a_division():
    x = jnp.array([3.0, -0.5])
    np.testing.assert_allclose(jax.grad(lambda x: ops.divide(x, 4).sum())(x), 0.25)
    np.testing.assert_allclose(jax.grad(lambda d: ops.divide(x, d).sum())(jnp.float32(2)), -2.5 / 4)
    np.testing.assert_array_equal(ops.divide(jnp.array([jnp.nan, jnp.inf]), 2), [np.nan, np.inf])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_ranges_of_ints_and_arrays_agree(bits, signed, narrow):
    low, high = ops.min_int(signed, narrow, bits), ops.max_int(signed, narrow, bits)
    assert type(low) is int
    assert type(high) is int
    assert high - low + 1 == 2**bits - narrow
    assert ops.min_int(signed, narrow, jnp.float32(bits)) == low
    assert ops.max_int(signed, narrow, jnp.float32(bits)) == high


def test_ranges_are_differentiable_in_the_bit_width():
    grad = jax.grad(lambda b: ops.max_int(True, True, b))(jnp.float32(8))
    np.testing.assert_allclose(grad, np.log(2) * 128, rtol=1e-6)
    assert jax.grad(lambda b: ops.min_int(False, False, b))(jnp.float32(8)) == 0
