"""Contractions of integers with scales and zero points, exact until the scales are multiplied in.

One operand may have scales for groups along a summed axis. On a CPU with the compiled kernels such operands are
contracted group by group in one call. Where these do not take the left operand (unsigned integers, zero points, more
rows), it is dequantized, and the right one in registers. On a CPU without kernels groups of fewer than 128 are
dequantized, because each makes a whole output: (256, 1024) x (1024, 1024) in groups of 32 takes 224 ms as integers, 10
ms dequantized. Elsewhere, and in a program for several devices, the integers of each group are one contraction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.geometry.dimensions import Dimensions, OutSharding, scale_in_output, varying_pairs
from jqinject.dot.kernels import accumulate, kernel_table, stored_rows
from jqinject.ops import processes, sharding, ste
from jqinject.ops.grid import IntGrid
from jqinject.quant_tensor import IntQuantTensor, QuantTensor

#: Smaller groups are contracted as floats, unless integers are asked for. Qwix uses the same limit.
LEAST_GROUP = 128


class Affine(NamedTuple):
    """Integers, and what they mean: `(payload - zero_point) * scale`.

    Attributes:
        payload: array of an integer dtype of at most 8 bits.
        scale: float32, broadcasts against the payload.
        zero_point: integers, broadcast against the payload; None for 0, which saves the corrections.
        sums: int32, the payload summed over the contracted axes, kept with size 1; None to sum when needed. Known for a
            frozen weight.
        packed: integers in 4 bits as a frozen weight stores them, two a byte, summed axes last; None otherwise.
    """

    payload: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    sums: jax.Array | None = None
    packed: jax.Array | None = None

    def signed(self) -> "Affine":
        """The same numbers as signed bytes: `q - 128` for unsigned ones, with the zero point shifted likewise.

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
        """The shapes of the scale and, if present, of the zero point."""
        zero = self.zero_point
        return (self.scale.shape,) if zero is None else (self.scale.shape, zero.shape)

    def dequantized(self) -> jax.Array:
        """The numbers, float32."""
        steps = self.payload.astype(jnp.float32)
        return (steps if self.zero_point is None else steps - self.zero_point) * self.scale

    def summed(self, axes: tuple[int, ...], accumulator: DTypeLike) -> jax.Array:
        """`sums`, computed unless they are known.

        Args:
            axes: the contracted axes.
            accumulator: dtype of the sums.
        """
        if self.sums is not None:
            return self.sums
        return jnp.sum(self.payload, axis=axes, keepdims=True, dtype=accumulator)

    def part(self, axes: tuple[int, ...], block: accumulate.Block) -> "Affine":
        """The part in a block along some axes, over which neither scale nor zero point varies."""
        payload = accumulate.part(self.payload, axes, block)
        return self if payload is self.payload else self._replace(payload=payload, sums=None, packed=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IntegerOperand:
    """Integers that are contracted, beside the floats that receive the gradient: an operand of a layer.

    Attributes:
        integers: forward; None where only the backward pass is left, and it takes the floats.
        value: the floats, unused forward; None for stored integers, which get no gradient.
        dtype: of the floats.
    """

    integers: Affine | None
    value: jax.Array | None
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def array(self) -> jax.Array:
        """The floats, or stored integers themselves: has their shape and sharding."""
        return self._stored().payload if self.value is None else self.value

    @property
    def floats(self) -> jax.Array:
        """The floats; stored integers are dequantized."""
        return self._stored().dequantized().astype(self.dtype) if self.value is None else self.value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the floats."""
        return self.array.shape

    def _stored(self) -> Affine:
        assert self.integers is not None, "an operand has integers or floats"
        return self.integers

    def for_backward(self, as_integers: bool) -> "IntegerOperand | IntQuantTensor":
        """What a backward pass keeps: what is stored, or the floats.

        Args:
            as_integers: whether it contracts the integers, which are then kept instead of the floats.
        """
        x = self.integers
        if as_integers and x is not None:
            info = jnp.iinfo(x.payload.dtype)
            grid = IntGrid(info.bits, info.min < 0)
            return IntQuantTensor.stored(x.payload, x.scale, x.zero_point, grid, self.dtype)
        return self if self.value is None else IntegerOperand(None, self.value, self.dtype)


def has_integers(x: object, in_groups: bool = False) -> bool:
    """Whether it is a tensor of integers that backends contract: at most 8 bits, not learned.

    Args:
        x: anything.
        in_groups: whether it may have a scale for each group.
    """
    if not isinstance(x, QuantTensor):
        return False
    contracted = x.kind == "integers" or (in_groups and x.kind == "grouped integers")
    return contracted and isinstance(x.bit_width, int) and x.bit_width <= 8


def affine_of(x: IntQuantTensor) -> Affine:
    """The integers of a tensor of at most 8 bits; a zero point known to be 0 is omitted."""
    integers = x.int() if x.payload is None else x.payload
    # Stored integers lie as they are contracted, and outside a program nothing could be fused.
    just_rounded = isinstance(integers, jax.core.Tracer) and not x.is_stored
    integers = kernel_table.settled(integers) if just_rounded else integers
    return Affine(integers, x.scale, x.zero_point if x.has_zero_point else None)


def affine_dot_general(
    lhs: Affine,
    rhs: Affine,
    dims: Dimensions,
    dtype: DTypeLike,
    accumulator_dtype: DTypeLike | None = None,
    out_sharding: OutSharding = None,
) -> jax.Array:
    """`sum (q_l - z_l) s_l (q_r - z_r) s_r`, the sum taken over integers.

    With zero points, `sum q_l q_r - z_l sum q_r - z_r sum q_l + n z_l z_r` in the accumulator's dtype, so that nothing
    is rounded. A sum of more products than the accumulator holds is cut into parts, each exact, which are added before
    they are rounded to float32. A summed axis along which a scale or zero point varies (groups of a weight laid out as
    `(groups, group, out)`) is summed in float32, after its scales are multiplied in.

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
    grouped = varying_pairs(dims, *shapes)
    if grouped:
        return dims.ordered(_contract_groups(lhs, rhs, dims, grouped, accumulator_dtype).astype(dtype))
    lengths = tuple(map(lhs.payload.shape.__getitem__, dims.lhs_contract))
    dtypes = (lhs.payload.dtype, lhs.zero_point is not None), (rhs.payload.dtype, rhs.zero_point is not None)
    accumulator, longest = accumulate.accumulation(lengths, *dtypes, accumulator_dtype)
    if math.prod(lengths) <= longest and plain:
        y = integer_contraction(lhs.payload, rhs.payload, dims, accumulator, out_sharding, rhs.packed)
    else:

        def contract(block: accumulate.Block) -> jax.Array:
            left, right = lhs.part(dims.lhs_contract, block), rhs.part(dims.rhs_contract, block)
            return _exact(left, right, dims, accumulator, out_sharding)

        y = accumulate.in_parts(lengths, longest, contract)
    of_lhs = scale_in_output(lhs.scale, dims.lhs, dims.result)
    of_rhs = scale_in_output(rhs.scale, dims.rhs, dims.result)
    assert of_lhs is not None and of_rhs is not None, "no scale varies along a sum, or it is a batch axis"
    mesh, of_scales = jax.typeof(y).sharding.mesh, (jax.typeof(of_lhs).sharding, jax.typeof(of_rhs).sharding)
    if not (mesh.empty and of_scales[0].mesh.empty and of_scales[1].mesh.empty):
        of_lhs, of_rhs = sharding.sharded_as(of_lhs, y), sharding.sharded_as(of_rhs, y)
    y = (y.astype(jnp.float32) * (of_lhs * of_rhs)).astype(dtype)
    return y if dims.is_ordered else dims.ordered(y)


def integer_contraction(
    lhs: jax.Array,
    rhs: jax.Array,
    dims: Dimensions,
    accumulator: np.dtype,
    out_sharding: OutSharding = None,
    packed: jax.Array | None = None,
) -> jax.Array:
    """Products of integers summed in `accumulator`, by the kernel of the platform that the program is lowered for.

    Args:
        lhs, rhs: arrays of integer dtypes, not necessarily the same.
        dims, out_sharding: as for `lax.dot_general`.
        accumulator: a signed integer dtype that holds the sums.
        packed: the right operand as `Affine.packed`, for a kernel that reads it so.
    """
    divisible = kernel_table.Product(dims, accumulator, out_sharding)
    unsharded = jax.typeof(lhs).sharding.mesh.empty and jax.typeof(rhs).sharding.mesh.empty
    if out_sharding is not None or (not unsharded and are_sharded(lhs, rhs)):
        return divisible(lhs, rhs)
    arrays = (lhs, rhs) if packed is None else (lhs, rhs, packed)
    return processes.on_one_device(kernel_table.Product(dims, accumulator, alone=True), divisible, *arrays)


def are_sharded(lhs: jax.Array, rhs: jax.Array) -> bool:
    """Whether the axes of a mesh are explicit in the type of an operand: they must not be reshaped away."""
    left, right = jax.typeof(lhs).sharding.mesh, jax.typeof(rhs).sharding.mesh
    return bool((not left.empty and left.explicit_axes) or (not right.empty and right.explicit_axes))


def _exact(
    lhs: Affine, rhs: Affine, dims: Dimensions, accumulator: np.dtype, out_sharding: OutSharding
) -> jax.Array:
    """`sum (q_l - z_l) (q_r - z_r)` in an accumulator that holds it."""
    y = integer_contraction(lhs.payload, rhs.payload, dims, accumulator, out_sharding, rhs.packed)

    def laid_out(x: jax.Array, side: int) -> jax.Array:
        layout = scale_in_output(x, (dims.lhs, dims.rhs)[side], dims.result)
        assert layout is not None, "zero points and sums vary along axes of the output alone"
        return sharding.sharded_as(layout, y)

    return corrected(y, (lhs, rhs), laid_out, (dims.lhs_contract, dims.rhs_contract), accumulator)


def corrected(
    y: jax.Array,
    operands: tuple[Affine, Affine],
    laid_out: Callable[[jax.Array, int], jax.Array],
    axes: tuple[tuple[int, ...], tuple[int, ...]],
    accumulator: DTypeLike,
    covered: Callable[[], jax.Array] | None = None,
) -> jax.Array:
    """`sum (q_l - z_l) (q_r - z_r)`, from `sum q_l q_r`.

    Args:
        y: the sum of the products of integers.
        operands: both operands.
        laid_out: takes numbers of an operand, and 0 for the left or 1 for the right one; returns them laid out for `y`.
        axes: the summed axes of each operand.
        accumulator: the dtype of the sums.
        covered: the sums of the left operand, laid out likewise, where they are not those over its summed axes.
    """
    lhs, rhs = operands
    left, right = (
        None if x.zero_point is None else laid_out(ste.nearest(x.zero_point), side).astype(accumulator)
        for side, x in enumerate(operands)
    )
    if left is not None:
        y = y - left * laid_out(rhs.summed(axes[1], accumulator), 1)
    if right is not None:
        sums = laid_out(lhs.summed(axes[0], accumulator), 0) if covered is None else covered()
        y = y - right * sums
    if left is None or right is None:
        return y
    return y + math.prod(rhs.payload.shape[axis] for axis in axes[1]) * left * right


def _contract_groups(
    lhs: Affine, rhs: Affine, dims: Dimensions, pairs: tuple[int, ...], accumulator_dtype: DTypeLike | None
) -> jax.Array:
    """The contraction in float32 of integers, along some of whose summed axes a scale or zero point varies.

    Args:
        lhs, rhs: the operands.
        dims: of the contraction.
        pairs: these summed pairs of axes, which are groups.
        accumulator_dtype: as for `affine_dot_general`.
    """
    leaves, tree = jax.tree.flatten((lhs, rhs))
    by_group = processes.Bound(
        _group_by_group, (tree, dims.plain.along(pairs), len(pairs), accumulator_dtype)
    )
    if len(pairs) != 1 or accumulator_dtype is not None or are_sharded(lhs.payload, rhs.payload):
        return by_group(*leaves)
    return processes.on_one_device(
        processes.Bound(_by_platform, (tree, dims, pairs, by_group)), by_group, *leaves
    )


def _group_by_group(
    tree: object, dims: Dimensions, axes: int, accumulator_dtype: DTypeLike | None, *leaves: jax.Array
) -> jax.Array:
    """The outputs of groups, summed in float32, as XLA partitions them over devices."""
    lhs, rhs = jax.tree.unflatten(tree, leaves)
    return affine_dot_general(lhs, rhs, dims, jnp.float32, accumulator_dtype).sum(tuple(range(axes)))


def _by_platform(
    tree: object, dims: Dimensions, pairs: tuple[int, ...], by_group: processes.Bound, *leaves: jax.Array
) -> jax.Array:
    """The contraction by the means of the platform."""

    def on_cpu(*leaves: jax.Array) -> jax.Array:
        lhs, rhs = jax.tree.unflatten(tree, leaves)
        table = stored_rows.TABLES.get(rhs.payload.dtype.name)
        right = stored_rows.StoredOperand(rhs.payload, rhs.packed, table, rhs.scale, rhs.zero_point)
        integers = (lhs.payload, lhs.scale) if _is_signed_bytes(lhs) else None
        y = stored_rows.stored_product(lhs.dequantized(), right, dims, pairs, integers)
        if y is not None:
            return y
        sizes = [lhs.payload.shape[axis] for axis in dims.lhs_contract]
        sized = all(isinstance(size, int) for size in sizes)  # not in an export for any platform
        if not sized or math.prod(sizes) >= LEAST_GROUP * sizes[pairs[0]]:
            return by_group(*leaves)
        return jax.lax.dot_general(lhs.dequantized(), rhs.dequantized(), dims.numbers)

    return jax.lax.platform_dependent(*leaves, cpu=on_cpu, default=by_group)


def _is_signed_bytes(x: Affine) -> bool:
    """Whether an operand has signed integers of at most 8 bits and no zero point."""
    dtype = x.payload.dtype
    return x.zero_point is None and dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.signedinteger)
