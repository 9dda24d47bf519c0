"""Pooling of integers with fewer bits in the end: shifts, saturation, refusals, transformations."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jqinject
from jqinject.core import BitWidthConst, FloorSte, RoundSte, TruncIntQuant
from jqinject.nn import QuantIdentity, TruncAdaptiveAvgPool2d, TruncAvgPool, TruncAvgPool2d
from jqinject.quant import (
    Int8ActPerTensorFloat,
    NoneTruncQuant,
    RoundTo8bit,
    ShiftRoundSaturateTo8bit,
    TruncTo8bit,
)
from jqinject.quant_tensor import IntQuantTensor, avg_pool


def integers(q, bits=8, signed=False, scale=0.5, dtype=jnp.float32):
    return IntQuantTensor.from_int(jnp.asarray(q), scale, 0.0, bits, signed=signed, dtype=dtype)


@pytest.mark.heavy
@settings(max_examples=30, deadline=None)
@given(
    hnp.arrays(np.int64, (7,), elements=st.integers(-(2**15), 2**15 - 1)),
    st.integers(2, 16),
    st.booleans(),
)
def test_truncation_is_a_shift_of_integers(q, bits, rounds):
    rounding = RoundSte() if rounds else FloorSte()
    x = integers(q, 16, signed=True)
    result = TruncIntQuant(rounding, BitWidthConst(bits))(x.value, x.scale, x.zero_point, 16, signed=True)
    steps = 2 ** (16 - bits)
    exact = q / steps
    expected = np.clip(
        np.round(exact) if rounds else np.floor(exact), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    )
    np.testing.assert_array_equal(result.value, expected * steps * 0.5)
    assert (float(result.scale), result.bit_width) == (0.5 * steps, bits)


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [TruncTo8bit, RoundTo8bit])
@pytest.mark.parametrize("window", [(2, 2), (3, 2)])
def test_pooled_integers_are_shifted_sums(quantizer, window):
    q = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3))
    y = TruncAvgPool2d(window, strides=window, trunc_quant=quantizer)(integers(q))
    blocks = q.reshape(2, 6 // window[0], window[0], 6 // window[1], window[1], 3)
    sums = blocks.sum(axis=(2, 4))
    steps = 2 ** (int(np.ceil(np.log2(255 * window[0] * window[1]))) - 8)
    shifted = sums / steps
    np.testing.assert_array_equal(
        y.int(), np.floor(shifted) if quantizer is TruncTo8bit else np.round(shifted)
    )
    np.testing.assert_allclose(y.scale, 0.5 / (window[0] * window[1]) * steps, rtol=1e-6)
    assert (y.bit_width, y.signed, bool(y.is_valid)) == (8, False, True)


def test_windows_are_those_of_the_function():
    x = integers(np.arange(75).reshape(1, 5, 5, 3))
    kept = TruncAvgPool((2, 2), strides=(1, 2), padding="SAME", trunc_quant=None)(x)
    np.testing.assert_array_equal(kept.value, avg_pool(x, (2, 2), (1, 2), "SAME").value)
    assert kept.bit_width == 10
    whole = TruncAdaptiveAvgPool2d((1, 1), trunc_quant=NoneTruncQuant)(x)
    np.testing.assert_array_equal(whole.value[0, 0, 0], x.value.mean(axis=(0, 1, 2)))
    with pytest.raises(ValueError, match=r"does not divide"):
        TruncAdaptiveAvgPool2d(2)(x)


@pytest.mark.heavy
def test_a_learned_shift_saturates():
    pool = TruncAvgPool((), trunc_quant=ShiftRoundSaturateTo8bit, collect_stats_steps=1)
    x = integers([0, 100, 300, 1000], 16, signed=True, scale=1.0)
    pool(x)
    assert pool(x).scale == 8.0  # 1000 fits into 8 bits in steps of 8: a power of two once it is learned
    state = jax.tree.map(np.asarray, nnx.state(pool))
    pool.eval()
    assert pool(integers([3000], 16, signed=True, scale=1.0)).int().tolist() == [127]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(pool), state)


def test_what_the_proxy_says():
    pool, x = TruncAvgPool2d(2, bit_width=4), integers(np.zeros((1, 2, 2, 1)))
    proxy = pool.trunc_quant
    y = pool(x)
    mean = avg_pool(x, (2, 2))
    assert (proxy.bit_width(), float(proxy.scale(mean)), float(proxy.zero_point(mean))) == (
        4,
        float(y.scale),
        0.0,
    )
    assert (proxy.is_narrow_range, proxy.is_signed, proxy.rounding_mode) == (False, None, "ROUND")
    off = TruncAvgPool2d(2, trunc_quant=NoneTruncQuant).trunc_quant
    assert (off.bit_width(), off.scale(mean), off.zero_point(mean)) == (None, None, None)


def test_arrays_are_refused_or_pooled_in_float():
    x = jnp.ones((1, 2, 2, 1))
    with pytest.raises(
        TypeError, match=r"TruncAvgPool2d: expected an IntQuantTensor.*\n  cure: return_quant_tensor"
    ):
        TruncAvgPool2d(2)(x)
    assert TruncAvgPool2d(2, return_quant_tensor=False)(x).tolist() == [[[[1.0]]]]
    with pytest.raises(TypeError, match=r"takes bits off integers, expected an IntQuantTensor"):
        TruncAvgPool2d(2).trunc_quant(x)
    with pytest.raises(
        TypeError, match=r"quantizes accumulators, and Int8ActPerTensorFloat is not for these"
    ):
        TruncAvgPool2d(2, trunc_quant=Int8ActPerTensorFloat)
    with pytest.raises(TypeError, match=r"quantizes activations, and TruncTo8bit is not for these"):
        QuantIdentity(TruncTo8bit)
    with pytest.raises(TypeError, match=r"bit_widht"):
        TruncAvgPool2d(2, bit_widht=4)
    with pytest.raises(ValueError, match=r"window_shape must be one positive int or two"):
        TruncAvgPool2d((2, 2, 2))
    with pytest.raises(
        ValueError, match=r"trunc_scaling_impl_type = 'wrapper'|restrict_scaling_type = 'fp' cannot"
    ):
        TruncAvgPool2d(2, trunc_quant=ShiftRoundSaturateTo8bit, restrict_scaling_type="fp")


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [TruncTo8bit, RoundTo8bit, ShiftRoundSaturateTo8bit])
def test_compiled_copied_and_differentiated(quantizer):
    pool = TruncAvgPool2d(2, strides=2, trunc_quant=quantizer)
    q = np.random.default_rng(1).integers(0, 256, (1, 4, 4, 2))
    for dtype in (jnp.float32, jnp.bfloat16):
        assert pool(integers(q, dtype=dtype)).value.dtype == dtype
    x = integers(q)
    expected = pool(x)
    copies = [nnx.clone(pool), copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))]
    fresh = TruncAvgPool2d(2, strides=2, trunc_quant=quantizer)
    jqinject.load_state(fresh, nnx.state(pool))
    for other in (*copies, fresh):
        np.testing.assert_array_equal(other(x).value, expected.value)
    compiled = nnx.jit(lambda pool, x: pool(x))(pool, x)
    np.testing.assert_allclose(compiled.value, expected.value, rtol=1e-6)
    if quantizer is not ShiftRoundSaturateTo8bit:  # whose shift depends on the input
        gradient = jax.grad(lambda v: jnp.sum(pool(x.set(value=v)).value))(x.value)
        np.testing.assert_allclose(gradient, np.full(x.shape, 0.25), rtol=1e-5)
