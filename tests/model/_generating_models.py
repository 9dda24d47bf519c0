"""Small decoders that keep keys and values: in a dict of arrays, in modules among the arguments, in Variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY, WIDTH, HEADS, KV_HEADS, FEATURES, LAYERS = 32, 16, 4, 2, 8, 2
BIAS_OF_MASKED = -1e9


class Einsum(nnx.Module):
    def __init__(self, equation: str, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.equation = equation
        self.w = nnx.Param(rngs.params.normal(shape) * 0.15)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.equation, x, self.w[...])


def attend(q: jax.Array, k: jax.Array, v: jax.Array, start: Any) -> jax.Array:
    """Grouped queries that begin at `start`, over all positions of a cache."""
    b, t, n, d = q.shape
    q = q.reshape(b, t, k.shape[2], n // k.shape[2], d)
    scores = jnp.einsum("BTHGD,BSHD->BHGTS", q, k) * d**-0.5
    seen = jnp.arange(k.shape[1])[None, :] <= start + jnp.arange(t)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, BIAS_OF_MASKED), axis=-1)
    return jnp.einsum("BHGTS,BSHD->BTHGD", weights, v).reshape(b, t, n, d)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q = Einsum("btd,dnh->btnh", (WIDTH, HEADS, FEATURES), rngs)
        self.k = Einsum("bsd,dkh->bskh", (WIDTH, KV_HEADS, FEATURES), rngs)
        self.v = Einsum("bsd,dkh->bskh", (WIDTH, KV_HEADS, FEATURES), rngs)
        self.o = Einsum("btnh,nhd->btd", (HEADS, FEATURES, WIDTH), rngs)

    def __call__(self, x: jax.Array, cache: Any) -> tuple[Any, jax.Array]:
        return self.block(x, cache)

    def block(self, x: jax.Array, cache: Any) -> tuple[Any, jax.Array]:
        k, v, start = self.k(x), self.v(x), 0
        if cache is not None:
            start = cache["end_index"][0]
            k = jax.lax.dynamic_update_slice(cache["k"], k, (0, start, 0, 0))
            v = jax.lax.dynamic_update_slice(cache["v"], v, (0, start, 0, 0))
            cache = {"k": k, "v": v, "end_index": cache["end_index"] + x.shape[1]}
        return cache, self.o(attend(self.q(x), k, v, start))


class RematAttention(Attention):
    """Splits itself inside a checkpoint."""

    def __call__(self, x: jax.Array, cache: Any) -> tuple[Any, jax.Array]:
        return nnx.remat(type(self).block)(self, x, cache)


class ScatterAttention(Attention):
    """Writes by indices, as models with a sliding window do."""

    def block(self, x: jax.Array, cache: Any) -> tuple[Any, jax.Array]:
        k, v, start = self.k(x), self.v(x), 0
        if cache is not None:
            start = cache["end_index"][0]
            places = (start + jnp.arange(x.shape[1])) % cache["k"].shape[1]
            k = cache["k"].at[:, places, ...].set(k)
            v = cache["v"].at[:, places, ...].set(v)
            cache = {"k": k, "v": v, "end_index": cache["end_index"] + x.shape[1]}
        return cache, self.o(attend(self.q(x), k, v, start))


class Decoder(nnx.Module):
    """The cache is a dict of dicts of arrays: an argument and a result."""

    def __init__(self, rngs: nnx.Rngs, attention: type[Attention] = Attention) -> None:
        self.table = nnx.Param(rngs.params.normal((VOCABULARY, WIDTH)))
        self.layers = nnx.List([attention(rngs) for _ in range(LAYERS)])
        self.up = nnx.List([nnx.Linear(WIDTH, 24, rngs=rngs) for _ in range(LAYERS)])
        self.down = nnx.List([nnx.Linear(24, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, ids: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
        x = self.table[(ids,)]
        new = None if cache is None else {}
        for i in range(LAYERS):
            held, y = self.layers[i](x, None if cache is None else cache[f"layer_{i}"])
            if new is not None:
                new[f"layer_{i}"] = held
            x = x + y
            x = x + self.down[i](jax.nn.relu(self.up[i](x)))
        return jnp.dot(x, self.table[...].T), new


def init_cache(batch: int, length: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    shape = (batch, length, KV_HEADS, FEATURES)
    return {
        f"layer_{i}": {
            "k": jnp.zeros(shape, dtype),
            "v": jnp.zeros(shape, dtype),
            "end_index": jnp.zeros(batch, jnp.int32),
        }
        for i in range(LAYERS)
    }


class LayerCache(nnx.Module):
    def __init__(self, batch: int, length: int) -> None:
        shape = (batch, length, KV_HEADS, FEATURES)
        self.k_cache = nnx.Cache(jnp.zeros(shape))
        self.v_cache = nnx.Cache(jnp.zeros(shape))
        self.size = self.k_cache.shape[1]
        self.start = nnx.Variable(jnp.zeros((), jnp.int32))


class ModuleAttention(Attention):
    """Writes into a module that it is given."""

    def block(self, x: jax.Array, cache: Any) -> tuple[Any, jax.Array]:
        start = cache.start[...]
        places = (0, start, 0, 0)
        cache.k_cache[...] = jax.lax.dynamic_update_slice(cache.k_cache[...], self.k(x), places)
        cache.v_cache[...] = jax.lax.dynamic_update_slice(cache.v_cache[...], self.v(x), places)
        cache.start[...] = start + x.shape[1]
        return cache, self.o(attend(self.q(x), cache.k_cache[...], cache.v_cache[...], start))


class ModuleDecoder(Decoder):
    """The caches are a list of modules: an argument that the call changes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, ModuleAttention)

    def __call__(self, ids: jax.Array, cache: Any = None) -> Any:
        return super().__call__(ids, {f"layer_{i}": held for i, held in enumerate(cache)})[0]


class OwnDecoder(ModuleDecoder):
    """The caches are Variables of the model itself."""

    def __init__(self, rngs: nnx.Rngs, batch: int, length: int) -> None:
        super().__init__(rngs)
        self.caches = nnx.List([LayerCache(batch, length) for _ in range(LAYERS)])

    def __call__(self, ids: jax.Array, cache: Any = None) -> Any:
        return super().__call__(ids, list(self.caches))


def full_pass(model: Any, ids: jax.Array) -> jax.Array:
    """The logits of all positions at once."""
    return Decoder.__call__(model, ids)[0]
