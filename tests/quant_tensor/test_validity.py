"""When a float array counts as integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jqinject.quant_tensor import IntQuantTensor, integer_bounds


def valid(value, scale=1.0, zero_point=0.0, bit_width=8, signed=True, dtype=jnp.float32):
    return IntQuantTensor(jnp.asarray(value, dtype), scale, zero_point, bit_width, signed, False).is_valid


@pytest.mark.parametrize(
    ("bit_width", "signed", "low", "high"),
    [
        (2, True, -2, 1),
        (2, False, 0, 3),
        (8, True, -128, 127),
        (8, False, 0, 255),
        (1, True, -1, 1),
        (1, False, 0, 1),
    ],
)
def test_range(bit_width, signed, low, high):
    assert [float(bound) for bound in integer_bounds(bit_width, signed)] == [low, high]
    assert [float(bound) for bound in integer_bounds(jnp.float32(bit_width), signed)] == [low, high]
    assert valid([low, high], bit_width=bit_width, signed=signed)
    if bit_width > 1:
        assert not valid([low, high + 1], bit_width=bit_width, signed=signed)
        assert not valid([low - 1, high], bit_width=bit_width, signed=signed)


@pytest.mark.parametrize(("dtype", "inside", "outside"), [("float32", 0.19, 0.21), ("bfloat16", 0.45, None)])
def test_tolerance_depends_on_the_dtype(dtype, inside, outside):
    assert valid([3.0 + inside], dtype=dtype)
    if outside is not None:
        assert not valid([3.0 + outside], dtype=dtype)


@pytest.mark.parametrize(
    ("integers", "signed", "expected"),
    [
        ([-1, 1], True, True),
        ([0, 1], False, True),
        ([-1, 1], False, False),
        ([0, 1], True, False),
        ([1, 1], True, False),
        ([-1, 0, 1], True, False),
    ],
)
def test_one_bit_means_two_values(integers, signed, expected):
    assert valid(integers, bit_width=1, signed=signed) is expected


@pytest.mark.parametrize(("number", "signed"), [(1, True), (-1, True), (0, False), (1, False)])
def test_one_bit_of_one_value_has_integers_though_it_is_not_valid(number, signed):
    tensor = IntQuantTensor(jnp.full(3, float(number)), 1.0, 0.0, 1, signed, False)
    assert not tensor.is_valid
    np.testing.assert_array_equal(tensor.int(), [number] * 3)
    np.testing.assert_array_equal(tensor.int(float_datatype=True), [number] * 3)


@pytest.mark.parametrize(("number", "signed"), [(0, True), (-1, False), (2, True), (0.5, True)])
@pytest.mark.parametrize("float_datatype", [True, False])
def test_one_bit_of_one_value_that_is_none_of_its_two_has_no_integers(number, signed, float_datatype):
    tensor = IntQuantTensor(jnp.full(3, float(number)), 1.0, 0.0, 1, signed, False)
    with pytest.raises(ValueError, match=r"one of them everywhere"):
        tensor.int(float_datatype)


def test_empty_is_valid_and_not_finite_is_not():
    assert valid(np.zeros((0, 3)))
    assert not valid([np.nan, 1.0])
    assert not valid([np.inf, 1.0])
    assert not valid([1.0, 1.0], scale=0.0)


def test_a_negative_scale_is_as_good():
    assert valid([-1.0, 0.5], scale=-0.5)


@pytest.mark.heavy
@settings(max_examples=25)
@given(
    st.lists(st.integers(-128, 127), min_size=1, max_size=8),
    st.floats(2**-20, 2**20, width=32),
    st.integers(-128, 127),
)
def test_integers_survive_the_way_through_floats(integers, scale, zero_point):
    x = IntQuantTensor.from_int(jnp.array(integers), scale, float(zero_point))
    assert x.is_valid
    np.testing.assert_array_equal(x.int(), integers)
    np.testing.assert_array_equal(jax.jit(lambda y: y.int())(x), integers)


@pytest.mark.parametrize("bits", [1, 2, 8, 16])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    "value",
    [[0, 1], [-1, 1], [-2, 1], [0, 0.5], [0, 255], [-128, 127], [0, 1, 256], [0, np.nan], [np.inf, 1]],
)
def test_a_constant_and_a_learned_width_agree(bits, signed, value):
    constant = IntQuantTensor(jnp.asarray(value, jnp.float32), 1.0, 0.0, bits, signed, False)
    learned = constant.set(bit_width=jnp.float32(bits))
    assert constant.is_valid is learned.is_valid
    if not constant.is_valid:
        for tensor in (constant, learned):
            with pytest.raises(ValueError, match=r"QuantTensor not valid"):
                tensor.int()
        return
    expected = np.asarray(value)
    for tensor in (constant, learned):
        assert tensor.int().dtype == (jnp.int32 if bits > 8 else jnp.int8 if signed else jnp.uint8)
        assert (np.asarray(tensor.int()) == expected).all()
        assert (np.asarray(jax.jit(lambda t: t.int())(tensor)) == expected).all()
