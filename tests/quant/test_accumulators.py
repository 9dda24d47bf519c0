"""No accumulator as wide as A2Q or A2Q+ was told can overflow, whatever the weights, the inputs and the training."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqinject
from jqinject.core import RoundSte, ZeroWeightsWarning
from jqinject.nn import QuantConv, QuantEmbed, QuantIdentity, QuantLinear, QuantLinearGeneral
from jqinject.ops import integer_budget, within_budget
from jqinject.quant import (
    Int8AccumulatorAwareWeightQuant,
    Int8AccumulatorAwareZeroCenterWeightQuant,
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowFloat,
    Int8DynamicActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Uint8ActPerTensorFloat,
)
from jqinject.quant_tensor import IntQuantTensor

pytestmark = pytest.mark.filterwarnings(
    "ignore::jqinject.core.ZeroWeightsWarning"
)  # of the narrowest accumulators

A2Q, A2Q_PLUS = Int8AccumulatorAwareWeightQuant, Int8AccumulatorAwareZeroCenterWeightQuant
BOTH = [A2Q, A2Q_PLUS]
SHAPE = (12, 3)
few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Weights that norms and means are hardest on: all alike, far from 0, of all magnitudes, zeros.
NUMBERS = st.one_of(
    st.floats(-1e3, 1e3, width=32, allow_subnormal=False),
    st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1000.0, 1000.0001, 1e30]),
)
KERNELS = st.one_of(
    hnp.arrays(np.float32, SHAPE, elements=NUMBERS),
    NUMBERS.map(lambda one: np.full(SHAPE, one, np.float32)),
)


def least_width(quantizer, bits, signed):
    return bits + 1 if quantizer is A2Q_PLUS else bits + 2 - signed


@st.composite
def formats(draw):
    """A quantizer, the format of the input and an accumulator that is not too narrow for it."""
    quantizer, bits, signed = draw(st.sampled_from(BOTH)), draw(st.integers(2, 8)), draw(st.booleans())
    return quantizer, bits, signed, draw(st.integers(least_width(quantizer, bits, signed), 32))


def linear(quantizer, bits, signed, width, kernel=None, **more):
    init = {} if kernel is None else {"kernel_init": lambda *_: jnp.asarray(kernel)}
    shape = SHAPE if kernel is None else kernel.shape
    return QuantLinear(
        *shape,
        use_bias=False,
        weight_quant=quantizer,
        weight_accumulator_bit_width=width,
        input_quant=Int8ActPerTensorFloat if signed else Uint8ActPerTensorFloat,
        input_bit_width=bits,
        rngs=nnx.Rngs(0),
        **init,
        **more,
    )


def worst_sums(integers, bits, signed):
    """The largest and smallest sums of products that any input gives, for every output channel, in Python integers."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    q = np.asarray(integers).astype(object).reshape(-1, integers.shape[-1])
    return np.maximum(q * low, q * high).sum(axis=0), np.minimum(q * low, q * high).sum(axis=0)


def assert_no_overflow(layer, bits, signed, width):
    highest, lowest = worst_sums(layer.quant_weight().int(), bits, signed)
    assert all(total <= 2 ** (width - 1) - 1 for total in highest)
    assert all(total >= -(2 ** (width - 1)) for total in lowest)


@pytest.mark.heavy
@few
@given(formats(), KERNELS)
def test_no_input_overflows_the_accumulator(chosen, kernel):
    quantizer, *chosen = chosen
    assert_no_overflow(linear(quantizer, *chosen, kernel), *chosen)


@pytest.mark.heavy
@few
@given(formats(), KERNELS)
def test_nor_with_weights_that_are_loaded(chosen, kernel):
    quantizer, *chosen = chosen
    layer = linear(quantizer, *chosen)
    jqinject.load_state(layer, {"kernel": kernel})
    assert_no_overflow(layer, *chosen)


@pytest.mark.heavy
@few
@given(formats(), KERNELS)
def test_nor_with_weights_under_a_quantizer_made_for_others(chosen, kernel):
    quantizer, *chosen = chosen
    layer = linear(quantizer, *chosen)
    layer.kernel[...] = jnp.asarray(kernel)  # in place: scales and norms stay those of the weights before
    assert_no_overflow(layer, *chosen)


@pytest.mark.parametrize("quantizer", BOTH)
@pytest.mark.parametrize("number", [0.0, 1e-30, 1000.0001, 1e30])
def test_weights_that_are_all_alike_have_integers(quantizer, number):
    layer = linear(quantizer, 2, False, 4)
    layer.kernel[...] = jnp.full(SHAPE, number, jnp.float32)
    assert layer.quant_weight().is_valid
    assert_no_overflow(layer, 2, False, 4)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(formats(), st.sampled_from([1e-3, 0.1, 1.0]))
def test_nor_after_training(chosen, rate):
    quantizer, *chosen = chosen
    layer = linear(quantizer, *chosen)
    optimizer = nnx.Optimizer(layer, optax.sgd(rate), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (5, SHAPE[0]))
    for _ in range(3):
        gradients = nnx.grad(lambda m: jnp.sum((m(x) - 1.0) ** 2))(layer)
        optimizer.update(layer, jax.tree.map(lambda g: jnp.clip(g, -10.0, 10.0), gradients))
        assert_no_overflow(layer, *chosen)


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", BOTH)
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("rounding", [None, RoundSte])
def test_nor_in_wide_layers_of_equal_weights(quantizer, channels, rounding):
    # Every weight lies on an integer, where the rounding of a norm decides between one and the next.
    more = {} if rounding is None else {"weight_float_to_int_impl": rounding}
    for width in (16, 20, 24, 26):
        layer = linear(quantizer, 8, True, width, np.full((1024, channels), 0.37, np.float32), **more)
        assert_no_overflow(layer, 8, True, width)


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", BOTH)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("signed", [True, False])
def test_nor_in_convolutions(quantizer, groups, signed):
    conv = QuantConv(
        4,
        8,
        (3, 3),
        padding="VALID",
        feature_group_count=groups,
        use_bias=False,
        weight_quant=quantizer,
        weight_accumulator_bit_width=16,
        input_quant=Int8ActPerTensorFloat if signed else Uint8ActPerTensorFloat,
        kernel_init=nnx.initializers.normal(1.0),
        rngs=nnx.Rngs(0),
    )
    assert_no_overflow(conv, 8, signed, 16)
    integers = np.asarray(conv.quant_weight().int(), np.int64)
    low, high = (-128, 127) if signed else (0, 255)
    sums, size = [], 8 // groups
    for channel in range(8):  # the worst image of every output channel, through a convolution of integers
        own = np.where(integers[..., channel] > 0, high, low)
        image = np.zeros((1, 3, 3, 4), np.int32)
        first = channel // size * (4 // groups)
        image[0, :, :, first : first + 4 // groups] = own
        out = jax.lax.conv_general_dilated(
            image, integers.astype(np.int32), (1, 1), "VALID", feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        sums.append(int(out[0, 0, 0, channel]))
    np.testing.assert_array_equal(sums, worst_sums(integers, 8, signed)[0])
    assert 2**13 < max(sums) <= 2**15 - 1  # and the room is used


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", BOTH)
def test_an_accumulator_that_leaves_no_weight_is_warned_of_with_the_narrowest_that_does(quantizer):
    kernel = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    with pytest.warns(ZeroWeightsWarning, match=r"an accumulator of 12 bits.*\(256, 16\) are 0") as caught:
        layer = linear(quantizer, 8, True, 12, kernel)
    assert not np.any(layer.quant_weight().int())
    named = int(re.search(r"cure: accumulator_bit_width = (\d+)", str(caught[0].message))[1])
    with pytest.warns(ZeroWeightsWarning):
        linear(quantizer, 8, True, named - 1, kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = linear(quantizer, 8, True, named, kernel)
        linear(quantizer, 8, True, 12, 0 * kernel)  # its zeros are its own
        nnx.eval_shape(lambda: linear(quantizer, 8, True, 12))
    assert np.any(layer.quant_weight().int())


@pytest.mark.heavy
def test_channels_along_two_axes():
    heads = QuantLinearGeneral(
        12,
        (2, 3),
        use_bias=False,
        weight_quant=A2Q,
        weight_accumulator_bit_width=12,
        input_quant=Int8ActPerTensorFloat,
        rngs=nnx.Rngs(0),
    )
    integers = heads.quant_weight().int()
    assert heads.quant_weight().scale.shape == (1, 2, 3)
    assert all(worst_sums(integers.reshape(12, 6), 8, True)[0] <= 2**11 - 1)


@pytest.mark.parametrize("quantizer", BOTH)
def test_centered_weights_have_about_twice_the_room_for_unsigned_inputs(quantizer):
    kernel = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    layer = linear(quantizer, 8, False, 16, kernel)
    norms = np.abs(np.asarray(layer.quant_weight().int(), np.int32)).sum(axis=0)
    bound = 2**15 / 2**8
    if quantizer is A2Q:
        assert (0.7 * bound < norms).all() and (norms < bound).all()
    else:
        assert (1.4 * bound < norms).all() and (norms < 2.02 * bound).all()


@few
@given(
    hnp.arrays(np.float32, (7, 2), elements=st.integers(-(2**24), 2**24).map(float)),
    st.integers(0, 2**26),
    st.booleans(),
)
def test_within_budget_is_exact_and_leaves_what_fits(q, budget, zero_centered):
    kept = np.asarray(within_budget(jnp.asarray(q), budget, (0,), zero_centered=zero_centered))

    def sums(integers):
        parts = [np.maximum(integers, 0), np.maximum(-integers, 0)] if zero_centered else [np.abs(integers)]
        return np.max([part.astype(np.int64).sum(axis=0) for part in parts], axis=0)

    assert (sums(kept) <= budget).all()
    assert (np.sign(kept) * np.sign(q) >= 0).all() and (np.abs(kept) <= np.abs(q)).all()
    fits = sums(q) <= budget
    np.testing.assert_array_equal(kept[:, fits], q[:, fits])


@given(st.integers(2, 32), st.integers(1, 16), st.booleans(), st.booleans())
def test_a_budget_of_arrays_is_that_of_numbers(width, bits, signed, zero_centered):
    arrays = integer_budget(jnp.float32(width), jnp.int32(bits), jnp.bool_(signed), zero_centered)
    assert int(arrays) == integer_budget(width, bits, signed, zero_centered)


# --- the input


@pytest.mark.parametrize("quantizer", BOTH)
@pytest.mark.parametrize("signed", [True, False])
def test_an_accumulator_that_is_too_narrow_is_refused_at_construction(quantizer, signed):
    least = least_width(quantizer, 8, signed)
    with pytest.raises(
        ValueError, match=rf"an accumulator of {least - 1} bits .*\n  cure: .* = {least} or more"
    ):
        linear(quantizer, 8, signed, least - 1)
    kernel = np.array([[1.0], [-1.0] if quantizer is A2Q_PLUS else [0.0]], np.float32)
    assert bool(jnp.any(linear(quantizer, 8, signed, least, kernel).quant_weight().int()))


def test_one_bit_holds_no_sum():
    with pytest.raises(ValueError, match=r"a signed accumulator of 1 bit holds no sum"):
        QuantLinear(4, 2, weight_quant=A2Q, weight_accumulator_bit_width=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"bit_width must be in 1 \.\. 32, got 33"):
        QuantLinear(4, 2, weight_quant=A2Q, weight_accumulator_bit_width=33, rngs=nnx.Rngs(0))


def fed(bits=8, signed=True):
    return IntQuantTensor(jnp.zeros((2, 12)), 0.5, 0.0, bits, signed=signed, training=True)


def without_input_quant(width=12):
    return QuantLinear(
        12, 3, use_bias=False, weight_quant=A2Q, weight_accumulator_bit_width=width, rngs=nnx.Rngs(0)
    )


def test_the_format_comes_with_the_input():
    layer = without_input_quant()
    wide, narrow = layer.quant_weight(fed(8)).int(), layer.quant_weight(fed(4, signed=False)).int()
    assert int(abs(wide).sum()) < int(abs(narrow).sum())
    layer(fed(4, signed=False))
    np.testing.assert_array_equal(layer.quant_weight().int(), narrow)  # kept from the training step
    layer.eval()
    layer(fed(8))
    np.testing.assert_array_equal(layer.quant_weight().int(), narrow)
    with pytest.raises(ValueError, match=r"an accumulator of 12 bits .* 13-bit signed input"):
        layer(fed(13))


def test_an_input_that_is_not_quantized_is_refused():
    layer = without_input_quant()
    with pytest.raises(TypeError, match=r"not quantized to integers: got ArrayImpl.\n  cure: .*input_quant"):
        layer(jnp.ones((2, 12)))
    for ask in (layer.quant_weight, layer.weight_quant.scale, lambda: jqinject.freeze(layer)):
        with pytest.raises(ValueError, match=r"how many bits the layer's input has is not known.*\n  cure: "):
            ask()
    with pytest.raises(
        ValueError, match=r"QuantEmbed: .* no quantized input.\n  cure: another weight quantizer"
    ):
        QuantEmbed(4, 3, weight_quant=A2Q, rngs=nnx.Rngs(0))


def test_a_norm_belongs_to_one_layer():
    first = without_input_quant()
    with pytest.raises(
        ValueError, match=r"normalizes one weight, got 2 .*\n  cure: a quantizer for each layer"
    ):
        QuantLinear(12, 3, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
    assert first.quant_weight(fed()).is_valid  # nothing was changed


@pytest.mark.parametrize("stated", [True, False])
def test_frozen_weights_are_those_of_the_last_evaluation(stated):
    layer = linear(A2Q_PLUS, 8, True, 12) if stated else without_input_quant()
    x = jax.random.normal(jax.random.key(1), (4, 12)) if stated else fed().set(value=jnp.ones((4, 12)))
    layer(x)
    layer.eval()
    integers, expected = layer.quant_weight().int(), layer(x)
    frozen = jqinject.freeze(layer)
    assert frozen.frozen.form.stored.dtype == jnp.int8
    np.testing.assert_array_equal(frozen.quant_weight().int(), integers)
    np.testing.assert_allclose(frozen(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
def test_a_stack_of_layers_keeps_a_format_each():
    @nnx.vmap(in_axes=0)
    def make(rngs):
        return QuantLinear(4, 4, use_bias=False, weight_quant=A2Q, weight_accumulator_bit_width=12, rngs=rngs)

    def fresh():
        return make(nnx.Rngs(0).split(3))

    stack, x = fresh(), QuantIdentity(return_quant_tensor=True)(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"how many bits the layer's input has is not known"):
        jqinject.freeze(fresh())
    outs = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack, x)
    assert outs.shape == (3, 2, 4)
    assert stack.weight_quant.tensor_quant.input_format[...].tolist() == [[8, 1]] * 3
    frozen = jqinject.freeze(stack)
    stored = np.asarray(frozen.frozen.numbers["value"], np.int32)  # the axis that is summed over lies last
    assert stored.shape == (3, 4, 4)
    assert np.abs(stored).sum(axis=-1).max() <= integer_budget(12, 8, True, False)


def test_other_quantizers_do_not_ask_for_the_input():
    layer = QuantLinear(12, 3, weight_quant=Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
    assert not layer.weight_quant.requires_quant_input
    np.testing.assert_array_equal(layer.quant_weight(fed()).value, layer.quant_weight().value)


@pytest.mark.parametrize(
    "act", [Int8ActPerTensorFloat, Int8DynamicActPerRowFloat, Int8DynamicActPerTensorFloat]
)
def test_building_a_layer_only_traces_the_input_quantizer(act):
    """Its bits and sign are asked for, no number: operations that run one by one compile one by one."""
    ran = []

    def rounding(x):
        ran.append(not isinstance(x, jax.core.Tracer))
        return jnp.round(x)

    layer = QuantLinear(
        *SHAPE,
        weight_quant=A2Q,
        weight_accumulator_bit_width=16,
        input_quant=act,
        input_float_to_int_impl=rounding,
        rngs=nnx.Rngs(0),
    )
    assert ran and not any(ran)
    x = jax.random.normal(jax.random.key(0), (4, SHAPE[0]))
    np.testing.assert_array_less(jnp.abs(layer.quant_weight(layer.input_quant(x)).int()).sum(0), 2**15 / 2**7)
