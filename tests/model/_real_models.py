"""Models in the styles in which people publish them, in small; nothing of ours is in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH, HIDDEN, HEADS, VOCABULARY, LENGTH = 32, 64, 2, 96, 8


class Einsum(nnx.Module):
    """A parameter and an equation of its own."""

    def __init__(self, equation: str, shape: tuple[int, ...], fan_in: int, *, rngs: nnx.Rngs):
        self.equation, self.shape = equation, shape
        self.w = nnx.Param(rngs.params.normal(shape) * fan_in**-0.5)

    def __call__(self, x):
        return jnp.einsum(self.equation, x, jnp.astype(self.w[...], x.dtype))


class RmsNorm(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.zeros(width))

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + self.scale[...])


class Embedder(nnx.Module):
    """A table that is also the output head, with methods for both."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.input_embedding = nnx.Param(rngs.params.normal((VOCABULARY, WIDTH)))

    def encode(self, ids):
        return self.input_embedding[(ids,)] * WIDTH**0.5

    def decode(self, x):
        return jnp.dot(x, self.input_embedding[...].T)


def rotated(x):
    """Rotary positions."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * 10_000.0 ** (
        -jnp.arange(half, dtype=x.dtype) / half
    )
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        size = WIDTH // HEADS
        self.qkv = Einsum("btd,sdnh->sbtnh", (3, WIDTH, HEADS, size), WIDTH, rngs=rngs)
        self.out = Einsum("btnh,nhd->btd", (HEADS, size, WIDTH), WIDTH, rngs=rngs)

    @property
    def head_dim(self) -> int:
        return self.out.w.shape[1]

    def __call__(self, x):
        q, k, v = self.qkv(x)
        scores = jnp.einsum("btnh,bsnh->bnts", rotated(q), rotated(k)) * self.head_dim**-0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
        return self.out(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v))


class GatedMlp(nnx.Module):
    """Three bare matrices."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.gate = nnx.Param(rngs.params.normal((WIDTH, HIDDEN)) * WIDTH**-0.5)
        self.up = nnx.Param(rngs.params.normal((WIDTH, HIDDEN)) * WIDTH**-0.5)
        self.down = nnx.Param(rngs.params.normal((HIDDEN, WIDTH)) * HIDDEN**-0.5)

    def __call__(self, x):
        return (nnx.silu(x @ self.gate) * jnp.matmul(x, self.up[...])) @ self.down[...]


class ExpertsByEinsum(nnx.Module):
    """Every expert on every token, weighted by a router."""

    def __init__(self, *, rngs: nnx.Rngs, experts: int = 4):
        self.router = nnx.Linear(WIDTH, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(rngs.params.normal((experts, WIDTH, HIDDEN)) * WIDTH**-0.5)
        self.down = nnx.Param(rngs.params.normal((experts, HIDDEN, WIDTH)) * HIDDEN**-0.5)

    def __call__(self, x):
        weights = jax.nn.softmax(self.router(x), -1)
        hidden = nnx.gelu(jnp.einsum("btd,edf->ebtf", x, self.up[...]))
        return jnp.einsum("ebtf,efd,bte->btd", hidden, self.down[...], weights)


class ExpertsByRaggedDot(nnx.Module):
    """Tokens sorted by their expert."""

    def __init__(self, *, rngs: nnx.Rngs, experts: int = 4):
        self.router = nnx.Linear(WIDTH, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(rngs.params.normal((experts, WIDTH, HIDDEN)) * WIDTH**-0.5)
        self.down = nnx.Param(rngs.params.normal((experts, HIDDEN, WIDTH)) * HIDDEN**-0.5)

    def __call__(self, x):
        flat = x.reshape(-1, WIDTH)
        weights = jax.nn.softmax(self.router(flat), -1)
        chosen = jnp.argmax(weights, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=self.up.shape[0])
        hidden = nnx.gelu(jax.lax.ragged_dot(flat[order], self.up[...], sizes))
        out = jax.lax.ragged_dot(hidden, self.down[...], sizes)[jnp.argsort(order)]
        return (out * jnp.max(weights, -1, keepdims=True)).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, mlp: Callable[..., Any], *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = RmsNorm(WIDTH, rngs=rngs), RmsNorm(WIDTH, rngs=rngs)
        self.attention, self.mlp = Attention(rngs=rngs), mlp(rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nnx.Module):
    """A language model with a tied table; its blocks may split themselves for rematerialization."""

    def __init__(self, mlp: Callable[..., Any] = GatedMlp, *, remat: bool = False, rngs: nnx.Rngs):
        self.embedder = Embedder(rngs=rngs)
        self.blocks = nnx.List([Block(mlp, rngs=rngs) for _ in range(2)])
        self.norm, self.remat = RmsNorm(WIDTH, rngs=rngs), remat

    def __call__(self, ids):
        x = self.embedder.encode(ids)
        for block in self.blocks:
            if self.remat:
                graphdef, state = nnx.split(block)
                x = jax.checkpoint(lambda state, x, g=graphdef: nnx.merge(g, state)(x))(state, x)
            else:
                x = block(x)
        return self.embedder.decode(self.norm(x))


class Scanned(nnx.Module):
    """Blocks stacked along a leading axis, and scanned."""

    def __init__(self, *, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: Block(GatedMlp, rngs=rngs), in_axes=0, out_axes=0)
        self.embedder, self.blocks = Embedder(rngs=rngs), make(rngs.split(2))

    def __call__(self, ids):
        step = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embedder.decode(step(self.embedder.encode(ids), self.blocks))


class StateSpace(nnx.Module):
    """Gated linear recurrences behind depthwise convolutions; returns a dict, as Mamba's do."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embedder = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.in_proj = nnx.Linear(WIDTH, 2 * HIDDEN, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(HIDDEN, HIDDEN, (4,), padding=((3, 0),), feature_group_count=HIDDEN, rngs=rngs)
        self.step = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.decay = nnx.Param(-jnp.exp(rngs.params.normal((HIDDEN,)) * 0.1))
        self.out_proj = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, ids, state=None):
        gate, x = jnp.split(self.in_proj(self.embedder(ids)), 2, -1)
        x = nnx.silu(self.conv(x))
        keep = jnp.exp(self.decay[...] * jax.nn.softplus(self.step(x)))
        start = jnp.zeros(x.shape[::2]) if state is None else state

        def one(h, now):
            h = now[0] * h + (1 - now[0]) * now[1]
            return h, h

        state, y = jax.lax.scan(one, start, (jnp.swapaxes(keep, 0, 1), jnp.swapaxes(x, 0, 1)))
        y = self.out_proj(jnp.swapaxes(y, 0, 1) * nnx.silu(gate))
        return {"logits": y @ self.embedder.embedding[:].T, "state": state}


class ScaledEmbed(nnx.Embed):
    """A subclass of Flax's table."""

    def __call__(self, inputs):
        return super().__call__(inputs) * self.features**0.5


class EncoderDecoder(nnx.Module):
    """Methods instead of a call, as speech models have."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(6, WIDTH, (3,), strides=2, rngs=rngs)
        self.encoder, self.decoder = Block(GatedMlp, rngs=rngs), Block(GatedMlp, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.table = ScaledEmbed(VOCABULARY, WIDTH, rngs=rngs)

    def __call__(self, *args):
        raise NotImplementedError("call encode and decode")

    def encode(self, sound):
        return self.encoder(nnx.gelu(self.conv(sound)))

    def decode(self, ids, heard, *, scale=1.0):
        x = self.table(ids)
        x = self.decoder(x + self.cross(x, heard))
        return self.table.attend(x) * scale


class VisionTransformer(nnx.Module):
    """Patches by a convolution, a class token, positions that are added."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.positions = nnx.Param(rngs.params.normal((1, 5, WIDTH)) * 0.02)
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.gelu, nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        )
        self.head = nnx.LinearGeneral(WIDTH, (2, 8), rngs=rngs)

    def __call__(self, images):
        x = self.patches(images).reshape(images.shape[0], -1, WIDTH)
        x = jnp.concatenate([jnp.tile(self.token[...], (x.shape[0], 1, 1)), x], 1) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x[:, 0])


class Convolutions(nnx.Module):
    """Two convolutions, one of Flax, one with a kernel of its own."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.first = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.second = nnx.Param(rngs.params.normal((3, 3, outputs, outputs)) * (4.5 * outputs) ** -0.5)

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        numbers = ("NHWC", "HWIO", "NHWC")
        return nnx.relu(
            jax.lax.conv_general_dilated(x, self.second[...], (1, 1), "SAME", dimension_numbers=numbers)
        )


class UNet(nnx.Module):
    """Down, up by transposed convolutions, with connections across."""

    def __init__(self, *, rngs: nnx.Rngs, features: tuple[int, ...] = (8, 16, 32)):
        pairs = list(itertools.pairwise(features))
        self.inc = Convolutions(1, features[0], rngs=rngs)
        self.downs = nnx.List([Convolutions(a, b, rngs=rngs) for a, b in pairs])
        self.ups = nnx.List(
            [nnx.ConvTranspose(b, a, (2, 2), strides=(2, 2), rngs=rngs) for a, b in pairs[::-1]]
        )
        self.joins = nnx.List([Convolutions(b, a, rngs=rngs) for a, b in pairs[::-1]])
        self.out = nnx.Conv(features[0], 2, (1, 1), rngs=rngs)

    def __call__(self, x):
        kept = [self.inc(x)]
        for down in self.downs:
            kept.append(down(nnx.max_pool(kept[-1], (2, 2), (2, 2))))
        x = kept.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(jnp.concatenate([kept.pop(), up(x)], -1))
        return self.out(x)


@dataclass(frozen=True)
class Case:
    """A model and how it is called.

    Attributes:
        make: makes it.
        methods: method -> its arguments.
    """

    make: Callable[[], nnx.Module]
    methods: dict[str, Any]


def cases() -> dict[str, Case]:
    """The models by their styles."""
    ids = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, VOCABULARY)
    normal = jax.random.normal
    images = normal(jax.random.key(2), (2, 8, 8, 3))
    sound = normal(jax.random.key(3), (2, 2 * LENGTH, 6))
    heard = normal(jax.random.key(4), (2, LENGTH, WIDTH))
    called = {"__call__": (ids,)}

    def decoder(*args: Any, **more: Any) -> Callable[[], nnx.Module]:
        return lambda: Decoder(*args, **more, rngs=nnx.Rngs(0))

    return {
        "decoder": Case(decoder(), called),
        "blocks that split themselves": Case(decoder(remat=True), called),
        "experts by einsum": Case(decoder(ExpertsByEinsum), called),
        "experts by ragged_dot": Case(decoder(ExpertsByRaggedDot), called),
        "scanned blocks": Case(lambda: Scanned(rngs=nnx.Rngs(0)), called),
        "state space": Case(lambda: StateSpace(rngs=nnx.Rngs(0)), called),
        "encoder and decoder": Case(
            lambda: EncoderDecoder(rngs=nnx.Rngs(0)),
            {"encode": (sound,), "decode": {"ids": ids, "heard": heard, "scale": 2.0}},
        ),
        "vision transformer": Case(lambda: VisionTransformer(rngs=nnx.Rngs(0)), {"__call__": (images,)}),
        "u-net": Case(
            lambda: UNet(rngs=nnx.Rngs(0)), {"__call__": (normal(jax.random.key(5), (2, 16, 16, 1)),)}
        ),
    }
