"""The Hadamard transform of all channels, or of blocks of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.construction import check
from jqinject.core.transforms.transform import Transform
from jqinject.ops import hadamard


class Hadamard(Transform):
    """`x diag(signs) H`: the orthogonal Hadamard matrix of each block of channels, in `n log n` additions.

    `H` is `kron(T^T, Sylvester(n / k)) / sqrt(n)` for the table `T` of size `k`, as in QuaRot and Brevitas; of a power
    of two, Sylvester's matrix.

    Args:
        block_size: consecutive channels that are transformed together; None for all of them.
        signs: 1 or -1 for each channel of a block, by which it is multiplied before; None for none. Static.
        factor_dtype: the dtype that `1 / sqrt(n)` is rounded to, for libraries that build the matrix in 16 bits; None
            for float32. The inverse is the transpose, which then is off by twice the rounding.

    Raises:
        ValueError: there is no such matrix (`jqinject.ops.hadamard.table_size`), the blocks do not fill the channels,
            or signs are not 1 and -1, one for each channel of a block.

    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024; NVIDIA's
    TransformerEngine, whose random Hadamard transform of 16 channels is `Hadamard(16, signs=...)`.

    Example:
        >>> transform = Hadamard(2, signs=(1, -1))
        >>> y = transform(jnp.array([2.0, 0.0, 0.0, 2.0]))
        >>> y.round(2), transform.inverse(y).round(2)
        (Array([ 1.41,  1.41, -1.41,  1.41], dtype=float32), Array([ 2., -0.,  0.,  2.], dtype=float32))
    """

    def __init__(
        self,
        block_size: int | None = None,
        signs: tuple[int, ...] | None = None,
        factor_dtype: Any = None,
    ) -> None:
        if signs is not None:
            given = np.asarray(signs)
            if given.ndim != 1 or given.dtype.kind not in "iu" or not np.all(np.abs(given) == 1):
                raise ValueError(
                    f"Hadamard: signs must be 1 or -1, one for each channel of a block, got {signs!r:.80}"
                )
            signs = tuple(given.tolist())
            if block_size is None:
                block_size = len(signs)
            if len(signs) != block_size:
                raise ValueError(
                    f"Hadamard: one sign for each of the {block_size} channels of a block, got {len(signs)}"
                )
        if block_size is not None:
            block_size = check.at_least(block_size, 1, "Hadamard", "block_size")
            hadamard.table_size(block_size)
        self.block_size, self.signs = block_size, signs
        self.factor_dtype = None if factor_dtype is None else np.dtype(factor_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        blocks = self._blocks(x)
        if self.signs is not None:
            blocks = blocks * jnp.asarray(np.asarray(self.signs), blocks.dtype)
        return hadamard.transform(blocks, factor_dtype=self.factor_dtype).reshape(x.shape)

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        blocks = hadamard.transform(self._blocks(x), inverse=True, factor_dtype=self.factor_dtype)
        if self.signs is not None:
            blocks = blocks * jnp.asarray(np.asarray(self.signs), blocks.dtype)
        return blocks.reshape(x.shape)

    def _blocks(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        size = channels if self.block_size is None else self.block_size
        if size < 1 or channels % size:
            raise ValueError(
                f"Hadamard: blocks of {size} do not fill {channels} channels.\n  cure: a block_size that divides them"
            )
        return x.reshape(*x.shape[:-1], channels // size, size)
