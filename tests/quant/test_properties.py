"""What holds for every tensor: errors, quantizing twice, channels, sharing."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFixedPoint,
    Int8WeightPerTensorFloat,
    ShiftedUint8WeightPerChannelFloat,
    ShiftedUint8WeightPerTensorFloat,
)

SHAPE = (4, 3)
NUMBERS = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
KERNELS = hnp.arrays(np.float32, SHAPE, elements=NUMBERS)
SYMMETRIC = [Int8WeightPerTensorFloat, Int8WeightPerChannelFloat, Int8WeightPerTensorFixedPoint]
SHIFTED = [ShiftedUint8WeightPerTensorFloat, ShiftedUint8WeightPerChannelFloat]
BITS = st.integers(2, 8)
few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def layer_of(kernel, quantizer, bits=8, **overrides):
    layer = QuantLinear(
        *kernel.shape,
        use_bias=False,
        weight_quant=quantizer,
        weight_bit_width=bits,
        rngs=nnx.Rngs(0),
        kernel_init=lambda *_: jnp.array(kernel),
        **overrides,
    )
    return layer


def quantized(kernel, quantizer, bits=8, **overrides):
    return layer_of(kernel, quantizer, bits, **overrides).quant_weight()


@pytest.mark.lengthy
@few
@given(KERNELS, st.sampled_from(SYMMETRIC + SHIFTED), BITS)
def test_no_number_in_range_is_off_by_more_than_half_a_step(kernel, quantizer, bits):
    if quantizer in SHIFTED:  # the range of a shifted grid is max - min, as in Brevitas: it has to reach 0
        kernel = np.concatenate([kernel, np.zeros((1, SHAPE[1]), np.float32)])
    result = quantized(kernel, quantizer, bits)
    assert result.is_valid
    scale, top = np.asarray(result.scale), 2 ** (bits - 1) - 1
    inside = kernel if quantizer in SHIFTED else np.clip(kernel, -top * scale, top * scale)
    error = np.abs(np.asarray(result.value) - inside)
    # Half a step, a float32 rounding of the quotient, and for a shifted grid the rounding of its zero point.
    room = 0.5 + (0.5 if quantizer in SHIFTED else 0.0) + 1e-4 * 2**bits
    assert (error <= room * scale).all()
    assert np.allclose(inside, kernel, rtol=1e-6) or quantizer is Int8WeightPerTensorFixedPoint


@pytest.mark.heavy
@few
@given(KERNELS, st.sampled_from([Int8WeightPerTensorFloat, Int8WeightPerChannelFloat]), BITS)
def test_what_is_on_the_grid_already_stays_there(kernel, quantizer, bits):
    once = quantized(kernel, quantizer, bits)
    twice = quantized(np.asarray(once.value), quantizer, bits)
    np.testing.assert_array_equal(twice.int(), once.int())
    np.testing.assert_allclose(twice.value, once.value, rtol=1e-5)


@pytest.mark.heavy
@few
@given(KERNELS, BITS)
def test_with_a_fixed_scale_the_second_time_changes_nothing(kernel, bits):
    scale = {"weight_scaling_impl_type": "const", "weight_scaling_const": 100.0}
    once = quantized(kernel, Int8WeightPerTensorFloat, bits, **scale)
    twice = quantized(np.asarray(once.value), Int8WeightPerTensorFloat, bits, **scale)
    np.testing.assert_array_equal(twice.value, once.value)
    assert float(once.scale) == float(twice.scale)


@pytest.mark.heavy
@few
@given(KERNELS, st.sampled_from([(Int8WeightPerChannelFloat, Int8WeightPerTensorFloat), SHIFTED[::-1]]), BITS)
def test_a_channel_is_quantized_as_if_it_were_alone(kernel, pair, bits):
    per_channel, per_tensor = pair
    together = quantized(kernel, per_channel, bits)
    for channel in range(SHAPE[1]):
        alone = quantized(kernel[:, channel : channel + 1], per_tensor, bits)
        np.testing.assert_allclose(together.scale[0, channel], alone.scale, rtol=1e-6)
        np.testing.assert_array_equal(together.value[:, channel : channel + 1], alone.value)


@pytest.mark.heavy
@few
@given(KERNELS, st.integers(-20, 20), BITS)
def test_scaling_a_weight_by_a_power_of_two_scales_all_and_moves_no_integer(kernel, exponent, bits):
    kernel = np.where(np.abs(kernel) < 1e-3, np.float32(0), kernel)  # nothing near the least scale
    kernel[0, 0] = 1.0
    for quantizer in (Int8WeightPerTensorFloat, Int8WeightPerTensorFixedPoint):
        plain, scaled = (
            quantized(kernel, quantizer, bits),
            quantized(kernel * np.float32(2.0**exponent), quantizer, bits),
        )
        np.testing.assert_array_equal(scaled.int(), plain.int())
        np.testing.assert_array_equal(scaled.scale, plain.scale * np.float32(2.0**exponent))


@pytest.mark.heavy
@few
@given(KERNELS, KERNELS, st.sampled_from([Int8WeightPerTensorFloat, Int8WeightPerChannelFloat]))
def test_it_does_not_matter_who_shares_with_whom(one, other, quantizer):
    scales = []
    for first, second in ((one, other), (other, one)):
        holder = layer_of(first, quantizer)
        sharer = QuantLinear(
            *SHAPE,
            use_bias=False,
            weight_quant=holder.weight_quant,
            kernel_init=lambda *_, kernel=second: jnp.array(kernel),
            rngs=nnx.Rngs(0),
        )
        np.testing.assert_array_equal(holder.quant_weight().scale, sharer.quant_weight().scale)
        scales.append(holder.quant_weight().scale)
    np.testing.assert_array_equal(*scales)
    # ... and it is the scale of both weights as one.
    np.testing.assert_array_equal(scales[0], quantized(np.concatenate([one, other]), quantizer).scale)


@pytest.mark.heavy
@few
@given(st.lists(hnp.arrays(np.float32, (5,), elements=NUMBERS), min_size=1, max_size=4))
def test_evaluation_depends_on_what_was_seen_in_training_only(batches):
    layer = QuantIdentity(
        Int8ActPerTensorFloat, scaling_stats_op="max", scaling_stats_momentum=None, return_quant_tensor=True
    )
    for batch in batches:
        layer(jnp.array(batch))
    layer.eval()
    expected = np.maximum(np.mean([np.abs(batch).max() for batch in batches]), 1e-10) / 128
    for x in (jnp.ones(3), 1e6 * jnp.ones(2)):
        np.testing.assert_allclose(layer(x).scale, expected, rtol=1e-5)
