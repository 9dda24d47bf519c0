"""Quantizers, zero points, bit widths, statistics."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from jqinject import core

VIEW = core.OverTensorView()
X = jnp.array([-1.0, -0.3, 0.0, 0.2, 2.0])


def _asymmetric(zero_point, scaling=None):
    return core.RescalingIntQuant(
        zero_point.int_quant,
        scaling or core.StatsFromParameterScaling(core.AbsMinMax(), VIEW),
        core.IntScaling(False, False),
        zero_point,
        core.BitWidthConst(8),
    )


@pytest.mark.heavy
@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(-1e4, 1e4, width=32)),
    st.integers(2, 10),
    st.booleans(),
    st.booleans(),
)
def test_integers_are_in_range_and_near(x, bits, signed, narrow):
    int_quant = core.IntQuant(narrow, signed)
    quant = core.RescalingIntQuant(
        int_quant,
        core.StatsFromParameterScaling(core.AbsMax(), VIEW),
        core.IntScaling(narrow, signed),
        core.ZeroZeroPoint(),
        core.BitWidthConst(bits),
    )
    result = quant(x)
    integers = np.asarray(result.value / result.scale)
    assert np.all(np.abs(integers - np.round(integers)) < 1e-2)
    assert np.all(np.round(integers) >= int_quant.min_int(bits))
    assert np.all(np.round(integers) <= int_quant.max_int(bits))
    inside = (integers > int_quant.min_int(bits)) & (np.round(integers) < int_quant.max_int(bits))
    error = np.abs(np.asarray(result.value) - x)
    assert np.all(error[inside & (x >= 0)] <= np.asarray(result.scale) * 0.51)


def test_zero_is_exact_in_asymmetric_quantization():
    int_quant = core.IntQuant(False, False)
    for zero_point in (
        core.StatsFromParameterZeroPoint(int_quant, True, VIEW, 0, core.NegativeMinOrZero(), ()),
        core.ParameterFromStatsFromParameterZeroPoint(int_quant, True, VIEW, 0, core.NegativeMinOrZero(), ()),
        core.ParameterFromRuntimeZeroPoint(1, int_quant, True, core.NegativeMinOrZero(), (), VIEW),
        core.ParameterZeroPoint(1.0, int_quant, True),
    ):
        quant = _asymmetric(zero_point)
        for _ in range(3):
            result = quant(X)
            assert result.zero_point == 85
            assert result.value[2] == 0
            np.testing.assert_allclose(result.value, X, atol=float(result.scale) / 2 + 1e-6)


def test_zero_point_that_is_not_an_integer():
    int_quant = core.IntQuant(False, False)
    zero_point = core.StatsFromParameterZeroPoint(
        int_quant, False, VIEW, 0, core.NegativeMinOrZero(), (), zero_point_affine_rescaling_init=0.5
    )
    assert zero_point(X, jnp.float32(0.4), 8) == 1.25


def test_a_learned_zero_point_gets_the_gradient():
    int_quant = core.IntQuant(False, False)
    zero_point = core.ParameterFromRuntimeZeroPoint(1, int_quant, False, core.NegativeMinOrZero(), (), VIEW)
    grad = nnx.grad(lambda z, x: z(x, jnp.float32(0.5), 8), argnums=(0, 1))
    first, second = grad(zero_point, X), grad(zero_point, X)
    assert first[0]["value"].get_value() == 0
    assert first[1].tolist() == [-2, 0, 0, 0, 0]
    assert second[0]["value"].get_value() == -2
    assert not second[1].any()
    zero_point.end_calibration()
    assert zero_point.complete_state({"value": 1.0}) == {
        "value": 1.0,
        "record.counter": 2,
        "record.buffer": 1.0,
    }


def test_binary_and_ternary():
    np.testing.assert_allclose(core.BinaryQuant(core.ConstScaling(0.5))(X).value, [-0.5, -0.5, 0.5, 0.5, 0.5])
    ternary = core.TernaryQuant(core.ConstScaling(0.5), 0.5)(X)
    np.testing.assert_allclose(ternary.value, [-0.5, -0.5, 0, 0, 0.5])
    assert (ternary.bit_width, ternary.zero_point) == (2, None)
    clamped = core.ClampedBinaryQuant(core.ParameterScaling(0.5))
    grads = nnx.grad(lambda q, x: q(x).value.sum(), argnums=1)(clamped, X)
    np.testing.assert_allclose(grads, [0, 0.5, 0.5, 0.5, 0])


def test_prescaled():
    quant = core.PrescaledRestrictIntQuant(core.IntQuant(False, True), core.BitWidthConst(8))
    result = quant(X.astype(jnp.bfloat16), jnp.float32(0.25))
    assert result.value.dtype == jnp.bfloat16
    np.testing.assert_allclose(result.value.astype(jnp.float32), [-1, -0.25, 0, 0.25, 2])
    assert (result.bit_width, result.zero_point) == (8, None)


def test_delay_counts_every_call():
    quant = core.IntQuant(False, True, quant_delay_steps=2)
    args = (jnp.float32(0.5), jnp.float32(0), 8, jnp.array([0.3]))
    np.testing.assert_allclose([quant(*args)[0] for _ in range(4)], [0.3, 0.3, 0.5, 0.5], rtol=1e-6)
    assert quant.delay.countdown.get_value() == 0
    assert nnx.state(core.IntQuant(False, True, quant_delay_steps=None)) == nnx.State({})


def test_learned_bit_width():
    impl = core.BitWidthParameter(8)
    value, grads = nnx.value_and_grad(lambda b: b())(impl)
    assert (value, grads["bit_width_offset"].get_value()) == (8, 1)
    assert impl.complete_state({"bit_width": 5.0}) == {"bit_width_offset": 3.0}
    assert core.BitWidthParameter(8, override_pretrained_bit_width=True).complete_state(
        {"bit_width_offset": 2.0}
    ) == {"bit_width_offset": 6.0}
    assert core.BitWidthParameter(4, min_bit_width=3).bit_width_offset.get_value() == 1
    with_bits = core.RescalingIntQuant(
        core.IntQuant(True, True),
        core.ConstScaling(1.0),
        core.IntScaling(True, True),
        core.ZeroZeroPoint(),
        impl,
    )
    assert with_bits(X).bit_width.dtype == jnp.float32


def test_result_becomes_a_quant_tensor():
    result = core.RescalingIntQuant(
        core.IntQuant(True, True),
        core.ConstScaling(1.0),
        core.IntScaling(True, True),
        core.ZeroZeroPoint(),
        core.BitWidthConst(4),
    )(X)
    tensor = result.quant_tensor(training=False)
    assert (tensor.bit_width, tensor.signed, tensor.training) == (4, True, False)
    assert tensor.value is result.value


@pytest.mark.heavy
def test_stochastic_rounding_follows_the_mode():
    quant = core.IntQuant(False, True, float_to_int_impl=core.StochasticRoundSte(nnx.Rngs(3)))
    args = (jnp.float32(1.0), jnp.float32(0), 8, jnp.full((1000,), 0.25))
    first, second = quant(*args), quant(*args)
    assert 0.15 < float(first.mean()) < 0.35
    assert not jnp.array_equal(first, second)
    assert nnx.jit(lambda q: q(*args))(quant).shape == (1000,)
    quant.eval()
    assert not quant(*args).any()


def test_custom_components_fit_in():
    def largest(x):
        return jnp.max(x)

    quant = core.RescalingIntQuant(
        core.IntQuant(True, True, float_to_int_impl=lambda x: x),
        core.ParameterFromRuntimeStatsScaling(1, largest, VIEW),
        core.IntScaling(True, True),
        core.ZeroZeroPoint(),
        core.BitWidthConst(8),
    )
    step = nnx.jit(lambda q, x: q(x).value)
    for _ in range(3):
        np.testing.assert_allclose(step(quant, X), X, rtol=1e-6)


@pytest.mark.parametrize(
    "stat",
    [
        core.AbsMax(),
        core.AbsMinMax(),
        core.AbsAve(),
        core.MeanSigmaStd(2.0),
        core.NegativeMinOrZero(),
        core.AbsPercentile(70.0),
        core.NegativePercentileOrZero(10.0),
        core.PercentileInterval(10.0, 90.0),
        core.SignedAbsMax(),
    ],
    ids=lambda s: type(s).__name__,
)
class TestStatistics:
    @pytest.mark.heavy
    def test_gradient_against_differences(self, stat):
        x = jax.random.normal(jax.random.key(0), (37,))
        grad = jax.grad(stat)(x)
        eps = 1e-3
        numeric = jax.vmap(lambda e: (stat(x + eps * e) - stat(x - eps * e)) / (2 * eps))(jnp.eye(37))
        np.testing.assert_allclose(grad, numeric, atol=5e-3)

    def test_gated(self, stat):
        x = jax.random.normal(jax.random.key(0), (37,))
        gated = jax.jit(
            jax.value_and_grad(lambda x, on: jnp.where(on, stat.statistic(stat.measured(x, on)), 7.0))
        )
        np.testing.assert_allclose(gated(x, jnp.bool_(True))[0], stat(x), rtol=1e-6)
        np.testing.assert_allclose(gated(x, jnp.bool_(True))[1], jax.grad(stat)(x), rtol=1e-5, atol=1e-7)
        value, grad = gated(x, jnp.bool_(False))
        assert value == 7
        assert not grad.any()

    def test_per_channel_is_the_statistic_of_each(self, stat):
        x = jax.random.normal(jax.random.key(0), (5, 37))
        kwargs = {f.name: getattr(stat, f.name) for f in dataclasses.fields(stat)} | {"stats_reduce_dim": 1}
        np.testing.assert_allclose(type(stat)(**kwargs)(x), [stat(row) for row in x], rtol=1e-5)

    def test_bfloat16_is_measured_in_float32(self, stat):
        assert stat(jnp.ones(5, jnp.bfloat16)).dtype == jnp.float32


def test_the_signed_extreme_has_the_sign_that_hits_the_smallest_integer():
    stat = core.SignedAbsMax(1)
    np.testing.assert_array_equal(
        stat(jnp.array([[1.0, -3.0], [3.0, 1.0], [2.0, -2.0], [0.0, 0.0]])), [3, -3, -2, 0]
    )
    assert core.SignedAbsMax.signed
    assert not core.AbsMax.signed
