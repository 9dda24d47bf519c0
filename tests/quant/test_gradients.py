"""Gradient quantizers of every format: what a layer's `grad_quant` does to what flows back."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import quant
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8DynamicGradPerRowFloat,
    Int8DynamicGradPerTensorFloat,
    Int8DynamicGradPerTensorFloatStochastic,
    Int8GradPerTensorDelayed,
    Int8WeightPerChannelFloat,
    MXFloat4e2m1Grad,
)
from jqinject.quant.solver import GradQuantSolver

G = jax.random.normal(jax.random.key(0), (4, 64))
ONES = jnp.ones((4, 64))
# of a gradient -> the quantizer of activations that makes the same numbers
LIKE = {
    "MXInt8Grad": "MXInt8Act",
    "MXFloat8e4m3Grad": "MXFloat8e4m3Act",
    "MXFloat8e5m2Grad": "MXFloat8e5m2Act",
    "MXFloat6e3m2Grad": "MXFloat6e3m2Act",
    "MXFloat6e2m3Grad": "MXFloat6e2m3Act",
    "MXFloat4e2m1Grad": "MXFloat4e2m1Act",
}
STOCHASTIC = (
    "Int8DynamicGradPerTensorFloatStochastic",
    "Int8DynamicGradPerRowFloatStochastic",
    "Fp8e5m2OCPDynamicGradPerTensorFloatStochastic",
    "MXFloat4e2m1GradStochastic",
)


def flowing_back(quantizer, gradient=G, **given):
    """What `gradient` becomes on its way back through an identity, and the identity."""
    identity = QuantIdentity(None, grad_quant=quantizer, **given)
    return jax.grad(lambda x: (identity(x) * gradient).sum())(jnp.ones_like(gradient)), identity


@pytest.mark.heavy
@pytest.mark.parametrize("name", LIKE)
def test_numbers_are_those_of_activations(name):
    found, identity = flowing_back(getattr(quant, name))
    np.testing.assert_array_equal(found, QuantIdentity(getattr(quant, LIKE[name]))(G))
    np.testing.assert_array_equal(found, identity.grad_quant.quantize(G).value)


def test_integers_by_hand():
    g = np.asarray(G)
    for quantizer, axes in ((Int8DynamicGradPerTensorFloat, (0, 1)), (Int8DynamicGradPerRowFloat, (1,))):
        scale = np.abs(g).max(axes, keepdims=True) / np.float32(127)
        expected = np.clip(np.round(g / scale), -127, 127) * scale
        np.testing.assert_allclose(flowing_back(quantizer)[0], expected, rtol=1e-6)


def test_e5m2_by_hand():
    scale = jnp.abs(G).max() / jnp.finfo(jnp.float8_e5m2).max.astype(jnp.float32)
    expected = (G / scale).astype(jnp.float8_e5m2).astype(jnp.float32) * scale
    np.testing.assert_allclose(
        flowing_back(quant.Fp8e5m2OCPDynamicGradPerTensorFloat)[0], expected, rtol=1e-6
    )


@pytest.mark.heavy
@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_is_right_on_average_and_new_every_time(name):
    identity = QuantIdentity(None, grad_quant=getattr(quant, name), rngs=nnx.Rngs(1))
    step = nnx.jit(nnx.grad(lambda x, m: (m(x) * 0.3 * G).sum()))
    draws = np.stack([step(ONES, identity) for _ in range(200)])
    assert len({draw.tobytes() for draw in draws}) == 200
    steps = np.abs(draws - draws.mean(0)).max()
    assert np.abs(draws.mean(0) - 0.3 * np.asarray(G)).max() < max(0.15 * steps, 1e-2) + 0.25 * steps
    identity.eval()
    np.testing.assert_array_equal(step(ONES, identity), step(ONES, identity))


def test_delayed_amaxes_of_integers_come_out_as_cotangents():
    identity = QuantIdentity(None, grad_quant=Int8GradPerTensorDelayed, grad_amax_history_length=2)
    step = nnx.jit(jqinject.grad(lambda x, m, g: (m(x) * g).sum()))
    assert identity.grad_quant.gradient_format(G).grid.is_integer
    for factor in (1.0, 2.0):
        step(ONES, identity, factor * G)
    history = identity.grad_quant.amax_history.amax_history[...]
    np.testing.assert_allclose(history, jnp.abs(G).max() * jnp.array([2.0, 1.0]), rtol=1e-6)
    scale = np.float32(2 * jnp.abs(G).max()) / np.float32(127)
    np.testing.assert_allclose(identity.grad_quant.scale(), scale, rtol=1e-6)
    np.testing.assert_allclose(step(ONES, identity, G), np.round(np.asarray(G) / scale) * scale, rtol=1e-6)


@pytest.mark.heavy
def test_a_layer_quantizes_the_gradient_of_both_products():
    layer = QuantLinear(
        8, 64, weight_quant=Int8WeightPerChannelFloat, grad_quant=MXFloat4e2m1Grad, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(1), (4, 8))
    gradients, dx = nnx.grad(lambda m, x: (m(x) * G).sum(), argnums=(0, 1))(layer, x)
    low = layer.grad_quant.quantize(G).value
    np.testing.assert_allclose(dx, low @ layer.quant_weight().value.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients["bias"][...], low.sum(0), rtol=1e-6)


@pytest.mark.parametrize(
    "quantizer", [Int8DynamicGradPerTensorFloat, Int8GradPerTensorDelayed, MXFloat4e2m1Grad]
)
def test_however_it_is_compiled(quantizer):
    graphdef, state = nnx.split(QuantIdentity(None, grad_quant=quantizer), graph=True)

    def loss(x, wrap):
        return (wrap(nnx.merge(graphdef, state))(x) * G).sum()

    keeps_state = quantizer is Int8GradPerTensorDelayed
    with pytest.warns(jqinject.LostStateWarning) if keeps_state else contextlib.nullcontext():
        eager = jax.grad(loss)(ONES, lambda m: m)
        compiled = jax.jit(lambda x: jax.grad(loss)(x, lambda m: m))(ONES)
        rematerialised = jax.grad(loss)(ONES, lambda m: jax.checkpoint(lambda x: m(x)))
    np.testing.assert_array_equal(compiled, eager)
    np.testing.assert_array_equal(rematerialised, eager)


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (Int8ActPerTensorFloat, "it learns a parameter"),
        (
            Int8ActPerTensorAbsMax,
            "its SimpleMovingAverage|its RangeScaling keeps a statistic that forward",
        ),
        (Fp8e4m3ActPerTensorDelayed, "statistic that forward passes move|recorded by forward passes"),
    ],
)
def test_what_a_backward_pass_can_not_move_is_refused(base, why):
    class Grad(base):
        proxy_class = GradQuantSolver.let(scaling_per_output=None).proxy_class

    with pytest.raises(
        TypeError, match=rf"Grad cannot quantize a gradient: .*({why})(.|\n)*cure: one of the ...Grad"
    ):
        QuantIdentity(None, grad_quant=Grad)


def test_a_dynamic_scale_is_not_known_beforehand():
    identity = QuantIdentity(None, grad_quant=Int8DynamicGradPerTensorFloatStochastic, rngs=nnx.Rngs(0))
    with pytest.raises(RuntimeError, match=r"depends on the gradient.*\n  cure: proxy.quantize\(g\).scale"):
        identity.grad_quant.scale()
    identity.grad_quant.disable_quant = True
    assert identity.grad_quant.scale() is None and identity.grad_quant.quantize(G) is G
