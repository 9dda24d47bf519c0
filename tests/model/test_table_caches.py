"""TurboQuant: caches of keys and values as codes into a table, after a rotation that reading undoes."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject import Rule, explain, freeze, quantize, quantized_cache, report
from jqinject.core.transforms import ChannelScale, Hadamard, Sized
from jqinject.dot import LowBitCache
from jqinject.nn import QuantIdentity, QuantMultiHeadAttention, QuantScaledDotProductAttention
from jqinject.ops import normal_table
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelFloat,
    NF4WeightPerChannelFloat,
    TurboQuant2Act,
    TurboQuant3Act,
    TurboQuant4Act,
)
from jqinject.recipes import Recipe, Rotate
from tests.model._generating_models import Einsum, OwnDecoder, attend
from tests.model.test_generation import Growing, Memory

FEATURES, LENGTH, WIDTH, VOCABULARY = 64, 12, 32, 48
BY_BITS = {2: TurboQuant2Act, 3: TurboQuant3Act, 4: TurboQuant4Act}
#: Squared errors of a normal distribution: Max, 1960, table I.
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03455, 4: 0.009497}


def quantizer_of(bits: int) -> Any:
    return BY_BITS.get(bits) or TurboQuant4Act.let(bit_width=bits)


def distortion(y: jax.Array, x: jax.Array) -> jax.Array:
    """Of each row."""
    y, x = (np.asarray(a, np.float64) for a in (y, x))
    return jnp.asarray(((y - x) ** 2).sum(-1) / (x**2).sum(-1))


def rotation(size: int) -> np.ndarray:
    """Two Sylvester matrices, with the signs of two seeds before them."""
    sylvester = np.ones((1, 1))
    while len(sylvester) < size:
        sylvester = np.kron(np.array([[1, 1], [1, -1]]), sylvester)
    signs = [1.0 - 2.0 * (np.random.PCG64(seed).random_raw(size) % 2) for seed in (0, 1)]
    return (signs[0][:, None] * sylvester) @ (signs[1][:, None] * sylvester) / size


def by_formula(x: np.ndarray, bits: int) -> np.ndarray:
    turn, table = rotation(x.shape[-1]), np.asarray(normal_table(bits).values)
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    unit = (x @ turn) / np.where(norm > 0, norm, 1)
    levels = table / np.sqrt(x.shape[-1])
    codes = np.abs(unit[..., None] - levels).argmin(-1)
    return norm * (levels[codes] @ turn.T)


@pytest.mark.parametrize("bits", DISTORTION)
def test_distortion_is_that_of_a_normal_distribution_for_any_vector(bits: int) -> None:
    layer = jax.jit(QuantIdentity(quantizer_of(bits)))
    x = jax.random.normal(jax.random.key(0), (4096, 128))
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    expected = DISTORTION[bits]
    np.testing.assert_allclose(distortion(layer(x), x).mean(), expected, rtol=0.03)
    np.testing.assert_allclose(
        distortion(layer(x.astype(jnp.bfloat16)), x.astype(jnp.bfloat16)).mean(), expected, rtol=0.03
    )
    one_hot = distortion(layer(jnp.eye(128)), jnp.eye(128))
    np.testing.assert_allclose(one_hot.mean(), expected, rtol=0.1)
    fixed = jnp.stack([jnp.ones(128), jnp.arange(128.0), jnp.eye(128)[5] * 30 + jnp.ones(128)])
    assert float(jnp.concatenate([one_hot, distortion(layer(fixed), fixed)]).max()) < 2 * expected


def test_rows_are_rotated_rounded_and_rotated_back() -> None:
    x = np.random.default_rng(0).standard_normal((5, 64)) ** 3
    for bits in BY_BITS:
        found = jax.jit(QuantIdentity(BY_BITS[bits]))(jnp.asarray(x, jnp.float32))
        np.testing.assert_allclose(found, by_formula(x, bits), rtol=1e-4, atol=1e-5)


def test_zeros_small_numbers_and_nan() -> None:
    proxy = QuantIdentity(TurboQuant2Act).act_quant
    layer = jax.jit(proxy)
    x = jax.random.normal(jax.random.key(1), (4, 64)).at[1].set(0.0)
    y = layer(x)
    np.testing.assert_array_equal(y[1], jnp.zeros(64))
    np.testing.assert_array_equal(layer(x * 2.0**-40), y * 2.0**-40)
    np.testing.assert_array_equal(layer(x * 2.0**60), y * 2.0**60)
    with_nan = layer(x.at[2, 3].set(jnp.nan))
    assert bool(jnp.isnan(with_nan[2]).all())
    np.testing.assert_array_equal(jnp.delete(with_nan, 2, axis=0), jnp.delete(y, 2, axis=0))
    assert layer(jnp.zeros((0, 64))).shape == (0, 64)
    rows = proxy.quantize_for_cache(x)
    assert rows.scale[1, 0] == 0.0 and bool((rows.value[1] == 0).all())


def test_the_gradient_goes_straight_through() -> None:
    x, g = jax.random.normal(jax.random.key(2), (2, 3, 64))
    layer = QuantIdentity(TurboQuant4Act)
    plain = jax.jit(jax.grad(lambda x: (layer(x) * g).sum()))
    np.testing.assert_allclose(plain(x), g, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(layer, x), layer(x), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(layer)(x), layer(x), rtol=1e-6, atol=1e-6)
    layer.act_quant.disable_quant = True
    np.testing.assert_array_equal(layer(x), x)


def test_sizes_that_are_no_power_of_two() -> None:
    for size in (80, 96):
        x = jax.random.normal(jax.random.key(size), (1024, size))
        np.testing.assert_allclose(
            distortion(jax.jit(QuantIdentity(TurboQuant3Act))(x), x).mean(), 0.0345, rtol=0.05
        )
    in_blocks = TurboQuant4Act.let(pre_transform=Hadamard(8, seed=0))
    x = jax.random.normal(jax.random.key(0), (64, 88))
    assert distortion(QuantIdentity(in_blocks)(x), x).mean() < 0.011


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        shape = (WIDTH, 2, FEATURES)
        self.q, self.k, self.v = (Einsum("btd,dnh->btnh", shape, rngs) for _ in range(3))
        self.o = Einsum("btnh,nhd->btd", (2, FEATURES, WIDTH), rngs)

    def __call__(self, x: jax.Array, cache: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        at, new = (0, cache["end"], 0, 0), {"k": self.k(x), "v": self.v(x)}
        held = {name: jax.lax.dynamic_update_slice(cache[name], new[name], at) for name in "kv"}
        y = self.o(attend(self.q(x), held["k"], held["v"], cache["end"]))
        return x + y, held | {"end": cache["end"] + x.shape[1]}


class Decoder(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.table = nnx.Param(rngs.params.normal((VOCABULARY, WIDTH)))
        self.layers = nnx.List([Attention(rngs) for _ in range(2)])
        self.head = nnx.Param(rngs.params.normal((WIDTH, VOCABULARY)))

    def __call__(self, ids: jax.Array, cache: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        x, after = self.table[(ids,)], {}
        for number, layer in enumerate(self.layers):
            x, after[f"layer_{number}"] = layer(x, cache[f"layer_{number}"])
        return x @ self.head[...], after


BATCH = 8
IDS = jax.random.randint(jax.random.key(0), (BATCH, LENGTH), 0, VOCABULARY)
ROWS = BATCH * LENGTH * 2


def empty(dtype: Any = jnp.float32) -> dict[str, Any]:
    rows = jnp.zeros((BATCH, LENGTH, 2, FEATURES), dtype)
    return {f"layer_{i}": {"k": rows, "v": rows, "end": jnp.zeros((), jnp.int32)} for i in range(2)}


def decoder(quantizer: Any, **more: Any) -> Any:
    return quantize(Decoder(), Rule(cache_quant=quantizer, **more), inputs=(IDS, empty()))


def generated(model: Any, cache: Any) -> tuple[jax.Array, Any, int]:
    """Logits of a prefill and of steps of one token, the cache afterwards, and how often the step was traced."""
    traces, logits = [], []

    @nnx.jit
    def step(model: Any, ids: jax.Array, cache: Any) -> Any:
        traces.append(ids.shape)
        return model(ids, cache)

    for start, end in ((0, 4), *((at, at + 1) for at in range(4, LENGTH))):
        found, cache = step(model, IDS[:, start:end], cache)
        logits.append(found)
    return jnp.concatenate(logits, 1), cache, len(traces)


@pytest.fixture(scope="module")
def in_float() -> jax.Array:
    return generated(Decoder(), empty())[0]


def decibels(found: jax.Array, expected: jax.Array) -> float:
    return float(20 * jnp.log10(jnp.linalg.norm(expected) / jnp.linalg.norm(found - expected)))


@pytest.mark.heavy
def test_a_cache_in_low_bits_gives_the_numbers_of_rounded_rows() -> None:
    model = decoder(TurboQuant4Act)
    rounded, floats, _ = generated(model, empty())
    found, low, traces = generated(model, quantized_cache(model, empty()))
    np.testing.assert_allclose(found, rounded, rtol=1e-4, atol=2e-3)
    cache = low["layer_0"]["k"]
    assert traces == 2 and cache.nbytes == ROWS * (FEATURES // 2 + 4)
    assert cache.numbers["value"].dtype == jnp.uint8 and cache.numbers["scale"].dtype == jnp.float32
    assert cache.shape == (BATCH, LENGTH, 2, FEATURES) and cache.ndim == 4
    np.testing.assert_allclose(cache.dequantized(), floats["layer_0"]["k"], rtol=1e-4, atol=1e-4)
    keys = Decoder().layers[0].k(Decoder().table[(IDS,)])
    np.testing.assert_allclose(cache[:], by_formula(np.asarray(keys), 4), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(quantized_cache(model, empty())["layer_1"]["k"][:], 0)
    again = pickle.loads(pickle.dumps(cache))
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    half = quantized_cache(model, empty(jnp.bfloat16))
    assert half["layer_0"]["v"].dtype == jnp.bfloat16 and half["layer_0"]["v"].nbytes == cache.nbytes


@pytest.mark.heavy
def test_reports_state_the_bytes() -> None:
    model = freeze(decoder(TurboQuant3Act, weight_quant=Int8WeightPerChannelFloat))
    low, floats = ROWS * (FEATURES * 3 // 8 + 4), ROWS * FEATURES * 4
    for cache in (empty(), quantized_cache(model, empty())):
        shown = report(model, IDS[:, :1], cache)
        row = shown.coverage.caches[0]
        assert (row.name, row.weight_bytes, row.float_bytes, row.bits) == ("cache.layer_0.k", low, floats, 3)
        assert f"cache: cache.layer_0.k: 3-bit table, {low:,} bytes of {floats:,}" in str(shown)
    assert explain(TurboQuant4Act)["undo_transform"].value is True


@pytest.mark.heavy
def test_products_that_quantize_the_rows_take_them_as_a_float_cache_has_them(in_float: jax.Array) -> None:
    rules = [
        Rule(op=("einsum", "dot_general"), rhs_quant=Int8DynamicActPerRowFloat),
        Rule(cache_quant=TurboQuant4Act),
    ]
    model = quantize(Decoder(), rules, inputs=(IDS, empty()))
    rounded = generated(model, empty())[0]
    found = generated(model, quantized_cache(model, empty()))[0]
    # A number at the border of two integers may go either way.
    assert decibels(found, rounded) > decibels(rounded, in_float) + 6


@pytest.mark.heavy
def test_caches_in_variables_and_stacked_growing_and_sharded_ones() -> None:
    ids = IDS[:2, :8] % 32
    own: Any = quantize(OwnDecoder(nnx.Rngs(0), 2, 8), Rule(cache_quant=TurboQuant4Act), inputs=(ids,))
    low = quantized_cache(own)
    np.testing.assert_allclose(low(ids), own(ids), rtol=1e-4, atol=1e-4)
    held = low.caches[0].k_cache.get_raw_value()
    assert isinstance(held, LowBitCache) and held.nbytes == 2 * 8 * 2 * (4 + 4)

    rule, x = Rule(cache_quant=TurboQuant4Act), jax.random.normal(jax.random.key(1), (1, 2, 2, 16))
    stack, at = jnp.zeros((3, 1, 6, 2, 16)), jnp.int32(1)
    model = quantize(Memory(), rule, inputs=(x, stack, at))
    expected, rounded = model(x, stack, at)
    found, cache = nnx.jit(lambda model, *inputs: model(*inputs))(model, x, quantized_cache(model, stack), at)
    assert cache.numbers["value"].shape == (3, 1, 6, 2, 8)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cache.dequantized(), rounded, rtol=1e-4, atol=1e-5)

    grows = quantize(Growing(), rule, inputs=(x, x[:, :0]))
    scores, longer = grows(x, quantized_cache(grows, x))
    expected = jnp.einsum("btnh,bsnh->bnts", x, longer.dequantized()[:, 1:])
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)

    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, None, "heads", None))
    spread = quantized_cache(grows, jax.device_put(x, sharding))
    assert spread.sharding.spec[:3] == (None, None, "heads")
    there, _ = nnx.jit(lambda model, *inputs: model(*inputs))(grows, jax.device_put(x, sharding), spread)
    np.testing.assert_allclose(there, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_attention_of_flax_keeps_low_bits_in_its_variables() -> None:
    mha = nnx.MultiHeadAttention(2, 16, qkv_features=128, decode=True, rngs=nnx.Rngs(0))
    mha.init_cache((3, 5, 16))
    x = jax.random.normal(jax.random.key(0), (3, 5, 16))
    model: Any = quantize(mha, Rule(cache_quant=TurboQuant4Act), inputs=(x[:, :1],))
    low = quantized_cache(model)
    step = nnx.jit(lambda model, x: model(x))
    for at in range(5):
        position = x[:, at : at + 1]
        np.testing.assert_allclose(step(low, position), step(model, position), rtol=1e-3, atol=1e-4)
    held = low.cached_key.get_raw_value()
    assert isinstance(held, LowBitCache) and held.nbytes == 3 * 5 * 2 * (32 + 4)


@pytest.mark.heavy
def test_our_attention_decodes_as_the_full_pass_and_stores_codes() -> None:
    quantizers = {"k_transposed_quant": TurboQuant4Act, "v_quant": TurboQuant3Act}
    mha = QuantMultiHeadAttention(
        4, 16, qkv_features=128, num_kv_heads=2, decode=False, **quantizers, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    full = mha(x, is_causal=True)
    mha.init_cache((2, 5, 16))
    mha.eval()
    assert mha.cached_key.dtype == jnp.uint8 and mha.cached_key.shape == (2, 5, 2, 16)
    assert mha.cached_value.shape == (2, 5, 2, 12) and mha.cached_value_scale.shape == (2, 5, 2, 1)
    step = nnx.jit(lambda mha, x: mha(x, decode=True))
    for at in range(5):
        np.testing.assert_allclose(step(mha, x[:, at : at + 1])[:, 0], full[:, at], rtol=1e-4, atol=1e-5)

    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 5, 2, 32))
    keys, values = (QuantIdentity(quantizers[name])(x) for name, x in zip(quantizers, (k, v), strict=True))
    np.testing.assert_allclose(
        QuantScaledDotProductAttention(**quantizers)(q, k, v),
        nnx.dot_product_attention(q, keys, values),
        rtol=1e-4,
        atol=1e-5,
    )


class One(nnx.Module):
    def __call__(self, x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = jax.lax.dynamic_update_slice(cache, x, (0, 1, 0))
        return jnp.einsum("bth,bsh->bts", x, cache), cache


def one(quantizer: Any, size: int = 16, dtype: Any = jnp.float32) -> Any:
    inputs = (jnp.ones((1, 1, size), dtype), jnp.zeros((1, 4, size), dtype))
    return quantize(One(), Rule(cache_quant=quantizer), inputs=inputs)


def test_what_does_not_fit_is_refused_by_path() -> None:
    with pytest.raises(
        ValueError, match=r"no Hadamard matrix of size 88(.|\n)*cure: (.|\n)*the cache cache was"
    ):
        one(TurboQuant4Act, 88)
    with pytest.raises(TypeError, match=r"cache(.|\n)*quantizes activations, and NF4WeightPerChannelFloat"):
        one(NF4WeightPerChannelFloat)
    with pytest.raises(ValueError, match=r"finds no cache to quantize(.|\n)*float arrays"):
        one(TurboQuant4Act, dtype=jnp.int32)
    with pytest.raises(
        ValueError, match=r"a payload of at most 8 bits, got 16 bits(.|\n)*cure(.|\n)*cache cache"
    ):
        one(Int8DynamicActPerRowFloat.let(bit_width=16))
    with pytest.raises(ValueError, match=r"bit_width must be 1 to 8|codebook has 2 to 256"):
        one(TurboQuant4Act.let(bit_width=9))
    with pytest.raises(TypeError, match="undo_transform has to be True or False, got 3"):
        QuantIdentity(TurboQuant4Act, undo_transform=3)
    with pytest.raises(
        ValueError, match=r"ChannelScale holds numbers of the model(.|\n)*cure: pre_transform"
    ):
        one(TurboQuant4Act.let(pre_transform=Sized(ChannelScale, 16)))
    with pytest.raises(ValueError, match=r"seed = 1 draws signs"):
        Hadamard(signs=(1, -1), seed=1)
    static = one(Int8ActPerTensorFloat)
    with pytest.raises(
        ValueError, match=r"quantizer of cache \(Int8ActPerTensorFloat\)(.|\n)*cure: jqinject.cal"
    ):
        quantized_cache(static, jnp.zeros((1, 4, 16)))


SHAPES: list[tuple[int, ...]] = []


class Watched(Hadamard):
    """Notes what it rotates."""

    def __call__(self, x: jax.Array) -> jax.Array:
        SHAPES.append(x.shape)
        return super().__call__(x)

    def inverse(self, x: jax.Array) -> jax.Array:
        SHAPES.append(x.shape)
        return super().inverse(x)


class Head(nnx.Module):
    def __call__(self, x: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, v = (jax.lax.dynamic_update_slice(cache, x, (0, 1, 0)) for cache in (k, v))
        weights = jax.nn.softmax(jnp.einsum("bth,bsh->bts", x, k))
        return jnp.einsum("bts,bsh->bth", weights, v), k, v


def test_products_rotate_queries_and_outputs_but_not_the_positions_of_a_cache() -> None:
    x, zeros = jax.random.normal(jax.random.key(0), (2, 1, 16)), jnp.zeros((2, 9, 16))
    rule = Rule(cache_quant=TurboQuant4Act.let(pre_transform=Watched(seed=0)))
    model = quantize(Head(), rule, inputs=(x, zeros, zeros))
    expected, *_ = model(x, zeros, zeros)
    low = quantized_cache(model, {"k": zeros, "v": zeros})
    SHAPES.clear()
    found, *_ = model(x, low["k"], low["v"])
    # New keys and values, the query and the output.
    assert SHAPES == [(2, 1, 16)] * 4
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_cache_of_another_rotation_is_refused() -> None:
    x, zeros = jnp.ones((1, 1, 16)), jnp.zeros((1, 4, 16))
    turned = one(TurboQuant4Act.let(pre_transform=Hadamard(seed=7)))
    with pytest.raises(
        ValueError, match=r"the cache cache, written in the model(.|\n)*cure: jqinject\.quantized_c"
    ):
        one(TurboQuant4Act)(x, quantized_cache(turned, zeros))


@pytest.mark.heavy
def test_a_recipe_leaves_rotated_caches_alone() -> None:
    result = Recipe(Rotate("R3")).apply(
        Decoder(), Rule(cache_quant=TurboQuant4Act), [(IDS, empty())], progress=False
    )
    (step,) = result.report.steps
    assert {str(site).partition(": ")[2] for site in step.sites} == {
        "R3: a rule has a transform there already"
    }
