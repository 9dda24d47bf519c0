"""What single layers do that others do not: equations of a call, tables, low-rank updates, several channel axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.nn import (
    QuantConvTranspose,
    QuantEinsum,
    QuantEmbed,
    QuantLinear,
    QuantLinearGeneral,
    QuantLoRALinear,
)
from jqinject.quant import (
    Fp8e4m3ActPerTensorCurrent,
    Fp8e4m3WeightPerChannelCurrent,
    Fp8e5m2GradPerTensorCurrent,
    Int8ActPerTensorFloat,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFloat,
    Int32Bias,
    ShiftedUint8WeightPerChannelFloat,
)

X = jax.random.normal(jax.random.key(0), (3, 6))
call = nnx.jit(lambda model, x: model(x))
INT8 = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8ActPerTensorFloat}
FP8 = {
    "weight_quant": Fp8e4m3WeightPerChannelCurrent,
    "input_quant": Fp8e4m3ActPerTensorCurrent,
    "grad_quant": Fp8e5m2GradPerTensorCurrent,
}


def general(**given):
    return QuantLinearGeneral(6, (2, 4), **given, rngs=nnx.Rngs(0))


def einsum(equation="bd,ndh->bhn", bias_shape=(4, 2), **given):
    return QuantEinsum(equation, (2, 6, 4), bias_shape, **given, rngs=nnx.Rngs(0))


# --- several channel axes

STATS = {
    "max": (Int8WeightPerChannelFloat, {}, lambda w: np.abs(w).max(1) / 127),
    "ave": (Int8WeightPerChannelFloat, {"scaling_stats_op": "ave"}, lambda w: np.abs(w).mean(1) / 127),
    "percentile": (
        Int8WeightPerChannelFloat,
        {"scaling_stats_op": "percentile", "high_percentile_q": 100.0},
        lambda w: np.abs(w).max(1) / 127,
    ),
    "learned": (
        Int8WeightPerChannelFloat,
        {"scaling_impl_type": "parameter_from_stats"},
        lambda w: np.abs(w).max(1) / 127,
    ),
    "fp8": (Fp8e4m3WeightPerChannelCurrent, {}, lambda w: np.abs(w).max(1) / 448),
    "shifted": (
        ShiftedUint8WeightPerChannelFloat,
        {},
        lambda w: (w.max(1) - np.minimum(w.min(1), 0)) / 255,
    ),
}


@pytest.mark.parametrize(("quantizer", "choices", "expected"), STATS.values(), ids=STATS)
@pytest.mark.parametrize("make", [general, einsum])
def test_statistics_of_channels_along_several_axes(make, quantizer, choices, expected):
    layer = make(weight_quant=quantizer, **{f"weight_{name}": choice for name, choice in choices.items()})
    weight, scale = np.asarray(layer.kernel[...]), layer.quant_weight().scale
    summed = layer.summed_axes[0]
    rows = np.moveaxis(weight, summed, -1).reshape(8, 6)
    assert scale.shape == tuple(1 if axis == summed else size for axis, size in enumerate(weight.shape))
    np.testing.assert_allclose(scale.reshape(-1), expected(rows), rtol=1e-5)
    if quantizer is ShiftedUint8WeightPerChannelFloat:
        assert layer.quant_weight().zero_point.shape == scale.shape


def test_one_scale_for_each_element_of_a_bias_of_several_axes():
    layer = general(
        bias_init=nnx.initializers.normal(1.0),
        bias_quant=Int8BiasPerTensorFloatInternalScaling,
        bias_scaling_per_output_type="channel",
    )
    bias = layer.quant_bias()
    assert bias.scale.shape == (2, 4)
    np.testing.assert_allclose(bias.scale, np.abs(layer.bias[...]) / 128, rtol=1e-6)
    np.testing.assert_array_equal(bias.int(), np.where(layer.bias[...] > 0, 127, -128))


def test_he_s_scale_counts_the_weights_behind_one_channel_of_several_axes():
    layer = general(weight_scaling_impl_type="he", weight_quant=Int8WeightPerChannelFloat)
    np.testing.assert_allclose(layer.quant_weight().scale, np.sqrt(2 / 6) / 127, rtol=1e-6)


@pytest.mark.heavy
def test_one_channel_axis_where_the_user_says_so():
    layer = general(**INT8, weight_output_channel_dim=2, bias_quant=Int32Bias, return_quant_tensor=True)
    weight = layer.quant_weight()
    np.testing.assert_allclose(
        weight.scale, np.abs(layer.kernel[...]).max((0, 1), keepdims=True) / 127, rtol=1e-6
    )
    y = layer(X)
    assert (y.scale.shape, y.is_valid) == ((1, 1, 4), True)
    layer = general(**INT8, weight_output_channel_dim=0, bias_quant=Int32Bias)
    with pytest.raises(ValueError, match=r"scales of shape \(6, 1, 1\) are not those of the output.\n  cure"):
        layer(X)
    layer = general(**INT8, weight_output_channel_dim=0)
    layer(X)
    frozen = jqinject.freeze(layer)
    np.testing.assert_allclose(
        frozen(X),
        jnp.tensordot(frozen.input_quant(X).value, frozen.quant_weight().value, 1),
        rtol=1e-5,
        atol=1e-6,
    )


# --- 8-bit floats


@pytest.mark.heavy
@pytest.mark.parametrize(
    "make", [general, einsum, lambda **given: QuantLoRALinear(6, 4, lora_rank=2, rngs=nnx.Rngs(0), **given)]
)
def test_8_bit_floats_are_contracted_forward_and_backward(make):
    payloads, floats = make(**FP8, contraction="fp8"), make(**FP8, contraction="float")
    assert "f8_e4m3" in str(jax.make_jaxpr(lambda x: nnx.clone(payloads)(x))(X)).lower()
    np.testing.assert_allclose(call(payloads, X), call(floats, X), rtol=1e-5, atol=1e-6)
    step = nnx.jit(jqinject.grad(lambda m, x: jnp.sum(jnp.sin(m(x)))))
    ours, theirs = step(payloads, X), step(floats, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)
    assert float(payloads.grad_quant.amax_history.newest) > 0


def test_what_has_no_payload_contraction():
    flipped = {"transpose_kernel": True, "kernel_size": 3, "in_features": 4, "out_features": 6}
    for layer, x in (
        (QuantConvTranspose(**flipped, **INT8, rngs=nnx.Rngs(0)), X[None, ..., :4]),
        (QuantEmbed(7, 6, rngs=nnx.Rngs(0)), jnp.array([1, 2])),
    ):
        layer.set_attributes(contraction="int")
        with pytest.raises(
            ValueError, match=r"needs (an input in integers|a contraction of integers, which a)"
        ):
            layer(x)


@pytest.mark.parametrize(
    "options", [{}, {"strides": 2, "padding": "VALID"}, {"padding": "CIRCULAR", "strides": 2}]
)
def test_transposed_convolutions_of_integers(options):
    given = {**INT8, **options, "rngs": nnx.Rngs(0)}
    integers = QuantConvTranspose(4, 6, 3, contraction="int", **given)
    floats = QuantConvTranspose(4, 6, 3, contraction="float", **{**given, "rngs": nnx.Rngs(0)})
    x = jax.random.normal(jax.random.key(1), (2, 5, 4))
    step = nnx.jit(nnx.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x)))))
    (ours, gradients), (theirs, wanted) = step(integers, x), step(floats, x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(gradients.kernel[...], wanted.kernel[...], rtol=1e-4, atol=1e-5)
    assert "i8[" in str(jax.make_jaxpr(lambda x: nnx.clone(integers)(x))(x))


def test_a_convolution_inside_a_jitted_function_is_one_of_integers_too(monkeypatch):
    given = {**INT8, "contraction": "int", "strides": 2}
    x = jax.random.normal(jax.random.key(1), (2, 5, 4))
    layer = QuantConvTranspose(4, 6, 3, **given, rngs=nnx.Rngs(0))
    layer(x)
    layer.eval()
    expected = layer(x)
    own = jax.lax.conv_transpose
    monkeypatch.setattr(
        jax.lax,
        "conv_transpose",
        lambda x, w, *rest, **how: jax.jit(lambda x, w: own(x, w, *rest, **how))(x, w),
    )
    np.testing.assert_array_equal(layer(x), expected)
    assert "preferred_element_type=int32" in str(jax.make_jaxpr(lambda x: nnx.clone(layer)(x))(x))
    monkeypatch.setattr(jax.lax, "conv_transpose", lambda *arrays, **how: jnp.zeros((2, 10, 6)))
    with pytest.raises(ValueError, match="none is in the open"):
        layer(x)


# --- einsum


@pytest.mark.heavy
def test_an_equation_of_a_call():
    layer = einsum(bias_shape=None, **INT8)
    parent = nnx.Einsum("bd,ndh->bhn", (2, 6, 4), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (3, 4))
    call_backwards = nnx.jit(lambda m, x: m(x, "bh,ndh->bdn"))
    call_backwards(layer, x)
    layer.eval()
    parent.kernel = nnx.Param(layer.quant_weight().value)
    expected = parent(layer.input_quant(x).value, "bh,ndh->bdn")
    np.testing.assert_allclose(layer(x, " bh,ndh -> bdn"), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(layer(X, "bd,ndh->bhn"), layer(X))
    assert layer.einsum_str == "bd,ndh->bhn"
    # Frozen, the sums of the integers that are known are those of the layer's own equation.
    for weight in (Int8WeightPerChannelFloat, ShiftedUint8WeightPerChannelFloat):
        layer = einsum(bias_shape=None, weight_quant=weight, input_quant=Int8ActPerTensorFloat)
        layer(x, "bh,ndh->bdn")
        layer.eval()
        expected = call_backwards(layer, x)
        np.testing.assert_allclose(call_backwards(jqinject.freeze(layer), x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
def test_an_equation_that_is_no_plain_contraction_contracts_floats():
    for equation, shape in (("bdd,ndh->bhn", (3, 6, 6)), ("bd,ndh->bh", (3, 6)), ("bd,ndh->bhn", (3, 1))):
        layer = einsum(equation, None, **INT8, return_quant_tensor=True)
        x = jax.random.normal(jax.random.key(1), shape)
        layer(x)
        layer.eval()
        y = layer(x)
        assert isinstance(y, jax.Array)
        expected = jnp.einsum(equation, layer.input_quant(x).value, layer.quant_weight().value)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(call(jqinject.freeze(layer), x), expected, rtol=1e-5, atol=1e-5)


def test_functions_of_the_users_own_contract():
    def doubled(*args, **kwargs):
        return 2 * jax.lax.dot_general(*args, **kwargs)

    kernel = general(**INT8).quant_weight().value
    for given in ({"dot_general": doubled}, {"dot_general_cls": lambda: doubled}):
        layer = general(**INT8, **given)
        layer(X)
        layer.eval()
        expected = 2 * jnp.tensordot(layer.input_quant(X).value, kernel, 1)
        np.testing.assert_allclose(layer(X), expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(jqinject.freeze(nnx.clone(layer))(X), expected, rtol=1e-5, atol=1e-6)
        layer.set_attributes(contraction="int")
        with pytest.raises(ValueError, match=r"would never call dot_general"):
            layer(X)


# --- embedding

TOKENS = jnp.array([[0, 6, -1], [3, 3, 7]])  # the last one is out of range


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("weight", [Int8WeightPerChannelFloat, ShiftedUint8WeightPerChannelFloat])
def test_rows_keep_their_scales(weight, frozen):
    layer = QuantEmbed(7, 6, weight_quant=weight, return_quant_tensor=True, rngs=nnx.Rngs(0))
    table = layer.quant_weight()
    if frozen:
        jqinject.freeze(layer)
        assert "sums" not in str(nnx.state(layer))
    rows = call(layer, TOKENS[:, :2])
    assert rows.scale.shape == (2, 2, 1)
    np.testing.assert_array_equal(rows.int(), np.asarray(table.int())[np.array([[0, 6], [3, 3]])])
    y = call(layer, TOKENS).value
    np.testing.assert_array_equal(y[0, 1], y[0, 2])
    assert bool(jnp.isnan(y[1, 2]).all()) and not bool(jnp.isnan(y[:, :2]).any())


@pytest.mark.heavy
def test_attending_to_the_quantized_table():
    layer = QuantEmbed(
        7, 6, weight_quant=Int8WeightPerChannelFloat, output_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0)
    )
    expected = X @ layer.quant_weight().value.T
    np.testing.assert_allclose(layer.attend(X), expected, rtol=1e-6, atol=1e-6)
    gradient = nnx.grad(lambda m: m.attend(X).sum())(layer)["embedding"]
    assert float(jnp.abs(gradient[...]).max()) > 0
    layer(TOKENS[:, :2])  # the quantizer of its rows sees data
    np.testing.assert_allclose(jqinject.freeze(layer).attend(X), expected, rtol=1e-5, atol=1e-6)


def test_a_table_of_one_row():
    layer = QuantEmbed(
        1, 6, weight_quant=Int8WeightPerChannelFloat, return_quant_tensor=True, rngs=nnx.Rngs(0)
    )
    y = layer(jnp.zeros((2, 3), jnp.int32))
    assert y.is_valid
    np.testing.assert_array_equal(y.value, jnp.broadcast_to(layer.quant_weight().value, (2, 3, 6)))


def test_a_table_without_a_scale_to_return():
    layer = QuantEmbed(7, 6, return_quant_tensor=True, rngs=nnx.Rngs(0))
    layer.weight_quant.disable_quant = True
    with pytest.raises(ValueError, match=r"the table is not quantized, so the output has no scale.\n  cure"):
        layer(TOKENS)


# --- low-rank updates


@pytest.mark.heavy
def test_a_frozen_kernel_and_a_trained_update():
    layer = QuantLoRALinear(
        6, 4, lora_rank=2, weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4, rngs=nnx.Rngs(0)
    )
    base = QuantLinear(6, 4, weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X), base(X))  # B starts at 0
    jqinject.freeze(layer)
    layer.train()
    trained = nnx.grad(lambda m: jnp.sum(m(X) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
    assert set(trained) == {"lora"}
    np.testing.assert_allclose(
        trained["lora"]["lora_b"][...],
        (X @ layer.lora.lora_a[...]).T @ (2 * (X @ layer.quant_weight().value)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_sum_of_two_products_has_no_scale():
    with pytest.raises(
        ValueError, match=r"needs output_quant to have a scale.*\n  cure: give it output_quant"
    ):
        QuantLoRALinear(6, 4, lora_rank=2, **INT8, return_quant_tensor=True, rngs=nnx.Rngs(0))


# --- stacks and attention that were Flax's


@pytest.mark.heavy
def test_the_projections_of_attention_become_ours_and_are_frozen():
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8))
    for name in ("query", "key", "value", "out"):
        layer = getattr(attention, name)
        object.__setattr__(layer, "__class__", QuantLinearGeneral)
        layer._init_quantizers(INT8, {}, nnx.Rngs(0))
    assert attention.query.quant_weight().scale.shape == (1, 2, 4)
    assert attention.out.quant_weight().scale.shape == (1, 1, 8)
    call(attention, x)
    attention.eval()
    expected = call(attention, x)
    jqinject.freeze(attention)
    np.testing.assert_allclose(call(attention, x), expected, rtol=1e-4, atol=1e-5)
    assert {layer.frozen.form.stored.dtype for layer in (attention.query, attention.out)} == {
        np.dtype(np.int8)
    }


@pytest.mark.heavy
def test_every_layer_of_a_stack_that_was_flaxs_rounds_by_its_own_random_numbers():
    stack = nnx.vmap(lambda rngs: nnx.Linear(6, 4, kernel_init=nnx.initializers.constant(0.3), rngs=rngs))(
        nnx.Rngs(0).split(3)
    )
    object.__setattr__(stack, "__class__", QuantLinear)
    given = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8ActPerTensorFloat}
    overrides = {
        "weight_float_to_int_impl_type": "stochastic_round",
        "weight_bit_width": 3,
        "weight_scaling_stats_op": "ave",
        "input_float_to_int_impl_type": "stochastic_round",
    }
    stack._init_quantizers(given, overrides, nnx.Rngs(7))
    outputs = nnx.vmap(lambda m: m.input_quant(X).value)(stack)
    assert not np.array_equal(outputs[0], outputs[1])
    keys = jax.random.key_data(stack.weight_quant.tensor_quant.int_quant.float_to_int_impl.stream.key[...])
    assert len(np.unique(keys, axis=0)) == 3
