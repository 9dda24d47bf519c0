"""Decoding from a cache of low-bit keys and values: position by position what the whole sequence gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.nn import QuantMultiHeadAttention
from jqinject.quant import (
    Fp6e2m3OCPActPerTensorFloat,
    Fp8e4m3ActPerTensorDelayed,
    Int8DynamicActPerGroupFloat,
    Int8DynamicActPerRowAbsMax,
    MXFloat4e2m1Act,
    ShiftedUint8ActPerTensorFloat,
)
from jqinject.quant_tensor import IntQuantTensor
from tests.brevitas_defaults import ATTENTION
from tests.quant._own_format import Log2ActPerRow

BATCH, LENGTH, SIZE = 2, 4, 8
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, SIZE))
ROWS = {"k_transposed_quant": Int8DynamicActPerRowAbsMax, "v_quant": Int8DynamicActPerRowAbsMax}
IN_FLOAT8 = ("q_scaled_quant", "k_transposed_quant", "v_quant", "attn_output_weights_quant")
whole = nnx.jit(lambda m, x: m(x, is_causal=True))


def _layer(**given):
    layer = QuantMultiHeadAttention(2, SIZE, **{"decode": False, "rngs": nnx.Rngs(0), **ATTENTION, **given})
    whole(layer, X)
    layer.eval()
    return layer


def _decoded(layer, x=X, dtype=jnp.float32, traces=None):
    """The outputs of every position, from an empty cache on."""

    @nnx.jit
    def step(m, token):
        if traces is not None:
            traces.append(1)
        return m(token, decode=True)

    layer.init_cache(x.shape, dtype)
    return jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(x.shape[1])], 1)


CACHES = {
    # what is given, dtype and features of the payloads of keys and values
    "one scale": ({}, ("int8", 4), ("int8", 4)),
    "each head and position": (ROWS, ("int8", 4), ("int8", 4)),
    "4 bits": ({**ROWS, "k_transposed_bit_width": 4, "v_bit_width": 4}, ("uint8", 2), ("uint8", 2)),
    "2 and 3 bits": ({"k_transposed_bit_width": 2, "v_bit_width": 3}, ("uint8", 1), ("uint8", 2)),
    "zero points": (
        dict.fromkeys(ROWS, ShiftedUint8ActPerTensorFloat),
        ("uint8", 4),
        ("uint8", 4),
    ),
    "8-bit floats": (
        dict.fromkeys(IN_FLOAT8, Fp8e4m3ActPerTensorDelayed),
        ("float8_e4m3fn", 4),
        ("float8_e4m3fn", 4),
    ),
    "groups": (
        dict.fromkeys(ROWS, Int8DynamicActPerGroupFloat)
        | {"k_transposed_group_size": 2, "v_group_size": 2, "v_bit_width": 4},
        ("int8", 2, 2),
        ("uint8", 2, 1),
    ),
    "groups of 4-bit floats": (
        dict.fromkeys(ROWS, MXFloat4e2m1Act) | {"k_transposed_group_size": 2, "v_group_size": 4},
        ("uint8", 2, 1),
        ("uint8", 1, 2),
    ),
    "6-bit floats": (dict.fromkeys(ROWS, Fp6e2m3OCPActPerTensorFloat), ("uint8", 4), ("uint8", 4)),
    "a format of one's own": (dict.fromkeys(ROWS, Log2ActPerRow), ("uint8", 2), ("uint8", 2)),
    "keys alone": ({**ROWS, "v_quant": None}, ("int8", 4), ("float32", 4)),
    "a learned width has no payload": (
        {"k_transposed_bit_width_impl_type": "parameter"},
        ("float32", 4),
        ("int8", 4),
    ),
    "grouped queries": ({**ROWS, "num_kv_heads": 1}, ("int8", 4), ("int8", 4)),
    "normalized": ({"normalize_qk": True}, ("int8", 4), ("int8", 4)),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", CACHES.values(), ids=CACHES)
def test_decoding_is_the_full_forward(case):
    given, *payloads = case
    layer, traces = _layer(**given), []
    found = _decoded(layer, traces=traces)
    np.testing.assert_allclose(found, whole(layer, X), atol=1e-6)
    assert len(traces) == 1
    assert int(layer.cache_index[...]) == LENGTH
    for cached, (dtype, *features) in zip((layer.cached_key, layer.cached_value), payloads, strict=True):
        heads = given.get("num_kv_heads", 2)
        assert (cached.dtype.name, cached.shape) == (dtype, (BATCH, LENGTH, heads, *features))


@pytest.mark.heavy
def test_the_cache_holds_the_integers_of_every_position():
    layer = _layer(**ROWS)
    _decoded(layer)
    for proxy, projection, cached, scales in (
        (layer.k_transposed_quant, layer.key, layer.cached_key, layer.cached_key_scale),
        (layer.v_quant, layer.value, layer.cached_value, layer.cached_value_scale),
    ):
        quantized = proxy(projection(X))
        assert isinstance(quantized, IntQuantTensor)
        np.testing.assert_array_equal(cached[...], quantized.int())
        np.testing.assert_allclose(scales[...], quantized.scale, rtol=1e-6)
        assert scales.shape == (BATCH, LENGTH, 2, 1)


@pytest.mark.parametrize(("bits", "share"), [(8, 4), (4, 8), (2, 16)])
def test_the_cache_takes_a_fraction_of_its_floats(bits, share):
    given = {"k_transposed_bit_width": bits, "v_bit_width": bits}
    layer = QuantMultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0), **ATTENTION, **given)
    twin = nnx.MultiHeadAttention(2, 32, decode=False, rngs=nnx.Rngs(0))
    for each in (layer, twin):
        each.init_cache((1, 64, 32))
    for name in ("cached_key", "cached_value"):
        floats, numbers = getattr(twin, name)[...].nbytes, getattr(layer, name)[...].nbytes
        assert floats == share * numbers
        assert getattr(layer, f"{name}_scale")[...].nbytes == 64 * 4  # one for each position


@pytest.mark.heavy
def test_without_quantizers_of_keys_and_values_the_cache_is_flaxs():
    off = dict.fromkeys(IN_FLOAT8)
    layer, twin = _layer(**off), nnx.MultiHeadAttention(2, SIZE, decode=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(_decoded(layer), _decoded(twin), atol=0.1)
    assert {path for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Cache))} == {
        path for path, v in nnx.to_flat_state(nnx.state(twin, nnx.Cache))
    }
    np.testing.assert_allclose(_decoded(layer), whole(layer, X), atol=1e-6)


@pytest.mark.heavy
def test_a_mask_hides_positions_of_the_cache():
    layer = _layer(**ROWS)
    layer.init_cache(X.shape)
    seen = jnp.asarray([True, False, True, True])
    step = nnx.jit(lambda m, x, mask: m(x, decode=True, mask=mask))
    outs = [step(layer, X[:, i : i + 1], seen[None, None, None]) for i in range(LENGTH)]
    masked = nnx.jit(lambda m, x, mask: m(x, mask=mask))
    full = masked(layer, X, seen[None, None, None] & jnp.tril(jnp.ones((LENGTH, LENGTH), bool)))
    np.testing.assert_allclose(jnp.concatenate(outs, 1), full, atol=1e-6)


@pytest.mark.heavy
def test_bfloat16():
    layer = _layer(**ROWS, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    found = _decoded(layer, X.astype(jnp.bfloat16), jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    assert layer.cached_key_scale.dtype == jnp.float32
    np.testing.assert_allclose(
        found.astype(jnp.float32), whole(layer, X.astype(jnp.bfloat16)).astype(jnp.float32), atol=0.05
    )


@pytest.mark.heavy
def test_stacked_layers_decode():
    def one(rngs):
        return QuantMultiHeadAttention(2, SIZE, decode=False, rngs=rngs, **ATTENTION | ROWS)

    stacked = nnx.split_rngs(splits=2)(nnx.vmap(one))(nnx.Rngs(0))
    full = nnx.jit(nnx.scan(lambda m, x: m(x, is_causal=True), in_axes=(0, nnx.Carry), out_axes=nnx.Carry))
    full(stacked, X)
    stacked.eval()
    nnx.vmap(lambda m: m.init_cache(X.shape), out_axes=None)(stacked)
    assert stacked.cached_key.shape == (2, BATCH, LENGTH, 2, 4)
    step = nnx.jit(nnx.scan(lambda m, x: m(x, decode=True), in_axes=(0, nnx.Carry), out_axes=nnx.Carry))
    found = jnp.concatenate([step(stacked, X[:, i : i + 1]) for i in range(LENGTH)], 1)
    np.testing.assert_allclose(found, full(stacked, X), atol=1e-5)


@pytest.mark.heavy
def test_a_new_cache_forgets():
    layer = _layer(**ROWS)
    first = _decoded(layer)
    np.testing.assert_array_equal(_decoded(layer), first)


def test_groups_of_positions_can_not_be_cached():
    given = {"k_transposed_quant": Int8DynamicActPerGroupFloat, "k_transposed_group_size": 2}
    layer = QuantMultiHeadAttention(
        2, SIZE, decode=False, rngs=nnx.Rngs(0), **given, k_transposed_group_dim=1
    )
    with pytest.raises(ValueError, match=r"a group of several positions cannot be quantized position by"):
        layer.init_cache(X.shape)


@pytest.mark.heavy
def test_positions_that_do_not_fit():
    layer = _layer()
    with pytest.raises(ValueError, match=r"decoding needs a cache.\n  cure: layer.init_cache"):
        layer(X[:, :1], decode=True)
    layer.init_cache(X.shape)
    with pytest.raises(ValueError, match=r"cached_key takes one position at a time"):
        layer(X, decode=True)
    with pytest.raises(ValueError, match=r"inputs of length 1 and of the batch that init_cache was given"):
        layer(X[:1, :1], decode=True)
    with pytest.raises(ValueError, match=r"No `decode` argument was provided"):
        QuantMultiHeadAttention(2, SIZE, rngs=nnx.Rngs(0))(X)
