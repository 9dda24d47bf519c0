"""How well a model predicts bytes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def log_losses(model: Any, windows: jax.Array) -> jax.Array:
    """The cross-entropy of each byte after the first, in nats: int32 (windows, time + 1) -> (windows, time)."""
    scores = jax.nn.log_softmax(model(windows[:, :-1]), axis=-1)
    return -jnp.take_along_axis(scores, windows[:, 1:, None], axis=-1)[..., 0]


@nnx.jit
def _bits(model: Any, windows: jax.Array) -> jax.Array:
    return log_losses(model, windows).mean(axis=-1) / math.log(2)


def bits_of_windows(model: Any, windows: jax.Array, batch: int = 16) -> np.ndarray:
    """Bits per byte of each window, float64 (windows,); their mean is the text's.

    Args:
        model: from int32 (batch, time) to scores.
        windows: int32 (windows, time + 1); the first byte of each is only read.
        batch: windows at a time; it divides their number.
    """
    parts = windows.reshape(-1, batch, windows.shape[-1])
    return np.concatenate([np.asarray(_bits(model, part), np.float64) for part in parts])
