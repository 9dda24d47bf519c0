"""Projections onto balls of the 1-norm (Duchi et al., 2008)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def l1_threshold(magnitudes: jax.Array, radius: jax.Array | float) -> jax.Array:
    """What each magnitude is made smaller by in the nearest point with a 1-norm of `radius`, `(...)`.

    Of use where the 1-norm is larger; negative otherwise.

    Args:
        magnitudes: `(..., n)`, at least 0.
        radius: of the ball.

    Example:
        >>> l1_threshold(jnp.array([3.0, 1.0]), 1.0).tolist()
        2.0
    """
    falling = -jnp.sort(-magnitudes, axis=-1)
    sums = jnp.cumsum(falling, axis=-1) - radius
    counts = jnp.arange(1, magnitudes.shape[-1] + 1, dtype=magnitudes.dtype)
    held = (falling - sums / counts > 0).sum(axis=-1, keepdims=True)
    found = jnp.take_along_axis(sums, jnp.maximum(held - 1, 0), axis=-1)
    return (found / jnp.maximum(held, 1).astype(magnitudes.dtype))[..., 0]


def onto_ball(rows: jax.Array) -> jax.Array:
    """Each row's nearest point in the unit ball of the 1-norm.

    Example:
        >>> onto_ball(jnp.array([[3.0, 1.0], [0.25, 0.5]])).tolist()
        [[1.0, 0.0], [0.25, 0.5]]
    """
    magnitudes = jnp.abs(rows)
    threshold = l1_threshold(magnitudes, 1.0)[..., None]
    inside = magnitudes.sum(axis=-1, keepdims=True) <= 1
    return jnp.where(inside, rows, jnp.sign(rows) * jnp.maximum(magnitudes - threshold, 0.0))
