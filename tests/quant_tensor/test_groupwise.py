"""Quantized tensors with a scale for each group: expanding, moving axes, crossing transformations."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.ops import join_groups, split_groups
from jqinject.quant_tensor import GroupwiseFloatQuantTensor, GroupwiseIntQuantTensor

INTEGERS = np.arange(-30, 30).reshape(3, 20) % 15 - 7
SCALES = np.array([[0.5, 1.0, 0.25], [2.0, 0.125, 1.0], [1.0, 1.0, 4.0]], np.float32)


def integers(group_dim=-1):
    """Three rows of 20 integers in groups of 8, the last of which has 4; or columns."""
    spread = np.repeat(SCALES, 8, axis=1)[:, :20]
    values, scales = INTEGERS * spread, SCALES[..., None]
    if group_dim == 0:
        grouped = split_groups(jnp.asarray(values.T), 8, 0)
        return GroupwiseIntQuantTensor(grouped, scales.transpose(1, 2, 0), 0.0, 8, 0, 4, True, False, (20, 3))
    grouped = split_groups(jnp.asarray(values), 8, -1)
    return GroupwiseIntQuantTensor(grouped, scales, 0.0, 8, group_dim, 4, True, False, (3, 20))


@pytest.mark.parametrize(
    ("length", "size", "axis"), [(20, 8, 1), (20, 8, -1), (3, 2, 0), (3, 5, -2), (20, 20, 1)]
)
def test_groups_are_cut_and_joined(length, size, axis):
    x = jnp.arange(60.0).reshape(3, 20)
    cut = split_groups(x, size, axis)
    assert cut.ndim == 3 and cut.size % size == 0
    np.testing.assert_array_equal(join_groups(cut, axis, length), x)
    assert float(cut.sum()) == float(x.sum())  # nothing but zeros was added


@pytest.mark.parametrize("group_dim", [-1, 1])
def test_what_every_group_has_is_spread_over_its_elements(group_dim):
    x = integers(group_dim)
    assert (x.shape, x.ndim, x.size, len(x), x.group_dim) == ((3, 20), 2, 60, 3, group_dim)
    np.testing.assert_array_equal(x.scale, np.repeat(SCALES, 8, axis=1)[:, :20])
    np.testing.assert_array_equal(x.int(), INTEGERS)
    assert x.is_valid is True and x.int().dtype == jnp.int8
    np.testing.assert_array_equal(x + 1.0, x.value + 1.0)
    assert isinstance(x.reshape(60), jax.Array)


def test_moving_axes_moves_the_groups():
    x, columns = integers(), integers(group_dim=0)
    for moved in (x.T, x.transpose(1, 0), x.swapaxes(0, 1)):
        np.testing.assert_array_equal(moved.int(), INTEGERS.T)
        np.testing.assert_array_equal(moved.scale, columns.scale)
        np.testing.assert_array_equal(moved.scale_, columns.scale_)


@pytest.mark.heavy
def test_indexing_keeps_whole_groups_alone():
    x = integers()
    assert isinstance(x[1], GroupwiseIntQuantTensor) and isinstance(x[:2, :], GroupwiseIntQuantTensor)
    np.testing.assert_array_equal(x[1].int(), INTEGERS[1])
    np.testing.assert_array_equal(x[..., 1:, :].scale, x.scale[1:])
    for key in (np.s_[:, 3], np.s_[0, 2:5], np.s_[jnp.array([0, 2])]):
        np.testing.assert_array_equal(x[key], x.value[key])
        assert isinstance(x[key], jax.Array)


@pytest.mark.heavy
def test_it_crosses_transformations_and_pickles():
    x = integers(group_dim=1)
    np.testing.assert_array_equal(jax.jit(lambda t: t.int())(x), INTEGERS)
    stacked = jax.vmap(lambda factor: x.set(value=x.value * factor))(jnp.array([1.0, -1.0]))
    assert stacked.shape == (2, 3, 20)
    np.testing.assert_array_equal(stacked.value[1], -x.value)
    assert jax.tree.structure(jax.jit(lambda t: t)(x)) == jax.tree.structure(x)
    again = pickle.loads(pickle.dumps(x))
    np.testing.assert_array_equal(again.value, x.value)
    gradient = jax.grad(lambda v: jnp.sum(x.set(value=v).value ** 2))(x.value)
    np.testing.assert_array_equal(gradient, 2 * x.value)


@pytest.mark.heavy
def test_minifloats_in_groups():
    x = GroupwiseFloatQuantTensor(
        jnp.array([[1.0, -3.0], [24.0, 0.0]]),
        jnp.array([[0.5], [4.0]]),
        2,
        0,
        "float4_e2m1fn",
        dequant_shape=(3,),
    )
    assert (x.shape, x.is_valid, x.exponent_bit_width, x.bit_width) == ((3,), True, 2, 4)
    np.testing.assert_array_equal(x.minifloat(), [2.0, -6.0, 6.0])
    np.testing.assert_array_equal(x.codes(), [4, 15, 7])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: split_and_build(group_size=4), r"has no groups of 4 along axis -1"),
        (lambda: split_and_build(group_dim=5), r"has no groups of 8 along axis 5"),
        (lambda: split_and_build(dequant_shape=(3, 30)), r"3 groups of 8 do not hold 30 elements"),
        (lambda: split_and_build(group_size=0), r"group_size must be a whole number of at least 1, got 0"),
    ],
)
def test_what_can_not_be(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def split_and_build(group_size=8, group_dim=-1, dequant_shape=None):
    grouped = split_groups(jnp.zeros((3, 20)), 8, -1)
    return GroupwiseIntQuantTensor(
        grouped, jnp.ones((3, 3, 1)), 0.0, group_size, group_dim, 8, True, False, dequant_shape
    )
