"""`contract`: two operands in the numbers that they have in common, by the kernel that the table of `choice` has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.dot.frozen.stored_dot import StoredDot, stored_dot_general
from jqinject.dot.geometry.dimensions import Dimensions, OutSharding, checked_dimensions
from jqinject.dot.kernels.accumulate import checked_accumulator
from jqinject.dot.kernels.convolution import Convolution
from jqinject.dot.kernels.integer import IntegerOperand
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.tensors.backward_quantizer import GradientFormat
from jqinject.dot.tensors.choice import (
    OF_KINDS,
    Arrays,
    ChosenKernel,
    ContractionKind,
    check_choice,
    choose,
    varies_along,
)
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.dot.tensors.product import Sums
from jqinject.dot.tensors.six_operands import (
    Plan,
    contract_integers,
    contract_operands,
)
from jqinject.ops import FloatGrid
from jqinject.quant_tensor import FloatQuantTensor, Operand, as_array, on_minifloats

_IN_FLOAT32, _FIRST = Sums(floats="float32"), Sums(floats="first")


def contract(
    lhs: Operand,
    rhs: Operand,
    dimension_numbers: object,
    *,
    numbers: ContractionKind = "auto",
    out_dtype: DTypeLike | None = None,
    out_sharding: OutSharding = None,
    accumulator_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Contract two operands in the numbers that they have in common.

    Args:
        lhs, rhs: arrays or QuantTensors; the right one may be a `FrozenParam`, which is contracted as it is stored.
        dimension_numbers: as for `lax.dot_general`; or a `Convolution`, which says the dtype of the output, its
            sharding and the accumulator itself.
        numbers: "auto" takes integers or 8-bit floats where both operands have them; "int", "fp8" or "float" insists.
        out_dtype: of the output; None promotes those of the operands.
        out_sharding: as for `lax.dot_general`.
        accumulator_dtype: of integers; None means int32.

    Returns:
        An array. Gradients pass straight through to the values of the operands; a stored one has none.

    Raises:
        TypeError: an accumulator that is not a signed integer.
        ValueError: dimension numbers that do not fit, `numbers` that the operands do not have, or that are unknown; an
            accumulator that could overflow.

    Example:
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor.from_int(jnp.array([[3, -2]]), 0.5)
        >>> contract(x, x, (((1,), (1,)), ((), ())))
        Array([[3.25]], dtype=float32)
    """
    shapes = tuple(lhs.shape), tuple(rhs.shape)
    convolves = isinstance(dimension_numbers, Convolution)
    where = dimension_numbers if convolves else checked_dimensions(*shapes, dimension_numbers)
    checked_accumulator(accumulator_dtype)
    OF_KINDS(numbers, "contract", "contraction")
    choice = choose(lhs, rhs, where, numbers, swaps=out_sharding is None)
    check_choice(choice, where, numbers)
    how: Any = {"accumulator_dtype": accumulator_dtype, "out_sharding": out_sharding}
    return contract_as(choice, where, output_dtype(lhs, rhs, out_dtype), **how)[0]


def ragged_dot_general(
    lhs: Operand,
    rhs: Operand,
    group_sizes: jax.Array,
    dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
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
    where = Ragged.of(lhs, rhs, dimension_numbers, dtype, precision) if group_sizes.ndim == 1 else None
    choice = choose(lhs, rhs, where, contraction)
    check_choice(choice, where, contraction)
    if where is not None:
        return contract_as(choice, where, dtype, group_sizes=group_sizes)[0]
    how: Any = {"preferred_element_type": preferred_element_type}
    return jax.lax.ragged_dot_general(
        as_array(lhs), as_array(rhs), group_sizes, dimension_numbers, precision, **how
    )


def float8_dot_general(
    lhs: FloatQuantTensor,
    rhs: FloatQuantTensor,
    dimension_numbers: object,
    *,
    grad_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: OutSharding = None,
) -> tuple[jax.Array, jax.Array]:
    """Contract the payloads of two 8-bit float tensors: `y = dot(payload_l, payload_r) * scale_l * scale_r`.

    The products are summed in float32. The backward pass contracts payloads again: with `grad_dtype`, the cotangent of
    `y` is a payload of that dtype times the cotangent of the token, so that both gradients also contract 8-bit floats;
    without it, or if a scale varies along an axis that a gradient sums over, they are float. Gradients pass straight
    through to the values of the operands.

    GPUs with 8-bit float units (Hopper and later) use them; CPUs compute the same, no faster than float.

    Args:
        lhs: the left operand.
        rhs: the right operand; its scale may vary along axes that are not summed. A stored one gets no gradient.
        dimension_numbers: as for `lax.dot_general`.
        grad_dtype: dtype of the gradient's payload, or None.
        preferred_element_type: dtype of the output; None means that of `lhs`.
        out_sharding: as for `lax.dot_general`.

    Returns:
        (the output, a token: a float32 0 whose cotangent is the gradient's scale).

    Raises:
        TypeError: an operand is not a `FloatQuantTensor`.
        ValueError: a scale varies along a summed axis, or hardware lacks a format.

    Source: Flax's `fp8_scaled_dot_general`.

    Example:
        >>> x = FloatQuantTensor.from_payload(jnp.ones((2, 3), jnp.float8_e4m3fn), 0.5)
        >>> float8_dot_general(x, x, (((1,), (1,)), ((), ())))[0]
        Array([[0.75, 0.75],
               [0.75, 0.75]], dtype=float32)
    """
    for side, operand in (("lhs", lhs), ("rhs", rhs)):
        if not on_minifloats(operand):
            raise TypeError(
                f"float8_dot_general: {side} must be a FloatQuantTensor, got {type(operand).__name__}"
            )
        if not operand.is_contractible:
            raise ValueError(
                f"float8_dot_general: {side} is in the format {operand.format}, which no backend contracts.\n"
                "  cure: one of the 8-bit formats of OCP or FNUZ; or contract the values: contraction='float'"
            )
    dims = Dimensions.of(lhs.ndim, rhs.ndim, dimension_numbers)
    if varies_along(lhs, dims.lhs_contract) or varies_along(rhs, dims.rhs_contract):
        raise ValueError(
            "float8_dot_general: a scale varies along an axis that is summed over, so no multiplication after the "
            f"sum can undo it (scales {lhs.scale.shape}, {rhs.scale.shape}; dimension numbers {dimension_numbers})."
            "\n  cure: quantize per tensor, or per output channel; or contract the values: contraction='float'"
        )
    dtype = np.dtype(preferred_element_type or lhs.dtype)
    gradient = None if grad_dtype is None else GradientFormat(FloatGrid.of_dtype(grad_dtype))
    y, token = _of_float8(lhs, rhs, dims, gradient, dtype, out_sharding)
    return y, jnp.zeros((), jnp.float32) if token is None else token


def _of_float8(
    lhs: FloatQuantTensor,
    rhs: FloatQuantTensor,
    dims: Dimensions,
    gradient: GradientFormat | None,
    dtype: DTypeLike,
    out_sharding: OutSharding,
) -> tuple[jax.Array, jax.Array | None]:
    """The contraction of payloads that the table has chosen, and its token if the gradient arrives quantized."""
    plan = Plan(
        dims,
        np.dtype(dtype),
        dgrad=_IN_FLOAT32,
        wgrad=_IN_FLOAT32,
        out_sharding=out_sharding,
        gradient_format=gradient,
        what="a contraction of 8-bit floats",
    )
    return contract_operands(plan, LabelledTensor(lhs, dims.lhs), LabelledTensor(rhs, dims.rhs))


def integer_conv(
    conv: Convolution, lhs: IntegerOperand, rhs: IntegerOperand, gradient: GradientFormat | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The convolution of integers, with the gradients of the convolution of their floats.

    Args:
        conv: the convolution.
        lhs, rhs: the operands; a stored right one gets no gradient.
        gradient: the numbers of the output's gradient, if it arrives quantized with one scale; else None.

    Returns:
        See `contract_as`.
    """
    plan = Plan(conv, conv.dtype, gradient_format=gradient, what="a convolution of integers")
    return contract_integers(plan, lhs, rhs)


def contract_as(
    choice: ChosenKernel,
    where: Dimensions | Convolution | Ragged,
    dtype: DTypeLike,
    values: Arrays | None = None,
    *,
    group_sizes: jax.Array | None = None,
    gradient: GradientFormat | None = None,
    accumulator_dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    out_sharding: OutSharding = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Contract operands as the table says.

    Args:
        choice: the row, and the operands.
        where: the axes of the contraction.
        dtype, out_sharding: of the output; a `Convolution` or a `Ragged` has them itself.
        values: arrays that receive the gradients instead of the operands' own values, such as those that a layer has
            cast; of a stored right operand anything.
        group_sizes: how many rows each expert of a ragged contraction gets.
        gradient: the numbers of the output's gradient, if it arrives quantized; None for floats.
        accumulator_dtype: of integers; None means int32.
        precision: of a contraction of floats.

    Returns:
        (the output, a token whose cotangent is the gradient's scale, None for a gradient of floats).
    """
    lhs, rhs = choice.lhs, choice.rhs
    if choice.kernel == "float8":
        if values is not None:
            lhs, rhs = _carried_by(values[0], lhs), rhs if rhs.is_stored else _carried_by(values[1], rhs)
        gradient = None if gradient is None or gradient.is_integer else gradient
        return _of_float8(lhs, rhs, choice.dims, gradient, dtype, out_sharding)
    rest = () if group_sizes is None else (group_sizes,)
    if choice.integers is not None:
        if isinstance(where, Convolution):
            return integer_conv(where, *choice.operands(values), _integers_in_one(gradient))
        if isinstance(where, Ragged):
            plan = Plan(where, where.dtype, what="a ragged contraction of integers")
        else:
            if gradient is not None and (choice.swapped or not gradient.is_integer):
                gradient = _integers_in_one(gradient)
            axes: Any = choice.where
            sums = Sums(accumulator_dtype, floats="first"), _FIRST, _FIRST
            plan = Plan(axes, np.dtype(dtype), *sums, out_sharding, gradient, "a contraction of integers")
        return contract_integers(plan, *choice.operands(values), *rest)
    left = as_array(lhs) if values is None else values[0]
    if choice.kernel == "stored":
        static = StoredDot(rhs.form, choice.dims, np.dtype(dtype), out_sharding, precision)
        return stored_dot_general(left, rhs.numbers, static), None
    right = as_array(rhs) if values is None else values[1]
    if not isinstance(where, Dimensions):
        return where(left, right, *rest), None
    how = {"preferred_element_type": dtype, "out_sharding": out_sharding}
    return jax.lax.dot_general(left, right, where.numbers, precision=precision, **how), None


def _integers_in_one(gradient: GradientFormat | None) -> GradientFormat | None:
    """The format of a gradient of integers with one scale, which follow any move of axes; None for any other."""
    return gradient.in_one() if gradient is not None and gradient.is_integer else None


def _carried_by(array: jax.Array, x: FloatQuantTensor) -> FloatQuantTensor:
    """8-bit floats whose gradient goes to an array, in the dtype of that array."""
    return FloatQuantTensor.cast(array, x.payload(), x.scale, x.format, x.training)


def output_dtype(lhs: Operand, rhs: Operand, out_dtype: DTypeLike | None) -> np.dtype:
    """The dtype of a contraction's output: the requested one, or the operands' promoted dtype."""
    return jnp.promote_types(lhs.dtype, rhs.dtype) if out_dtype is None else np.dtype(out_dtype)
