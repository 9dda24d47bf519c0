"""Axes put together, also of an array that is sharded along them."""

from __future__ import annotations

import math

import jax
from jax.sharding import PartitionSpec


def merge_axes(x: jax.Array, first: int, last: int) -> jax.Array:
    """The axes `first` to `last` (exclusive) of `x` as one; without any, a new one of size 1.

    On a mesh with explicit axes, where JAX does not decide what becomes of a sharding, the axis is whole on every
    device if one of the axes behind the first was sharded.

    Args:
        x: an array.
        first: the first axis of those that are put together, from the front.
        last: the axis after them, from the front.

    Returns:
        An array of shape `(*x.shape[:first], n, *x.shape[last:])`.

    Example:
        >>> import jax.numpy as jnp
        >>> merge_axes(jnp.zeros((2, 3, 4, 5)), 1, 3).shape
        (2, 12, 5)
    """
    shape = (*x.shape[:first], math.prod(x.shape[first:last]), *x.shape[last:])
    spec = jax.typeof(x).sharding.spec
    if all(axis is None for axis in spec[first + 1 : last]):
        return x.reshape(shape)
    return jax.lax.reshape(x, shape, out_sharding=PartitionSpec(*spec[:first], None, *spec[last:]))
