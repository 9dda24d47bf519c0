"""Scales: where they come from, where their gradients go, what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import core
from jqinject.core.state import flat_parts

VIEW = core.OverTensorView()
CHANNELS = core.OverOutputChannelView((1, 0))
KERNEL = jax.random.normal(jax.random.key(1), (6, 4))


def _state(module):
    return {
        ".".join(map(str, path)): np.asarray(part.get_value()) for path, part in flat_parts(nnx.state(module))
    }


@pytest.mark.parametrize(
    ("restriction", "stored", "value"),
    [
        (None, 0.3, 0.3),
        (core.LogFloatRestrictValue, np.log2(0.3), 0.3),
        (core.PowerOfTwoRestrictValue, np.log2(0.3), 0.25),
        (lambda: core.PowerOfTwoRestrictValue(core.CeilSte()), np.log2(0.3), 0.5),
        (core.SignedFloatRestrictValue, 0.3, 0.3),
    ],
)
def test_parameter_and_constant_restricted(restriction, stored, value):
    made = restriction() if restriction else None
    parameter = core.ParameterScaling(0.3, (1, 4), made)
    np.testing.assert_allclose(parameter.value.get_value(), np.full((1, 4), stored, np.float32), rtol=1e-6)
    np.testing.assert_allclose(parameter(KERNEL), np.full((1, 4), value), rtol=1e-6)
    constant = core.ConstScaling(0.3, made)
    np.testing.assert_allclose(constant(KERNEL, 4), value / 4, rtol=1e-6)
    assert _state(constant) == {}


def test_constants_are_equal_by_value():
    a, b, c = (nnx.graphdef(core.ConstScaling(np.array(v))) for v in ([0.1, 0.2], [0.1, 0.2], [0.1, 0.3]))
    assert a == b
    assert a != c


def test_threshold_is_restricted_too():
    scaling = core.ConstScaling(1.0, core.PowerOfTwoRestrictValue())
    assert scaling(KERNEL, 127) == 2.0**-7
    assert core.ConstScaling(1.0)(KERNEL, 127) == np.float32(1) / np.float32(127)
    assert (
        core.ConstScaling(1.0, restrict_threshold_impl=core.PowerOfTwoRestrictValue())(KERNEL, 127) == 2.0**-7
    )
    rounded = core.ConstScaling(5.0, restrict_scale_threshold_impl=core.IntRestrictValue())
    assert rounded(KERNEL, 2) == 2.0


def test_least_value_with_straight_through_gradient():
    scaling = core.ParameterScaling(0.01, scaling_min_val=0.5)
    value, grads = nnx.value_and_grad(lambda s: s(KERNEL))(scaling)
    assert (value, grads["value"].get_value()) == (0.5, 1.0)


def test_a_single_tracked_parameter_is_not_kept():
    scaling = core.StatsFromParameterScaling(core.AbsMax(), VIEW, tracked_parameter_list=[nnx.Param(KERNEL)])
    assert _state(scaling) == {}
    np.testing.assert_allclose(scaling(2 * KERNEL), 2 * jnp.max(jnp.abs(KERNEL)))


def test_several_tracked_parameters_share_statistic_and_gradient():
    class Pair(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(KERNEL)
            self.b = nnx.Param(3 * KERNEL)
            self.scaling = core.StatsFromParameterScaling(
                core.AbsAve(1), CHANNELS, 1, [self.a, self.b], scaling_shape=(1, 4)
            )

    pair = Pair()
    scale = pair.scaling(pair.a.get_value())
    np.testing.assert_allclose(scale, 2 * jnp.mean(jnp.abs(KERNEL), axis=0, keepdims=True), rtol=1e-6)
    assert set(_state(pair)) == {"a", "b"}
    grads = nnx.grad(lambda p: p.scaling(p.a.get_value()).sum())(pair)
    for name in ("a", "b"):
        np.testing.assert_allclose(grads[name].get_value(), jnp.sign(KERNEL) / 12, rtol=1e-6)
    np.testing.assert_allclose(nnx.jit(lambda p: p.scaling(None))(pair), scale, rtol=1e-6)
    np.testing.assert_allclose(nnx.clone(pair).scaling(None), scale)


def test_forced_parameter():
    kernel = nnx.Param(KERNEL)
    scaling = core.StatsFromParameterScaling(core.AbsMax(), VIEW, 0, [kernel], force_parameter=True)
    kernel.set_value(5 * KERNEL)
    np.testing.assert_allclose(scaling(None), 5 * jnp.max(jnp.abs(KERNEL)))
    np.testing.assert_allclose(scaling(KERNEL), jnp.max(jnp.abs(KERNEL)))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "stat", [core.AbsMax(1), core.AbsPercentile(90.0, 1), core.AbsAve(1), core.MeanSigmaStd(2.0, 1)]
)
@pytest.mark.parametrize("shape", [(6, 4), (3, 3, 2, 4)])
def test_channels_last_need_no_transposition(stat, shape):
    kernel = jax.random.normal(jax.random.key(2), shape)
    order = (len(shape) - 1, *range(len(shape) - 1))
    scaling = core.StatsFromParameterScaling(stat, core.OverOutputChannelView(order), scaling_shape=(4,))
    value, grad = jax.value_and_grad(lambda x: jnp.sum(scaling(x) * jnp.arange(4.0)))(kernel)
    flat = kernel.reshape(-1, 4).T
    expected, slope = jax.value_and_grad(lambda x: jnp.sum(stat(x) * jnp.arange(4.0)))(flat)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, slope.T.reshape(shape), rtol=1e-5, atol=1e-7)
    assert "transpose" not in str(jax.make_jaxpr(scaling)(kernel))


def test_affine_map_is_learned():
    scaling = core.StatsFromParameterScaling(
        core.AbsMax(), VIEW, scaling_affine_rescaling_init=1.25, scaling_affine_shifting_init=0.5
    )
    top = jnp.max(jnp.abs(KERNEL))
    value, grads = nnx.value_and_grad(lambda s: s(KERNEL))(scaling)
    np.testing.assert_allclose(value, 1.25 * top + 0.5, rtol=1e-6)
    np.testing.assert_allclose(grads["affine_rescaling"]["affine_weight"].get_value(), top)
    assert grads["affine_rescaling"]["affine_bias"].get_value() == 1


class TestFilledOnce:
    def build(self):
        return core.ParameterFromStatsFromParameterScaling(
            core.AbsMax(), VIEW, restrict_scaling_impl=core.LogFloatRestrictValue()
        )

    def test_training_fills_it_once_and_the_gradient_is_the_parameters(self):
        scaling = self.build()
        value, grads = nnx.value_and_grad(lambda s: s(KERNEL))(scaling)
        top = jnp.max(jnp.abs(KERNEL))
        np.testing.assert_allclose(value, top, rtol=1e-6)
        np.testing.assert_allclose(grads["value"].get_value(), np.log(2) * top, rtol=1e-5)
        np.testing.assert_allclose(scaling.value.get_value(), np.log2(top), rtol=1e-6)
        assert scaling.counter.get_value() == 1
        np.testing.assert_allclose(scaling(7 * KERNEL), top, rtol=1e-6)
        assert jnp.all(jax.grad(lambda x: self.build()(x))(KERNEL) == 0)

    def test_evaluation_computes_it_and_stores_nothing(self):
        scaling = self.build()
        scaling.set_view(use_running_average=True)
        np.testing.assert_allclose(scaling(KERNEL), jnp.max(jnp.abs(KERNEL)), rtol=1e-6)
        assert _state(scaling) == {"value": 1.0, "record.counter": 0}

    def test_no_statistic_is_computed_afterwards(self):
        calls = []

        class Counting(nnx.Module):
            def __call__(self, x):
                jax.debug.callback(lambda: calls.append(1))
                return jnp.max(x)

        scaling = core.ParameterFromStatsFromParameterScaling(Counting(), VIEW)
        step = nnx.jit(lambda s, x: s(x))
        for _ in range(4):
            step(scaling, KERNEL).block_until_ready()
        jax.effects_barrier()
        assert len(calls) == 1

    def test_a_weight_that_is_not_finite_does_not_fill_it(self):
        scaling = self.build()
        assert jnp.isnan(scaling(KERNEL.at[0, 0].set(jnp.nan)))
        assert scaling.counter.get_value() == 0
        np.testing.assert_allclose(scaling(KERNEL), jnp.max(jnp.abs(KERNEL)), rtol=1e-6)

    def test_entries_of_a_checkpoint(self):
        assert self.build().complete_state({}) == {}
        assert self.build().complete_state({"value": 3.0}) == {"value": 3.0, "record.counter": 1}
        unfilled = {"value": 3.0, "record.counter": 0}
        assert self.build().complete_state({"value": 3.0, "counter": 0}) == unfilled


class TestCollected:
    def build(self, steps=2, restriction=core.PowerOfTwoRestrictValue, momentum=0.1):
        return core.ParameterFromRuntimeStatsScaling(
            steps,
            core.AbsMax(),
            VIEW,
            restrict_scaling_impl=restriction() if restriction else None,
            scaling_stats_momentum=momentum,
        )

    def test_the_course_of_a_training(self):
        scaling = self.build()
        seen = []
        for top in (3.0, 5.0, 100.0, 200.0):
            seen.append((float(scaling(jnp.array([top]), 4)), int(scaling.counter.get_value())))
        assert seen == [(0.75, 1), (1.25, 2), (1.0, 3), (1.0, 3)]
        np.testing.assert_allclose(scaling.value.get_value(), np.log2(3.2), rtol=1e-6)

    def test_evaluation_before_during_and_after(self):
        scaling = self.build(restriction=None)
        seen = []
        for top in (3.0, 5.0, 100.0):
            scaling.use_running_average = True
            seen.append(float(scaling(jnp.array([9.0]))))
            scaling.use_running_average = False
            scaling(jnp.array([top]))
        scaling.use_running_average = True
        np.testing.assert_allclose([*seen, scaling(jnp.array([9.0]))], [1.0, 3.0, 3.2, 3.2], rtol=1e-6)

    def test_the_gradient_goes_to_the_tensor_first_and_to_the_parameter_then(self):
        scaling = self.build(restriction=None)
        x = jnp.array([1.0, -3.0])
        step = nnx.jit(nnx.grad(lambda s, x: s(x), argnums=(0, 1)))
        grads = [step(scaling, x) for _ in range(4)]
        assert [float(g[0]["value"].get_value()) for g in grads] == [0, 0, 1, 1]
        assert [g[1].tolist() for g in grads] == [[0, -1], [0, -1], [0, 0], [0, 0]]

    def test_an_optimizer_may_move_the_parameter_after_the_hand_over(self):
        scaling = self.build(steps=1, restriction=None)
        scaling(jnp.array([3.0]))
        scaling(jnp.array([3.0]))
        scaling.value.set_value(jnp.float32(7))
        assert scaling(jnp.array([3.0])) == 7

    def test_no_statistic_is_computed_afterwards(self):
        calls = []

        class Counting(nnx.Module):
            def __call__(self, x):
                jax.debug.callback(lambda: calls.append(1))
                return jnp.max(x)

        scaling = core.ParameterFromRuntimeStatsScaling(2, Counting(), VIEW)
        step = nnx.jit(lambda s, x: s(x))
        for _ in range(5):
            step(scaling, KERNEL).block_until_ready()
        jax.effects_barrier()
        assert len(calls) == 2

    def test_gradient_of_a_calibrated_step_has_no_branch_that_large(self):
        scaling = self.build(restriction=None)
        graphdef, state = nnx.split(scaling)
        grad = jax.grad(lambda x: nnx.merge(graphdef, jax.tree.map(lambda v: v, state))(x))
        branches = [
            e
            for e in jax.make_jaxpr(jax.jit(grad))(KERNEL).jaxpr.eqns[0].params["jaxpr"].eqns
            if e.primitive.name == "cond"
        ]
        assert len(branches) == 1
        assert all(v.aval.size <= 1 for v in branches[0].outvars)

    def test_cumulative_mean(self):
        scaling = self.build(steps=4, momentum=None)
        for top in (1.0, 2.0, 6.0):
            scaling(jnp.array([top]))
        np.testing.assert_allclose(scaling.buffer.get_value(), 3.0, rtol=1e-6)

    def test_collection_can_be_ended(self):
        scaling = self.build(steps=100)
        scaling(jnp.array([4.0]))
        scaling.end_calibration()
        assert (scaling.value.get_value(), scaling.counter.get_value()) == (2.0, 101)
        scaling.value.set_value(jnp.float32(7.0))
        scaling.end_calibration()
        assert scaling.value.get_value() == 7.0

    def test_entries_of_a_checkpoint(self):
        scaling = self.build()
        assert scaling.complete_state({}) == {}
        assert scaling.complete_state({"value": 3.0}) == {
            "value": 3.0,
            "record.counter": 3,
            "record.buffer": 3.0,
        }
        whole = {"value": 1.0, "record.counter": 1, "record.buffer": 5.0}
        assert scaling.complete_state(whole) == whole
        assert scaling.complete_state({"value": 3.0, "counter": 1})["record.buffer"] == 8.0
        assert scaling.complete_state({"buffer": 8.0, "counter": 1})["value"] == 1.0
        for name in ("running_stats", "runtime_stats.running_stats"):
            assert scaling.complete_state({name: 8.0})["value"] == 3.0
            assert core.ParameterScaling(1.0).complete_state({name: 8.0}) == {"value": 8.0}


def test_running_statistics():
    scaling = core.RuntimeStatsScaling(core.AbsMax(), scaling_stats_momentum=0.5)
    assert [float(scaling(jnp.array([[top]]), 2)) for top in (4.0, 8.0)] == [2, 4]
    scaling.set_view(use_running_average=True)
    assert float(scaling(jnp.array([[100.0]]), 2)) == 3
    assert (scaling.running_stats.get_value(), scaling.counter.get_value()) == (6, 2)
    assert scaling.complete_state({"running_stats": 6.0}) == {
        "record.running_stats": 6.0,
        "record.counter": 1,
    }


def test_per_channel_activations_channels_last():
    x = jax.random.normal(jax.random.key(0), (2, 5, 5, 4))
    view = core.OverOutputChannelView((3, 0, 1, 2))
    scaling = core.ParameterFromRuntimeStatsScaling(1, core.AbsMax(1), view, (1, 1, 1, 4))
    for _ in range(2):
        np.testing.assert_allclose(scaling(x), jnp.max(jnp.abs(x), axis=(0, 1, 2), keepdims=True), rtol=1e-6)


@pytest.mark.heavy
def test_every_call_of_one_pass_gives_its_gradient_to_the_parameter():
    """A quantizer that several places share, or that is called at every time step."""
    scaling = core.ParameterFromRuntimeStatsScaling(1, core.AbsMax())
    x = jnp.array([[1.0, -3.0]])
    for _ in range(2):
        scaling(x)

    def scales(scaling, calls):
        return sum(scaling(x) for _ in range(calls))

    once, thrice = (nnx.grad(scales)(scaling, calls)["value"][...] for calls in (1, 3))
    assert float(once) == 1.0
    assert float(thrice) == 3.0
