"""Scales and zero points of groups that nested injectors quantize, with scales of their own."""

import jax
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import FloatRestrictValue, QuantRestrictValue, RescalingIntQuant, ScaleShiftQuantZeroPoint
from jqinject.inject import this, value
from jqinject.nn import QuantConv, QuantEmbed, QuantLinear
from jqinject.quant import Int8WeightPerTensorFloat, ShiftedUint8WeightPerTensorFloat
from jqinject.quant.enums import ScalingPerOutputType
from jqinject.quant_tensor import as_array

SCALE_BITS, ZERO_POINT_BITS = 5, 6


class OfScales(Int8WeightPerTensorFloat):
    bit_width = SCALE_BITS
    module = (this << 1).module
    tracked_parameter_list = (this << 1).tracked_parameter_list
    upstream_scaling = (this << 1).scaling_per_output_type
    rescaling_int_quant = RescalingIntQuant


class WithShape(OfScales):
    """As Brevitas's users write it: the shape with the axis that groups have more."""

    @value
    def scaling_shape(
        scaling_per_output,
        scaling_per_output_channel_shape,
        expanded_groupwise_shape,
        group_dim,
        upstream_scaling,
    ):
        per_channel = scaling_per_output == ScalingPerOutputType.CHANNEL
        assert expanded_groupwise_shape is None  # no groups of its own
        shape = list(scaling_per_output_channel_shape) if per_channel else []
        if per_channel and upstream_scaling == ScalingPerOutputType.GROUP:
            shape.insert(group_dim + 1, 1)
        return tuple(shape)


class Groups(ShiftedUint8WeightPerTensorFloat):
    scaling_per_output_type = "group"
    group_size = 32
    scaling_int_quant = OfScales
    restrict_scaling_impl = QuantRestrictValue

    @value
    def restrict_value_float_to_int_impl():
        return this.scaling_int_quant.rescaling_int_quant


class ZeroPointsToo(Groups):
    zp_int = OfScales.let(bit_width=ZERO_POINT_BITS, scaling_per_output_type="channel")
    scale_shift_zero_point_impl = ScaleShiftQuantZeroPoint

    @value
    def zp_int_quant():
        return this.zp_int.rescaling_int_quant


class ShapedZeroPointsToo(ZeroPointsToo):
    scaling_int_quant = WithShape
    zp_int = WithShape.let(bit_width=ZERO_POINT_BITS, scaling_per_output_type="channel")


class ScalesOfChannels(Groups):
    restrict_threshold_impl = FloatRestrictValue
    scaling_int_quant = OfScales.let(scaling_per_output_type="channel")


def _on_grid(numbers, axes, bits):
    """Whether numbers are whole multiples of the largest of those that share a step, over 2^(bits - 1) - 1."""
    step = np.abs(numbers).max(axes, keepdims=True) / (2 ** (bits - 1) - 1)
    whole = numbers / np.where(step == 0, 1, step)
    np.testing.assert_allclose(whole, np.round(whole), atol=1e-3)
    assert np.unique(np.round(whole)).size > 2


@pytest.mark.heavy
def test_one_scale_for_all_scales():
    weight = QuantLinear(64, 12, weight_quant=Groups, rngs=nnx.Rngs(0)).quant_weight()
    assert weight.scale_.shape == (2, 1, 12)
    _on_grid(np.asarray(weight.scale_) * 255, None, SCALE_BITS)


@pytest.mark.heavy
def test_a_scale_for_the_scales_of_each_channel():
    weight = QuantLinear(256, 3, weight_quant=ScalesOfChannels, rngs=nnx.Rngs(0)).quant_weight()
    _on_grid(np.asarray(weight.scale_) * 255, (0, 1), SCALE_BITS)


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [ZeroPointsToo, ShapedZeroPointsToo])
def test_zero_points_of_each_channel(quantizer):
    layer = QuantLinear(256, 12, weight_quant=quantizer, rngs=nnx.Rngs(0))
    weight = layer.quant_weight()
    _on_grid(np.asarray(weight.scale_) * 255, None, SCALE_BITS)
    _on_grid(np.asarray(weight.zero_point_ * weight.scale_), (0, 1), ZERO_POINT_BITS)
    # Scales of 5 bits and zero points of 6 leave the numbers near the weights.
    error = np.abs(as_array(weight) - layer.kernel[...]).max()
    assert error < np.abs(layer.kernel[...]).max() / 10


@pytest.mark.heavy
@pytest.mark.parametrize(
    "make",
    [
        lambda **given: QuantConv(64, 4, (3,), **given, rngs=nnx.Rngs(0)),
        lambda **given: QuantEmbed(5, 64, **given, rngs=nnx.Rngs(0)),
    ],
    ids=["convolution", "channels first"],
)
def test_wherever_the_channels_are(make):
    layer = make(weight_quant=ShapedZeroPointsToo)
    weight = layer.quant_weight()
    channels = layer.output_channel_dim + (layer.output_channel_dim > 0)
    others = tuple(axis for axis in range(weight.zero_point_.ndim) if axis != channels)
    _on_grid(np.asarray(weight.zero_point_ * weight.scale_), others, ZERO_POINT_BITS)


@pytest.mark.lengthy
def test_it_trains_and_freezes():
    layer = QuantLinear(64, 4, weight_quant=ZeroPointsToo, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 64))
    gradients = nnx.grad(lambda m: (m(x) ** 2).sum())(layer)
    assert np.isfinite(gradients["kernel"].get_value()).all()
    layer.eval()
    evaluated = layer(x)
    np.testing.assert_allclose(jqinject.freeze(layer)(x), evaluated, rtol=1e-4, atol=1e-5)
