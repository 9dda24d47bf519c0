"""Quantized tensors in the form that differentiation rules take and keep: payloads, not values.

Operands whose scales come in two levels are contracted as `minifloat * block scale`, scaled by the other level after. A
product of an e2m1 number and an e4m3 scale has at most 6 significant bits, so it is exact in bfloat16 and float16
alike, and the sum is that of dequantized float32 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.kernels.block_scales import levels_of
from jqinject.dot.kernels.integer import Affine, IntegerOperand
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.grid import IntGrid
from jqinject.ops.minifloat import from_float_steps
from jqinject.ops.packing import LowBitTree, as_bits
from jqinject.ops.sharding import is_split
from jqinject.quant_tensor import (
    FloatQuantTensor,
    Groups,
    GroupwiseFloatQuantTensor,
    IntQuantTensor,
    Levels,
    as_array,
    grouped_minifloats,
    in_groups,
    is_grouped,
    on_integers,
    on_minifloats,
)

BLOCK_DTYPE = jnp.float8_e4m3fn


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
        minifloats = FloatQuantTensor((numbers * scale).astype(self.dtype), scale, self.format, levels=levels)
        tensor = in_groups(
            minifloats,
            self.groups.size,
            self.groups.dim,
            self.groups.length,
        )
        assert grouped_minifloats(tensor)
        return tensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Packed:
    """A payload and its scale.

    Attributes:
        payload: integers, or 8-bit floats.
        scale: float per step.
        zero_point: of integers; None for 0.
        dtype: of the value.
        bits: of integers, and whether they have a sign; None for 8-bit floats.
    """

    payload: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    dtype: np.dtype = field(metadata={"static": True})
    bits: tuple[int, bool] | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _PackedCodes:
    """Minifloats of fewer than 8 bits, or of no dtype that backends convert to, as codes.

    Attributes:
        codes: in bytes, as their format packs them.
        scale: of the numbers, in a dtype of 8 bits where that is known.
        format: of the codes.
        shape: of the numbers.
        dtype: of the value.
    """

    codes: jax.Array
    scale: jax.Array
    format: FloatGrid = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _PackedGroups:
    """A packed tensor in groups, and how they lie.

    Attributes:
        grouped: the packed tensor.
        groups, dim, piece: as of a `GroupwiseQuantTensor`.
    """

    grouped: Any
    groups: Groups = field(metadata={"static": True})
    dim: int = field(metadata={"static": True})
    piece: int | None = field(metadata={"static": True})


def shaped_like(x: object) -> jax.Array:
    """An array that has the shape and the sharding of a tensor; a stored one is not dequantized for it."""
    if isinstance(x, IntegerOperand | ShapeAlone):
        return x.array
    if on_minifloats(x) and x.is_stored:
        return x.payload()
    if on_integers(x) and x.is_stored and x.payload is not None:
        return x.payload
    return as_array(x)


@jax.tree_util.register_static
@dataclass(frozen=True)
class ShapeAlone:
    """What a backward pass keeps of an operand that it takes in another form."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def array(self) -> jax.Array:
        """An array of the shape."""
        return jnp.zeros(self.shape, self.dtype)


def shape_alone(x: object) -> Any:
    """An operand without its numbers; itself where an array's sharding or mapped axes are needed.

    Args:
        x: a result of `packed_tensor`.
    """
    if isinstance(x, IntegerOperand):
        return x
    tensor = unpacked_tensor(x)
    array = shaped_like(tensor)
    if is_split(array) or getattr(jax.typeof(array), "vma", None):
        return x
    return ShapeAlone(tuple(array.shape), np.dtype(tensor.dtype))


def floats_of(x: object) -> jax.Array:
    """The numbers, in the dtype of the tensor."""
    return x.floats if isinstance(x, IntegerOperand) else as_array(x)


def float32_of(x: object) -> jax.Array:
    """The numbers in float32; those of a payload are rounded once."""
    if on_minifloats(x) and x.is_contractible:
        return from_float_steps(x.payload().astype(jnp.float32), x.scale, jnp.float32)
    return floats_of(x).astype(jnp.float32)


def is_packed(x: object) -> bool:
    """Whether something is a result of `packed_tensor`."""
    return isinstance(x, _Packed | _PackedCodes | _PackedGroups | TwoLevels)


def packed_tensor(x: object) -> Any:
    """A quantized tensor as its payload and scale, if it keeps them; anything else unchanged."""
    if on_integers(x) and x.payload is not None and isinstance(x.bit_width, int):
        zero = x.zero_point if x.has_zero_point else None
        return _Packed(x.payload, x.scale, zero, np.dtype(x.dtype), (x.bit_width, x.signed))
    levels = levels_of(x)
    if levels is not None and grouped_minifloats(x):
        return TwoLevels.of(x, levels)
    if is_grouped(x):
        lies, piece = x.as_it_lies, x.piece
        packed = packed_tensor(x.grouped if lies is None else lies)
        return _PackedGroups(packed, x.groups, x.group_dim, piece) if is_packed(packed) else x
    if on_minifloats(x) and x.is_contractible:
        return _Packed(x.payload(), _narrow(x.scale, x.scale_dtype), None, np.dtype(x.dtype))
    if on_minifloats(x) and not x.format.is_learned and (x.kept_payload is not None or x.levels is not None):
        return _packed_codes(x, x.format)
    return x


def _packed_integers(x: Affine, dtype: np.dtype) -> _Packed:
    info = jnp.iinfo(x.payload.dtype)
    return _Packed(x.payload, x.scale, x.zero_point, dtype, (info.bits, info.min < 0))


def _packed_codes(x: FloatQuantTensor, form: FloatGrid) -> _PackedCodes:
    codes = form.pack(form.codes(x.minifloats()))
    return _PackedCodes(codes, _narrow(x.scale, x.scale_dtype), form, x.shape, np.dtype(x.dtype))


def _narrow(scale: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    return scale if dtype is None else scale.astype(dtype)


def unpacked_tensor(x: object) -> Any:
    """Inverts `packed_tensor`."""
    if isinstance(x, TwoLevels):
        return x.tensor()
    if isinstance(x, _PackedGroups):
        return in_groups(unpacked_tensor(x.grouped), x.groups.size, x.dim, x.groups.length, x.piece)
    if isinstance(x, _PackedCodes):
        scale = x.scale.astype(jnp.float32)
        value = from_float_steps(x.format.decode(x.format.unpack(x.codes, x.shape)), scale, x.dtype)
        return FloatQuantTensor(value, scale, x.format)
    if not isinstance(x, _Packed):
        return x
    if x.bits is None:
        scale_dtype = x.scale.dtype if x.scale.dtype.itemsize == 1 else None
        form = FloatGrid.of_dtype(x.payload.dtype)
        return FloatQuantTensor.stored(
            x.payload, x.scale.astype(jnp.float32), None, form, x.dtype, scale_dtype
        )
    return IntQuantTensor.stored(x.payload, x.scale, x.zero_point, IntGrid(*x.bits), x.dtype)


class KeptOperands(NamedTuple):
    """Arguments without gradient: both operands, then each backward product's other operand, quantizer and factor."""

    lhs: Any
    rhs: Any
    others: tuple[Any, ...]
    quantizers: tuple[Any, Any]
    folded: tuple[Any, Any]

    def without_unused(self) -> KeptOperands:
        """Without the numbers of forward operands in whose place backward products have others."""
        of_dgrad, of_wgrad = self.others
        left = self.lhs if of_wgrad is None else shape_alone(self.lhs)
        return self._replace(lhs=left, rhs=self.rhs if of_dgrad is None else shape_alone(self.rhs))

    def for_backward(self, as_integers: bool = False) -> LowBitTree:
        """What a backward pass keeps; `from_forward` reads it.

        Args:
            as_integers: whether it contracts the integers of operands, not their floats.
        """
        left, right, *others = (
            _packed_integers(x.integers, x.dtype)
            if as_integers and isinstance(x, IntegerOperand) and x.integers is not None
            else x.for_backward()
            if isinstance(x, IntegerOperand | TwoLevels)
            else x
            for x in (self.lhs, self.rhs, *self.others)
        )
        return as_bits(self._replace(lhs=left, rhs=right, others=tuple(others)))

    @staticmethod
    def from_forward(residuals: LowBitTree) -> KeptOperands:
        """What `for_backward` kept."""
        return jax.tree.map(unpacked_tensor, residuals.floats(), is_leaf=is_packed)
