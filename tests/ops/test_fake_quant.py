"""`fake_quantize` against autodiff of the composition it stands for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.ops import fake_quantize, floor_ste, round_ste, tensor_clamp, tensor_clamp_ste
from jqinject.ops.clamps import within_range
from jqinject.ops.fake_quant import Steps

KINDS = {
    "masked": (-7.0, 7.0, Steps()),
    "straight": (0.0, 15.0, Steps(jnp.floor, straight=True)),
}


def masked(x):
    return tensor_clamp(round_ste(x), -7.0, 7.0)


def straight(x):
    return tensor_clamp_ste(floor_ste(x), 0.0, 15.0)


COMPOSED = {"masked": masked, "straight": straight}


def composed(x, scale, zero_point, to_integer):
    return (to_integer(x / scale + zero_point) - zero_point) * scale


def arguments(scale_shape):
    keys = jax.random.split(jax.random.key(3), 4)
    x = jax.random.normal(keys[0], (6, 5, 4))
    scale = jax.random.uniform(keys[1], scale_shape, minval=0.05, maxval=0.3)
    zero_point = jnp.round(jax.random.uniform(keys[2], scale_shape, minval=0.0, maxval=4.0))
    return (x, scale, zero_point), jax.random.normal(keys[3], x.shape)


@pytest.mark.heavy
@pytest.mark.parametrize("scale_shape", [(), (1,), (4,), (1, 1, 4), (6, 1, 1), (1, 5, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_composition_in_value_and_in_every_gradient(scale_shape, kind):
    given, cotangent = arguments(scale_shape)
    y, pull = jax.vjp(lambda x, scale, zero_point: fake_quantize(x, scale, zero_point, *KINDS[kind]), *given)
    expected, expected_pull = jax.vjp(lambda x, s, z: composed(x, s, z, COMPOSED[kind]), *given)
    np.testing.assert_array_equal(y, expected)
    for gradient, wanted in zip(pull(cotangent), expected_pull(cotangent), strict=True):
        assert gradient.shape == wanted.shape
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_works_in_forward_mode_under_jit_vmap_and_checkpoint():
    (x, scale, zero_point), cotangent = arguments((4,))

    def value(x, scale):
        return fake_quantize(x, scale, zero_point, -7, 7)

    _, tangent = jax.jvp(value, (x, scale), (cotangent, scale))
    _, wanted = jax.jvp(lambda x, s: composed(x, s, zero_point, masked), (x, scale), (cotangent, scale))
    np.testing.assert_allclose(tangent, wanted, rtol=1e-4, atol=1e-5)
    eager = jax.grad(lambda s: value(x, s).sum())(scale)
    for transform in (jax.jit, jax.checkpoint):
        moved = transform(value)
        np.testing.assert_allclose(jax.grad(lambda s, f=moved: f(x, s).sum())(scale), eager, rtol=1e-5)
    np.testing.assert_array_equal(jax.vmap(value, in_axes=(0, None))(x, scale), value(x, scale))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (5, 1)])
def test_bounds_that_are_learned_get_their_gradient(shape, kind):
    (x, scale, zero_point), cotangent = arguments(())
    low, high, how = KINDS[kind]
    bounds = jnp.full(shape, low, jnp.float32), jnp.full(shape, high - 3, jnp.float32)
    clamp = tensor_clamp_ste if how.straight else tensor_clamp
    rounded = floor_ste if how.straight else round_ste

    def by_parts(x, scale, zero_point, low, high):
        return (clamp(rounded(x / scale + zero_point), low, high) - zero_point) * scale

    given = x, scale, zero_point, *bounds
    y, pull = jax.vjp(partial(fake_quantize, how=how), *given)
    expected, expected_pull = jax.vjp(by_parts, *given)
    np.testing.assert_array_equal(y, expected)
    for gradient, wanted in zip(pull(cotangent), expected_pull(cotangent), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_no_zero_point_takes_no_addition():
    x, scale = jnp.linspace(-2.0, 2.0, 9), jnp.float32(0.25)
    without, with_zero = (
        lambda x, scale, zero=zero: fake_quantize(x, scale, zero, -7, 7) for zero in (None, jnp.float32(0))
    )
    np.testing.assert_array_equal(without(x, scale), with_zero(x, scale))
    assert " add " in str(jax.make_jaxpr(with_zero)(x, scale))
    assert " add " not in str(jax.make_jaxpr(without)(x, scale))


def test_nan_and_infinity_are_not_hidden():
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.5])
    y = fake_quantize(x, jnp.float32(0.5), jnp.float32(0), -7, 7)
    assert jnp.isnan(y[0]) and y[1] == 3.5 and y[2] == -3.5 and y[3] == 0.5


@pytest.mark.heavy
@pytest.mark.parametrize("low, high", [(-1.0, 2.0), (0.0, 2.0), (0.0, 0.0)])
@pytest.mark.parametrize("shape", [(), (5, 1)])
def test_beyond_a_range_its_ends_have_the_gradient_of_clipping(low, high, shape):
    x, cotangent = jnp.array([-3.0, -1.0, 0.0, 0.5, 2.0, 4.0]), jnp.arange(1.0, 7.0)
    x = x if low < high else jnp.zeros(6)
    ends = jnp.full(shape, low, jnp.float32), jnp.full(shape, high, jnp.float32)

    def clipped(x, low, high):
        return jnp.minimum(jnp.maximum(x, low), high)

    def within(x, low, high):
        return within_range(lambda x: clipped(x, *ends), x, high, low)

    y, pull = jax.vjp(within, x, *ends)
    expected, expected_pull = jax.vjp(clipped, x, *ends)
    np.testing.assert_array_equal(y, expected)
    cotangent = jnp.broadcast_to(cotangent, y.shape)
    for gradient, wanted in zip(pull(cotangent), expected_pull(cotangent), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
