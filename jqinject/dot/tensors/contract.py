"""`contract`: two operands in the numbers that they have in common, by the kernel that one table chooses for them.

The first row that fits is taken. "Along sums" are the axes that are summed over.

| kernel | grids | scales and zero points | stored right operand |
|---|---|---|---|
| "integers" | integers of at most 8 bits | anywhere; groups of at least 128, or integers asked for | or not |
| "integers", convolution | the same | one, or one each for examples (left), output features (right) | or not |
| "integers", ragged | the same | not along sums | or not |
| "float8" | 8-bit floats of backends, not convolved | not along sums | or not |
| "stored" | floats; bytes, or a table of 16 numbers | anywhere | yes, dequantized in registers |
| "floats" | any | anywhere | or not: dequantized, by XLA |

The files of `kernels/` decide what a kernel does on each platform. The products of a scheme do not come here: see
`product`. Next: `decision`, which explains why a row is not taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.dot.frozen.stored_array import StoredArray
from jqinject.dot.frozen.stored_dot import StoredDot, reads_stored, stored_dot_general
from jqinject.dot.geometry.dimensions import Dimensions, checked_dimensions
from jqinject.dot.kernels.accumulate import checked_accumulator
from jqinject.dot.kernels.convolution import Convolution, Filters
from jqinject.dot.kernels.groups import LEAST_GROUP
from jqinject.dot.kernels.integer import Affine, IntegerOperand, affine_of, has_integers
from jqinject.dot.kernels.ragged import Ragged
from jqinject.dot.tensors.common_groups import in_common_groups, wide_dimensions
from jqinject.dot.tensors.decision import KINDS, OTHER_IS_FLOAT, ContractionKind, decide_along, describe
from jqinject.dot.tensors.float8_dot_general import float8_dot_general
from jqinject.dot.tensors.six_operands import contract_integers
from jqinject.dot.tensors.tensor_conv import integer_conv
from jqinject.quant_tensor import (
    FloatQuantTensor,
    Groups,
    as_array,
    in_pieces,
    is_quantized,
)

NOT_KEPT = (
    "an operand keeps no integers, as in training, where rounding to them again costs more than it saves"
)
UNFIT = f"scales vary where no contraction of integers takes them, or groups have fewer than {LEAST_GROUP} elements"


@dataclass(frozen=True)
class ChosenKernel:
    """The row of the table for two operands.

    Attributes:
        kernel: "integers", "float8", "stored" or "floats".
        numbers: "int", "fp8" or "float".
        where: the axes of the contraction.
        lhs, rhs: the operands.
        why: why operands with a payload are contracted as floats; else empty.
        integers: theirs, for "integers".
        groups: how a summed axis of both is cut in two in their integers; None if it is not.
        swapped: whether the operands were swapped, as only the left one has groups.
    """

    kernel: str
    numbers: str
    where: Dimensions | Filters | Ragged | None
    lhs: Any
    rhs: Any
    why: str = ""
    integers: tuple[Affine, Affine] | None = None
    groups: tuple[Groups, Groups] | None = None
    swapped: bool = False

    def operands(self, values: tuple[Any, Any] | None = None) -> tuple[IntegerOperand, IntegerOperand]:
        """The integers, beside the floats that receive the gradients.

        Args:
            values: these floats; None for the operands' own. Those of a stored right operand receive none.
        """
        assert self.integers is not None, "asked for where integers are contracted"
        lhs, rhs = self.lhs, self.rhs
        left, right = (None, None) if values is None else values
        if rhs.is_stored:
            right = None
        elif right is None:
            right = rhs.value
        if left is None and not (self.swapped and lhs.is_stored):
            left = lhs.value
        dtypes = lhs.dtype if left is None else left.dtype, rhs.dtype if right is None else right.dtype
        return IntegerOperand(self.integers[0], left, dtypes[0]), IntegerOperand(
            self.integers[1], right, dtypes[1]
        )


def contract(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    *,
    numbers: ContractionKind = "auto",
    out_dtype: Any = None,
    out_sharding: Any = None,
    accumulator_dtype: Any = None,
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
    if numbers not in KINDS:
        raise ValueError(f"contraction must be one of {', '.join(map(repr, KINDS))}; got {numbers!r}")
    choice = choose(lhs, rhs, where, numbers, swaps=out_sharding is None)
    check_choice(choice, where, numbers)
    how: Any = {"accumulator_dtype": accumulator_dtype, "out_sharding": out_sharding}
    return contract_as(choice, where, output_dtype(lhs, rhs, out_dtype), **how)[0]


def check_choice(choice: ChosenKernel, where: Dimensions | Convolution, numbers: ContractionKind) -> None:
    """Raise unless a choice has the numbers that were asked for.

    Raises:
        ValueError: it has others.
    """
    if numbers in ("auto", choice.numbers):
        return
    both = f"got {describe(choice.lhs)} and {describe(choice.rhs)}"
    if isinstance(where, Dimensions):
        raise ValueError(
            f"contraction={numbers!r} needs {_NEEDS[numbers]}; {both}.\n"
            "  cure: quantize both so, or contraction='auto'"
        )
    if numbers == "fp8":
        raise ValueError(
            "a convolution has no contraction of 8-bit floats.\n  cure: contraction='auto', which contracts the "
            "dequantized floats"
        )
    raise ValueError(
        "contraction='int' of a convolution needs two IntQuantTensors of at most 8 bits: the left one with one "
        "zero point, and one scale or one for each example; the right one with one scale or one for each output "
        f"feature, and zero points likewise; {both}.\n  cure: contraction='auto'"
    )


_NEEDS = {
    "int": "two IntQuantTensors of at most 8 bits, known before the program runs",
    "fp8": "two FloatQuantTensors in 8-bit formats of hardware, whose scales do not vary along what is summed over",
}


def choose(
    lhs: Any,
    rhs: Any,
    where: Dimensions | Convolution | Filters | Ragged | None,
    numbers: ContractionKind = "auto",
    *,
    rounded: bool = True,
    swaps: bool = False,
) -> ChosenKernel:
    """Choose the row of the table for two operands.

    Args:
        lhs, rhs: as for `contract`.
        where: the axes of the contraction; None for one that is none of these, which contracts floats.
        numbers: as for `contract`; where the operands do not have them, the choice has others.
        rounded: whether "auto" also takes integers that no quantizer kept, which are rounded for the contraction.
        swaps: whether the operands may be swapped if only the left one has groups.
    """
    where = where.filters if isinstance(where, Convolution) else where
    dims = where if isinstance(where, Dimensions) and numbers != "float" else None
    stored, why = isinstance(rhs, StoredArray), ""
    both = has_integers(lhs, in_groups=True) and (
        rhs.form.has_integers if stored else has_integers(rhs, in_groups=True)
    )
    if both and where is not None and numbers in ("auto", "int"):
        rounds = rounded or numbers == "int" or stored or keep_integers(lhs, rhs)
        found = _integers(lhs, rhs, where, numbers, swaps) if rounds else None
        if found is not None:
            return found
        why = UNFIT if rounds else NOT_KEPT
    reads = dims is not None and stored and reads_stored(rhs.form, lhs.dtype)
    if reads and not is_quantized(lhs):
        return ChosenKernel("stored", "float", where, lhs, rhs, OTHER_IS_FLOAT)
    tensor = rhs.operand() if stored else rhs
    if dims is not None and not why:
        decision = decide_along(lhs, tensor, dims)
        if decision.kind == "fp8" and numbers != "int":
            return ChosenKernel("float8", "fp8", where, lhs, tensor)
        why = decision.why
    return ChosenKernel("stored" if reads else "floats", "float", where, lhs, rhs if reads else tensor, why)


def keep_integers(lhs: Any, rhs: Any) -> bool:
    """Whether two QuantTensors keep their integers, as quantizers in evaluation let them, or one of them is stored."""
    return (lhs.kept_payload is not None and rhs.kept_payload is not None) or lhs.is_stored or rhs.is_stored


def _integers(
    lhs: Any, rhs: Any, where: Dimensions | Filters | Ragged, numbers: ContractionKind, swaps: bool
) -> ChosenKernel | None:
    """The choice for two operands of integers; None if their scales or groups do not fit."""
    stored = isinstance(rhs, StoredArray)
    groups = rhs.form.contracted_groups if stored else rhs.groups if rhs.is_grouped else None
    grouped = groups is not None or lhs.is_grouped
    if isinstance(where, Dimensions):
        if grouped:
            return _in_groups(lhs, rhs, where, groups, numbers, swaps)
        where, right = rhs.integers_as_stored(where) if stored else (where, affine_of(rhs))
        return ChosenKernel("integers", "int", where, lhs, rhs, integers=(affine_of(lhs), right))
    if grouped or not where.fit(lhs, rhs.operand() if stored else rhs):
        return None
    both = affine_of(lhs), rhs.integers() if stored else affine_of(rhs)
    return ChosenKernel("integers", "int", where, lhs, rhs, integers=both) if where.take(*both) else None


def _in_groups(
    lhs: Any, rhs: Any, dims: Dimensions, groups: Groups | None, numbers: ContractionKind, swaps: bool
) -> ChosenKernel | None:
    """The choice for integers of which one operand has groups; None if these do not fit, or are smaller than pays."""
    if swaps and groups is None and not rhs.is_stored:
        found = _in_groups(rhs, lhs, dims.swapped(), lhs.groups, numbers, swaps=False)
        if found is not None and found.integers is not None:
            of_right, of_left = found.integers
            own = {"where": dims, "lhs": lhs, "rhs": rhs, "integers": (of_left, of_right)}
            return replace(found, **own, swapped=True)
    if isinstance(rhs, StoredArray):
        right = rhs.integers(dims.rhs_contract)
    else:
        pieces: Any = rhs if groups is None else in_pieces(rhs)
        groups = None if groups is None else pieces.groups
        right = affine_of(pieces if groups is None else pieces.grouped)
    common = in_common_groups(lhs, right, groups, dims)
    if common is None or (common.groups[0].size < LEAST_GROUP and numbers != "int"):
        return None
    return ChosenKernel(
        "integers", "int", dims, lhs, rhs, integers=(common.x, common.weight), groups=common.groups
    )


def contract_as(
    choice: ChosenKernel,
    where: Dimensions | Convolution,
    dtype: Any,
    values: tuple[Any, Any] | None = None,
    *,
    grad_dtype: Any = None,
    accumulator_dtype: Any = None,
    precision: Any = None,
    out_sharding: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Contract operands as the table says.

    Args:
        choice: the row, and the operands.
        where: the axes of the contraction.
        dtype, out_sharding: of the output; a `Convolution` says them itself.
        values: arrays that receive the gradients instead of the operands' own values, such as those that a layer has
            cast; of a stored right operand anything.
        grad_dtype: dtype of the gradient's payload where 8-bit floats are contracted; None for a float gradient.
        accumulator_dtype: of integers; None means int32.
        precision: of a contraction of floats.

    Returns:
        (the output, a token whose cotangent is the scale of the gradient's payload; None where there is none).
    """
    lhs, rhs = choice.lhs, choice.rhs
    if isinstance(where, Convolution):
        if choice.integers is not None:
            return integer_conv(where, *choice.operands(values)), None
        left, right = (as_array(lhs), as_array(rhs)) if values is None else values
        return where.numbers(left, right, where.dtype), None
    dims = where
    if choice.kernel == "float8":
        if values is not None:
            lhs, rhs = _carried_by(values[0], lhs), rhs if rhs.is_stored else _carried_by(values[1], rhs)
        how: Any = {"grad_dtype": grad_dtype, "preferred_element_type": dtype, "out_sharding": out_sharding}
        return float8_dot_general(lhs, rhs, dims.numbers, **how)
    if choice.integers is not None:
        dims: Any = choice.where  # a stored operand's axes may have another order
        left, right = choice.operands(values)
        if choice.swapped:
            left, right, dims = right, left, dims.swapped()
        wide = dims
        if choice.groups is not None:
            of_left, of_right = choice.groups
            wide = wide_dimensions(dims, of_left.dim % dims.lhs_ndim, of_right.dim % dims.rhs_ndim)
            left, right = _split(left, of_left), _split(right, of_right)
        y = contract_integers(left, right, wide, dtype, accumulator_dtype, out_sharding)
        return y.transpose(dims.rhs_first) if choice.swapped else y, None
    left = as_array(lhs) if values is None else values[0]
    if choice.kernel == "stored":
        static = StoredDot(rhs.form, dims, np.dtype(dtype), out_sharding, precision)
        return stored_dot_general(left, rhs.numbers, static), None
    right = as_array(rhs) if values is None else values[1]
    how = {"preferred_element_type": dtype, "out_sharding": out_sharding}
    return jax.lax.dot_general(left, right, dims.numbers, precision=precision, **how), None


def _carried_by(array: jax.Array, x: FloatQuantTensor) -> FloatQuantTensor:
    """8-bit floats whose gradient goes to an array, in the dtype of that array."""
    return FloatQuantTensor.cast(array, x.payload(), x.scale, x.format, x.training)


def _split(operand: IntegerOperand, groups: Groups) -> IntegerOperand:
    """An operand whose integers are in groups already, with its floats in groups."""
    return operand if operand.value is None else replace(operand, value=groups.split(operand.value))


def output_dtype(lhs: Any, rhs: Any, out_dtype: Any) -> Any:
    """The dtype of a contraction's output: the requested one, or the operands' promoted dtype."""
    return jnp.promote_types(lhs.dtype, rhs.dtype) if out_dtype is None else np.dtype(out_dtype)
