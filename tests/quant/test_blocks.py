"""Blocks over two axes: `group_size = (rows, columns)` of any quantizer in groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.core import AbsAve, AbsMax, FloatSaturate
from jqinject.core.statistics.statistic import OverBlocks
from jqinject.core.views import Blocks
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear
from jqinject.quant import (
    Int4WeightPerGroupAbsMax,
    MXFloat4e2m1Act,
    MXFloat4e2m1Weight,
    MXFloat6e2m3Act,
    MXFloat6e3m2Act,
    MXFloat8e4m3Act,
    MXFloat8e4m3Weight,
    MXFloat8e5m2Act,
    MXInt8Act,
    MXInt8Weight,
    MXInt8WeightMSE,
    NVFP4Weight,
    ShiftedMXUInt8Weight,
    ShiftedMXUInt8WeightMSE,
)


def linear(quantizer, inputs=40, outputs=24, **more):
    return QuantLinear(inputs, outputs, weight_quant=quantizer, rngs=nnx.Rngs(0), **more)


def block_maxima(kernel, rows, columns):
    """max |w| of each block, for each of its elements."""
    found = np.zeros_like(kernel)
    for i in range(0, kernel.shape[0], rows):
        for j in range(0, kernel.shape[1], columns):
            found[i : i + rows, j : j + columns] = np.abs(kernel[i : i + rows, j : j + columns]).max()
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("block", [(16, 16), (8, 5), (128, 128)])
def test_a_block_has_one_scale_from_its_largest_magnitude(block):
    weight = linear(MXFloat8e4m3Weight.let(group_size=block)).quant_weight()
    kernel = np.asarray(linear(MXFloat8e4m3Weight).kernel[...])
    wanted = 2.0 ** (np.floor(np.log2(block_maxima(kernel, *block))) - 8)
    np.testing.assert_array_equal(weight.scale, wanted)


@pytest.mark.heavy
def test_blocks_of_square_shape_are_the_same_for_the_transpose():
    layer = linear(NVFP4Weight.let(group_size=(16, 16)), 32, 48)
    twin = linear(NVFP4Weight.let(group_size=(16, 16)), 48, 32)
    twin.kernel[...] = layer.kernel[...].T
    np.testing.assert_array_equal(layer.quant_weight().value, twin.quant_weight().value.T)


@pytest.mark.heavy
def test_blocks_go_through_freezing_jit_stacks_and_reports():
    layer = linear(MXFloat4e2m1Weight, weight_group_size=(16, 8))
    x = jax.random.normal(jax.random.key(1), (3, 40))
    value = x @ layer.quant_weight().value
    frozen = jqinject.freeze(layer)
    np.testing.assert_array_equal(nnx.jit(lambda layer, x: layer(x))(frozen, x), frozen(x))
    np.testing.assert_allclose(frozen(x), value, rtol=1e-5, atol=1e-6)
    model = nnx.Sequential(linear(MXFloat4e2m1Weight, weight_group_size=(16, 8)))
    assert "in blocks of 16 x 8" in str(jqinject.coverage(model, x))

    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(key):
        return QuantLinear(
            40, 24, weight_quant=MXFloat4e2m1Weight, weight_group_size=(16, 8), rngs=nnx.Rngs(key)
        )

    stacked = stack(jax.random.split(jax.random.key(0), 2))
    values = nnx.vmap(lambda layer: layer.quant_weight().value)(stacked)
    alone = linear(MXFloat4e2m1Weight, weight_group_size=(16, 8))
    alone.kernel[...] = stacked.kernel[...][1]
    np.testing.assert_array_equal(values[1], alone.quant_weight().value)


@pytest.mark.heavy
def test_kernels_of_convolutions_have_blocks_of_input_and_output_channels():
    conv = QuantConv(8, 12, (3, 3), weight_quant=MXInt8Weight, weight_group_size=(4, 6), rngs=nnx.Rngs(0))
    scale, kernel = conv.quant_weight().scale, np.asarray(conv.kernel[...])
    for tap in np.ndindex(3, 3):
        wanted = 2.0 ** (np.floor(np.log2(block_maxima(kernel[tap], 4, 6))) - 6)
        np.testing.assert_array_equal(scale[tap], wanted)


@pytest.mark.heavy
def test_activations_have_blocks_of_rows_and_features():
    x = jax.random.normal(jax.random.key(2), (2, 20, 40))
    act = QuantIdentity(act_quant=MXFloat8e4m3Act, group_size=(16, 8), return_quant_tensor=True)
    for rows, scale in zip(np.asarray(x), act(x).scale, strict=True):
        wanted = 2.0 ** (np.floor(np.log2(block_maxima(rows.T, 16, 8).T)) - 8)
        np.testing.assert_array_equal(scale, wanted)
    with pytest.raises(ValueError, match=r"blocks of 16 x 8 need an axis beside axis -1"):
        act(x[0, 0])


@pytest.mark.heavy
def test_a_statistic_that_only_reduces_one_axis_sees_whole_blocks():
    x = jax.random.normal(jax.random.key(0), (3, 4, 6))
    blocks = Blocks(2, axis=2, elements=1)
    mean = OverBlocks(lambda x: jnp.mean(jnp.abs(x), axis=1, keepdims=True), blocks)
    wanted = jnp.abs(x).reshape(3, 4, 3, 2).mean(axis=(1, 3))
    np.testing.assert_allclose(mean(x)[:, 0], jnp.repeat(wanted, 2, axis=1), rtol=1e-6)
    along = OverBlocks(AbsAve(stats_reduce_dim=1), blocks)
    np.testing.assert_allclose(along(x), mean(x), rtol=1e-6)
    first = Blocks(2, axis=0, elements=1)
    top = OverBlocks(AbsMax(stats_reduce_dim=1, keepdim=True), first)(x)
    np.testing.assert_array_equal(top[0], top[1])
    np.testing.assert_array_equal(top[2, 0], jnp.abs(x[2]).max(axis=0))


@pytest.mark.heavy
def test_gradients_reach_the_largest_element_of_a_block():
    layer = linear(MXInt8Weight.let(group_size=(8, 4), restrict_scaling_type="fp"), 8, 8)
    gradient = nnx.grad(lambda layer: layer.quant_weight().value.sum())(layer).kernel[...]
    assert bool(jnp.isfinite(gradient).all())


@pytest.mark.parametrize(
    ("quantizer", "group_size", "message"),
    [
        (MXInt8Weight, (16, 16, 16), "a block has two lengths, group_size has 3"),
        (MXInt8Weight, (16, 0), "group_size must be a whole number of at least 1, got 0"),
        (MXInt8WeightMSE, (16, 16), "not for blocks over two axes"),
        (
            Int4WeightPerGroupAbsMax,
            (16, 16),
            r"cuts one axis into groups, got the block group_size = \(16, 16\)",
        ),
        (MXInt8Weight.let(group_padding=False), (8, 16), "groups of 16 do not fill an axis of 24"),
        (MXInt8Weight.let(group_padding=False), (16, 8), "groups of 16 do not fill an axis of 40"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_with_a_cure(quantizer, group_size, message):
    with pytest.raises(ValueError, match=message) as caught:
        linear(quantizer.let(group_size=group_size)).quant_weight()
    assert "cure:" in str(caught.value)


@pytest.mark.parametrize("rounding", ["floor", "rceil"])
def test_subnormal_numbers_are_not_taken_for_zero(rounding):
    x = np.float32([[3e-39, -1e-38, 2e-38, 0.0, -2.5e-37, 1e-45, 6e-36, -0.0]])
    quantizer = MXFloat8e4m3Act.let(
        group_size=8, scale_rounding=rounding, straight_through=True, float_clamp_impl=FloatSaturate
    )
    act = QuantIdentity(act_quant=quantizer, return_quant_tensor=True)
    tensor, payload = jax.jit(lambda x: ((made := act(x)), made.payload()))(x)
    scale = float(np.float64(tensor.scale_.reshape(-1)[0]))
    # NumPy has subnormal numbers; blocks of the scale 2**-127 are divided by the smallest normal one, or by 1.
    divisor = scale if scale >= 2.0**-126 else {"floor": 2.0**-126, "rceil": 1.0}[rounding]
    numbers = np.clip(x.astype(np.float64) / divisor, -448, 448).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(payload).view(np.uint8), numbers.view(np.uint8))
    wanted = (numbers.astype(np.float64) * scale).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(tensor.value).view(np.uint32), wanted.view(np.uint32))


# The largest number, and the bits of the mantissa.
SIGNED4 = MXInt8Act.let(bit_width=4)
MX = {
    MXInt8Act: (127, 6),
    SIGNED4: (7, 2),
    MXFloat8e4m3Act: (448, 3),
    MXFloat8e5m2Act: (57344, 2),
    MXFloat6e2m3Act: (7.5, 3),
    MXFloat6e3m2Act: (28, 2),
    MXFloat4e2m1Act: (6, 1),
}


def exponent_of(rounding, amax, largest, mantissa):
    """The rules of "Microscaling Formats (MX)" 1.0, 6.3, of torchao and of cuBLAS, in float64."""
    amax = amax.astype(np.float64)
    emax = np.floor(np.log2(largest))
    if rounding == "rceil":
        return np.ceil(np.log2(amax / largest))
    if rounding == "ceil":  # of integers up to the power of two above the largest
        return np.ceil(np.log2(amax)) - (np.log2(largest + 1) if largest in (127, 7) else emax)
    if rounding == "even":
        unit = 2.0 ** (np.floor(np.log2(amax)) - mantissa)
        amax = np.floor(amax / unit + 0.5) * unit
    return np.floor(np.log2(amax)) - emax


@pytest.mark.heavy
@pytest.mark.parametrize("rounding", [None, "floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("quantizer", MX, ids=lambda q: q.__name__)
def test_scales_of_microscaling_formats_follow_their_rules(quantizer, rounding):
    largest, mantissa = MX[quantizer]
    x = np.array(jax.random.normal(jax.random.key(0), (512, 32)), np.float32)
    edges = np.float32([1, 2, 8, 0.125, largest, 2 * largest])
    edges = np.concatenate([np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(9e9))])
    x[: edges.size, 0] = edges
    chosen = quantizer if rounding is None else quantizer.let(scale_rounding=rounding)
    scale = QuantIdentity(act_quant=chosen, return_quant_tensor=True)(x).scale_[..., 0]
    np.testing.assert_array_equal(np.log2(scale), exponent_of(rounding, largest_of(x), largest, mantissa))


def largest_of(x):
    return np.abs(x).max(-1, keepdims=True)


@pytest.mark.heavy
@pytest.mark.parametrize("rounding", [None, "floor", "ceil", "even", "rceil"])
def test_elements_of_mx_int8_are_64ths_of_the_scale(rounding):
    quantizer = MXInt8Weight if rounding is None else MXInt8Weight.let(scale_rounding=rounding)
    layer = linear(quantizer, 32, 256)
    weight = layer.quant_weight()
    kernel = np.asarray(layer.kernel[...], np.float64)
    step = 2.0 ** exponent_of(rounding, np.abs(kernel).max(0, keepdims=True), 127, 6)
    codes = np.clip(np.round(kernel / step), -128, 127)
    np.testing.assert_array_equal(weight.int(), codes)
    np.testing.assert_array_equal(weight.value, codes * step)


# Uniform noise of a step on N(0, 1): 41.6 dB of signed steps, 42.6 of unsigned ones from the least number on.
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("quantizer", "least"),
    [
        (MXInt8Weight, 41.4),
        (MXInt8WeightMSE, 41.4),
        (ShiftedMXUInt8Weight, 42.4),
        (ShiftedMXUInt8WeightMSE, 42.4),
    ],
)
def test_mx_integers_cover_the_range_of_their_block(quantizer, least):
    layer = linear(quantizer, 256, 256)
    kernel = jax.random.normal(jax.random.key(0), (256, 256))
    jqinject.load_state(layer, {"kernel": kernel, "bias": layer.bias[...]})
    noise = jnp.square(layer.quant_weight().value - kernel).mean()
    assert -10 * jnp.log10(noise) > least
