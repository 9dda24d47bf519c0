"""Arrays in blocks that share a scale: how a number is stored, and what is stored; and the tables of such numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops import TableGrid, divide

SMALLEST_SCALE = 1e-12
FLOAT8_MAX = 448.0


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["form", "shape"])
@dataclass(frozen=True)
class StoredBlocks:
    """An array in blocks of consecutive numbers, the last axis first; a pytree.

    Attributes:
        codes: uint8; in the shape of the array, or with 4 bits flat, two in a byte, the first in the high half.
        scale: float32, one for each block.
        form: how it is stored.
        shape: of the array.
    """

    codes: jax.Array
    scale: jax.Array
    form: BlockFormat
    shape: tuple[int, ...]

    def decoded(self) -> jax.Array:
        """The numbers, float32."""
        return self.form.decode(self)


class BlockFormat(Protocol):
    """How an array is stored in blocks: static, compared by value.

    Attributes:
        block_size: consecutive numbers that share a scale; the last block may be shorter.
    """

    @property
    def block_size(self) -> int: ...
    def encode(self, x: jax.Array, /) -> StoredBlocks: ...
    def decode(self, stored: StoredBlocks, /) -> jax.Array: ...


@dataclass(frozen=True)
class BlockTable:
    """The nearest number of a table, times the largest magnitude of the block; halfway, the greater.

    Attributes:
        table: in [-1, 1]; 16 numbers are stored in 4 bits, up to 256 in 8.
        block_size: consecutive numbers that share a scale.

    Raises:
        ValueError: `block_size` is below 1, or odd with 4 bits.

    Example:
        >>> from jqinject.optim import dynamic_table
        >>> stored = BlockTable(dynamic_table(8, signed=True), 2).encode(jnp.array([2.0, -0.02, 0.0]))
        >>> stored.codes.dtype, stored.scale.round(2).tolist(), [round(x, 3) for x in stored.decoded().tolist()]
        (dtype('uint8'), [2.0, 0.0], [2.0, -0.019, 0.0])
    """

    table: TableGrid
    block_size: int

    def __post_init__(self) -> None:
        _check_block(self.block_size, self.in_halves)

    @property
    def in_halves(self) -> bool:
        """Whether two codes share a byte."""
        return self.table.bit_width <= 4

    def encode(self, x: jax.Array) -> StoredBlocks:
        """The array as codes and scales."""
        steps, scale = _scaled(x, self.block_size, 1.0)
        codes = self.table.encode(steps, ties_up=True)
        if self.in_halves:
            codes = jnp.pad(codes.reshape(-1), (0, codes.size % 2))
            codes = (codes[::2] << jnp.uint8(4)) | codes[1::2]
        return StoredBlocks(codes, scale, self, x.shape)

    def decode(self, stored: StoredBlocks) -> jax.Array:
        """The numbers, float32."""
        codes = stored.codes
        if self.in_halves:
            codes = jnp.stack([codes >> jnp.uint8(4), codes & jnp.uint8(15)], -1).reshape(-1)
            codes = codes[: math.prod(stored.shape)].reshape(stored.shape)
        return _times(self.table.decode(codes), stored.scale, self.block_size)


@dataclass(frozen=True)
class BlockFloat8:
    """e4m3 numbers, scale = largest magnitude of the block / 448.

    Attributes:
        block_size: consecutive numbers that share a scale.

    Raises:
        ValueError: `block_size` is below 1.

    Example:
        >>> BlockFloat8(4).encode(jnp.array([896.0, -17.0])).decoded()
        Array([896., -16.], dtype=float32)
    """

    block_size: int

    def __post_init__(self) -> None:
        _check_block(self.block_size, False)

    def encode(self, x: jax.Array) -> StoredBlocks:
        """The array as codes and scales."""
        steps, scale = _scaled(x, self.block_size, FLOAT8_MAX)
        codes = jax.lax.bitcast_convert_type(steps.astype(jnp.float8_e4m3fn), jnp.uint8)
        return StoredBlocks(codes, scale, self, x.shape)

    def decode(self, stored: StoredBlocks) -> jax.Array:
        """The numbers, float32."""
        numbers = jax.lax.bitcast_convert_type(stored.codes, jnp.float8_e4m3fn)
        return _times(numbers.astype(jnp.float32), stored.scale, self.block_size)


def _check_block(block_size: object, in_halves: bool) -> None:
    if not isinstance(block_size, int) or block_size < 1 or (in_halves and block_size % 2):
        what = (
            "an even int of at least 2, as two numbers share a byte" if in_halves else "an int of at least 1"
        )
        raise ValueError(f"block_size must be {what}; got {block_size!r}")


def _scaled(x: jax.Array, block_size: int, largest: float) -> tuple[jax.Array, jax.Array]:
    """The array divided by the scales of its blocks, and the scales."""
    x = x.astype(jnp.float32)
    count = -(-x.size // block_size)
    flat = jnp.pad(x.reshape(-1), (0, count * block_size - x.size)).reshape(count, block_size)
    amax = jnp.abs(flat).max(-1)
    scale = divide(jnp.maximum(amax, SMALLEST_SCALE), largest)
    steps = divide(flat, scale[:, None]).reshape(-1)[: x.size].reshape(x.shape)
    return steps, jnp.where(amax > 0, scale, 0.0)  # zeros are zeros again in a table without 0, too


def _times(x: jax.Array, scale: jax.Array, block_size: int) -> jax.Array:
    flat = jnp.pad(x.reshape(-1), (0, scale.size * block_size - x.size)).reshape(-1, block_size)
    return (flat * scale[:, None]).reshape(-1)[: x.size].reshape(x.shape)


def dynamic_table(bit_width: int, signed: bool) -> TableGrid:
    """The dynamic data type: `2^b` numbers of 7 orders of magnitude (of `b - 1`, if fewer), with 0 and 1.

    The first bits count the orders below 1, what is left divides `[0.1, 1]` of that order evenly.

    Args:
        bit_width: b, 4 or 8.
        signed: whether there are negative numbers; else there is twice the precision.

    Source: Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization"; the numbers are bitsandbytes's and
    torchao's.

    Example:
        >>> [round(value, 4) for value in dynamic_table(4, signed=True).values[6:]]
        [-0.0055, 0.0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    """
    orders = bit_width - 1
    numbers = [0.0, 1.0]
    for order in range(orders):
        counts = 2**order if signed else 2 ** (order + 1)
        edges = np.linspace(0.1, 1, counts + 1, dtype=np.float32)
        middles = (edges[1:] + edges[:-1]) / np.float32(2) * np.float32(10.0 ** (order - orders + 1))
        numbers += middles.tolist()
        numbers += (-middles).tolist() if signed else []
    return TableGrid(tuple(sorted(numbers)))


def linear_table(bit_width: int) -> TableGrid:
    """`2^b` evenly spaced numbers up to 1, without 0.

    A second moment must not become 0, as updates are divided by its root.

    Args:
        bit_width: b.

    Source: Li et al., 2023, "Memory Efficient Optimizers with 4-bit States".

    Example:
        >>> linear_table(2).values
        (0.25, 0.5, 0.75, 1.0)
    """
    count = 2**bit_width
    return TableGrid(tuple((k + 1) / count for k in range(count)))
