"""The value type: construction, integers, decay to arrays, errors."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.quant_tensor import IntQuantTensor, QuantTensor, as_array


def tensor(integers, scale=0.5, zero_point=0.0, bit_width=8, signed=True, training=False, dtype=jnp.float32):
    return IntQuantTensor.from_int(
        jnp.array(integers), scale, zero_point, bit_width, signed=signed, training=training, dtype=dtype
    )


def test_value_is_integer_minus_zero_point_times_scale():
    x = tensor([0, 3, 255], scale=0.25, zero_point=3.0, signed=False)
    np.testing.assert_array_equal(x.value, [-0.75, 0.0, 63.0])
    np.testing.assert_array_equal(x.int(), [0, 3, 255])


@pytest.mark.parametrize(
    ("bit_width", "signed", "dtype"),
    [
        (2, True, "int8"),
        (4, False, "uint8"),
        (8, True, "int8"),
        (8, False, "uint8"),
        (9, True, "int32"),
        (16, False, "int32"),
        (np.float32(8.0), True, "int8"),
        (jnp.float32(8.0), True, "int8"),
    ],
)
def test_int_takes_the_narrowest_dtype(bit_width, signed, dtype):
    x = IntQuantTensor(jnp.array([0.0, 1.0]), 1.0, 0.0, bit_width, signed, False)
    assert x.int().dtype.name == dtype
    assert x.int(float_datatype=True).dtype == jnp.float32


def test_fields_are_float32_arrays_and_a_whole_bit_width_is_an_int():
    x = IntQuantTensor(np.ones((2, 3), np.float32), 1, np.float64(0), 8.0, True, False)
    assert (x.scale.dtype, x.zero_point.dtype) == (jnp.float32, jnp.float32)
    assert not x.scale.weak_type and not x.zero_point.weak_type
    assert type(x.bit_width) is int
    assert (x.shape, x.ndim, x.size, x.dtype, len(x)) == ((2, 3), 2, 6, jnp.float32, 2)
    learned = x.set(bit_width=jnp.float32(7.5))
    assert isinstance(learned.bit_width, jax.Array)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_values_keep_their_dtype_and_their_integers(dtype):
    x = tensor([-128, 5, 127], scale=0.1, dtype=dtype)
    assert x.dtype == dtype
    np.testing.assert_array_equal(x.int(), [-128, 5, 127])
    assert (x + x).dtype == (x * x).dtype == (-x).dtype == (x + 1.0).dtype == dtype
    assert x.astype(jnp.float32).scale.dtype == jnp.float32


def test_it_is_immutable_and_set_makes_copies():
    x = tensor([1, 2])
    with pytest.raises(AttributeError):
        x.value = jnp.zeros(2)  # type: ignore[misc]
    assert x.set(signed=False).signed is False
    assert x.signed is True


def test_a_wrong_field_name_is_answered_with_the_nearest():
    with pytest.raises(TypeError, match=r"no field 'bitwidth'.*Did you mean 'bit_width'\?"):
        tensor([1]).set(bitwidth=4)


def test_integers_as_value_are_refused_with_the_cure():
    with pytest.raises(TypeError, match=r"got int32 of shape \(2,\).*IntQuantTensor\.from_int"):
        IntQuantTensor(jnp.array([1, 2]), 0.5, 0.0, 8, True, False)
    with pytest.raises(TypeError, match=r"use \.int\(\)"):
        tensor([1]).astype(jnp.int8)


@pytest.mark.parametrize("field", ["scale", "zero_point"])
def test_metadata_that_does_not_broadcast_is_refused_with_the_shape_expected(field):
    fields = {"scale": 0.5, "zero_point": 0.0} | {field: jnp.ones(2)}
    with pytest.raises(ValueError, match=rf"{field} of shape \(2,\) .* shape \(2, 3\).*example \(1, 3\)"):
        IntQuantTensor(jnp.ones((2, 3)), bit_width=8, signed=True, training=False, **fields)
    with pytest.raises(ValueError, match="does not broadcast"):
        fields |= {field: jnp.ones((1, 3))}
        IntQuantTensor(jnp.ones(3), bit_width=8, signed=True, training=False, **fields)


def test_a_bit_width_below_one_is_refused():
    with pytest.raises(ValueError, match="bit_width must be at least 1, got 0"):
        tensor([0], bit_width=0)


def test_int_of_a_tensor_off_its_grid_says_how_far():
    x = IntQuantTensor(jnp.array([0.5, 0.75]), 0.5, 0.0, 8, True, False)
    assert x.is_valid is False
    with pytest.raises(
        ValueError, match=r"valid.* 0\.5 away from an integer and runs from 1 to 1\.5.*-128 to 127"
    ):
        x.int()


@pytest.mark.heavy
def test_it_stands_where_an_array_stands():
    x = tensor([[1, 2], [3, 4]])
    np.testing.assert_array_equal(jnp.exp(x), jnp.exp(x.value))
    np.testing.assert_array_equal(jax.nn.relu(x), jax.nn.relu(x.value))
    np.testing.assert_array_equal(jax.nn.softmax(x), jax.nn.softmax(x.value))
    np.testing.assert_array_equal(np.asarray(x), x.value)
    np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(x.value, np.float64))
    np.testing.assert_array_equal(x @ x, x.value @ x.value)
    np.testing.assert_array_equal(x > 1.0, x.value > 1.0)
    np.testing.assert_array_equal(x == x, np.ones((2, 2), bool))
    np.testing.assert_array_equal(x**2, x.value**2)
    np.testing.assert_array_equal(1.0 / x, 1.0 / x.value)
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(x), layer(x.value))
    assert nnx.LayerNorm(2, rngs=nnx.Rngs(0))(x).shape == (2, 2)
    assert as_array(x) is x.value
    assert isinstance(x, QuantTensor)


def test_functions_of_jax_lax_take_the_value():
    x = tensor([1, 2])
    with pytest.raises(ValueError, match="__jax_array__"):
        jax.nn.sigmoid(x)
    np.testing.assert_array_equal(jax.nn.sigmoid(as_array(x)), jax.nn.sigmoid(x.value))


def test_numpy_on_the_left_leaves_the_operation_to_us():
    x = tensor([1, 2])
    assert isinstance(np.float32(1.0) + x, IntQuantTensor)
    assert isinstance(np.ones(2, np.float32) - x, IntQuantTensor)


def test_scalars_convert():
    x = tensor(3)
    assert float(x) == 1.5
    assert bool(x)
    with pytest.raises(TypeError, match="without axes"):
        len(x)


def test_repr_shows_format_shape_metadata_and_values():
    x = tensor([[1, 2]], zero_point=3.0, training=True)
    assert repr(x) == (
        "IntQuantTensor(8-bit signed, float32[1, 2], scale=0.5, zero_point=3, training,\n"
        "  value=[[-1. , -0.5]])"
    )
    per_channel = tensor(np.ones((2, 9), np.int32), scale=jnp.arange(1.0, 10.0))
    assert "scale=1 to 9 (shape (9,))" in repr(per_channel)
    assert "value=0" in repr(IntQuantTensor(0, None, None, 8, True, False))


def test_repr_works_under_tracing():
    seen = []
    jax.jit(lambda y: seen.append(repr(y)))(tensor([1, 2]))
    assert seen == [
        "IntQuantTensor(8-bit signed, float32[2], scale=traced, shape (), zero_point=traced, shape (),\n"
        "  value=traced)"
    ]


def test_pickle_and_deepcopy():
    x = tensor([1, 2], bit_width=jnp.float32(4.0), training=True)
    for twin in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
        np.testing.assert_array_equal(twin.value, x.value)
        assert jax.tree.structure(twin) == jax.tree.structure(x)


def test_the_integers_in_float_carry_the_straight_through_gradient():
    def loss(value, scale):
        return jnp.sum(IntQuantTensor(value, scale, 0.0, 8, True, False).int(float_datatype=True))

    value, scale = jax.grad(loss, argnums=(0, 1))(jnp.array([1.0, 2.0]), jnp.float32(0.5))
    np.testing.assert_allclose(value, [2.0, 2.0])
    np.testing.assert_allclose(scale, -12.0)
