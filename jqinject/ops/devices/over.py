"""The axes that a statistic reduces: those of a tensor, and mapped axes that it is distributed over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqinject.ops.devices.cut import Cut
from jqinject.ops.devices.explicit_axes import sharded_as
from jqinject.ops.devices.mapped import Names, max_over, min_over, place_over, places_over, sum_over

Axes = int | tuple[int, ...] | Cut | None
Tensors = jax.Array | tuple[jax.Array, ...]
"""A tensor, or several that share a statistic: that of all their elements, the first tensor's first."""


def each(function: Callable[..., Any], x: Tensors, *others: Any) -> Any:
    """A function applied to each of some tensors.

    Example:
        >>> each(jnp.abs, (jnp.float32(-1), jnp.float32(2)))
        (Array(1., dtype=float32), Array(2., dtype=float32))
    """
    return jax.tree.map(function, x, *others)


def parts_of(x: Tensors) -> tuple[jax.Array, ...]:
    """Tensors that share a statistic, as a tuple even if there is only one."""
    return x if isinstance(x, tuple) else (x,)


class Over(NamedTuple):
    """What a statistic reduces: a tensor in place, or several without joining them.

    Attributes:
        axes: an axis, a tuple of axes in the order in which elements are counted, an axis in groups, or None for the
            whole tensor.
        names: of mapped axes that share one statistic.
    """

    axes: Axes = None
    names: Names = ()

    def of(self, ndim: int) -> tuple[int, ...]:
        """The axes of a tensor of `ndim` axes, from the front."""
        if self.axes is None:
            return tuple(range(ndim))
        if isinstance(self.axes, Cut):
            return self.axes.shared
        return tuple(axis % ndim for axis in (self.axes if isinstance(self.axes, tuple) else (self.axes,)))

    @classmethod
    def along(cls, axes: Sequence[int] | Cut | None, names: Names = ()) -> Over:
        """Over any sequence of axes, an axis in groups, or with None the whole tensor."""
        return cls(axes if axes is None or isinstance(axes, Cut) else tuple(axes), names)

    @property
    def keeps(self) -> bool:
        """Whether results broadcast against the tensor along its axes: unless the whole tensor is reduced."""
        return self.axes is not None

    def count(self, x: Tensors) -> int:
        """The number of elements in one statistic."""
        if self.axes is None and not (self.names or isinstance(x, tuple)):
            return x.size
        return sum(map(self._here, parts_of(x))) * places_over(self.names)

    def max(self, x: Tensors) -> jax.Array:
        """The largest element."""
        found = self._plainly(jnp.max, x)
        if found is not None:
            return found
        found = reduce(jnp.maximum, self._reduced(jnp.max, x))
        return max_over(self._with_zeros(jnp.maximum, found), self.names)

    def min(self, x: Tensors) -> jax.Array:
        """The smallest element."""
        found = self._plainly(jnp.min, x)
        if found is not None:
            return found
        found = reduce(jnp.minimum, self._reduced(jnp.min, x))
        return min_over(self._with_zeros(jnp.minimum, found), self.names)

    def sum(self, x: Tensors, of_zero: Any = None) -> jax.Array:
        """The sum.

        Args:
            x: what is added: a function of the tensor.
            of_zero: this function of a zero that fills up a group; None for 0.
        """
        found = self._plainly(jnp.sum, x)
        if found is not None:
            return found
        found = reduce(jnp.add, self._reduced(jnp.sum, x))
        if of_zero is not None and isinstance(self.axes, Cut):
            zeros = sum(self.axes.zeros(part.shape) for part in parts_of(x))
            found = self.axes.filled(found, found + zeros * of_zero)
        return sum_over(found, self.names)

    def positions(self, x: Tensors) -> Any:
        """The number of each element, counted along the axes in their order; int32, one array for each tensor."""
        parts = parts_of(x)
        before = [sum(map(self._here, parts[:place])) for place in range(len(parts))]
        found = tuple(
            self._numbered(part, start, sum(map(self._here, parts)))
            for part, start in zip(parts, before, strict=True)
        )
        return found if isinstance(x, tuple) else found[0]

    def _plainly(self, reduction: Any, x: Tensors) -> jax.Array | None:
        """The result where one reduction along axes is all there is to do, else None."""
        if self.names or isinstance(x, tuple) or isinstance(self.axes, Cut):
            return None
        return reduction(x, axis=self.axes, keepdims=self.axes is not None)

    def _here(self, x: jax.Array) -> int:
        if isinstance(self.axes, Cut):
            return self.axes.count(x.shape)
        return math.prod(x.shape[axis] for axis in self.of(x.ndim))

    def _with_zeros(self, extreme: Any, found: jax.Array) -> jax.Array:
        """An extreme with the zeros that fill up groups; positions, which are integers, leave them out."""
        if not isinstance(self.axes, Cut) or jnp.issubdtype(found.dtype, jnp.integer):
            return found
        return self.axes.filled(found, extreme(found, 0))

    def _reduced(self, reduction: Any, x: Tensors) -> list[jax.Array]:
        if isinstance(self.axes, Cut):
            return [self.axes.reduced(reduction, part) for part in parts_of(x)]
        return [reduction(part, axis=self.of(part.ndim), keepdims=self.keeps) for part in parts_of(x)]

    def _numbered(self, x: jax.Array, start: int, count: int) -> jax.Array:
        axes, cut = self.of(x.ndim), self.axes if isinstance(self.axes, Cut) else None
        found = jnp.zeros(x.shape, jnp.int32)
        for axis in axes:
            places, length = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis), x.shape[axis]
            if cut is not None and axis == cut.axis:
                places, length = places % cut.size, cut.size
            found = found * length + places
        if start:
            found = found + start
        if self.names:
            found = found + place_over(self.names) * count
        return sharded_as(found, x)
