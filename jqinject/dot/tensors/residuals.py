"""What differentiation rules take of quantized tensors, and keep for the backward pass: payloads, not values.

Operands whose scales come in two levels are contracted as `minifloat * block scale`, scaled by the other level after. A
product of an e2m1 number and an e4m3 scale has at most 6 significant bits, so it is exact in bfloat16 and float16
alike, and the sum is that of dequantized float32 numbers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.kernels.integer import IntegerOperand
from jqinject.ops import minifloat, packing, sharding
from jqinject.quant_tensor import (
    FloatQuantTensor,
    GroupwiseFloatQuantTensor,
    Levels,
    as_array,
    is_quantized,
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


def shaped_like(x: object) -> jax.Array:
    """An array that has the shape and the sharding of a tensor; a stored one is not dequantized for it."""
    if isinstance(x, IntegerOperand | ShapeAlone):
        return x.array
    return x.kept_payload if is_quantized(x) and x.is_stored and not x.is_grouped else as_array(x)


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
        x: as a derivative rule takes it: without its value, if it keeps a payload.
    """
    if isinstance(x, IntegerOperand):
        return x
    array = shaped_like(x)
    if sharding.is_split(array) or sharding.varying_axes(array):
        return x
    return ShapeAlone(tuple(array.shape), np.dtype(x.dtype))


def floats_of(x: object) -> jax.Array:
    """The numbers, in the dtype of the tensor."""
    return x.floats if isinstance(x, IntegerOperand) else as_array(x)


def float32_of(x: object) -> jax.Array:
    """The numbers in float32; those of a payload are rounded once."""
    if on_minifloats(x) and x.is_contractible:
        return minifloat.from_float_steps(x.payload().astype(jnp.float32), x.scale, jnp.float32)
    return floats_of(x).astype(jnp.float32)


def _narrow(x: object) -> object:
    """Stored minifloats as a backward pass keeps them: in as few bits as they have, their scales in a byte each."""
    if not (on_minifloats(x) and x.is_stored):
        return x
    scale, dtype, levels = x.scale, x.scale_dtype, x.levels
    if levels is not None:
        scale, dtype, levels = levels.block, BLOCK_DTYPE, levels._replace(minifloats=None, block=None)
    scale = scale if dtype is None else scale.astype(dtype)
    return FloatQuantTensor.stored(x.narrow_numbers(), scale, None, x.grid, x.dtype, dtype, levels)


def _wide(x: object) -> object:
    """Inverts `_narrow`."""
    if not (on_minifloats(x) and x.is_stored):
        return x
    payload, scale, levels = x.kept_payload, x.scale.astype(jnp.float32), x.levels
    if levels is not None:
        payload = x.grid.decode(payload)
        levels = Levels(payload, scale, levels.shared)
        scale = scale * levels.shared
    return FloatQuantTensor.stored(payload, scale, None, x.grid, x.dtype, x.scale_dtype, levels)


class KeptOperands(NamedTuple):
    """Arguments without gradient: both operands, then each backward product's other operand, quantizer and factor."""

    lhs: Any
    rhs: Any
    others: tuple[Any, ...]
    quantizers: tuple[Any, Any]
    folded: tuple[Any, Any]

    def without_unused(self) -> "KeptOperands":
        """Without the numbers of forward operands in whose place backward products have others."""
        of_dgrad, of_wgrad = self.others
        left = self.lhs if of_wgrad is None else shape_alone(self.lhs)
        return self._replace(lhs=left, rhs=self.rhs if of_dgrad is None else shape_alone(self.rhs))

    def for_backward(self, as_integers: bool = False) -> packing.LowBitTree:
        """What a backward pass keeps; `from_forward` reads it.

        Args:
            as_integers: whether it contracts the integers of operands, not their floats.
        """
        left, right = (
            x.for_backward(as_integers) if isinstance(x, IntegerOperand) else x for x in (self.lhs, self.rhs)
        )
        operands = self._replace(lhs=left, rhs=right)
        return packing.as_bits(jax.tree.map(_narrow, operands, is_leaf=on_minifloats))

    @staticmethod
    def from_forward(residuals: packing.LowBitTree) -> "KeptOperands":
        """What `for_backward` kept."""
        return jax.tree.map(_wide, residuals.floats(), is_leaf=on_minifloats)
