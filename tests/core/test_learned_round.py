"""Learned rounding: values, modes, gradients, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import (
    LearnedRoundHardSigmoid,
    LearnedRoundIdentity,
    LearnedRoundSigmoid,
    LearnedRoundSte,
)
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, ShiftedUint8WeightPerTensorFloat

KINDS = ("hard_sigmoid", "sigmoid", "identity")
X = jnp.array([[1.2, -0.7, 2.5], [0.0, 3.9, -4.1]])


@pytest.mark.heavy
@pytest.mark.parametrize("impl", [LearnedRoundHardSigmoid(), LearnedRoundSigmoid(0.5)])
def test_a_share_that_starts_where_the_numbers_are_gives_the_numbers_back(impl):
    rounding = LearnedRoundSte(impl, impl.start_at(X - jnp.floor(X)))
    np.testing.assert_allclose(rounding(X), X, atol=2e-4)
    rounding.deterministic = True
    np.testing.assert_array_equal(rounding(X), np.floor(np.asarray(X) + 0.5 - 1e-3))


def test_identity_shifts_by_half_a_step_at_most():
    rounding = LearnedRoundSte(LearnedRoundIdentity(), jnp.full(X.shape, 7.0))
    np.testing.assert_array_equal(rounding(X), np.round(np.asarray(X) + 0.5))


def test_what_has_another_shape_is_rounded_to_nearest():
    rounding = LearnedRoundSte(LearnedRoundSigmoid(), jnp.full(X.shape, 9.0))
    np.testing.assert_array_equal(rounding(jnp.array([0.4, 1.6])), [0.0, 2.0])


def test_gradients_reach_the_numbers_and_what_is_learned():
    def total(value, x):
        return jnp.sum(LearnedRoundSte(LearnedRoundHardSigmoid(), value)(x) * X)

    value = jnp.array([[0.0, 20.0, 1.0], [-20.0, 0.5, -1.0]])
    by_value, by_x = jax.grad(total, argnums=(0, 1))(value, X)
    sigmoid = 1 / (1 + np.exp(-np.asarray(value)))
    inside = np.abs(np.asarray(value)) < 10  # beyond, the share is cut off at 0 or 1
    np.testing.assert_allclose(by_value, np.asarray(X) * inside * 1.2 * sigmoid * (1 - sigmoid), rtol=1e-5)
    np.testing.assert_array_equal(by_x, X)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: LearnedRoundHardSigmoid(1.0, -0.1), "learned_round_zeta > 1"),
    (lambda: LearnedRoundHardSigmoid(1.1, 0.0), "learned_round_gamma < 0"),
    (lambda: LearnedRoundSigmoid(0.0), "must be above 0, got 0.0"),
    (lambda: LearnedRoundSte(LearnedRoundIdentity(), np.array([np.nan])), "must be finite"),
])  # fmt: skip
def test_wrong_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def learning(kind, quant=Int8WeightPerChannelFloat, **more):
    return {
        "weight_quant": quant,
        "weight_bit_width": 4,
        "weight_float_to_int_impl_type": "learned_round",
        "weight_learned_round_impl_type": kind,
        **more,
    }


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant", [Int8WeightPerChannelFloat, ShiftedUint8WeightPerTensorFloat])
def test_a_layer_is_served_as_it_evaluates(kind, quant):
    layer = QuantConv(2, 3, (3, 3), **learning(kind, quant), rngs=nnx.Rngs(0))
    rounding = layer.weight_quant.tensor_quant.int_quant.float_to_int_impl
    assert rounding.value.shape == layer.kernel.shape
    assert layer.weight_quant.rounding_mode == "LEARNED_ROUND"
    x = jax.random.normal(jax.random.key(0), (2, 5, 5, 2))
    layer.eval()
    y = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert layer.quant_weight().is_valid and layer.quant_weight().zero_point.size == 1
    np.testing.assert_allclose(jqinject.freeze(nnx.clone(layer))(x), y, atol=1e-5)


def test_what_was_learned_is_loaded():
    first, second = (QuantLinear(4, 3, **learning("sigmoid"), rngs=nnx.Rngs(seed)) for seed in (0, 1))
    first.weight_quant.tensor_quant.int_quant.float_to_int_impl.value[...] = jnp.full((4, 3), 0.25)
    jqinject.load_state(second, nnx.state(first))
    np.testing.assert_array_equal(
        second.weight_quant.tensor_quant.int_quant.float_to_int_impl.value[...], np.full((4, 3), 0.25)
    )


@pytest.mark.heavy
def test_layers_can_not_share_it_and_activations_have_no_weight():
    layer = QuantLinear(4, 3, **learning("hard_sigmoid"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"this quantizer has 2 weights.\n  cure: a quantizer of its own"):
        QuantLinear(4, 3, weight_quant=layer.weight_quant, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="this quantizer has no weight"):
        QuantIdentity(act_quant=Int8ActPerTensorFloat, float_to_int_impl_type="learned_round")
