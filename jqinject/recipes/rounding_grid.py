"""The numbers that a site's quantizer can make of a weight, as a solver sees them: matrices with scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.ops import Grid, quantize_on_grid


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MatrixGrid:
    """A quantizer's own grid, at given scales.

    Attributes:
        scale: of each number, or broadcasting with the matrices `(stack, rows, columns)`; float32.
        zero_point: likewise.
        grid: the numbers at scale 1: static.
        by_reciprocal: whether the quantizer multiplies by the reciprocal of a scale that numbers share: static.

    Example:
        >>> from jqinject.ops import IntGrid
        >>> grid = MatrixGrid(jnp.float32([[0.5], [1.0]]), jnp.float32(0), IntGrid(4))
        >>> grid.nearest(jnp.array([[0.6, -9.0], [0.6, -9.0]])).tolist()
        [[0.5, -4.0], [1.0, -8.0]]
    """

    scale: jax.Array
    zero_point: jax.Array
    grid: Grid = field(metadata={"static": True})
    by_reciprocal: bool = field(default=False, metadata={"static": True})

    def nearest(self, x: jax.Array) -> jax.Array:
        """The nearest numbers of the grid."""
        return quantize_on_grid(x, self.grid, self.scale, self.zero_point, by_reciprocal=self.by_reciprocal)

    def spread(self, shape: tuple[int, ...]) -> MatrixGrid:
        """The grid with a scale and a zero point for each number."""
        scale, zero_point = (jnp.broadcast_to(x, shape) for x in (self.scale, self.zero_point))
        return replace(self, scale=scale, zero_point=zero_point)

    def columns(self, at: Any) -> MatrixGrid:
        """The grid of some columns; scales are for each number.

        Args:
            at: a slice.
        """
        return replace(self, scale=self.scale[..., at], zero_point=self.zero_point[..., at])

    def ordered(self, order: jax.Array) -> MatrixGrid:
        """The grid with its columns in another order; scales are for each number.

        Args:
            order: places of columns, `(stack, columns)`.
        """
        return replace(self, scale=ordered(self.scale, order), zero_point=ordered(self.zero_point, order))

    def from_column(self, start: Any, size: int) -> MatrixGrid:
        """The grid of `size` columns from a place that may be traced."""
        scale, zero_point = (
            jax.lax.dynamic_slice_in_dim(x, start, size, -1) for x in (self.scale, self.zero_point)
        )
        return replace(self, scale=scale, zero_point=zero_point)


def ordered(x: jax.Array, order: jax.Array) -> jax.Array:
    """Matrices with their columns in another order.

    Args:
        x: `(stack, rows, columns)`.
        order: places of columns, `(stack, columns)`.
    """
    return jnp.take_along_axis(x, order[:, None], axis=-1)


Measure = Callable[[jax.Array], MatrixGrid]
"""From matrices to the grid that their quantizer would choose for them."""


def as_argument(measure: Measure) -> Measure:
    """The same as an argument of a compiled function, which is compiled once for those that differ in arrays alone.

    Args:
        measure: a pytree; or any function, for which there is a program of its own.
    """
    opaque = jax.tree_util.all_leaves([measure])
    return jax.tree_util.Partial(measure) if opaque else measure
