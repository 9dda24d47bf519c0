"""Concatenation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.quant_tensor import DifferentScalesWarning, IntQuantTensor, concatenate


def tensor(scale=0.5, zero_point=0.0, bit_width=8, signed=True, training=False, n=3):
    integers = jnp.arange(2 * n).reshape(2, n)
    return IntQuantTensor.from_int(integers, scale, zero_point, bit_width, signed=signed, training=training)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_grid(axis):
    x = tensor(zero_point=2.0)
    y = concatenate([x, x, x], axis=axis)
    np.testing.assert_array_equal(y.int(), np.concatenate([x.int()] * 3, axis))
    assert (y.scale.shape, y.bit_width) == ((), 8)
    assert concatenate([x]) is x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.25}, r"scaling factors are different, 0\.5 and 0\.25"),
        ({"zero_point": 1.0}, "zero points are different, 0 and 1"),
        ({"bit_width": 4}, "bit widths are different, 8 and 4"),
        ({"bit_width": jnp.float32(4.5)}, r"bit widths are different, 8 and 4\.5"),
        ({"signed": False}, "signs are different, signed and unsigned"),
    ],
)
def test_different_grids_are_refused_with_numbers_and_cure(change, message):
    with pytest.raises(ValueError, match=rf"concatenate: {message}.*shared quantizer"):
        concatenate([tensor(), tensor(**change)])


def test_training_mode_averages():
    with pytest.warns(DifferentScalesWarning, match=r"concatenate: .*0\.5 and 0\.25.*evaluation refuses it"):
        y = concatenate([tensor(training=True), tensor(scale=0.25, zero_point=1.0)])
    assert (float(y.scale), float(y.zero_point), y.training) == (0.375, 0.5, True)


def test_per_channel_scales_are_joined_along_their_axis():
    a, b = tensor(scale=jnp.array([1.0, 2.0, 3.0])), tensor(scale=0.5, n=2)
    y = concatenate([a, b], axis=-1)
    np.testing.assert_array_equal(y.scale, [[1.0, 2.0, 3.0, 0.5, 0.5]])
    assert y.is_valid
    along_rows = concatenate([a, a], axis=0)
    np.testing.assert_array_equal(along_rows.scale, a.scale)
    with pytest.raises(ValueError, match=r"scaling factors are different, \[1, 2, 3\]"):
        concatenate([a, tensor()], axis=0)


def test_a_plain_array_makes_a_plain_array():
    assert isinstance(concatenate([tensor(), jnp.zeros((1, 3))]), jax.Array)


def test_nothing_to_join():
    with pytest.raises(ValueError, match="got no tensors"):
        concatenate([])


def test_under_jit():
    y = jax.jit(lambda a, b: concatenate([a, b]))(tensor(), tensor())
    assert y.is_valid
