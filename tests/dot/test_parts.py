"""Sums of more products than an int32 holds: cut into parts and added exactly, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jqinject
from jqinject.dot import Affine, affine_dot_general, conv_general_dilated, dot_general, einsum
from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.accumulate import added, blocks
from jqinject.nn import QuantConv, QuantEinsum, QuantLinear
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8WeightPerTensorFloat,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8WeightPerTensorFloat,
)
from jqinject.quant.aqt import config_v4
from jqinject.quant_tensor import IntQuantTensor

LONG = 140_003
MATMUL = (((1,), (0,)), ((), ()))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 40))
def test_blocks_fill_the_box_and_are_small(lengths, longest):
    seen = np.zeros(lengths, int)
    for block in blocks(lengths, longest):
        seen[tuple(slice(*ends) for ends in block)] += 1
        assert np.prod([stop - start for start, stop in block]) <= longest
    assert np.all(seen == 1)


@pytest.mark.heavy
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40))
def test_parts_are_added_exactly_and_rounded_once(numbers):
    got = added([jnp.full((1,), number, jnp.int32) for number in numbers])
    np.testing.assert_array_equal(got, np.array([sum(numbers)], np.int64).astype(np.float32))


# What is farthest from the zero point: (bits, signed, zero point, every integer, as float of a step).
EXTREMES = {
    "int8 least": (8, True, 0.0, -128),
    "int8 largest": (8, True, 0.0, 127),
    "uint8": (8, False, 0.0, 255),
    "uint8, all below 0": (8, False, 255.0, 0),
    "int8 with a zero point": (8, True, -128.0, 127),
    "int4": (4, True, 0.0, -8),
}


def filled(kind, shape):
    bits, signed, zero, integer = EXTREMES[kind]
    # One column is not the extreme, so that parts differ.
    integers = jnp.full(shape, integer).at[..., ::7].set(integer - 1 if integer > 0 else integer + 1)
    return IntQuantTensor.from_int(integers, 0.5, zero, bits, signed=signed)


def steps(x):
    return np.asarray(x.int(), np.int64) - np.asarray(x.zero_point, np.int64)


@pytest.mark.heavy
@pytest.mark.parametrize("left", EXTREMES)
@pytest.mark.parametrize("right", ["int8 least", "uint8, all below 0", "int8 with a zero point"])
def test_the_worst_operands(left, right):
    x, w = filled(left, (2, LONG)), filled(right, (3, LONG))
    dims = (((1,), (1,)), ((), ()))
    expected = (steps(x) @ steps(w).T).astype(np.float32) * np.float32(0.25)
    np.testing.assert_array_equal(dot_general(x, w, dims, contraction="int"), expected)


@pytest.mark.heavy
def test_traced_zero_points_and_tracing_change_nothing():
    x, w = filled("uint8, all below 0", (2, LONG)), filled("uint8", (LONG, 3))

    def contract(x, w):
        return dot_general(x, w, MATMUL, contraction="int")

    np.testing.assert_array_equal(jax.jit(contract)(x, w), contract(x, w))


@pytest.mark.heavy
def test_several_summed_axes_and_a_batch_axis():
    x, w = filled("uint8", (2, 300, 3, 301)), filled("int8 least", (301, 300, 4, 2))
    expected = np.einsum("bicj,jidb->bcd", steps(x), steps(w)).astype(np.float32) * np.float32(0.25)
    np.testing.assert_array_equal(einsum("bicj,jidb->bcd", x, w, contraction="int"), expected)


@pytest.mark.parametrize(
    ("left", "right", "parts"),
    [(jnp.int8, jnp.int8, 2), (jnp.uint8, jnp.int8, 3), (jnp.uint8, jnp.uint8, 5), (jnp.int4, jnp.int8, 1)],
)
def test_there_are_as_many_parts_as_the_dtypes_need(left, right, parts):
    x, w = jax.ShapeDtypeStruct((2, LONG), left), jax.ShapeDtypeStruct((LONG, 2), right)
    one = jnp.ones(())

    def contract(x, w):
        dims = Dimensions.of(2, 2, (((1,), (0,)), ((), ())))
        return affine_dot_general(Affine(x, one), Affine(w, one), dims, jnp.float32)

    assert str(jax.make_jaxpr(contract)(x, w)).count("= one_device[") == parts


# --- convolutions

LONG_CONVOLUTIONS = {
    "features": ((1, 3, 70_000), (2, 70_000, 3), {}),
    "window": ((1, 140_100, 1), (140_000, 1, 2), {}),
    "groups": ((1, 3, 140_000), (2, 70_000, 4), {"feature_group_count": 2}),
    "dilated window": ((1, 140_100, 1), (70_000, 1, 2), {"rhs_dilation": (2,), "window_strides": (3,)}),
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", LONG_CONVOLUTIONS)
@pytest.mark.parametrize(
    ("left", "right"),
    [("uint8", "int8 least"), ("uint8, all below 0", "int8 least"), ("int8 least", "uint8, all below 0")],
)
def test_convolutions(kind, left, right):
    lhs_shape, rhs_shape, options = LONG_CONVOLUTIONS[kind]
    x, w = filled(left, lhs_shape), filled(right, rhs_shape)
    options = {"window_strides": (1,), "padding": ((3, 2),), **options}
    how = {"dimension_numbers": ("NWC", "WIO", "NWC"), **options}
    got = conv_general_dilated(x, w, contraction="int", **how)
    with jax.enable_x64():
        exact = jax.lax.conv_general_dilated(
            jnp.asarray(steps(x), jnp.float64), jnp.asarray(steps(w), jnp.float64), **how
        )
        expected = np.asarray(exact).astype(np.float32) * np.float32(0.25)
    np.testing.assert_array_equal(got, expected)


# --- configurations, backward

ROWS = 140_000


@pytest.mark.heavy
def test_backward_sums_over_many_rows():
    config = config_v4(rng_type=None, dlhs_bits=8, drhs_bits=8)
    x, w, g = jnp.ones((ROWS, 1)), jnp.ones((1, 2)), jnp.ones((ROWS, 2))
    _, pull = jax.vjp(lambda x, w: dot_general(x, w, MATMUL, config=config), x, w)
    # Ones are 127 steps of 1 / 127.5.
    np.testing.assert_allclose(pull(g)[1], ROWS * (127 / 127.5) ** 2 * np.ones((1, 2)), rtol=1e-6)


def test_forward_sums_of_a_configuration():
    x = jnp.ones((1, ROWS))
    y = dot_general(x, x.T, MATMUL, config=config_v4(rng_type=None))
    np.testing.assert_allclose(y, [[ROWS * (127 / 127.5) ** 2]], rtol=1e-6)


# --- layers


INT = {
    "weight_quant": Int8WeightPerTensorFloat,
    "input_quant": Int8ActPerTensorMinMax,
    "contraction": "int",
}


def layers():
    given = {"rngs": nnx.Rngs(0), "use_bias": False}
    for weight_quant, input_quant in (
        (Int8WeightPerTensorFloat, ShiftedUint8ActPerTensorFloat),
        (ShiftedUint8WeightPerTensorFloat, Int8ActPerTensorMinMax),
    ):
        quant = {"weight_quant": weight_quant, "input_quant": input_quant, "contraction": "int"}
        yield QuantLinear(LONG, 1, **given, **quant), (1, LONG)
    yield QuantConv(70_000, 1, (2,), padding="VALID", **given, **INT), (1, 2, 70_000)
    yield QuantEinsum("bij,ijd->bd", (350, 400, 1), rngs=nnx.Rngs(0), **INT), (1, 350, 400)


@pytest.mark.lengthy
def test_what_is_trained_is_served_to_the_bit():
    for layer, shape in layers():
        x = jax.random.uniform(jax.random.key(1), shape, minval=-1.0, maxval=2.0)
        layer.input_quant(jnp.linspace(-1.0, 2.0, 8))
        layer.eval()
        trained = layer(x)
        np.testing.assert_array_equal(jqinject.freeze(layer)(x), trained)
        exact = np.tensordot(
            np.asarray(layer.input_quant(x).value, np.float64).reshape(shape[0], -1),
            np.asarray(layer.quant_weight().value, np.float64).reshape(-1, 1),
            axes=1,
        )
        np.testing.assert_allclose(trained.reshape(-1, 1), exact, rtol=1e-5, atol=1e-4)


def test_the_report_says_in_how_many_parts():
    layer = QuantLinear(LONG, 2, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
    layer.input_quant(jnp.linspace(-1.0, 2.0, 8))
    found = jqinject.report(jqinject.freeze(layer), jax.ShapeDtypeStruct((2, LONG), jnp.float32))
    assert found.layers[0].contraction == "int"
    assert found.layers[0].program.endswith("-> s32 in 2 parts")
