"""Exact powers of two and logarithms, division, integer ranges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject import ops

EXPONENTS = np.arange(-126, 128, dtype=np.float32)
POWERS = np.ldexp(np.float32(1), EXPONENTS.astype(np.int32)).astype(np.float32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_exact_at_every_normal_power_of_two(wrap):
    np.testing.assert_array_equal(wrap(ops.exp2)(EXPONENTS), POWERS)
    np.testing.assert_array_equal(wrap(ops.log2)(POWERS), EXPONENTS)


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


def test_division_by_a_constant_is_a_division_under_jit():
    x = jax.random.normal(jax.random.key(0), (10_000,))
    expected = np.asarray(x) / np.float32(127)
    np.testing.assert_array_equal(jax.jit(lambda x: ops.divide(x, 127))(x), expected)
    np.testing.assert_array_equal(ops.divide(x, 127), expected)
    np.testing.assert_allclose(jax.vmap(lambda x: ops.divide(x, 127))(x), expected, rtol=3e-7)
    np.testing.assert_allclose(jax.grad(lambda x: ops.divide(x, 4).sum())(x), 0.25)


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
