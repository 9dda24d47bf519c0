"""Products of rows with stored numbers, in bytes or in 4 bits, by the compiled kernels. Used by `dot.kernels`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.native.library import library

MOST_GROUPS = 1024
#: The table of signed integers in 4 bits: what each half of a byte stands for.
INT4 = (*range(8), *range(-8, 0))
#: That of unsigned ones.
UINT4 = tuple(range(16))
#: What scales may be stored in.
SCALE_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.float8_e4m3fn, jnp.float8_e8m0fnu)))
#: What zero points may be stored in.
ZERO_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.int8, jnp.uint8)))


class Scales(NamedTuple):
    """What stored numbers in groups mean: `(number - zero) * scale`.

    Attributes:
        scale: `(..., groups, n)`, or `(..., n, groups)`, of one of `SCALE_DTYPES`.
        zero: likewise, of one of `ZERO_DTYPES`; None for 0.
    """

    scale: jax.Array
    zero: jax.Array | None = None


@dataclass(frozen=True)
class StoredRows:
    """What is static in rows of stored numbers `(..., n, k)`, summed over the last axis.

    Attributes:
        table: what the 16 numbers in 4 bits stand for, two of which are packed into a byte; None for int8.
        group: numbers that share a scale; 0 if all of a row do.
        by_column: whether scales lie as `(n, groups)`.
    """

    table: tuple[float, ...] | None = None
    group: int = 0
    by_column: bool = False

    def fits(self, depth: int, floats: bool) -> bool:
        """Whether the kernels take such groups.

        Args:
            depth: k.
            floats: whether the rows on the left are floats.
        """
        step = 64 if self.table is None else 128
        least = 16 if floats and self.table is None else step // 16
        if self.group == 0:
            return True
        divides = step % self.group == 0 or self.group % step == 0
        return (
            divides and self.group >= least and depth % self.group == 0 and depth // self.group <= MOST_GROUPS
        )


def takes_stored(stored: StoredRows, depth: int, rows: int, floats: bool) -> bool:
    """Whether contractions leave a product with stored numbers to the kernels.

    Args:
        stored: what is static in them.
        depth: the numbers that are summed.
        rows: on the left.
        floats: whether the rows on the left are floats.
    """
    kernels = library()
    most = kernels.rows_of_floats if floats else kernels.rows
    fits = most is None or rows <= most
    return kernels.target is not None and depth > 0 and fits and stored.fits(depth, floats)


def int4_matmul(lhs: jax.Array, rhs: jax.Array, table: tuple[int, ...]) -> jax.Array:
    """`y[..., i, j] = sum_t lhs[..., i, t] * table[rhs[..., j, t]]`, exact, int32.

    Args:
        lhs: int8 `(..., m, k)`.
        rhs: uint8 `(..., n, ceil(k / 2))`, two numbers a byte, the lower half first.
        table: 16 integers that int8 holds.
    """
    return _call("int4_matmul", jnp.int32, lhs, rhs, _constant(table, np.int8, lhs.ndim))


def group_matmul(
    lhs: jax.Array, lhs_scale: jax.Array, rhs: jax.Array, scales: Scales, stored: StoredRows
) -> jax.Array:
    """The product of integers in groups: exact within a group, or 1,024 numbers of it, and these summed in float32.

    Args:
        lhs: int8 `(..., m, k)`.
        lhs_scale: float32 `(..., m, 1)` or `(..., m, groups)`.
        rhs: int8 `(..., n, k)`, or uint8 in 4 bits.
        scales: of rhs.
        stored: what is static in rhs.
    """
    table = _constant(stored.table or INT4, np.int8, lhs.ndim)
    if lhs_scale.shape[-1] > 1:
        lhs_scale = jnp.broadcast_to(lhs_scale, (*lhs.shape[:-1], lhs_scale.shape[-1]))
    return _call("group_matmul", jnp.float32, lhs, rhs, table, *_of_groups(scales, stored), lhs_scale)


def float_matmul(lhs: jax.Array, rhs: jax.Array, scales: Scales, stored: StoredRows) -> jax.Array:
    """The product of floats with stored numbers, which are dequantized in registers, summed in float32.

    Args:
        lhs: float32 `(..., m, k)`.
        rhs: int8 `(..., n, k)`, or uint8 in 4 bits.
        scales: of rhs.
        stored: what is static in rhs.
    """
    table = _constant(stored.table or INT4, np.float32, lhs.ndim)
    return _call("float_matmul", jnp.float32, lhs, rhs, table, *_of_groups(scales, stored))


def three_bits(packed: jax.Array, signed: bool) -> jax.Array:
    """Numbers packed in 3 bits as the same numbers are packed in 4: `IntGrid.in_halves`, of whole bytes.

    Args:
        packed: uint8 `(..., 3 * n)`.
        signed: whether they are signed.

    Returns:
        uint8 `(..., 4 * n)`.
    """
    out = jax.ShapeDtypeStruct((*packed.shape[:-1], packed.shape[-1] // 3 * 4), packed.dtype)
    sign = _constant((0x44444444 * signed,), np.int32, packed.ndim)
    y = jax.ffi.ffi_call(library().function("three_bits"), out, vmap_method="expand_dims")(packed, sign)
    assert isinstance(y, jax.Array)
    return y


def _of_groups(scales: Scales, stored: StoredRows) -> tuple[jax.Array, jax.Array, jax.Array]:
    scale, zero = scales
    none = jnp.zeros((*(1,) * (scale.ndim - 2), 0, 1), jnp.float32)
    form = _constant((stored.group, int(stored.by_column)), np.int32, scale.ndim)
    return scale, none if zero is None else zero, form


def _constant(numbers: tuple[float, ...], dtype: Any, ndim: int) -> jax.Array:
    return jnp.asarray(np.asarray(numbers, dtype).reshape((1,) * (ndim - 1) + (-1,)))


def _call(name: str, dtype: object, lhs: jax.Array, rhs: jax.Array, *more: jax.Array) -> jax.Array:
    lead = jnp.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    out = jax.ShapeDtypeStruct((*lead, lhs.shape[-2], rhs.shape[-2]), dtype)
    function = library().function(name)
    y = jax.ffi.ffi_call(function, out, vmap_method="expand_dims")(lhs, rhs, *more)
    assert isinstance(y, jax.Array)
    return y
