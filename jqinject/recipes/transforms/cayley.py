"""Steps on the orthogonal matrices, along their gradient: Cayley's transform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

HIGHEST = "highest"


def cayley_step(matrix: jax.Array, gradient: jax.Array, rate: jax.Array, keeps_sums: bool) -> jax.Array:
    """An orthogonal matrix after a step against a gradient: `(1 + W)^-1 (1 - W) R`, with `W` skew.

    `W = rate / 2 * A / |A|`, `A = G R^T - R G^T`, and `|A|` the largest of the sums of its rows' magnitudes, which no
    eigenvalue exceeds; so no direction turns by more than `rate`, in radians.

    Args:
        matrix: `R`, float32.
        gradient: `G`, of its shape.
        rate: see above.
        keeps_sums: leave the vector of equal numbers where it is.

    Example:
        >>> turned = cayley_step(jnp.eye(2), jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.float32(0.1), False)
        >>> bool(jnp.allclose(turned.T @ turned, jnp.eye(2), atol=1e-6)), bool(turned[0, 1] < 0)
        (True, True)
    """
    with jax.default_matmul_precision(HIGHEST):
        skew = gradient @ matrix.T
        skew = skew - skew.T
        if keeps_sums:
            skew = skew - skew.mean(axis=0, keepdims=True)
            skew = skew - skew.mean(axis=1, keepdims=True)
        size = jnp.abs(skew).sum(axis=1).max()
        skew = skew * (rate / 2 / jnp.where(size > 0, size, 1.0))
        one = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
        moved = jnp.linalg.solve(one + skew, (one - skew) @ matrix)
        # Rounding is taken back: one step of Newton's towards the nearest orthogonal matrix.
        return moved @ (1.5 * one - 0.5 * (moved.T @ moved))
