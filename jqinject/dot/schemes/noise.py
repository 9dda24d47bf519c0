"""Noise for stochastic rounding: uniform within half a step, so that rounding is right on average."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jqinject.core.construction.checked_arguments import checked_arguments


class Noise(Protocol):
    """Draws noise of a shape."""

    def __call__(self, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        """Float32 in [-0.5, 0.5], of the shape or with size 1 where it is shared."""
        ...


def _shared(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of noise that is the same along some axes."""
    shared = {axis % len(shape) for axis in axes}
    return tuple(1 if axis in shared else size for axis, size in enumerate(shape))


@checked_arguments
@dataclass(frozen=True)
class JaxUniform:
    """32 random bits a number.

    Args:
        noise_sharing_axes: axes along which all numbers get the same noise, which is cheaper, and correlates them.

    Source: AQT's `'jax.uniform'`.

    Example:
        >>> JaxUniform(noise_sharing_axes=(0,))((8, 4), jax.random.key(0)).shape
        (1, 4)
    """

    noise_sharing_axes: tuple[int, ...] = ()

    def __call__(self, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        """Uniform in [-0.5, 0.5); broadcasts to the shape."""
        return jax.random.uniform(key, _shared(shape, self.noise_sharing_axes), jnp.float32) - 0.5


@checked_arguments
@dataclass(frozen=True)
class RandomCenteredUniform:
    """16 random bits a number, centred exactly: less than half the cost.

    Args:
        noise_sharing_axes: as for `JaxUniform`.

    Source: AQT's `'custom-1'`.

    Example:
        >>> RandomCenteredUniform()((8, 4), jax.random.key(0)).shape
        (8, 4)
    """

    noise_sharing_axes: tuple[int, ...] = ()

    def __call__(self, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        """One of 2^16 numbers, `2^-16` apart, symmetric about 0; broadcasts to the shape."""
        shape = _shared(shape, self.noise_sharing_axes)
        # Two numbers of every 32 bits: drawing 16 at a time costs more than drawing 32.
        size = math.prod(shape)
        pairs = jax.lax.bitcast_convert_type(jax.random.bits(key, (-(-size // 2),), jnp.uint32), jnp.uint16)
        bits = pairs.reshape(-1)[:size].reshape(shape)
        return (bits.astype(jnp.float32) + 0.5) * 2.0**-16 - 0.5


NOISES = {"jax.uniform": JaxUniform, "custom-1": RandomCenteredUniform}
