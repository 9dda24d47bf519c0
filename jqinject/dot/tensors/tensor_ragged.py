"""The ragged contraction of two operands, in the numbers that the table chooses."""

from __future__ import annotations

from typing import Any

import jax

from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.tensors.contract import choose
from jqinject.dot.tensors.decision import ContractionKind, describe
from jqinject.dot.tensors.ragged_operands import contract_ragged_integers
from jqinject.quant_tensor import as_array


def ragged_dot_general(
    lhs: Any,
    rhs: Any,
    group_sizes: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    contraction: ContractionKind = "auto",
) -> jax.Array:
    """`lax.ragged_dot_general` in low bits: the rows of each group with the expert of that group.

    Two `IntQuantTensor`s of at most 8 bits are contracted as integers if none of their scales and zero points varies
    along a summed axis: one for each expert and output channel, and one for each row. Everything else is contracted as
    floats.

    Args:
        lhs, rhs: QuantTensors or arrays.
        group_sizes: how many rows each expert gets.
        dimension_numbers, precision: as for `lax.ragged_dot_general`.
        preferred_element_type: dtype of the output; None promotes those of the operands.
        contraction: "auto"; "int" or "float" to insist.

    Returns:
        An array; rows of no group are 0. Gradients pass straight through to the values of the operands.

    Raises:
        ValueError: `contraction` is "int" or "fp8", and the operands cannot be contracted so.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor.from_int(jnp.array([[2], [3]]), 0.5)
        >>> experts = IntQuantTensor.from_int(jnp.array([[[1]], [[1]]]), jnp.array([1.0, 10.0]).reshape(2, 1, 1))
        >>> numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        >>> ragged_dot_general(x, experts, jnp.array([1, 1]), numbers).tolist()
        [[1.0], [15.0]]
    """
    dtype = preferred_element_type or jax.numpy.promote_types(lhs.dtype, rhs.dtype)
    ragged = Ragged.of(lhs, rhs, dimension_numbers, dtype, precision)
    choice = choose(lhs, rhs, ragged if group_sizes.ndim == 1 else None, contraction)
    if ragged is not None and choice.integers is not None:
        return contract_ragged_integers(ragged, *choice.operands(), group_sizes)
    if contraction in ("int", "fp8"):
        raise ValueError(
            f"contraction={contraction!r} of a ragged contraction needs two IntQuantTensors of at most 8 bits whose "
            f"scales do not vary along what is summed over; got {describe(lhs)} and {describe(rhs)}.\n"
            "  cure: contraction='auto'"
        )
    return jax.lax.ragged_dot_general(
        as_array(lhs),
        as_array(rhs),
        group_sizes,
        dimension_numbers,
        precision,
        preferred_element_type=preferred_element_type,
    )
