"""Contracting payloads inside the forward of a Flax layer."""

from typing import Any

import jax

from jqinject.dot import float8_dot_general
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor


class Float8Contraction:
    """Called by a Flax layer in the place of `lax.dot_general`, for one forward pass.

    The layer hands in its operands as plain arrays, promoted to its dtype; scales and formats are known here.

    Args:
        x: the input.
        weight: the kernel.
        grad_dtype: dtype of the gradient's payload, or None.
    """

    def __init__(self, x: FloatQuantTensor, weight: FloatQuantTensor, grad_dtype: Any) -> None:
        self.x = x
        self.weight = weight
        self.grad_dtype = grad_dtype
        self.token: jax.Array | None = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The contraction; `precision` is that of the format."""
        y, self.token = float8_dot_general(
            self.x.set(value=lhs),
            self.weight.set(value=rhs),
            dimension_numbers,
            grad_dtype=self.grad_dtype,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
        return y


def describe(operand: Any) -> str:
    """An operand in an error text: its format, or its dtype."""
    if isinstance(operand, FloatQuantTensor):
        return f"{operand.q_dtype.name} with scales of shape {operand.scale.shape}"
    if isinstance(operand, IntQuantTensor):
        return f"{operand.bit_width}-bit integers"
    return f"{operand.dtype} numbers without a quantizer"
