"""A statistic of blocks over two axes, from one of groups along one axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core.facts import takes_axes
from jqinject.core.view import Blocks
from jqinject.ops.groups import check_divides, elements_axis, fitting_size, split_groups, spread_groups


@dataclass(frozen=True)
class OverBlocks:
    """The statistic of each block of a tensor in groups, once for each group of the block.

    Args:
        stats: the statistic of a group, which keeps the reduced axis.
        blocks: where they lie; zeros fill up the last.

    Raises:
        ValueError: (when called) a block does not fit, and is not to be filled up.

    Example:
        >>> from jqinject.core import AbsMax
        >>> x = jnp.arange(8.0).reshape(1, 2, 4)  # one group of two, and four beside
        >>> OverBlocks(AbsMax(stats_reduce_dim=1, keepdim=True), Blocks(2, axis=2, elements=1))(x).tolist()
        [[[5.0, 5.0, 7.0, 7.0]]]
    """

    stats: Any
    blocks: Blocks

    @property
    def never_negative(self) -> bool:
        """As the statistic of a group says."""
        return getattr(self.stats, "never_negative", False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The statistic of a tensor in groups, float32, with 1 along the elements of a group."""
        elements, axis, length = self.blocks.elements, self.blocks.axis, x.shape[self.blocks.axis]
        if not self.blocks.padding:
            check_divides(length, self.blocks.width, "a quantizer in blocks, along their second axis,")
        width = fitting_size(self.blocks.width, length)
        cut = split_groups(x, width, axis)
        inner = elements_axis(axis)
        first = elements + (elements > axis)
        found = self.stats.along((first, inner))(cut) if takes_axes(self.stats) else None
        if found is None:
            found = self._of_merged(cut, first, inner)
        return spread_groups(jnp.reshape(found, _with_one(cut.shape, first, inner)), width, axis, length)

    def _of_merged(self, cut: jax.Array, first: int, inner: int) -> jax.Array:
        """The statistic of a tensor whose two axes of a block have become one, in place of a group's elements."""
        beside = jnp.moveaxis(cut, inner, first + 1 - (inner < first))
        at = first - (inner < first)
        shape = (*beside.shape[:at], beside.shape[at] * beside.shape[at + 1], *beside.shape[at + 2 :])
        return self.stats(beside.reshape(shape))


def _with_one(shape: tuple[int, ...], *axes: int) -> tuple[int, ...]:
    return tuple(1 if place in axes else length for place, length in enumerate(shape))
