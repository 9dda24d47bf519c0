"""Operands whose scales come in two levels: contracted as `minifloat * block scale`, scaled by the other level after.

A product of an e2m1 number and an e4m3 scale has at most 6 significant bits, so it is exact in bfloat16 and float16
alike, and the sum is that of dequantized float32 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.float_grid import FloatGrid
from jqinject.quant_tensor import (
    FloatQuantTensor,
    Groups,
    GroupwiseFloatQuantTensor,
    Levels,
    grouped_minifloats,
    in_groups,
)

BLOCK_DTYPE = jnp.float8_e4m3fn


def levels_of(x: Any) -> Levels | None:
    """Both levels of an operand in groups, if they are known; else None."""
    if not grouped_minifloats(x) or x.as_it_lies is not None:
        return None
    return x.grouped.levels


def first_level(x: GroupwiseFloatQuantTensor, levels: Levels) -> tuple[jax.Array, jax.Array]:
    """An operand without the level that the whole tensor shares, and this level.

    Args:
        x: the operand.
        levels: its levels.

    Returns:
        Numbers in the dtype of the operand, exact; and a float32 scalar. Where the level differs from row to row, the
        dequantized numbers in float32, and 1.
    """
    numbers = levels.minifloats * levels.block
    if levels.shared.ndim == 0:
        return x.groups.join(numbers).astype(x.dtype), levels.shared
    return x.groups.join(numbers * levels.shared), jnp.ones((), jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TwoLevels:
    """An operand as the arrays that a derivative rule takes and keeps.

    Attributes:
        numbers: of the forward pass, minifloats in float32; of a backward pass their codes, as their format packs them.
        block: the scales of blocks; of a backward pass one byte each.
        shared: the level that these share.
        groups, dim: how its axis is cut.
        format, dtype: of its minifloats and of the tensor.
        packed: the shape of the minifloats, of a backward pass; else None.
    """

    numbers: jax.Array
    block: jax.Array
    shared: jax.Array
    groups: Groups = field(metadata={"static": True})
    dim: int = field(metadata={"static": True})
    format: FloatGrid = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})
    packed: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, x: GroupwiseFloatQuantTensor, levels: Levels) -> TwoLevels:
        """From a tensor."""
        form = x.grouped.known_format("an operand")
        return cls(*levels, x.groups, x.group_dim, form, np.dtype(x.dtype))

    def for_backward(self) -> TwoLevels:
        """What a backward pass keeps: codes and scales in their own bits."""
        codes = self.format.pack(self.format.codes(self.numbers))
        block = self.block.astype(BLOCK_DTYPE)
        rest = (self.shared, self.groups, self.dim, self.format, self.dtype)
        return TwoLevels(codes, block, *rest, packed=self.numbers.shape)

    def tensor(self) -> GroupwiseFloatQuantTensor:
        """The tensor again."""
        numbers, block = self.numbers, self.block.astype(jnp.float32)
        if self.packed is not None:
            numbers = self.format.decode(self.format.unpack(numbers, self.packed))
        scale = block * self.shared
        levels = Levels(numbers, block, self.shared)
        made = FloatQuantTensor((numbers * scale).astype(self.dtype), scale, self.format, levels=levels)
        whole = in_groups(
            made,
            self.groups.size,
            self.groups.dim,
            self.groups.length,
        )
        assert grouped_minifloats(whole)
        return whole
