"""Rounding float32 to bfloat16 by chance, so that it is right on average."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def to_bfloat16_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """One of the two bfloat16 neighbours, the farther from 0 with a probability equal to the fraction of the way to it.

    Args:
        x: float32.
        key: of `jax.random`.

    Returns:
        bfloat16. nan and infinities stay; a finite number stays finite.

    Example:
        >>> x = jnp.full((10_000,), 1.0 + 2.0**-10)
        >>> y = to_bfloat16_stochastically(x, jax.random.key(0)).astype(jnp.float32)
        >>> sorted(set(y.tolist())), abs(float(y.mean()) - float(x[0])) < 2e-4
        ([1.0, 1.0078125], True)
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    low = jnp.uint32(0xFFFF)
    drawn = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    down, up = bits & ~low, (bits + drawn) & ~low
    within = (up & jnp.uint32(0x7F800000)) != jnp.uint32(0x7F800000)
    chosen = jax.lax.bitcast_convert_type(jnp.where(within, up, down), jnp.float32)
    return jnp.where(jnp.isfinite(x), chosen, x).astype(jnp.bfloat16)
