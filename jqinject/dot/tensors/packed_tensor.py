"""Quantized tensors in the form that differentiation rules take and keep: payloads, not values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.kernels.integer import IntegerOperand, known_zero_point
from jqinject.dot.tensors.two_levels import TwoLevels, levels_of
from jqinject.ops.devices.explicit_axes import is_split
from jqinject.ops.fake_quant import known_zero
from jqinject.ops.minifloats.float8_cast import from_float8
from jqinject.quant_tensor import FloatQuantTensor, GroupwiseFloatQuantTensor, IntQuantTensor, as_array


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


def shaped_like(x: Any) -> jax.Array:
    """An array that has the shape and the sharding of a tensor; a stored one is not dequantized for it."""
    if isinstance(x, IntegerOperand | ShapeAlone):
        return x.array
    if isinstance(x, FloatQuantTensor) and x.is_stored:
        return x.payload()
    if isinstance(x, IntQuantTensor) and x.is_stored and x.payload is not None:
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


def shape_alone(x: Any) -> Any:
    """An operand without its numbers; itself where an array's sharding or mapped axes are needed.

    Args:
        x: a result of `packed_tensor`.
    """
    if not isinstance(x, TwoLevels) or is_split(x.numbers) or getattr(jax.typeof(x.numbers), "vma", None):
        return x
    return ShapeAlone(x.groups.shape_of(x.numbers.shape), x.dtype)


def floats_of(x: Any) -> jax.Array:
    """The numbers, in the dtype of the tensor."""
    return x.floats if isinstance(x, IntegerOperand) else as_array(x)


def float32_of(x: Any) -> jax.Array:
    """The numbers in float32; those of a payload are rounded once."""
    if isinstance(x, FloatQuantTensor) and x.is_contractible:
        return from_float8(x.payload(), x.scale, jnp.float32)
    return floats_of(x).astype(jnp.float32)


def is_packed(x: Any) -> bool:
    """Whether something is a result of `packed_tensor`."""
    return isinstance(x, _Packed | TwoLevels)


def packed_tensor(x: Any) -> Any:
    """A quantized tensor as its payload and scale, if it keeps them; anything else unchanged."""
    if isinstance(x, IntQuantTensor) and x.payload is not None and isinstance(x.bit_width, int):
        zero = None if known_zero_point(x) else x.zero_point
        return _Packed(x.payload, x.scale, zero, np.dtype(x.dtype), (x.bit_width, x.signed))
    if isinstance(x, FloatQuantTensor) and x.is_contractible:
        return _Packed(x.payload(), x.scale, None, np.dtype(x.dtype))
    levels = levels_of(x)
    if levels is None or not isinstance(x, GroupwiseFloatQuantTensor):
        return x
    return TwoLevels.of(x, levels)


def unpacked_tensor(x: Any) -> Any:
    """Inverts `packed_tensor`."""
    if isinstance(x, TwoLevels):
        return x.tensor()
    if not isinstance(x, _Packed):
        return x
    if x.bits is None:
        return FloatQuantTensor.stored(x.payload, x.scale, x.dtype)
    zero = known_zero() if x.zero_point is None else x.zero_point
    return IntQuantTensor.stored(x.payload, x.scale, zero, *x.bits, x.dtype)
