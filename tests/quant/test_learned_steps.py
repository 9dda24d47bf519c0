"""Weights and activations with learned steps: start and gradient are those of the LSQ paper, worked out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.core import AbsAve, LearnedStepScaling, OverTensorView
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear
from jqinject.quant import (
    Int2WeightPerChannelLearned,
    Int4ActPerTensorLearned,
    Int4WeightPerChannelLearned,
    Int8ActPerTensorLearned,
    Int8WeightPerChannelLearned,
    Uint4ActPerTensorLearned,
    Uint8ActPerTensorLearned,
)

BITS = {8: Int8WeightPerChannelLearned, 4: Int4WeightPerChannelLearned, 2: Int2WeightPerChannelLearned}
KERNEL = np.asarray(jax.random.normal(jax.random.key(0), (24, 3)) ** 3, np.float32)  # tails that are clamped
COTANGENT = np.asarray(jax.random.normal(jax.random.key(1), (24, 3)), np.float32)


def paper(kernel, cotangent, bits, axes):
    """Step, its gradient and the weight's, equations 1 to 3 and section 2.2; float64."""
    v, g = kernel.astype(np.float64), cotangent.astype(np.float64)
    q_n, q_p = 2 ** (bits - 1), 2 ** (bits - 1) - 1
    step = 2 * np.abs(v).mean(axes, keepdims=True) / np.sqrt(q_p)
    ratio = v / step
    inside = (-q_n < ratio) & (ratio < q_p)
    slope = np.where(inside, np.round(ratio) - ratio, np.where(ratio <= -q_n, -q_n, q_p))
    shared = v.size / step.size
    return step, (g * slope).sum(axes, keepdims=True) / np.sqrt(shared * q_p), g * inside


def linear(quantizer, kernel=KERNEL, **given):
    return QuantLinear(
        *kernel.shape,
        weight_quant=quantizer,
        kernel_init=lambda *_: jnp.asarray(kernel),
        rngs=nnx.Rngs(0),
        **given,
    )


def gradients(layer, cotangent):
    return nnx.grad(lambda m: jnp.sum(m.quant_weight().value * cotangent))(layer)


@pytest.mark.heavy
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_start_and_gradients_are_the_papers(bits, tensor):
    given = {"weight_scaling_per_output_type": "tensor"} if tensor else {}
    layer = linear(BITS[bits], **given)
    found = gradients(layer, COTANGENT)
    step, slope, of_weight = paper(KERNEL, COTANGENT, bits, (0, 1) if tensor else 0)
    learned = layer.weight_quant.tensor_quant.scaling_impl.value[...]
    shape = () if tensor else (1, 3)
    np.testing.assert_allclose(learned, step.reshape(shape), rtol=1e-6)
    found_slope = found["weight_quant"]["tensor_quant"]["scaling_impl"]["value"][...]
    np.testing.assert_allclose(found_slope, slope.reshape(shape), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found["kernel"][...], of_weight, rtol=1e-6)
    assert np.any(of_weight == 0) == (bits < 8)  # some are clamped


@pytest.mark.parametrize("filled", [False, True])
def test_the_largest_integer_has_no_gradient_from_a_step(filled):
    """It sets where the step starts and the factor of its gradient: of a learned width neither is part of the loss."""
    scaling, x = LearnedStepScaling(AbsAve(), OverTensorView()), jnp.asarray(KERNEL)
    if filled:
        scaling(x, 7)
    scaling.set_view(use_running_average=True)
    step, slope = jax.value_and_grad(lambda largest: scaling(x, largest))(jnp.float32(7))
    np.testing.assert_allclose(step, 2 * np.abs(KERNEL).mean() / np.sqrt(7), rtol=1e-6)
    assert float(slope) == 0


@pytest.mark.heavy
def test_a_convolution_counts_all_weights_of_a_channel():
    kernel, cotangent = (a[:18].reshape(3, 3, 2, 3) for a in (KERNEL, COTANGENT))
    layer = QuantConv(
        2, 3, (3, 3), weight_quant=BITS[4], kernel_init=lambda *_: jnp.asarray(kernel), rngs=nnx.Rngs(0)
    )
    found = gradients(layer, cotangent)["weight_quant"]["tensor_quant"]["scaling_impl"]["value"][...]
    np.testing.assert_allclose(found.ravel(), paper(kernel, cotangent, 4, (0, 1, 2))[1].ravel(), rtol=2e-5)


def test_layers_that_share_a_step_are_counted_together():
    one = linear(BITS[4], weight_scaling_per_output_type="tensor")
    two = linear(one.weight_quant, 2 * KERNEL)
    model = nnx.List([one, two])
    found = nnx.grad(lambda m: jnp.sum(m[0].quant_weight().value * COTANGENT), graph=True)(model)
    joint = np.concatenate([KERNEL, 2 * KERNEL])
    cotangent = np.concatenate([COTANGENT, np.zeros_like(COTANGENT)])
    leaf = one.weight_quant.tensor_quant.scaling_impl
    step, slope, _ = paper(joint, cotangent, 4, (0, 1))
    np.testing.assert_allclose(leaf.value[...], step.squeeze(), rtol=1e-6)
    (value,) = (v for path, v in nnx.to_flat_state(found) if path[-1] == "value")
    np.testing.assert_allclose(value[...], slope.squeeze(), rtol=2e-5)


def test_the_factor_of_the_gradient_can_be_declared():
    plain = gradients(linear(BITS[4], weight_scaling_gradient_scale=1.0), COTANGENT)
    lsq = gradients(linear(BITS[4]), COTANGENT)
    at = ("weight_quant", "tensor_quant", "scaling_impl", "value")
    of_plain, of_lsq = (nnx.to_pure_dict(found) for found in (plain, lsq))
    for key in at:
        of_plain, of_lsq = of_plain[key], of_lsq[key]
    np.testing.assert_allclose(of_plain, of_lsq * np.sqrt(24 * 7), rtol=1e-6)
    with pytest.raises(ValueError, match="scaling_gradient_scale"):
        linear(BITS[4], weight_scaling_gradient_scale=0.0)


@pytest.mark.heavy
def test_training_lowers_the_error_and_serves_what_it_trained():
    x = jax.random.normal(jax.random.key(2), (64, 24))
    kernel = jax.random.normal(jax.random.key(3), (24, 3))
    target = x @ kernel
    model = jqinject.quantize(
        nnx.Sequential(nnx.Linear(24, 3, kernel_init=lambda *_: kernel, rngs=nnx.Rngs(0))),
        [Rule(".*", weight_quant=Int4WeightPerChannelLearned)],
    )
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, found = nnx.value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(model)
        optimizer.update(model, found)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]
    model.eval()
    served = model(x)
    np.testing.assert_allclose(jqinject.freeze(model)(x), served, rtol=1e-5, atol=1e-5)


def test_wrong_steps_are_refused():
    with pytest.raises(ValueError, match="no integer above 0"):
        linear(BITS[2], weight_bit_width=1).quant_weight()


ACTIVATIONS = {
    Int8ActPerTensorLearned: (-128, 127),
    Int4ActPerTensorLearned: (-8, 7),
    Uint8ActPerTensorLearned: (0, 255),
    Uint4ActPerTensorLearned: (0, 15),
}


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("quantizer", ACTIVATIONS)
def test_steps_of_activations_are_the_papers(quantizer, calibrated):
    lowest, largest = ACTIVATIONS[quantizer]
    x = KERNEL if lowest else np.abs(KERNEL)
    layer = QuantIdentity(act_quant=quantizer)
    if calibrated:
        jqinject.calibrate(layer, [x, 3 * x])
    else:
        layer(jnp.asarray(2 * x))
    step = 2 * np.abs(2 * x.astype(np.float64)).mean() / np.sqrt(largest)
    np.testing.assert_allclose(layer.act_quant.scale(), step, rtol=1e-6)

    of_layer, of_x = nnx.grad(lambda m, x: (m(x) * COTANGENT).sum(), argnums=(0, 1))(layer, jnp.asarray(x))
    ratio, g = x.astype(np.float64) / step, COTANGENT.astype(np.float64)
    inside = (lowest < ratio) & (ratio < largest) | (x == 0)
    slope = np.where(inside, np.round(ratio) - ratio, np.where(ratio <= lowest, lowest, largest))
    expected = (g * slope).sum() / np.sqrt(x.shape[1] * largest)  # features of one example
    found = of_layer["act_quant"]["tensor_quant"]["scaling_impl"]["value"][...]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(of_x, g * inside, rtol=1e-6)
    np.testing.assert_allclose(layer.act_quant.scale(), step, rtol=1e-6)  # later batches do not move it


def test_learned_activations_serve_what_they_trained():
    layer = linear(Int4WeightPerChannelLearned, input_quant=Int4ActPerTensorLearned)
    x = jnp.asarray(KERNEL.T)
    jqinject.calibrate(layer, [x])
    layer.eval()
    np.testing.assert_array_equal(jqinject.freeze(layer)(x), layer(x))
