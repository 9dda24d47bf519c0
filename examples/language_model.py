"""A small language model: characters of Python's help texts, a decoder-only transformer, a training step.

Which quantizers its dense layers get is an argument. The embedding, the normalisations and the output head are never
quantized: that is customary, since the head's errors go straight into the loss.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jqinject
from jqinject.nn import QuantLinear

HELD_OUT = 0.1
HEAD_WIDTH = 32
Quantizers = Mapping[str, Any]
"""Keywords of a `QuantLinear`."""


@dataclass(frozen=True)
class Text:
    """A text as numbers of characters, its last tenth held out.

    Attributes:
        train, held_out: int32, one number a character.
        characters: the vocabulary; a character's number is its place.
    """

    train: np.ndarray
    held_out: np.ndarray
    characters: str

    @classmethod
    def of_python_help(cls) -> "Text":
        """What `help()` says about the language: some 450,000 characters that come with every Python."""
        text = "\n".join(topics[name] for name in sorted(topics))
        characters = "".join(sorted(set(text)))
        number_of = {character: number for number, character in enumerate(characters)}
        numbers = np.array([number_of[character] for character in text], np.int32)
        cut = int(len(numbers) * (1 - HELD_OUT))
        return cls(numbers[:cut], numbers[cut:], characters)

    def batches(self, steps: int, batch: int, context: int, seed: int) -> Iterator[jax.Array]:
        """Windows at random places, int32 (batch, context + 1); the same ones for the same seed."""
        random = np.random.default_rng(seed)
        for _ in range(steps):
            starts = random.integers(0, len(self.train) - context, batch)
            yield jnp.asarray(self.train[starts[:, None] + np.arange(context + 1)])

    def held_out_windows(self, windows: int, context: int) -> jax.Array:
        """Windows evenly spread over what is held out, int32 (windows, context + 1)."""
        starts = np.linspace(0, len(self.held_out) - context - 1, windows).astype(int)
        return jnp.asarray(self.held_out[starts[:, None] + np.arange(context + 1)])


@dataclass(frozen=True)
class Size:
    """Of a model.

    Attributes:
        vocabulary: number of characters.
        context: number of characters it looks at.
        width: of the residual stream; a multiple of 32, or less than 64 for a single head.
        depth: number of blocks.
    """

    vocabulary: int
    context: int = 64
    width: int = 96
    depth: int = 2

    @property
    def heads(self) -> int:
        """One for every 32 of the width."""
        return max(1, self.width // HEAD_WIDTH)


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each added to the residual stream; six quantized dense layers."""

    def __init__(self, size: Size, quantizers: Quantizers, dtype: Any, rngs: nnx.Rngs) -> None:
        width = size.width
        dense = partial(QuantLinear, use_bias=False, dtype=dtype, rngs=rngs, **quantizers)
        self.heads = size.heads
        self.before_attention = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.query, self.key, self.value = (dense(width, width) for _ in range(3))
        self.out = dense(width, width)
        self.before_mlp = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up = dense(width, 4 * width)
        self.down = dense(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, time, width) -> the same."""
        x = x + self.out(self.attention(self.before_attention(x)))
        return x + self.down(nnx.gelu(self.up(self.before_mlp(x))))

    def attention(self, x: jax.Array) -> jax.Array:
        """Every character looks at itself and at those before it."""
        per_head = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        query, key, value = (layer(x).reshape(per_head) for layer in (self.query, self.key, self.value))
        return jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)


class Transformer(nnx.Module):
    """Characters -> scores of the next one. Parameters are float32, computation is in `dtype`.

    Args:
        size: of the model.
        quantizers: of the dense layers in the blocks, keywords of `QuantLinear`; None for none.
        dtype: of the computation.
        seed: of the initial parameters, which do not depend on the quantizers.
    """

    def __init__(
        self, size: Size, quantizers: Quantizers | None = None, dtype: Any = jnp.bfloat16, seed: int = 0
    ) -> None:
        rngs = nnx.Rngs(seed)
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(size.vocabulary, size.width, dtype=dtype, embedding_init=init, rngs=rngs)
        self.position = nnx.Param(init(rngs.params(), (size.context, size.width), jnp.float32))
        self.blocks = nnx.List([Block(size, quantizers or {}, dtype, rngs) for _ in range(size.depth)])
        self.norm = nnx.RMSNorm(size.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(size.width, size.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 (batch, time) -> float32 (batch, time, vocabulary)."""
        x = self.embedding(tokens)
        x = x + self.position[: tokens.shape[1]].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_share(model: Transformer, windows: jax.Array, characters: int) -> jax.Array:
    """The cross-entropy of these windows, as their share of a mean over `characters` characters.

    Micro-batches divide by the count of the whole batch, so that their losses and gradients *add up* to the batch's,
    and what flows back to one example does not depend on how the batch was cut.
    """
    scores = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:]).sum() / characters


@partial(nnx.jit, static_argnums=3)
def train_step(
    model: Transformer, optimizer: nnx.Optimizer[Any], windows: jax.Array, micro_batches: int = 1
) -> jax.Array:
    """One step of the optimizer, on a batch cut into micro-batches. Returns the loss, the mean over all characters."""
    characters = windows[:, 1:].size
    parts = jnp.split(windows, micro_batches)
    total: Any = None
    jqinject.begin_step(model)  # the statistics of all the parts count once
    for part in parts:
        found = jqinject.value_and_grad(loss_share)(model, part, characters)
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    jqinject.end_step(model)
    loss, gradients = total
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def _mean_loss(model: Transformer, windows: jax.Array) -> jax.Array:
    return loss_share(model, windows, windows[:, 1:].size)


def held_out_loss(model: Transformer, windows: jax.Array) -> float:
    """The mean cross-entropy in evaluation mode; the model is back in training mode after it."""
    model.eval()
    loss = float(_mean_loss(model, windows))
    model.train()
    return loss


def adamw(model: Transformer, steps: int, learning_rate: float = 3e-3) -> nnx.Optimizer[Any]:
    """AdamW with a linear warm-up and a cosine, float32 throughout."""
    warm_up = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warm_up, max(steps, warm_up + 1))
    return nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)


def train(
    model: Transformer,
    batches: Iterator[jax.Array],
    optimizer: nnx.Optimizer[Any],
    micro_batches: int = 1,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train on all the batches; returns the loss of every step."""
    losses = []
    for windows in batches:
        losses.append(train_step(model, optimizer, windows, micro_batches))
        after_step()
    return [float(loss) for loss in losses]
