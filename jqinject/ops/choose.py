"""Everyday functions of arrays that leave no more operations in a program than they need."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jqinject.ops.devices.explicit_axes import sharded_as


def choose(which: jax.Array, x: ArrayLike, y: ArrayLike) -> jax.Array:
    """`jnp.where(which, x, y)` of the dtype of its array, without the call that `jnp.where` leaves in a program.

    Args:
        which: booleans; all shapes broadcast together.
        x: taken where `which` is true: an array, or a number.
        y: taken elsewhere, of the dtype of `x` if both are arrays.

    Returns:
        An array of the broadcast shape.

    Example:
        >>> choose(jnp.array([True, False]), 0.0, jnp.array([1.0, 2.0]))
        Array([0., 2.], dtype=float32)
    """
    arrays = [a for a in (x, y) if isinstance(a, jax.Array)]
    dtype = arrays[0].dtype if arrays else jnp.float32
    shape = jnp.broadcast_shapes(which.shape, *(a.shape for a in arrays))
    like = next((a for a in (which, *arrays) if a.shape == shape), which)
    return jax.lax.select(*(_filled(a, shape, d, like) for a, d in ((which, bool), (x, dtype), (y, dtype))))


def _filled(x: ArrayLike, shape: tuple[int, ...], dtype: jnp.dtype | type, like: jax.Array) -> jax.Array:
    if isinstance(x, jax.Array) and x.shape == shape:
        return x
    return sharded_as(jnp.broadcast_to(jnp.asarray(x, dtype), shape), like)


def shaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x.reshape(shape)`; `x` itself where it has that shape.

    Example:
        >>> shaped(jnp.float32(2), (1, 1))
        Array([[2.]], dtype=float32)
    """
    return x if x.shape == shape else x.reshape(shape)
