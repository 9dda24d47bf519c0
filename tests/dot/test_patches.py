"""A convolution as a product of patches, against XLA's own convolution."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqinject.dot.kernels.convolution import Convolution

LAST, FIRST = "channels last", "channels first"


def spec(order, space):
    letters = "HWD"[:space]
    if order == LAST:
        return f"N{letters}C", f"{letters}IO", f"N{letters}C"
    return f"NC{letters}", f"OI{letters}", f"NC{letters}"


def bytes_of(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).integers(-128, 128, shape), jnp.int8)


@pytest.mark.parametrize(
    ("space", "stride", "padding", "dilation", "order"),
    list(itertools.product((1, 2, 3), (1, 2), ("SAME", "VALID", ((1, 2),)), (1, 2), (LAST, FIRST))),
)
def test_it_is_the_convolution(space, stride, padding, dilation, order):
    sizes, window = (7, 6, 5)[:space], (3, 2, 3)[:space]
    x = bytes_of((2, *sizes, 4) if order == LAST else (2, 4, *sizes), 0)
    w = bytes_of((*window, 4, 6) if order == LAST else (6, 4, *window), 1)
    pads = padding if isinstance(padding, str) else padding * space
    numbers = spec(order, space)
    convolution = Convolution.of(
        x.shape, w.shape, (stride,) * space, pads, None, (dilation,) * space, numbers, dtype=jnp.float32
    )
    patches, kernel = convolution.matrices(x, w)
    product = np.asarray(patches, np.int64) @ np.asarray(kernel, np.int64).T
    expected = jax.lax.conv_general_dilated(
        x, w, (stride,) * space, pads, None, (dilation,) * space, numbers, preferred_element_type=jnp.int32
    )
    np.testing.assert_array_equal(convolution.image(jnp.asarray(product, jnp.int32)), expected)


@pytest.mark.parametrize(("window", "stride", "dilation"), [((64,), 4, 1), ((8, 9), 2, 2)])
def test_long_windows_are_one_gather(window, stride, dilation):
    space = len(window)
    x, w = bytes_of((2, *(70, 40)[:space], 3), 0), bytes_of((*window, 3, 4), 1)
    options = ((stride,) * space, [(5, 6)] * space, None, (dilation,) * space, spec(LAST, space))
    convolution = Convolution.of(x.shape, w.shape, *options, dtype=jnp.float32)
    program = jax.make_jaxpr(lambda x, w: convolution.matrices(x, w))(x, w)
    assert [eqn.primitive.name for eqn in program.eqns].count("gather") == 1
    assert len(program.eqns) < 20, "not one slice for each place of the window"
    patches, kernel = convolution.matrices(x, w)
    product = np.asarray(patches, np.int64) @ np.asarray(kernel, np.int64).T
    expected = jax.lax.conv_general_dilated(x, w, *options, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(convolution.image(jnp.asarray(product, jnp.int32)), expected)


def test_a_window_that_does_not_fit_sees_nothing():
    x, w = bytes_of((2, 3, 4), 0), bytes_of((5, 4, 6), 1)
    convolution = Convolution.of(
        x.shape, w.shape, (1,), "VALID", None, None, spec(LAST, 1), dtype=jnp.float32
    )
    patches, _ = convolution.matrices(x, w)
    assert patches.shape == (2, 0, 20)


@pytest.mark.parametrize(
    "options",
    [
        {"feature_group_count": 2},
        {"lhs_dilation": (2,)},
        {"padding": ((-1, 0),)},
    ],
)
def test_what_is_no_plain_product(options):
    given = {"padding": "VALID", "feature_group_count": 1} | options
    groups = given["feature_group_count"]
    convolution = Convolution.of(
        (2, 8, 4), (3, 4 // groups, 6), (1,), dimension_numbers=spec(LAST, 1), dtype=jnp.float32, **given
    )
    assert not convolution.is_product


def test_an_input_that_has_its_border_already_needs_none():
    convolution = Convolution.of(
        (2, 8, 4),
        (3, 4, 6),
        (1,),
        ((2, 2),),
        lhs_dilation=(2,),
        dimension_numbers=spec(LAST, 1),
        dtype=jnp.float32,
    )
    assert not convolution.is_product
    bordered = dataclasses.replace(convolution, padding=((0, 0),), lhs_dilation=(1,))
    assert bordered.is_product
