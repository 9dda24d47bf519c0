"""Low-bit floats as unsigned integers, to keep them from the forward pass to the backward pass.

Under a rematerialisation policy that saves intermediate results, JAX rounds floats to the exponent and mantissa widths
of their dtype, by IEEE 754's rules. Formats that use codes which IEEE 754 reserves lose their largest numbers: 256 and
448 of `float8_e4m3fn` become nan, and so do 4 and 6 of `float4_e2m1fn`. Integers are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_low_bit(dtype: Any) -> bool:
    """Whether it is a float dtype of fewer than 16 bits.

    Example:
        >>> is_low_bit(jnp.float8_e4m3fn), is_low_bit(jnp.float4_e2m1fn), is_low_bit(jnp.bfloat16), is_low_bit(jnp.int8)
        (True, True, False, False)
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowBits:
    """A pytree whose low-bit floats are bit-cast to unsigned integers of the same width; made by `as_bits`.

    Attributes:
        tree: the pytree, with integers in place of low-bit floats.
        dtypes: the original dtypes of its leaves, None for unchanged ones.
    """

    tree: Any
    dtypes: tuple[np.dtype | None, ...] = field(metadata={"static": True})

    def floats(self) -> Any:
        """The original pytree."""
        leaves, structure = jax.tree.flatten(self.tree)
        back = [
            leaf if dtype is None else jax.lax.bitcast_convert_type(leaf, dtype)
            for leaf, dtype in zip(leaves, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(structure, back)


def as_bits(tree: Any) -> LowBits:
    """A pytree in a form that can be kept for a backward pass. No gradient.

    Args:
        tree: arrays; those that are not low-bit floats stay as they are.

    Returns:
        The pytree as `LowBits`; its `floats()` restores it.

    Example:
        >>> kept = as_bits((jnp.array([448.0], jnp.float8_e4m3fn), jnp.ones(2)))
        >>> kept.tree
        (Array([126], dtype=uint8), Array([1., 1.], dtype=float32))
        >>> kept.floats()[0]
        Array([448], dtype=float8_e4m3fn)
    """
    leaves, structure = jax.tree.flatten(tree)
    dtypes = tuple(np.dtype(leaf.dtype) if is_low_bit(leaf.dtype) else None for leaf in leaves)
    bits = [leaf if dtype is None else _bits(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return LowBits(jax.tree.unflatten(structure, bits), dtypes)


def _bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(dtype).bits}"))
