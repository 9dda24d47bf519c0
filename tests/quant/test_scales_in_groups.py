"""Scales and zero points that a nested injector quantizes in groups of its own, as Brevitas's users declare it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jqinject
from jqinject.core import FloatRestrictValue, QuantRestrictValue, RescalingIntQuant, ScaleShiftQuantZeroPoint
from jqinject.inject import ExtendedInjector, this, value
from jqinject.nn import QuantConv, QuantEmbed, QuantLinear
from jqinject.quant import (
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    ShiftedUint8WeightPerTensorFloat,
)
from jqinject.quant.enums import ScalingPerOutputType
from jqinject.quant_tensor import GroupwiseQuantTensor, as_array

INPUTS, BITS, GROUP, SCALE_BITS, SCALES_OF_A_GROUP = 64, 4, 4, 6, 8


class ShapeMixin(ExtendedInjector):
    """As Brevitas's users write it: the shape of the scales of scales."""

    @value
    def scaling_shape(
        scaling_per_output_type, scaling_per_output_channel_shape, expanded_groupwise_shape, group_dim
    ):
        if scaling_per_output_type == ScalingPerOutputType.TENSOR:
            return ()
        if scaling_per_output_type == ScalingPerOutputType.CHANNEL:
            return scaling_per_output_channel_shape
        assert expanded_groupwise_shape is not None and group_dim is not None
        shape = list(expanded_groupwise_shape)
        shape[group_dim + 1] = 1
        return tuple(shape)


class OfScales(ShapeMixin, Int8WeightPerTensorFloat):
    bit_width = SCALE_BITS
    module = (this << 1).module
    rescaling_int_quant = RescalingIntQuant
    group_size = SCALES_OF_A_GROUP
    scaling_per_output_type = ScalingPerOutputType.GROUP
    upstream_shape = (this << 1).scaling_shape
    signed = False

    @value
    def tracked_parameter_list(upstream_shape):
        return [jnp.empty(upstream_shape)]


class OfZeroPoints(OfScales):
    restrict_threshold_impl = FloatRestrictValue
    upstream_shape = (this << 1).zero_point_shape


class QuantizedScales(ExtendedInjector):
    scaling_quant = OfScales
    restrict_scaling_impl = QuantRestrictValue
    restrict_threshold_impl = FloatRestrictValue
    bit_width = BITS

    @value
    def restrict_value_float_to_int_impl():
        return this.scaling_quant.rescaling_int_quant

    @value
    def scale_dequantized_shape(scaling_shape):
        return scaling_shape


class InGroups(QuantizedScales):
    scaling_per_output_type = ScalingPerOutputType.GROUP
    group_size = GROUP


class Symmetric(InGroups, Int8WeightPerTensorFloat):
    pass


class Shifted(InGroups, ShiftedUint8WeightPerTensorFloat):
    zp_quant = OfZeroPoints
    scale_shift_zero_point_impl = ScaleShiftQuantZeroPoint

    @value
    def zp_int_quant():
        return this.zp_quant.rescaling_int_quant

    @value
    def zero_point_dequantized_shape(zero_point_shape):
        return zero_point_shape


class Channels(QuantizedScales, Int8WeightPerChannelFloat):
    """The scales of channels, two of which share a scale."""

    scaling_quant = OfScales.let(group_dim=1, group_size=2)


class WithoutShape(InGroups, Int8WeightPerTensorFloat):
    """What the scales are in their quantizer is known from either of the names that say so."""

    scaling_quant = Int8WeightPerTensorFloat.let(
        bit_width=SCALE_BITS,
        signed=False,
        module=(this << 1).module,
        tracked_parameter_list=(this << 1).tracked_parameter_list,
        upstream_scaling=(this << 1).scaling_per_output_type,
        rescaling_int_quant=RescalingIntQuant,
        group_size=SCALES_OF_A_GROUP,
        scaling_per_output_type="group",
    )


class OtherName(OfScales):
    upstream_shape = None
    upstream_scaling_shape = (this << 1).scaling_shape

    @value
    def tracked_parameter_list(upstream_scaling_shape):
        return [jnp.empty(upstream_scaling_shape)]


def weights(outputs):
    """The weight of Brevitas's layer (outputs, inputs)."""
    n = np.arange(outputs * INPUTS, dtype=np.float64).reshape(outputs, INPUTS)
    return (np.sin(0.37 * n + 0.2) * (1 + 0.05 * n) / 8).astype(np.float32)


def linear(quantizer, outputs=2):
    layer = QuantLinear(INPUTS, outputs, weight_quant=quantizer, use_bias=False, rngs=nnx.Rngs(0))
    jqinject.load_state(layer, {"kernel": weights(outputs).T})
    return layer


def in_steps(numbers):
    """Numbers (..., elements of a group) as whole multiples of a step: the largest of the group over the top code."""
    top = 2**SCALE_BITS - 2  # unsigned and narrow: the largest code is left out
    largest = np.abs(numbers).max(-1, keepdims=True)
    step = np.where(largest == 0, np.float32(2**-64), largest) / np.float32(top)
    return np.clip(np.round(numbers / step), 0, top) * step


def reference(outputs, shifted):
    """(scale, zero point, value) of a weight in groups whose scales and zero points are in groups: NumPy alone."""
    grouped = weights(outputs).reshape(outputs, -1, GROUP)
    in_groups = (outputs, -1, SCALES_OF_A_GROUP)
    if shifted:
        extent = grouped.max(-1) - np.minimum(grouped.min(-1), 0)
        least, most = 0, 2**BITS - 1
    else:
        extent = np.abs(grouped).max(-1)
        least, most = -(2 ** (BITS - 1)) + 1, 2 ** (BITS - 1) - 1
    scale = in_steps(extent.reshape(in_groups)).reshape(outputs, -1, 1) / np.float32(most)
    zero_point = np.zeros_like(scale)
    if shifted:
        distance = -np.minimum(grouped.min(-1), 0)
        zero_point = in_steps(distance.reshape(in_groups)).reshape(scale.shape) / scale
    codes = np.clip(np.round(grouped / scale + zero_point), least, most)
    return scale, zero_point, ((codes - zero_point) * scale).reshape(outputs, INPUTS)


# What Brevitas 0.13.4 makes of the same weight, quantizers declared alike (its `group_dim` counts the axes of
# (outputs, inputs)): scales, sum and sum of magnitudes of the values, and where the gradient goes.
BREVITAS = {
    "symmetric": (
        [0.0197156, 0.0211239, 0.0253486, 0.0281651, 0.0281651, 0.0366147, 0.0288693, 0.043656],
        [2.8865714, 42.4843521],
        [
            1.0,
            0.5403,
            -0.41615,
            -1.01118,
            -0.61489,
            0.28366,
            0.96017,
            0.7539,
            -0.1455,
            -0.91113,
            -0.83907,
            -0.02043,
        ],
        [1.1066160, 81.1642761],
    ),
    "shifted": (
        [0.0092434, 0.0098809, 0.0114746, 0.0057373, 0.0156182, 0.0168931, 0.0197618, 0.0038249],
        [2.6290483, 42.1069107],
        [
            1.0,
            0.5403,
            -0.41615,
            -0.95489,
            -0.63565,
            0.28366,
            0.96017,
            0.7539,
            -0.10192,
            -0.91113,
            -0.83907,
            -0.03916,
        ],
        [1.6096153, 80.9532242],
    ),
    "channels": (
        [0.0732252, 0.1261101, 0.1865865, 0.2410076],
        [-4.7130003, 150.8019104],
        [
            1.0,
            0.5403,
            -0.41615,
            -0.98999,
            -0.65364,
            0.28366,
            0.96017,
            0.7539,
            -0.1455,
            -0.91113,
            -0.83907,
            0.00443,
        ],
        [0.1356281, 163.6334229],
    ),
}
CASES = {"symmetric": (Symmetric, 2), "shifted": (Shifted, 2), "channels": (Channels, 4)}


def scale_of(weight):
    """The scales, outputs first."""
    return np.moveaxis(
        np.asarray(weight.scale_ if isinstance(weight, GroupwiseQuantTensor) else weight.scale), -1, 0
    )


@pytest.mark.lengthy
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_brevitas(name):
    quantizer, outputs = CASES[name]
    layer = linear(quantizer, outputs)
    scales, sums, gradients, sums_of_gradients = BREVITAS[name]
    weight = layer.quant_weight()
    np.testing.assert_allclose(scale_of(weight).ravel()[: len(scales)], scales, atol=1e-7)
    values = np.asarray(as_array(weight))
    np.testing.assert_allclose([values.sum(), np.abs(values).sum()], sums, rtol=1e-6)

    factors = jnp.cos(jnp.arange(outputs * INPUTS, dtype=jnp.float32)).reshape(outputs, INPUTS).T
    gradient = nnx.grad(lambda m: (as_array(m.quant_weight()) * factors).sum())(layer)["kernel"].get_value()
    np.testing.assert_allclose(gradient.T.ravel()[: len(gradients)], gradients, atol=1e-5)
    np.testing.assert_allclose([gradient.sum(), jnp.abs(gradient).sum()], sums_of_gradients, rtol=1e-4)


@pytest.mark.parametrize("name", ["symmetric", "shifted"])
def test_it_agrees_with_numpy(name):
    weight = linear(CASES[name][0]).quant_weight()
    scale, zero_point, values = reference(2, name == "shifted")
    np.testing.assert_array_equal(scale_of(weight), scale)
    np.testing.assert_array_equal(np.asarray(as_array(weight)).T, values)
    if name == "shifted":
        np.testing.assert_array_equal(np.moveaxis(np.asarray(weight.zero_point_), -1, 0), zero_point)


@pytest.mark.heavy
def test_two_channels_share_a_scale_of_scales():
    largest = np.abs(weights(4)).max(1).reshape(2, 2)
    scale = scale_of(linear(Channels, 4).quant_weight()).reshape(4)
    np.testing.assert_array_equal(scale, in_steps(largest).reshape(4) / np.float32(7))


@pytest.mark.parametrize("quantizer", [WithoutShape, Symmetric.let(scaling_quant=OtherName)])
def test_either_name_tells_the_shape_of_the_scales(quantizer):
    found, expected = linear(quantizer).quant_weight(), linear(Symmetric).quant_weight()
    np.testing.assert_array_equal(as_array(found), as_array(expected))


@pytest.mark.heavy
@pytest.mark.parametrize(
    "make",
    [
        lambda **given: QuantConv(INPUTS, 4, (3,), **given, rngs=nnx.Rngs(0)),
        lambda **given: QuantEmbed(5, INPUTS, **given, rngs=nnx.Rngs(0)),
    ],
    ids=["convolution", "channels first"],
)
def test_wherever_the_groups_are(make):
    layer = make(weight_quant=Symmetric)
    kernel, scale = np.asarray(layer.weight[...]), np.asarray(layer.quant_weight().scale_)
    axis = layer.weight_quant.group_dim
    of_groups = np.moveaxis(kernel, axis, -1)
    of_groups = of_groups.reshape(*of_groups.shape[:-1], -1, SCALES_OF_A_GROUP, GROUP)
    expected = in_steps(np.abs(of_groups).max(-1)) / np.float32(7)
    found = np.moveaxis(scale.squeeze(axis + 1), axis, -1)
    np.testing.assert_array_equal(found, expected.reshape(found.shape))


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_it_freezes_and_unfreezes(name):
    layer = linear(*CASES[name])
    layer.eval()
    x = jax.random.normal(jax.random.key(0), (3, INPUTS))
    before = layer(x)
    frozen = jqinject.freeze(nnx.clone(layer))
    weight = as_array(layer.quant_weight())
    # A compiled kernel may sum in another order.
    rounding = np.abs(x) @ np.abs(weight) * INPUTS * 2.0**-24
    assert np.all(np.abs(np.asarray(frozen(x)) - np.asarray(before)) <= rounding)
    np.testing.assert_array_equal(as_array(frozen.quant_weight()), weight)
    unfrozen = jqinject.unfreeze(jqinject.freeze(nnx.clone(layer), keep_masters=True))
    np.testing.assert_array_equal(unfrozen(x), layer(x))


def test_the_report_counts_what_is_stored():
    layer = linear(Symmetric)
    x = jnp.ones((3, INPUTS))
    frozen = jqinject.freeze(nnx.clone(layer))
    codes, scales = 2 * INPUTS * BITS // 8, 2 * INPUTS // GROUP * 4
    assert sum(row.weight_bytes for row in jqinject.report(frozen, x).layers) == codes + scales
    assert sum(row.weight_bytes for row in jqinject.report(layer, x).layers) == 2 * INPUTS * 4


@pytest.mark.heavy
def test_a_learned_scale_of_scales_is_loaded():
    learned = Symmetric.let(scaling_quant=OfScales.let(scaling_impl_type="parameter_from_stats"))
    layer, other = linear(learned), linear(learned)
    layer(jnp.ones((1, INPUTS)))
    paths = {path: v.get_value().shape for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    assert [shape for path, shape in paths.items() if path[-1] == "value"] == [(2, 1, 1, 2)]
    gradients = nnx.grad(lambda m: m(jnp.ones((1, INPUTS))).sum())(layer)
    assert all(np.any(gradient.get_value()) for _, gradient in nnx.to_flat_state(gradients))
    state = nnx.state(layer)
    jqinject.load_state(
        other, jax.tree.map(lambda leaf: leaf * 2 if leaf.shape == (2, 1, 1, 2) else leaf, state)
    )
    assert not np.array_equal(as_array(other.quant_weight()), as_array(layer.quant_weight()))
    jqinject.load_state(other, state)
    np.testing.assert_array_equal(as_array(other.quant_weight()), as_array(layer.quant_weight()))


@pytest.mark.parametrize(
    ("of_scales", "message"),
    [
        (OfScales.let(group_size=5), r"groups of 5 scales do not fill axis 0 of scales of shape \(16, 1, 2\).* 16."
         r"\n  cure: in the nested injector group_size = 2, 4, 8, 16 "),
        (OfScales.let(group_size=32), r"groups of 32 scales .* it has 16.\n  cure: .*group_size = 2, 4, 8, 16 "),
        (OtherName.let(group_size=5), r"groups of 5 scales .* it has 16."),
        (OfScales.let(group_dim=1), r"groups of 8 scales do not fill axis 1 .* it has 1.\n  cure: .*group_dim = "),
        (OfScales.let(group_dim=5), r"scales of shape \(16, 1, 2\).* have no axis 5 .*\n  cure: group_dim = 0"),
    ],
)  # fmt: skip
def test_scales_that_groups_do_not_fill(of_scales, message):
    with pytest.raises(ValueError, match=message):
        linear(Symmetric.let(scaling_quant=of_scales))


def test_a_quantizer_of_scales_that_does_not_say_so():
    unsaid = WithoutShape.let(scaling_quant=WithoutShape.scaling_quant.let(upstream_scaling=None))
    with pytest.raises(
        ValueError, match=r"got one of shape \(16, 1, 2\).*\n  cure: .*upstream_shape = \(this << 1\)"
    ):
        linear(unsaid).quant_weight()


def test_the_threshold_has_no_groups():
    quantizer = Symmetric.let(restrict_threshold_impl=QuantRestrictValue)
    with pytest.raises(
        ValueError, match=r"got one of shape \(\), .*\n  cure: .*restrict_threshold_impl = FloatRestr"
    ):
        linear(quantizer).quant_weight()


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")
@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_sharded_rows(axis):
    def quantized(**metadata):
        layer = QuantLinear(INPUTS, 32, weight_quant=Shifted, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        return nnx.jit(lambda layer: layer.quant_weight().value)(layer)

    expected = quantized()
    with jax.set_mesh(jax.make_mesh((4,), ("model",), axis_types=(axis,))):
        np.testing.assert_array_equal(quantized(out_sharding=("model", None)), expected)
