"""Metadata follows the value: after every shape operation each element has the scale it had before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jqinject.quant_tensor import (
    IntQuantTensor,
    expand_dims,
    pad,
    repeat,
    reshape,
    squeeze,
    swapaxes,
    transpose,
)

SHAPE = (2, 3, 4)
LAYOUTS = [(), (1,), (1, 1, 1), (4,), (1, 3, 1), (2, 1, 1), (3, 1), (2, 1, 4), (2, 3, 4)]


def tensor(layout, shape=SHAPE):
    """A tensor whose every element tells its own scale: integer 1 wherever the zero point is 0."""
    scale = jnp.arange(1.0, 1.0 + np.prod(layout, dtype=int)).reshape(layout)
    value = jnp.ones(shape) * scale
    return IntQuantTensor(value, scale, jnp.zeros(layout), 8, True, False)


def check(x, value):
    np.testing.assert_array_equal(x.value, value)
    np.testing.assert_array_equal(np.broadcast_to(x.scale, x.shape), x.value)
    assert x.is_valid


ROWS = np.array([1, 0])
MASK = np.array([True, False, True])
OPERATIONS = {
    "transpose": (transpose, jnp.transpose),
    "permute": (lambda x: x.transpose(2, 0, 1), lambda v: v.transpose(2, 0, 1)),
    "T": (lambda x: x.T, lambda v: v.T),
    "swapaxes": (lambda x: swapaxes(x, 0, -1), lambda v: v.swapaxes(0, -1)),
    "ravel": (lambda x: x.ravel(), lambda v: v.ravel()),
    "flatten": (lambda x: x.flatten(), lambda v: v.flatten()),
    "reshape merge": (lambda x: x.reshape(2, -1), lambda v: v.reshape(2, -1)),
    "reshape merge front": (lambda x: x.reshape((6, 4)), lambda v: v.reshape(6, 4)),
    "reshape split": (lambda x: x.reshape(2, 3, 2, 2), lambda v: v.reshape(2, 3, 2, 2)),
    "reshape across": (lambda x: x.reshape(4, 6), lambda v: v.reshape(4, 6)),
    "expand": (lambda x: expand_dims(x, (0, 2)), lambda v: jnp.expand_dims(v, (0, 2))),
    "squeeze": (lambda x: squeeze(expand_dims(x, 1)), lambda v: v),
    "repeat": (lambda x: repeat(x, 3, axis=1), lambda v: jnp.repeat(v, 3, axis=1)),
    "index": (lambda x: x[1], lambda v: v[1]),
    "index last": (lambda x: x[..., 2], lambda v: v[..., 2]),
    "slice": (lambda x: x[:, 1:, ::2], lambda v: v[:, 1:, ::2]),
    "newaxis": (lambda x: x[None, :, 0], lambda v: v[None, :, 0]),
    "array": (lambda x: x[ROWS, :, ROWS + 2], lambda v: v[ROWS, :, ROWS + 2]),
    "mask": (lambda x: x[:, MASK], lambda v: v[:, MASK]),
    "empty": (lambda x: x[:, :0], lambda v: v[:, :0]),
}


@pytest.mark.heavy
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_element_keeps_its_scale(name, layout):
    ours, plain = OPERATIONS[name]
    x = tensor(layout)
    check(ours(x), plain(x.value))
    traced = jax.jit(ours)(x)
    np.testing.assert_array_equal(traced.scale, ours(x).scale)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pad_adds_zeros_on_the_grid(layout):
    x = tensor(layout)
    y = pad(x, ((1, 0), (0, 2), (1, 1)))
    np.testing.assert_array_equal(y.value, jnp.pad(x.value, ((1, 0), (0, 2), (1, 1))))
    assert y.is_valid
    np.testing.assert_array_equal(np.unique(y.int()), [0, 1])


def test_per_tensor_metadata_is_untouched():
    x = tensor(())
    for y in (x.reshape(6, 4), x.T, x[0], expand_dims(x, 0), repeat(x, 2, axis=0)):
        assert y.scale is x.scale


def test_metadata_stays_small_where_nothing_varies():
    per_channel = tensor((4,))
    assert per_channel[0].scale.shape == (1, 4)
    assert per_channel.reshape(6, 4).scale.shape == (1, 4)
    assert per_channel.T.scale.shape == (4, 1, 1)
    assert tensor((2, 1, 1)).reshape(2, 12).scale.shape == (2, 1)


def test_iteration_ends():
    rows = list(tensor((2, 1, 1)))
    assert [float(row.scale.squeeze()) for row in rows] == [1.0, 2.0]


@st.composite
def _reshapes(draw):
    factors = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=5))

    def grouped():
        shape, rest = [], list(factors)
        while rest:
            n = draw(st.integers(1, len(rest)))
            shape.append(int(np.prod(rest[:n])))
            rest = rest[n:]
        return tuple(shape)

    old, new = grouped(), grouped()
    layout = tuple(n if draw(st.booleans()) else 1 for n in old)
    return old, new, layout


@pytest.mark.slow
@settings(max_examples=25)
@given(_reshapes())
def test_any_reshape(case):
    old, new, layout = case
    x = tensor(layout, old)
    check(reshape(x, new), x.value.reshape(new))


def test_a_wrong_shape_is_refused_by_jax():
    with pytest.raises((TypeError, ValueError)):
        tensor((4,)).reshape(5, 5)
