"""Noise for stochastic rounding: uniform within half a step, so that rounding is right on average."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp


class Noise(Protocol):
    """Draws noise of a shape."""

    def __call__(self, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        """Float32 in [-0.5, 0.5]."""
        ...


@dataclass(frozen=True)
class JaxUniform:
    """32 random bits a number. Source: AQT's `'jax.uniform'`."""

    def __call__(self, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        """Uniform in [-0.5, 0.5)."""
        return jax.random.uniform(key, shape, jnp.float32) - 0.5


@dataclass(frozen=True)
class RandomCenteredUniform:
    """16 random bits a number, centred exactly: half the cost. Source: AQT's `'custom-1'`."""

    def __call__(self, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        """One of 2^16 numbers, `2^-16` apart, symmetric about 0."""
        # Two numbers of every 32 bits: drawing 16 at a time costs more than drawing 32.
        size = math.prod(shape)
        pairs = jax.lax.bitcast_convert_type(jax.random.bits(key, (-(-size // 2),), jnp.uint32), jnp.uint16)
        bits = pairs.reshape(-1)[:size].reshape(shape)
        return (bits.astype(jnp.float32) + 0.5) * 2.0**-16 - 0.5


NOISES = {"jax.uniform": JaxUniform, "custom-1": RandomCenteredUniform}
