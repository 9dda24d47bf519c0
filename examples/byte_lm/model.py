"""A decoder-only transformer over bytes: RMSNorm, rotary positions, SwiGLU. Plain Flax NNX."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Size:
    """Of a model.

    Attributes:
        width: of the residual stream.
        depth: number of blocks.
        hidden: width within the feed-forward networks.
        heads: of the attention; `width / heads` is even.
        vocabulary: number of tokens.
    """

    width: int = 128
    depth: int = 4
    hidden: int = 512
    heads: int = 4
    vocabulary: int = 256

    def as_dict(self) -> dict[str, int]:
        """The numbers by name."""
        return asdict(self)


def rotated(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary position embeddings: `(batch, time, heads, size) -> the same`.

    Pairs `(x[i], x[i + size / 2])` turn by the angle `time * base ** (-2 i / size)`.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nnx.Module):
    """Causal attention with rotary positions."""

    def __init__(self, size: Size, dense: Any) -> None:
        self.heads = size.heads
        self.query, self.key, self.value, self.out = (dense(size.width, size.width) for _ in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, time, width) -> the same."""
        per_head = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        query, key, value = (layer(x).reshape(per_head) for layer in (self.query, self.key, self.value))
        mixed = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        return self.out(mixed.reshape(x.shape))


class FeedForward(nnx.Module):
    """SwiGLU."""

    def __init__(self, size: Size, dense: Any) -> None:
        self.gate, self.up = dense(size.width, size.hidden), dense(size.width, size.hidden)
        self.down = dense(size.hidden, size.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, time, width) -> the same."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and a feed-forward network, each on the normalized stream and added to it."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs) -> None:
        dense = partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.attention = Attention(size, dense)
        self.mlp_norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.mlp = FeedForward(size, dense)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, time, width) -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nnx.Module):
    """Bytes -> scores of the next byte. Parameters are float32, computation is in `dtype`.

    Args:
        size: of the model; the default has 1.1 million parameters.
        dtype: of the computation; scores are float32.
        rngs: for the initial parameters.
    """

    def __init__(self, size: Size | None = None, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        size = Size() if size is None else size
        init = nnx.initializers.normal(0.02)
        self.size = size
        self.embedding = nnx.Embed(size.vocabulary, size.width, dtype=dtype, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(size, dtype, rngs) for _ in range(size.depth)])
        self.norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(size.width, size.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 (batch, time) -> float32 (batch, time, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)
