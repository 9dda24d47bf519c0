"""Searched scales and zero points: against searches written out in NumPy, and what they do in corner cases."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject.quant
from jqinject.core import (
    MSE,
    AbsMax,
    BitWidthConst,
    Component,
    HalfQuadraticOptimizerScale,
    HalfQuadraticOptimizerZeroPoint,
    IntQuant,
    IntScaling,
    NegativeMinOrZero,
    OverOutputChannelView,
    OverTensorView,
    ParameterFromStatsFromParameterScaling,
    Quantized,
    RescalingIntQuant,
    Search,
    SignedFloatRestrictValue,
    StatsFromParameterScaling,
    ZeroZeroPoint,
)
from jqinject.core.statistics.half_quadratic_search import masked_median, shrink_lp
from jqinject.core.statistics.search import fibonacci_search, grid_search
from jqinject.nn import QuantIdentity, QuantLinear, QuantLinearGeneral
from jqinject.ops import IntGrid
from jqinject.ops.power import ordered_sum
from jqinject.ops.reductions import Over
from jqinject.quant import ShiftedUint8WeightPerChannelFloatHQO

W = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
W[0, 0] = 9.0  # an outlier that a search clips


def quantizer(stat, bits=3, shape=(), restrict=None, learned=False):
    kind = ParameterFromStatsFromParameterScaling if learned else StatsFromParameterScaling
    return RescalingIntQuant(
        IntQuant(narrow_range=True, signed=True),
        kind(stat, lambda x: x, scaling_shape=shape, restrict_scaling_impl=restrict),
        IntScaling(narrow_range=True, signed=True),
        ZeroZeroPoint(),
        BitWidthConst(bits),
    )


def squared_error(w, scale, bits):
    top = 2 ** (bits - 1) - 1
    return np.sum((w - np.clip(np.round(w / scale), -top, top) * scale) ** 2, dtype=np.float64)


def best_on_grid(w, bits, tries):
    top = 2 ** (bits - 1) - 1
    candidates = np.abs(w).max() * np.arange(1, tries + 1) / tries / top
    return candidates[np.argmin([squared_error(w, scale, bits) for scale in candidates])]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_grid_search_finds_the_candidate_with_the_least_squared_error(bits):
    stat = MSE(AbsMax(), OverTensorView(), mse_iters=20, mse_search_method="grid")
    scale = quantizer(stat, bits)(jnp.asarray(W)).scale
    np.testing.assert_allclose(scale, best_on_grid(W, bits, 20), rtol=1e-5)


def test_each_channel_has_a_search_of_its_own():
    stat = MSE(
        AbsMax(stats_reduce_dim=1),
        OverOutputChannelView(permute_dims=(1, 0)),
        mse_iters=20,
        mse_search_method="grid",
        stats_reduce_dim=1,
    )
    scale = quantizer(stat, 3, (1, 6))(jnp.asarray(W.T)).scale
    assert scale.shape == (1, 6)
    np.testing.assert_allclose(scale[0], [best_on_grid(row, 3, 20) for row in W], rtol=1e-5)


def test_fibonacci_shrinks_to_the_valley():
    centers = jnp.array([0.3, 2.0, 3.7])
    found = fibonacci_search(jnp.zeros(3), jnp.full(3, 4.0), lambda c: (c - centers) ** 2, 24)
    np.testing.assert_allclose(found[0], centers, atol=1e-3)


def test_of_equal_candidates_a_grid_takes_the_lowest():
    found = grid_search(jnp.float32(1), jnp.float32(2), lambda c: jnp.zeros_like(c), 5)
    assert float(found[0]) == 1.0


def test_a_bipolar_search_finds_a_negative_scale():
    # -4 is an integer of 3 bits and 4 is none: all mass at 4 wants a negative scale.
    w = jnp.array([4.0, 4.0, 4.0, -3.0])
    stat = MSE(AbsMax(), OverTensorView(), 40, mse_search_method="grid", bipolar_search=True)
    scaling = StatsFromParameterScaling(stat, lambda x: x, restrict_scaling_impl=SignedFloatRestrictValue())
    quant = RescalingIntQuant(
        IntQuant(False, True), scaling, IntScaling(False, True), ZeroZeroPoint(), BitWidthConst(3)
    )
    result = quant(w)
    np.testing.assert_allclose(result.scale, -1.0, rtol=1e-6)
    np.testing.assert_allclose(result.value, w, rtol=1e-6)


def test_a_search_leaves_no_gradient_and_the_quantizer_as_it_was():
    stat = MSE(AbsMax(), OverTensorView(), mse_search_method="grid")
    quant = quantizer(stat)
    gradient = nnx.grad(lambda x, q: q(x).scale, argnums=0)(jnp.asarray(W), quant)
    assert not np.any(gradient)
    learned = quantizer(MSE(AbsMax(), OverTensorView(), mse_search_method="grid"), learned=True)
    first = learned(jnp.asarray(W)).scale
    scaling: Any = learned.scaling_impl
    assert int(scaling.counter.get_value()) == 1
    np.testing.assert_array_equal(learned(jnp.asarray(W) * 5).scale, first)


def test_one_trace_serves_every_step_and_holds_one_candidate_at_a_time():
    traces = []

    @nnx.jit
    def step(quant, x):
        traces.append(1)
        return quant(x).scale

    quant = quantizer(MSE(AbsMax(), OverTensorView(), mse_search_method="grid"))
    for factor in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(step(quant, factor * W), factor * best_on_grid(W, 3, 20), rtol=1e-5)
    assert len(traces) == 1
    graphdef, state = nnx.split(quant)
    program = str(jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x).scale)(state, jnp.asarray(W)))
    assert "[20,6,40]" not in program and "[19,6,40]" not in program and "scan" in program


@pytest.mark.parametrize("make", [
    lambda: MSE(AbsMax(), OverTensorView(), mse_search_method="grid"),
    lambda: MSE(AbsMax(), OverTensorView()),
    lambda: HalfQuadraticOptimizerScale(
        AbsMax(), OverTensorView(), IntScaling(True, True), BitWidthConst(3)
    ),
])  # fmt: skip
def test_zeros_and_nothing_have_a_finite_scale(make):
    for x in (jnp.zeros((3, 4)), jnp.zeros((0, 4))):
        result = quantizer(make())(x)
        assert bool(jnp.isfinite(result.scale)) and float(result.scale) > 0
        np.testing.assert_array_equal(result.value, x)


def test_outside_of_a_quantizer_there_is_nothing_to_try():
    with pytest.raises(ValueError, match=r"was called by none.\n  cure: use it as scaling_stats_impl"):
        MSE(AbsMax(), OverTensorView())(jnp.ones(3))


class ThreeBits(Component):
    """A quantizer of a user's own, which hands its scaling what to do."""

    def __init__(self, scaling_impl):
        self.scaling_impl: Any = scaling_impl

    def __call__(self, x):
        return self._by(x, self.scaling_impl(x, 3, Search(self)))

    def try_candidate(self, x, candidate):
        return self._by(x, self.scaling_impl(x, 3, candidate))

    def _by(self, x, scale):
        value = jnp.clip(jnp.round(x / scale), -3, 3) * scale
        return Quantized(value, scale, None, IntGrid(3))


def test_a_search_tries_candidates_on_a_quantizer_of_ones_own():
    stat = MSE(AbsMax(), OverTensorView(), mse_iters=20, mse_search_method="grid")
    quant = ThreeBits(StatsFromParameterScaling(stat, OverTensorView()))
    np.testing.assert_allclose(quant(jnp.asarray(W)).scale, best_on_grid(W, 3, 20), rtol=1e-5)


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"mse_search_method": "golden"}, ValueError, r"one of \['exact', 'fibonacci', 'grid'\], got 'golden'"),
    ({"mse_iters": 1}, ValueError, "mse_iters must be at least 2, got 1"),
    ({"mse_iters": 3, "bipolar_search": True}, ValueError, "mse_iters must be at least 4, got 3"),
    ({"mse_iters": 2.5}, TypeError, "mse_iters must be an int, got 2.5"),
])  # fmt: skip
def test_wrong_arguments_of_a_search_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        MSE(AbsMax(), OverTensorView(), **arguments)


@pytest.mark.parametrize(("name", "given"), [
    ("hqo_beta_zp", 0.0), ("hqo_kappa_zp", -1.0), ("hqo_lp_norm_zp", 0.0), ("hqo_iters_zp", 0),
])  # fmt: skip
def test_wrong_arguments_of_half_quadratic_optimization_are_refused(name, given):
    with pytest.raises(ValueError, match=name):
        HalfQuadraticOptimizerZeroPoint(NegativeMinOrZero(), OverTensorView(), **{name: given})


def hqo_scale_in_numpy(w, bits, rounds=1000, beta=1e5, kappa=1.01, p=0.7):
    """The search as the paper has it, in double precision; ends at the first round without improvement."""
    top = 2 ** (bits - 1) - 1
    candidate = best = np.abs(w).max()
    least = np.inf
    for _ in range(rounds):
        integers = np.clip(np.round(w / (candidate / top)), -top, top)
        error = w - integers * (candidate / top)
        loss = np.abs(error).mean()
        if loss >= least:
            break
        best, least = candidate, loss
        size = np.abs(error)
        sparse = np.sign(error) * np.maximum(size - np.maximum(size, 1e-30) ** (p - 1) / beta, 0)
        counts = (integers != 0) & (w - sparse != 0)
        ratio = np.sort((w - sparse)[counts] / integers[counts])
        candidate = ratio[(len(ratio) - 1) // 2] * top
        beta *= kappa
    return best / top


@pytest.mark.parametrize("bits", [3, 4])
def test_half_quadratic_scales_are_those_of_the_loop_written_out(bits):
    stat = HalfQuadraticOptimizerScale(
        AbsMax(), OverTensorView(), IntScaling(True, True), BitWidthConst(bits)
    )
    scale = quantizer(stat, bits)(jnp.asarray(W)).scale
    np.testing.assert_allclose(scale, hqo_scale_in_numpy(W.astype(np.float64), bits), rtol=1e-4)


def test_the_median_leaves_out_what_is_masked():
    x = jnp.array([[3.0, 1.0, 2.0, 9.0], [5.0, 7.0, 0.0, 0.0]])
    mask = jnp.array([[True, True, True, True], [True, True, False, False]])
    np.testing.assert_array_equal(masked_median(x, mask, Over(1)), [[2.0], [5.0]])
    assert np.isnan(masked_median(x, jnp.zeros_like(mask), Over(1))).all()


def test_shrinking_takes_away_less_from_larger_errors():
    x = jnp.array([-8.0, 0.0, 8.0, 0.1])
    np.testing.assert_allclose(
        shrink_lp(x, jnp.float32(2.0), 0.5), [-8 + 8**-0.5 / 2, 0, 8 - 8**-0.5 / 2, 0], rtol=1e-6
    )


@pytest.mark.parametrize("size", [0, 5, 12, 60, 200, 1000, 40_000])
def test_a_cascade_is_the_sum(size):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    np.testing.assert_allclose(ordered_sum(jnp.asarray(x)), x.sum(dtype=np.float64), rtol=1e-5, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["ShiftedUint8ActPerTensorFloatMSE", "Int8ActPerTensorFloatMSE"])
def test_channels_of_an_activation_are_searched_each_by_itself(name):
    given = {"act_quant": getattr(jqinject.quant, name), "bit_width": 4, "return_quant_tensor": True}
    over_channels = {
        "scaling_per_output_type": "channel",
        "per_channel_broadcastable_shape": (1, 3),
        "scaling_stats_permute_dims": (1, 0),
    }
    layer, alone = QuantIdentity(**given, **over_channels), [QuantIdentity(**given) for _ in range(3)]
    for seed in range(2):  # the second search goes on beside the first one's zero points
        x = jax.random.normal(jax.random.key(seed), (8, 3)) * jnp.array([1.0, 4.0, 0.1])
        result = layer(x)
        parts = [alone[i](x[:, i : i + 1]) for i in range(3)]
        np.testing.assert_allclose(result.scale, [[part.scale for part in parts]], rtol=1e-6)
        np.testing.assert_allclose(result.zero_point, [[part.zero_point for part in parts]], rtol=1e-6)


def test_half_quadratic_zero_points_of_two_output_axes_are_those_of_one() -> None:
    general = QuantLinearGeneral(
        8, (2, 3), weight_quant=ShiftedUint8WeightPerChannelFloatHQO, rngs=nnx.Rngs(0)
    )
    flat = QuantLinear(8, 6, weight_quant=ShiftedUint8WeightPerChannelFloatHQO, rngs=nnx.Rngs(1))
    jqinject.load_state(flat, {"kernel": general.kernel[...].reshape(8, 6), "bias": jnp.zeros(6)})
    for name in ("zero_point", "scale"):
        values = [np.ravel(getattr(layer.quant_weight(), name)) for layer in (general, flat)]
        np.testing.assert_array_equal(*values)
