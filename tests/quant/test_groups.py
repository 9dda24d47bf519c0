"""Quantizers with a scale for each group, in layers: groups by hand, freezing, integers, stacks, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as ready_made
from jqinject import native
from jqinject.core import RoundMidMaxSte
from jqinject.nn import QuantConv, QuantEmbed, QuantIdentity, QuantLinear
from jqinject.quant import (
    Int4WeightPerGroupAbsMax,
    Int8ActPerTensorFloat,
    Int8Bias,
    Int8DynamicActPerGroupFloat,
    Int8DynamicActPerRowAbsMax,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelAbsMax,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
    MXFloat4e2m1Weight,
    MXFloat8e4m3Act,
    MXFloat8e4m3Weight,
    MXInt8Act,
    MXInt8Weight,
    NVFP4Weight,
    ShiftedMXUInt8Weight,
    ShiftedUint8DynamicActPerGroupFloat,
    ShiftedUint8WeightGroupQuantFloat,
    ShiftedUint8WeightPerGroupFloatHQO,
)
from jqinject.quant_tensor import GroupwiseIntQuantTensor, as_array

X = jax.random.normal(jax.random.key(1), (4, 64))


def linear(quantizer, features=64, **more):
    return QuantLinear(features, 6, weight_quant=quantizer, rngs=nnx.Rngs(0), **more)


def stored_bits(layer):
    frozen = jax.tree.leaves(jqinject.freeze(layer).kernel.numbers)
    return sum(x.size * x.dtype.itemsize * 8 for x in frozen)


def test_a_group_is_quantized_as_if_it_were_alone():
    layer = linear(IntWeightSymmetricGroupQuant, features=20, weight_group_size=8, weight_bit_width=4)
    weight, kernel = layer.quant_weight(), np.asarray(layer.kernel[...])
    for start in (0, 8, 16):
        rows = slice(start, start + 8)
        scale = np.abs(kernel[rows]).max(axis=0) / 7
        np.testing.assert_allclose(weight.scale[rows], np.broadcast_to(scale, kernel[rows].shape), rtol=1e-6)
        np.testing.assert_array_equal(
            weight.int()[rows], np.round(kernel[rows] / np.asarray(weight.scale[rows]))
        )


def test_mx_scales_are_powers_of_two_that_reach_the_largest_magnitude():
    weight = linear(MXInt8Weight).quant_weight()
    exponents = np.log2(np.asarray(weight.scale_))
    np.testing.assert_array_equal(exponents, np.round(exponents))
    largest = np.abs(np.asarray(weight.value_)).max(axis=1, keepdims=True) / np.asarray(weight.scale_)
    assert (largest >= 64).all() and (largest <= 128).all()


def test_mid_max_scales_clamp_nothing_that_does_not_round_to_the_largest_number():
    plain, mid = (
        linear(MXFloat8e4m3Weight, **more)
        for more in ({}, {"weight_restrict_value_float_to_int_impl": RoundMidMaxSte})
    )
    kernel = np.asarray(plain.kernel[...])
    for layer, most in ((plain, np.inf), (mid, 464.0)):
        steps = np.abs(kernel) / np.asarray(layer.quant_weight().scale)
        assert steps.max() <= most
    assert (np.abs(kernel) / np.asarray(plain.quant_weight().scale)).max() > 464.0


def test_one_override_turns_a_quantizer_into_one_of_groups():
    layer = linear(Int8WeightPerChannelFloat, weight_scaling_per_output_type="group", weight_group_size=16)
    assert isinstance(layer.quant_weight(), GroupwiseIntQuantTensor)
    assert (layer.weight_quant.group_size, layer.weight_quant.group_dim) == (16, 0)


@pytest.mark.heavy
def test_groups_lie_along_the_inputs_of_every_layer():
    conv = QuantConv(6, 4, (3, 3), weight_quant=MXInt8Weight, weight_group_size=4, rngs=nnx.Rngs(0))
    assert conv.quant_weight().scale_.shape == (3, 3, 2, 1, 4)
    embed = QuantEmbed(10, 12, weight_quant=MXInt8Weight, weight_group_size=4, rngs=nnx.Rngs(0))
    assert embed.quant_weight().scale_.shape == (10, 3, 1)


@pytest.mark.parametrize(
    ("quantizer", "more", "bits"),
    [
        (MXInt8Weight, {"weight_bit_width": 4}, 4 + 8 / 32),
        (IntWeightSymmetricGroupQuant, {"weight_bit_width": 4, "weight_group_size": 32}, 4 + 32 / 32),
        (MXFloat4e2m1Weight, {}, 4 + 8 / 32),
        (NVFP4Weight, {}, 4 + 8 / 16),
        (MXFloat8e4m3Weight, {}, 8 + 8 / 32),
        (ShiftedUint8WeightGroupQuantFloat, {"weight_group_size": 32}, 8 + 40 / 32),
    ],
)
def test_frozen_it_takes_the_bits_of_its_numbers_and_scales_and_computes_the_same(quantizer, more, bits):
    layer = linear(quantizer, **more)
    layer.eval()
    expected, weight = layer(X), layer.quant_weight()
    factor = 32 if quantizer is NVFP4Weight else 0  # one float32 scale of the scales
    assert stored_bits(layer) == bits * 64 * 6 + factor
    served = layer.quant_weight()
    for name in ("value", "scale", "zero_point"):
        np.testing.assert_array_equal(getattr(served, name), getattr(weight, name))
    np.testing.assert_allclose(layer(X), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("weight", [MXInt8Weight, ShiftedMXUInt8Weight])
@pytest.mark.parametrize(
    ("given", "more"),
    [
        (Int8ActPerTensorFloat, {}),
        (Int8DynamicActPerRowFloat, {}),
        (MXInt8Act, {}),
        (ShiftedUint8DynamicActPerGroupFloat, {"input_group_size": 32}),
    ],
)
def test_integers_are_contracted_group_by_group(weight, given, more):
    layer = linear(weight, features=40, input_quant=given, **more)
    x = X[:, :40]
    layer(x)
    layer.eval()
    expected = layer(x)
    jqinject.freeze(layer)
    assert jqinject.report(layer, x).layers[0].contraction == "float"  # small groups cost more as integers
    layer.contraction = "int"
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    # Small groups cost XLA more as integers than as floats: only a compiled kernel contracts them, of signed inputs.
    takes = native.status().startswith("in use") and given is not ShiftedUint8DynamicActPerGroupFloat
    assert jqinject.report(layer, x).layers[0].contraction == ("int" if takes else "float")


@pytest.mark.heavy
def test_large_groups_are_contracted_as_integers():
    layer = linear(MXInt8Weight, features=256, weight_group_size=128, input_quant=Int8DynamicActPerRowFloat)
    x = jax.random.normal(jax.random.key(2), (4, 256))
    layer.eval()
    expected = layer(x)
    jqinject.freeze(layer)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert jqinject.report(layer, x).layers[0].contraction == "int"


@pytest.mark.heavy
def test_groups_of_another_size_and_zero_points_between_integers_are_contracted_as_floats():
    sizes = linear(MXInt8Weight, input_quant=Int8DynamicActPerGroupFloat, input_group_size=16)
    between = linear(ShiftedUint8WeightPerGroupFloatHQO, input_quant=Int8DynamicActPerRowFloat)
    for layer in (sizes, between):
        layer(X)
        layer.eval()
        expected = layer(X)
        jqinject.freeze(layer)
        np.testing.assert_allclose(layer(X), expected, rtol=1e-5, atol=1e-5)
        assert jqinject.report(layer, X).layers[0].contraction == "float"


@pytest.mark.heavy
def test_integers_from_the_start_have_the_gradients_of_the_floats():
    plain, whole = (
        linear(MXInt8Weight, input_quant=MXInt8Act, contraction=contraction)
        for contraction in ("float", "int")
    )
    of_plain, of_whole = (nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(m) for m in (plain, whole))
    np.testing.assert_allclose(of_whole["kernel"][...], of_plain["kernel"][...], rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_a_stack_of_layers_has_groups_for_each():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return QuantLinear(64, 6, weight_quant=MXInt8Weight, weight_bit_width=4, rngs=rngs)

    layers = make(nnx.Rngs(0).split(3))
    run = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    expected = run(layers, X)
    jqinject.freeze(layers)
    assert layers.frozen.shape == (3, 64, 6)
    np.testing.assert_allclose(run(layers, X), expected, rtol=1e-6, atol=1e-6)


def test_an_abstract_model_freezes_to_the_same_structure():
    def make():
        return jqinject.freeze(linear(NVFP4Weight))

    abstract, concrete = nnx.eval_shape(make), make()
    assert nnx.graphdef(abstract) == nnx.graphdef(concrete)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(nnx.state(concrete))]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(nnx.state(abstract))] == shapes


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["MXInt8Weight", "MXFloat4e2m1Weight", "NVFP4Weight", "ShiftedMXUInt8Weight"]
)
def test_zeros_and_emptiness_have_no_nan(name):
    for features in (64, 0):
        layer = linear(getattr(ready_made, name), features=features, kernel_init=nnx.initializers.zeros)
        weight = layer.quant_weight()
        assert bool(jnp.all(weight.value == 0)) and bool(jnp.all(jnp.isfinite(weight.scale)))
        assert bool(jnp.all(weight.scale > 0))
        jqinject.freeze(layer)
        assert bool(jnp.all(layer.quant_weight().value == 0))


def test_dynamic_scales_are_those_of_the_tensor_in_training_and_evaluation():
    identity = QuantIdentity(Int8DynamicActPerRowFloat, return_quant_tensor=True)
    for _ in range(2):
        for factor in (1.0, 100.0):
            scale = identity(X * factor).scale
            np.testing.assert_allclose(scale, np.abs(X * factor).max(axis=-1, keepdims=True) / 128, rtol=1e-6)
        identity.eval()
    assert not jax.tree.leaves(nnx.state(identity))


@pytest.mark.parametrize(
    ("quantizer", "more"),
    [(Int8DynamicActPerRowFloat, {}), (MXInt8Act, {}), (MXFloat8e4m3Act, {})],
)
def test_what_depends_on_the_input_is_not_told_without_one(quantizer, more):
    proxy = QuantIdentity(quantizer, **more).act_quant
    assert proxy.bit_width() == 8
    for name in ("scale", "zero_point"):
        with pytest.raises(RuntimeError, match=r"depends on the input"):
            getattr(proxy, name)()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: linear(MXInt8Weight, features=40, weight_group_padding=False),
            r"groups of 32 do not fill an axis of 40",
        ),
        (
            lambda: linear(MXInt8Weight, weight_group_size=0),
            r"group_size must be a whole number of at least 1, got 0",
        ),
        (lambda: linear(MXInt8Weight, weight_group_size=2.5), r"group_size must be a whole number"),
        (lambda: linear(Int4WeightPerGroupAbsMax, features=40).quant_weight(), r"groups of 32 do not fill"),
        (
            lambda: linear(IntWeightSymmetricGroupQuant, weight_group_size=8, weight_quant_type="ternary"),
            r"'ternary' has no scales for groups",
        ),
        (
            lambda: QuantIdentity(Int8ActPerTensorFloat, scaling_per_output_type="group", group_size=8),
            r"cure: scaling_impl = RuntimeDynamicGroupStatsScaling",
        ),
        (
            lambda: QuantIdentity(MXInt8Act, group_padding=False)(X[:, :40]),
            r"groups of 32 do not fill an axis of 40 elements",
        ),
        (lambda: QuantIdentity(MXInt8Act, group_dim=2)(X), r"has no axis 2 to cut into groups"),
        (
            lambda: linear(MXInt8Weight, input_quant=Int8ActPerTensorFloat, bias_quant=Int8Bias)(X),
            r"a scale for each group, so that their sums have none",
        ),
    ],
)
def test_what_can_not_be_is_refused_with_a_cure(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make()


@pytest.mark.heavy
@pytest.mark.parametrize("size", [17, 10**9])
def test_a_group_longer_than_its_axis_is_the_axis(size):
    layers = [
        QuantLinear(
            16, 4, weight_quant=IntWeightSymmetricGroupQuant, weight_group_size=length, rngs=nnx.Rngs(0)
        )
        for length in (size, 16)
    ]
    for found, expected in zip(*(jax.tree.leaves(layer.quant_weight()) for layer in layers), strict=True):
        np.testing.assert_array_equal(found, expected)
    x = jnp.linspace(-1.0, 2.0, 32).reshape(2, 16)
    np.testing.assert_array_equal(*(as_array(QuantIdentity(MXInt8Act, group_size=n)(x)) for n in (size, 16)))


@pytest.mark.heavy
def test_rows_and_weight_in_the_same_tiles_are_a_sum_of_layers_of_one_tile_each():
    rows, tiles = (
        {"input_quant": Int8DynamicActPerRowAbsMax},
        {"weight_group_size": 16, "input_group_size": 16},
    )
    plain = nnx.Sequential(nnx.Linear(64, 6, use_bias=False, rngs=nnx.Rngs(0)))
    rule = jqinject.Rule(weight_quant=Int4WeightPerGroupAbsMax, **rows, **tiles)
    model = jqinject.quantize(plain, rule, inputs=X)
    expected = jnp.zeros((4, 6))
    for start in range(0, 64, 16):
        cut = slice(start, start + 16)
        part = linear(Int8WeightPerChannelAbsMax, 16, weight_bit_width=4, use_bias=False, **rows)
        part.kernel[...] = plain.layers[0].kernel[cut]
        expected += part(X[:, cut])
    frozen = jqinject.freeze(model)
    for each in (model, frozen):
        np.testing.assert_allclose(each(X), expected, rtol=1e-5, atol=1e-6)
    assert "1 of 1 matrices quantized" in str(jqinject.report(frozen, X))
