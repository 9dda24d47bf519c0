"""Models as Flax's own documentation and examples write them, in small; nothing of ours is in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Cnn(nnx.Module):
    """The network of the MNIST tutorial: convolutions, batch normalization, dropout, pools, dense layers."""

    def __init__(self, *, rngs):
        self.conv1 = nnx.Conv(1, 6, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(6, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025)
        self.conv2 = nnx.Conv(6, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(8, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(32, 16, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025)
        self.linear2 = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dropout2(self.linear1(x), rngs=rngs))
        return self.linear2(x)


class DecoderBlock(nnx.Module):
    """A block of a decoder: normalization, masked attention, normalization, two dense layers."""

    def __init__(self, features, heads, *, dropout_rate, rngs):
        self.ln1 = nnx.LayerNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=heads,
            in_features=features,
            qkv_features=features,
            use_bias=False,
            decode=False,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.ln2 = nnx.LayerNorm(features, rngs=rngs)
        self.fc1 = nnx.Linear(features, 2 * features, rngs=rngs)
        self.fc2 = nnx.Linear(2 * features, features, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.dropout(self.attention(self.ln1(x), mask=mask))
        return x + self.dropout(self.fc2(nnx.relu(self.fc1(self.ln2(x)))))


class Decoder(nnx.Module):
    """A language model: embeddings of tokens and of positions, blocks, logits."""

    def __init__(self, vocabulary=11, features=16, heads=2, blocks=1, length=6, *, dropout_rate=0.1, rngs):
        self.token_embed = nnx.Embed(vocabulary, features, rngs=rngs)
        self.position_embed = nnx.Embed(length, features, rngs=rngs)
        self.blocks = nnx.List(
            [DecoderBlock(features, heads, dropout_rate=dropout_rate, rngs=rngs) for _ in range(blocks)]
        )
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        mask = nnx.make_causal_mask(tokens)
        x = self.token_embed(tokens) + self.position_embed(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Recurrent(nnx.Module):
    """A recurrent classifier: a cell run over a sequence, the last output through a dense layer."""

    def __init__(self, cell=nnx.OptimizedLSTMCell, *, rngs):
        self.rnn = nnx.RNN(cell(5, 8, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


class BasicBlock(nnx.Module):
    """A residual block of two convolutions; the way around it is a convolution where shapes differ."""

    def __init__(self, ins, outs, strides, *, rngs):
        conv = partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.conv1 = conv(ins, outs, (3, 3), strides=strides)
        self.bn1 = nnx.BatchNorm(outs, rngs=rngs)
        self.conv2 = conv(outs, outs, (3, 3))
        self.bn2 = nnx.BatchNorm(outs, scale_init=nnx.initializers.zeros_init(), rngs=rngs)
        if strides != 1 or ins != outs:
            self.downsample = nnx.Sequential(
                conv(ins, outs, (1, 1), strides=strides), nnx.BatchNorm(outs, rngs=rngs)
            )
        else:
            self.downsample = lambda x: x

    def __call__(self, x):
        residual = self.downsample(x)
        y = nnx.relu(self.bn1(self.conv1(x)))
        return nnx.relu(residual + self.bn2(self.conv2(y)))


class ResNet(nnx.Module):
    """A residual network."""

    def __init__(self, *, rngs):
        self.conv_init = nnx.Conv(3, 4, (3, 3), use_bias=False, rngs=rngs)
        self.bn_init = nnx.BatchNorm(4, rngs=rngs)
        self.stages = nnx.List([BasicBlock(4, 4, 1, rngs=rngs), BasicBlock(4, 8, 2, rngs=rngs)])
        self.fc = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn_init(self.conv_init(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        for stage in self.stages:
            x = stage(x)
        return self.fc(jnp.mean(x, axis=(1, 2)))


@dataclass(frozen=True)
class Published:
    """A model as published, and what it is trained on.

    Attributes:
        make: makes the model.
        x: a batch of its inputs.
        classes: how many it tells apart.
        rngs: whether the call takes `nnx.Rngs` for its dropout.
        promotion: of dtypes; Flax's own average pool divides by a NumPy integer, which "strict" refuses.
    """

    make: Callable[[], nnx.Module]
    x: jax.Array
    classes: int
    rngs: bool = False
    promotion: str = "strict"

    @property
    def labels(self):
        """What the model is to say of `x`."""
        shape = self.x.shape if jnp.issubdtype(self.x.dtype, jnp.integer) else self.x.shape[:1]
        return jax.random.randint(jax.random.key(3), shape, 0, self.classes)


def _normal(*shape):
    return jax.random.normal(jax.random.key(0), shape)


PUBLISHED = {
    "cnn": Published(lambda: Cnn(rngs=nnx.Rngs(0)), _normal(8, 8, 8, 1), 4, rngs=True, promotion="standard"),
    "decoder": Published(
        lambda: Decoder(rngs=nnx.Rngs(0)), jax.random.randint(jax.random.key(0), (4, 6), 0, 11), 11
    ),
    "lstm": Published(lambda: Recurrent(nnx.LSTMCell, rngs=nnx.Rngs(0)), _normal(8, 4, 5), 3),
    "optimized_lstm": Published(lambda: Recurrent(rngs=nnx.Rngs(0)), _normal(8, 4, 5), 3),
    "gru": Published(lambda: Recurrent(nnx.GRUCell, rngs=nnx.Rngs(0)), _normal(8, 4, 5), 3),
    "resnet": Published(lambda: ResNet(rngs=nnx.Rngs(0)), _normal(8, 8, 8, 3), 3),
}


@nnx.jit
def train_step(model, optimizer, x, labels, *rngs):
    """One step of the tutorials: cross entropy, gradients of the parameters, the optimizer."""

    def loss(model, *rngs):
        logits = model(x, *rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = nnx.value_and_grad(loss)(model, *rngs)
    optimizer.update(model, grads)
    return value


@nnx.jit
def evaluate(model, x):
    return model(x)


def trained(model, case, steps):
    """The losses of some steps on one batch."""
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    rngs = (nnx.Rngs(5),) if case.rngs else ()
    return [float(train_step(model, optimizer, case.x, case.labels, *rngs)) for _ in range(steps)]
