"""Contractions of integers with scales and zero points, exact until the scales are multiplied in."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.geometry.dimensions import Dimensions, scale_in_output
from jqinject.dot.geometry.parts import Block, in_parts, part
from jqinject.dot.kernels.accumulate import integer_accumulator, largest_magnitude, longest_sum
from jqinject.dot.kernels.kernel_table import integer_contraction
from jqinject.ops.devices.explicit_axes import sharded_beside


class Affine(NamedTuple):
    """Integers, and what they mean: `(payload - zero_point) * scale`.

    Attributes:
        payload: array of an integer dtype of at most 8 bits.
        scale: float32, broadcasts against the payload.
        zero_point: whole numbers, broadcast against the payload; None for 0, which saves the corrections.
        sums: int32, the payload summed over the axes that a contraction sums over, kept as axes of size 1; None to sum
            when it is needed. Of a frozen weight it is known.
    """

    payload: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    sums: jax.Array | None = None

    def signed(self) -> Affine:
        """The same numbers as signed bytes: `q - 128` for unsigned ones, with the zero point moved along.

        Products of unsigned with signed bytes have no fast path.

        Example:
            >>> x = Affine(jnp.array([0, 255], jnp.uint8), jnp.ones(())).signed()
            >>> x.payload, x.zero_point
            (Array([-128,  127], dtype=int8), Array(-128., dtype=float32))
        """
        if self.payload.dtype != jnp.uint8:
            return self
        payload = jax.lax.bitcast_convert_type(self.payload ^ jnp.uint8(128), jnp.int8)
        zero = jnp.zeros((), jnp.float32) if self.zero_point is None else self.zero_point
        return Affine(payload, self.scale, zero - 128.0)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the scale, and of the zero point where there is one."""
        zero = self.zero_point
        return (self.scale.shape,) if zero is None else (self.scale.shape, zero.shape)

    def dequantized(self) -> jax.Array:
        """The numbers, float32."""
        steps = self.payload.astype(jnp.float32)
        return (steps if self.zero_point is None else steps - self.zero_point) * self.scale

    def part(self, axes: tuple[int, ...], block: Block) -> Affine:
        """What lies in a block along some axes, over which neither scale nor zero point varies."""
        payload = part(self.payload, axes, block)
        return self if payload is self.payload else self._replace(payload=payload, sums=None)


def affine_dot_general(
    lhs: Affine,
    rhs: Affine,
    dims: Dimensions,
    dtype: Any,
    accumulator_dtype: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`sum (q_l - z_l) s_l (q_r - z_r) s_r`, the sum taken over integers.

    With zero points, `sum q_l q_r - z_l sum q_r - z_r sum q_l + n z_l z_r` in the accumulator's dtype, so that nothing
    is rounded. A sum of more products than the accumulator holds is cut into parts, each exact, which are added before
    they are rounded to float32. An axis that is summed over and along which a scale or zero point varies (groups of a
    weight that is laid out as `(groups, group, out)`) is summed in float32, after its scales are multiplied in.

    Args:
        lhs, rhs: the operands.
        dims: as for `lax.dot_general`.
        dtype: of the output; the scales are multiplied in float32.
        accumulator_dtype: None means int32.
        out_sharding: as for `lax.dot_general`.

    Raises:
        ValueError: an accumulator of fewer bits than int32 could overflow.
    """
    lhs = lhs.signed() if lhs.payload.dtype == jnp.uint8 else lhs
    rhs = rhs.signed() if rhs.payload.dtype == jnp.uint8 else rhs
    plain = lhs.zero_point is None and rhs.zero_point is None
    shapes = ((lhs.scale.shape,), (rhs.scale.shape,)) if plain else (lhs.shapes, rhs.shapes)
    grouped = _grouped(dims, *shapes)
    if not grouped:
        return _whole(lhs, rhs, dims, accumulator_dtype, out_sharding).astype(dtype)
    y = _whole(lhs, rhs, _along(dims, grouped), accumulator_dtype, None)
    return y.sum(tuple(range(len(grouped)))).astype(dtype)


def _whole(
    lhs: Affine, rhs: Affine, dims: Dimensions, accumulator_dtype: Any, out_sharding: Any
) -> jax.Array:
    lengths = tuple(map(lhs.payload.shape.__getitem__, dims.lhs_contract))
    dtypes = (lhs.payload.dtype, lhs.zero_point is not None), (rhs.payload.dtype, rhs.zero_point is not None)
    accumulator, longest = _accumulation(lengths, *dtypes, accumulator_dtype)
    if math.prod(lengths) <= longest and lhs.zero_point is None and rhs.zero_point is None:
        y = integer_contraction(lhs.payload, rhs.payload, dims, accumulator, out_sharding)
    elif math.prod(lengths) <= longest:
        y = _exact(lhs, rhs, dims, accumulator, out_sharding)
    else:

        def contract(block: Block) -> jax.Array:
            left, right = lhs.part(dims.lhs_contract, block), rhs.part(dims.rhs_contract, block)
            return _exact(left, right, dims, accumulator, out_sharding)

        y = in_parts(lengths, longest, contract)
    of_lhs = _expanded(lhs.scale, dims.lhs_ndim, dims.lhs_places, dims.out_ndim, y)
    of_rhs = _expanded(rhs.scale, dims.rhs_ndim, dims.rhs_places, dims.out_ndim, y)
    return y.astype(jnp.float32) * (of_lhs * of_rhs)


@lru_cache(maxsize=1024)
def _accumulation(
    lengths: tuple[int, ...], lhs: tuple[Any, bool], rhs: tuple[Any, bool], accumulator_dtype: Any
) -> tuple[np.dtype, int]:
    """The dtype of the sums, and how many products it holds.

    Args:
        lengths: of the axes that are summed over.
        lhs, rhs: dtype of an operand, and whether it has a zero point.
        accumulator_dtype: None means int32.
    """
    spans = [largest_magnitude(dtype, 0 if has_zero_point else None) for dtype, has_zero_point in (lhs, rhs)]
    accumulator = integer_accumulator(accumulator_dtype, math.prod(lengths), *spans)
    return accumulator, longest_sum(accumulator, *spans)


def _exact(lhs: Affine, rhs: Affine, dims: Dimensions, accumulator: np.dtype, out_sharding: Any) -> jax.Array:
    """`sum (q_l - z_l) (q_r - z_r)` in an accumulator that holds it."""
    y = integer_contraction(lhs.payload, rhs.payload, dims, accumulator, out_sharding)
    if lhs.zero_point is None and rhs.zero_point is None:
        return y

    def expanded(x: jax.Array, of: Affine) -> jax.Array:
        places = dims.lhs_places if of is lhs else dims.rhs_places
        return _expanded(x, of.payload.ndim, places, dims.out_ndim, y)

    def offset(operand: Affine) -> jax.Array | None:
        zero = operand.zero_point
        return None if zero is None else expanded(_nearest(zero), operand).astype(accumulator)

    def summed(operand: Affine, axes: tuple[int, ...]) -> jax.Array:
        sums = operand.sums
        if sums is None:
            sums = jnp.sum(operand.payload, axis=axes, keepdims=True, dtype=accumulator)
        return expanded(sums, operand)

    left, right = offset(lhs), offset(rhs)
    if left is not None:
        y = y - left * summed(rhs, dims.rhs_contract)
    if right is not None:
        y = y - right * summed(lhs, dims.lhs_contract)
    if left is not None and right is not None:
        y = y + math.prod(lhs.payload.shape[axis] for axis in dims.lhs_contract) * left * right
    return y


def _nearest(zero_point: jax.Array) -> jax.Array:
    return jax.lax.round(zero_point, jax.lax.RoundingMethod.TO_NEAREST_EVEN)


@lru_cache(maxsize=1024)
def _grouped(
    dims: Dimensions, lhs: tuple[tuple[int, ...], ...], rhs: tuple[tuple[int, ...], ...]
) -> list[int]:
    """The pairs of summed axes along which a scale or zero point varies, from the shapes of these."""
    return [
        pair
        for pair, axes in enumerate(zip(dims.lhs_contract, dims.rhs_contract, strict=True))
        if _varies(lhs, axes[0], dims.lhs_ndim) or _varies(rhs, axes[1], dims.rhs_ndim)
    ]


def _varies(shapes: tuple[tuple[int, ...], ...], axis: int, ndim: int) -> bool:
    return any(
        len(shape) > axis - ndim + len(shape) >= 0 and shape[axis - ndim + len(shape)] != 1
        for shape in shapes
    )


def _along(dims: Dimensions, pairs: list[int]) -> Dimensions:
    """With some summed axes going along in front instead."""
    kept = [pair for pair in range(len(dims.lhs_contract)) if pair not in pairs]
    return replace(
        dims,
        lhs_contract=tuple(dims.lhs_contract[pair] for pair in kept),
        rhs_contract=tuple(dims.rhs_contract[pair] for pair in kept),
        lhs_batch=(*(dims.lhs_contract[pair] for pair in pairs), *dims.lhs_batch),
        rhs_batch=(*(dims.rhs_contract[pair] for pair in pairs), *dims.rhs_batch),
    )


def _expanded(x: jax.Array, ndim: int, places: dict[int, int], out_ndim: int, y: jax.Array) -> jax.Array:
    """What an operand has one of for each index of some axes, laid out beside the output."""
    expanded = scale_in_output(x, ndim, places, out_ndim)
    assert expanded is not None, (
        "axes that are summed over go along in front where something varies along them"
    )
    alone = jax.typeof(y).sharding.mesh.empty and jax.typeof(expanded).sharding.mesh.empty
    return expanded if alone or not expanded.ndim else sharded_beside(expanded, y)
