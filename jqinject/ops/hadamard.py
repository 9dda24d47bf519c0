"""Hadamard matrices, and products with them that take `n log n` additions."""

import functools
import importlib.resources
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Sizes that are no power of two times a smaller table, of which a matrix is stored. The largest that divides a size is
#: used, which is also the one that QuaRot and Brevitas use.
TABLES = (12, 20, 28, 36, 40, 52, 60, 108, 140, 152, 156, 172)


@functools.cache
def table(size: int) -> np.ndarray:
    """The stored matrix of a size: 1 and -1, int8, rows orthogonal.

    Args:
        size: one of `TABLES`.

    Example:
        >>> bool((table(12) @ table(12).T == 12 * np.eye(12)).all())
        True
    """
    packed = importlib.resources.files("jqinject.ops").joinpath("hadamard_tables.bin").read_bytes()
    lengths = [-(-order * order // 8) for order in TABLES]
    start = sum(lengths[: TABLES.index(size)])
    bits = np.unpackbits(np.frombuffer(packed, np.uint8)[start : start + -(-size * size // 8)])
    return (2 * bits[: size * size].astype(np.int8) - 1).reshape(size, size)


def table_size(size: int) -> int:
    """The size of the table that a matrix of a size is made of: 1 for a power of two.

    Args:
        size: of the matrix.

    Raises:
        ValueError: there is no table for the size.

    Example:
        >>> table_size(64), table_size(48)
        (1, 12)
    """
    dividing = [count for count in (1, *TABLES) if size > 0 and size % count == 0]
    fitting = [count for count in dividing if (size // count).bit_count() == 1]
    if not fitting:
        raise ValueError(
            f"no Hadamard matrix of size {size}: a size must be a power of two, or one times a size of "
            f"{', '.join(map(str, TABLES))}.\n"
            "  cure: rotate blocks of a size that has one, and whose multiple this is: Hadamard(block_size)"
        )
    return fitting[-1]


def transform(x: jax.Array, *, inverse: bool = False, factor_dtype: Any = None) -> jax.Array:
    """The last axis times the orthogonal Hadamard matrix of its size, computed in float32.

    The matrix is `kron(T^T, Sylvester(n / k)) / sqrt(n)` for the table `T` of size `k`.

    Args:
        x: `(..., n)`, of any float dtype.
        inverse: whether the inverse matrix is meant.
        factor_dtype: the dtype that the factor `1 / sqrt(n)` is rounded to; None for float32.

    Returns:
        In the shape and dtype of `x`.

    Raises:
        ValueError: see `table_size`.

    Example:
        >>> transform(jnp.array([1.0, 1.0, 1.0, 1.0])).tolist()
        [2.0, 0.0, 0.0, 0.0]
    """
    size = x.shape[-1]
    count = table_size(size)
    rest = size // count
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], count, rest)
    step = 1
    while step < rest:
        pairs = y.reshape(*x.shape[:-1], count, rest // (2 * step), 2, step)
        upper, lower = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([upper + lower, upper - lower], axis=-2).reshape(*x.shape[:-1], count, rest)
        step *= 2
    if count > 1:
        mixed = table(count) if inverse else table(count).T
        y = jnp.einsum("...ij,ik->...kj", y, jnp.asarray(mixed, y.dtype), precision="highest")
    factor = np.asarray(1 / math.sqrt(size), factor_dtype or np.float32).astype(np.float32)
    return (y.reshape(x.shape) * factor).astype(x.dtype)
