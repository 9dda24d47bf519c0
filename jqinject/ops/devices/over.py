"""What a statistic reduces: axes of a tensor, and mapped axes that it is spread over."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jqinject.ops.devices.explicit_axes import sharded_as
from jqinject.ops.devices.mapped import Names, max_over, min_over, place_over, places_over, sum_over

Axes = int | tuple[int, ...] | None


class Over(NamedTuple):
    """What a statistic reduces.

    Attributes:
        axes: an axis, a tuple of axes in the order in which elements are counted, or None for the whole tensor.
        names: of mapped axes, over which the statistic is one.
    """

    axes: Axes = None
    names: Names = ()

    def of(self, ndim: int) -> tuple[int, ...]:
        """The axes of a tensor of `ndim` axes, from the front."""
        if self.axes is None:
            return tuple(range(ndim))
        return tuple(axis % ndim for axis in (self.axes if isinstance(self.axes, tuple) else (self.axes,)))

    @property
    def keeps(self) -> bool:
        """Whether reduced axes are kept with size 1: not of the whole tensor."""
        return self.axes is not None

    def count(self, x: jax.Array) -> int:
        """How many elements one statistic is of."""
        return math.prod(x.shape[axis] for axis in self.of(x.ndim)) * places_over(self.names)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest element."""
        return max_over(jnp.max(x, axis=self.of(x.ndim), keepdims=self.keeps), self.names)

    def min(self, x: jax.Array) -> jax.Array:
        """The smallest element."""
        return min_over(jnp.min(x, axis=self.of(x.ndim), keepdims=self.keeps), self.names)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum."""
        return sum_over(jnp.sum(x, axis=self.of(x.ndim), keepdims=self.keeps), self.names)

    def positions(self, x: jax.Array) -> jax.Array:
        """The number of each element, counted along the axes in their order; int32."""
        axes = self.of(x.ndim)
        if not axes:
            return jnp.zeros(x.shape, jnp.int32)
        found = jax.lax.broadcasted_iota(jnp.int32, x.shape, axes[0])
        for axis in axes[1:]:
            found = found * x.shape[axis] + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        if self.names:
            found = found + place_over(self.names) * math.prod(x.shape[axis] for axis in self.of(x.ndim))
        return sharded_as(found, x)
