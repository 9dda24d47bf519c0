"""Generation by models that are not made of our layers: float caches, and caches in low bits by rule."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, freeze, quantize, quantized_cache
from jqinject.dot import LowBitCache
from jqinject.quant import (
    Fp8e4m3OCPDynamicActPerRowFloat,
    Int8DynamicActPerGroupFloat,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelFloat,
)
from tests.model._generating_models import (
    FEATURES,
    KV_HEADS,
    Attention,
    Decoder,
    LayerCache,
    ModuleDecoder,
    OwnDecoder,
    RematAttention,
    ScatterAttention,
    init_cache,
)

BATCH, LENGTH, PREFILL = 2, 8, 4
IDS = jax.random.randint(jax.random.key(0), (BATCH, LENGTH), 0, 32)
W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowFloat)
KV8 = Rule(cache_quant=Int8DynamicActPerRowFloat)
ROW = BATCH * LENGTH * KV_HEADS  # rows of features in one array of a cache


class Int4Rows(Int8DynamicActPerRowFloat):
    bit_width = 4


class Groups(Int8DynamicActPerGroupFloat):
    group_size = 4


def frozen(model: nnx.Module, *rules: Rule, cache: Any = None) -> Any:
    made = quantize(model, rules, inputs=(IDS, cache))
    made.eval()
    return freeze(made)


def generated(model: Any, cache: Any) -> tuple[jax.Array, Any, int]:
    """Logits of a prefill and of steps of one token, the cache afterwards, and how often the step was traced."""
    traces = []

    @nnx.jit
    def step(model: Any, ids: jax.Array, cache: Any) -> Any:
        traces.append(ids.shape)
        return model(ids, cache)

    logits = []
    for start, end in ((0, PREFILL), *((at, at + 1) for at in range(PREFILL, LENGTH))):
        found = step(model, IDS[:, start:end], cache)
        found, cache = found if isinstance(found, tuple) else (found, cache)
        logits.append(found)
    return jnp.concatenate(logits, 1), cache, len(traces)


def bytes_of(cache: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(cache))


def noise(found: jax.Array, wanted: jax.Array) -> float:
    return float(20 * jnp.log10(jnp.linalg.norm(wanted) / jnp.linalg.norm(found - wanted)))


@pytest.fixture(scope="module")
def full() -> jax.Array:
    """The logits of the frozen model without a cache."""
    return frozen(Decoder(nnx.Rngs(0)), W8A8, cache=init_cache(BATCH, LENGTH))(IDS)[0]


@pytest.mark.heavy
@pytest.mark.parametrize("attention", [Attention, RematAttention, ScatterAttention])
def test_steps_of_a_frozen_model_equal_the_full_pass(attention: type, full: jax.Array) -> None:
    cache = init_cache(BATCH, LENGTH)
    model = frozen(Decoder(nnx.Rngs(0), attention), W8A8, cache=cache)
    found, _, traces = generated(model, cache)
    np.testing.assert_allclose(found, full, rtol=1e-5, atol=1e-5)
    assert traces == 2  # the prefill and the step
    eager, cache = model(IDS[:, :PREFILL], cache)
    np.testing.assert_allclose(eager, full[:, :PREFILL], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        model(IDS[:, PREFILL : PREFILL + 1], cache)[0][:, 0], full[:, PREFILL], rtol=1e-5, atol=1e-5
    )


def module_caches() -> list[LayerCache]:
    return [LayerCache(BATCH, LENGTH) for _ in range(2)]


@pytest.mark.heavy
def test_caches_in_variables_move_as_in_a_plain_model(full: jax.Array) -> None:
    caches = module_caches()
    given, _, traces = generated(frozen(ModuleDecoder(nnx.Rngs(0)), W8A8, cache=module_caches()), caches)
    own, _, traces_of_own = generated(frozen(OwnDecoder(nnx.Rngs(0), BATCH, LENGTH), W8A8), None)
    for found in (given, own):
        np.testing.assert_allclose(found, full, rtol=1e-5, atol=1e-5)
    assert traces == traces_of_own == 2 and caches[1].start[...] == LENGTH


@pytest.mark.heavy
@pytest.mark.parametrize("attention", [Attention, RematAttention, ScatterAttention])
def test_a_cache_in_low_bits_gives_the_numbers_of_rounded_keys_and_values(
    attention: type, full: jax.Array
) -> None:
    empty = init_cache(BATCH, LENGTH)
    model = frozen(Decoder(nnx.Rngs(0), attention), W8A8, KV8, cache=empty)
    rounded, held, _ = generated(model, empty)
    found, low, traces = generated(model, quantized_cache(model, empty))
    np.testing.assert_allclose(found, rounded, rtol=1e-5, atol=1e-5)
    assert traces == 2 and 20 < noise(found, full) < 80
    for layer, wanted in held.items():
        for name in ("k", "v"):
            kept = low[layer][name]
            assert kept.numbers["value"].dtype == jnp.int8
            np.testing.assert_allclose(kept.dequantized(), wanted[name], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(low[layer]["end_index"], wanted["end_index"])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("quantizer", "bits", "scales", "decibels"),
    [
        (Int8DynamicActPerRowFloat, 8, 1, 30),
        (Fp8e4m3OCPDynamicActPerRowFloat, 8, 1, 20),
        (Int4Rows, 4, 1, 5),
        (Groups, 8, FEATURES // 4, 30),
    ],
)
def test_formats_and_memory(quantizer: Any, bits: int, scales: int, decibels: float, full: jax.Array) -> None:
    empty = init_cache(BATCH, LENGTH)
    model = frozen(Decoder(nnx.Rngs(0)), W8A8, Rule(cache_quant=quantizer), cache=empty)
    cache = quantized_cache(model, empty)
    assert cache["layer_0"]["k"].nbytes == ROW * (FEATURES * bits // 8 + 4 * scales)
    assert bytes_of(empty["layer_0"]["k"]) == ROW * FEATURES * 4
    found, after, _ = generated(model, cache)
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    assert bytes_of(after) == bytes_of(cache) and noise(found, full) > decibels


@pytest.mark.heavy
def test_rows_are_rounded_by_a_scale_for_each_position_and_head() -> None:
    plain, empty = Decoder(nnx.Rngs(0)), init_cache(BATCH, LENGTH)
    model = quantize(plain, KV8, inputs=(IDS, empty))
    keys = plain(IDS, empty)[1]["layer_0"]["k"]
    kept = model(IDS, quantized_cache(model, empty))[1]["layer_0"]["k"]
    scale = jnp.abs(keys).max(-1, keepdims=True) / 128
    np.testing.assert_allclose(kept.numbers["scale"], scale, rtol=1e-6)
    rounded = jnp.clip(jnp.round(keys / scale), -128, 127) * scale
    np.testing.assert_allclose(kept.dequantized(), rounded, rtol=1e-6, atol=1e-6)


@pytest.mark.heavy
def test_variables_hold_low_bits(full: jax.Array) -> None:
    model = frozen(ModuleDecoder(nnx.Rngs(0)), W8A8, KV8, cache=module_caches())
    floats = module_caches()
    wanted, _, _ = generated(model, floats)
    caches: Any = quantized_cache(model, module_caches())
    assert caches[0].k_cache.shape == (BATCH, LENGTH, KV_HEADS, FEATURES)
    found, _, traces = generated(model, caches)
    assert isinstance(caches[1].v_cache.get_raw_value(), LowBitCache) and traces == 2
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)

    own = frozen(OwnDecoder(nnx.Rngs(0), BATCH, LENGTH), W8A8, KV8)
    low = quantized_cache(own)
    assert not isinstance(own.caches[0].k_cache.get_raw_value(), LowBitCache)
    assert low.table.get_raw_value()["value"] is own.table.get_raw_value()["value"]
    before = low.caches[0].k_cache.get_raw_value().nbytes
    found, _, traces = generated(low, None)
    assert low.caches[0].k_cache.get_raw_value().nbytes == before and traces == 2
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
def test_a_cache_after_a_float_prefill_and_in_a_compiled_loop(full: jax.Array) -> None:
    empty = init_cache(BATCH, LENGTH)
    model = frozen(Decoder(nnx.Rngs(0)), W8A8, KV8, cache=empty)
    _, filled = model(IDS[:, :PREFILL], empty)
    graphdef, state = nnx.split(model, graph=True)

    @jax.jit
    def rest(state: Any, cache: Any) -> jax.Array:
        def step(cache: Any, ids: jax.Array) -> Any:
            logits, cache = nnx.merge(graphdef, state)(ids[:, None], cache)
            return cache, logits[:, 0]

        return jax.lax.scan(step, cache, IDS[:, PREFILL:].T)[1].swapaxes(0, 1)

    found = rest(state, quantized_cache(model, filled))
    assert 20 < noise(found, full[:, PREFILL:]) < 80


def test_low_bit_caches_answer_as_arrays_and_are_pickled() -> None:
    empty = init_cache(BATCH, LENGTH, jnp.bfloat16)
    model = quantize(Decoder(nnx.Rngs(0)), KV8, inputs=(IDS, init_cache(BATCH, LENGTH)))
    cache = quantized_cache(model, empty)["layer_1"]["v"]
    assert (cache.shape, cache.dtype, cache.ndim, len(cache)) == ((2, 8, 2, 8), jnp.bfloat16, 4, 2)
    assert cache[0, 1].shape == (2, 8) and jnp.asarray(cache).dtype == jnp.bfloat16
    again = pickle.loads(pickle.dumps(cache))
    assert again.form == cache.form and "value=int8[2, 8, 2, 8]" in repr(again)
    abstract = quantized_cache(model, jax.eval_shape(lambda: init_cache(BATCH, 100)))
    assert abstract["layer_0"]["k"].numbers["value"].shape == (BATCH, 100, KV_HEADS, FEATURES)


def test_rules_choose_caches_by_the_path_of_the_cache_or_the_module() -> None:
    empty = init_cache(BATCH, LENGTH)
    rules = [Rule(r"layers\.0"), Rule(r"cache\.layer_1\.k", cache_quant=Int8DynamicActPerRowFloat), W8A8]
    cache = quantized_cache(frozen(Decoder(nnx.Rngs(0)), *rules, cache=empty), empty)
    low = [(a, b) for a, layer in cache.items() for b, x in layer.items() if isinstance(x, LowBitCache)]
    assert low == [("layer_1", "k")]


class Memory(nnx.Module):
    """Layers stacked in a scan, with a cache of which every layer takes its own, and a sharding of its own."""

    def __call__(self, x: jax.Array, keys: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "x"))

        def layer(x: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
            keys = jax.lax.dynamic_update_slice(keys, x, (0, at, 0, 0))
            keys = jax.lax.with_sharding_constraint(keys, spread)
            return jnp.einsum("btnh,bsnh,bsnd->btnd", x, keys, keys) / 8, keys

        return jax.lax.scan(layer, x, keys)


class Growing(nnx.Module):
    def __call__(self, x: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = jnp.concatenate([keys, x], axis=1)
        return jnp.einsum("btnh,bsnh->bnts", x, keys[:, 1:]), keys


@pytest.mark.heavy
def test_caches_of_scanned_layers_and_growing_caches() -> None:
    x = jax.random.normal(jax.random.key(1), (1, 2, KV_HEADS, FEATURES))
    stack, at = jnp.zeros((3, 1, 6, KV_HEADS, FEATURES)), jnp.int32(1)
    model = quantize(Memory(), KV8, inputs=(x, stack, at))
    wanted, rounded = model(x, stack, at)
    found, low = nnx.jit(lambda model, *given: model(*given))(model, x, quantized_cache(model, stack), at)
    assert low.numbers["scale"].shape == (3, 1, 6, KV_HEADS, 1) and jnp.abs(rounded).max() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(low.dequantized(), rounded, rtol=1e-5, atol=1e-6)

    grows = quantize(Growing(), KV8, inputs=(x, x[:, :0]))
    scores, longer = grows(x, quantized_cache(grows, x))
    first = quantized_cache(grows, x)
    assert longer.shape == (1, 4, KV_HEADS, FEATURES) and longer.numbers["value"].dtype == jnp.int8
    np.testing.assert_array_equal(longer.numbers["value"], jnp.concatenate([first.numbers["value"]] * 2, 1))
    wanted = jnp.einsum("btnh,bsnh->bnts", x, longer.dequantized()[:, 1:])
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)


class Masked(nnx.Module):
    """Writes by a mask, which a cache in low bits does not follow."""

    def __call__(self, x: jax.Array, cache: jax.Array, at: int = 0) -> tuple[jax.Array, dict[str, jax.Array]]:
        cache = jax.lax.dynamic_update_slice(cache["k"], x, (0, at, 0))
        cache = jnp.where(jnp.arange(cache.shape[1])[:, None] < 4, cache, 0.0)
        return cache.sum(), {"k": cache}


class Partial(nnx.Module):
    def __call__(self, x: jax.Array, cache: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, x, (0, 0, 2))


@pytest.mark.heavy
def test_refusals() -> None:
    x, empty = jnp.ones((1, 1, 8)), init_cache(BATCH, LENGTH)
    with pytest.raises(ValueError, match=r"finds no cache to quantize(.|\n)*Variables(.|\n)*cure: inputs"):
        quantize(Decoder(nnx.Rngs(0)), [W8A8, KV8], inputs=(IDS,))
    with pytest.raises(ValueError, match=r"caches that the calls write: cache\.layer_0\.k, "):
        quantize(
            Decoder(nnx.Rngs(0)), Rule("cach", cache_quant=Int8DynamicActPerRowFloat), inputs=(IDS, empty)
        )
    with pytest.raises(ValueError, match=r"the cache cache, written in the model(.|\n)*features last"):
        quantize(Partial(), KV8, inputs=(x[..., :4], jnp.zeros((1, 4, 8))))
    with pytest.raises(ValueError, match=r"rule with op=\.\.\. is for operations"):
        Rule(op="add", cache_quant=Int8DynamicActPerRowFloat)
    model = quantize(Decoder(nnx.Rngs(0)), [W8A8, KV8], inputs=(IDS, empty))
    with pytest.raises(ValueError, match=r"none of the arrays other\.k is a cache .*cache\.layer_0\.k"):
        quantized_cache(model, {"other": {"k": jnp.zeros((2, 8, 2, 8))}})
    with pytest.raises(ValueError, match=r"layer_0\.k is float32\[2, 8, 16\].*\n?.*4 axes and 8 features"):
        quantized_cache(model, {"layer_0": {"k": jnp.zeros((2, 8, 16))}})
    with pytest.raises(ValueError, match=r"Decoder has no rule for caches"):
        quantized_cache(Decoder(nnx.Rngs(0)), empty)
    four = quantize(Decoder(nnx.Rngs(0)), [W8A8, Rule(cache_quant=Int4Rows)], inputs=(IDS, empty))
    with pytest.raises(
        ValueError, match=r"the cache cache\.layer_0\.k, written in layers\.0 by(.|\n)*quantized_cache"
    ):
        four(IDS, quantized_cache(model, empty))
    masked = quantize(Masked(), KV8, inputs=(x, {"k": jnp.zeros((1, 8, 8))}))
    with pytest.raises(ValueError, match=r"cache\.k: the cache was given in low bits, and the call leaves"):
        masked(x, quantized_cache(masked, {"k": jnp.zeros((1, 8, 8))}))
