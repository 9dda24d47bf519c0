"""The table that chooses the numbers and the kernel of a contraction.

The first row that fits is taken. "Along sums" are the axes that are summed over.

| kernel | grids | scales and zero points | stored right operand |
|---|---|---|---|
| "integers" | integers of at most 8 bits | anywhere; groups of at least 128, or integers asked for | or not |
| "integers", of a scheme | the same | not along sums, but along tiles; groups of at least 128 | or not |
| "integers", convolution | the same | one, or one each for examples (left), output features (right) | or not |
| "integers", ragged | the same | not along sums | or not |
| "gradients" | integers of at most 8 bits and a gradient of integers: floats forward | anywhere | or not |
| "float8" | 8-bit floats of backends, not convolved | not along sums | or not |
| "blocks", if a scheme asks | MXFP8, NVFP4: on CUDA, elsewhere floats | along one summed axis | not |
| "stored" | floats; bytes, or a table of 16 numbers | anywhere | yes, dequantized in registers |
| "floats" | any | anywhere | or not: dequantized, by XLA |

Everything that contracts asks `choose`: layers, sites, attention, stored parameters, and the three products of a
scheme, forward and backward. The files of `kernels/` decide what a kernel does on each platform. Next: `contract`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from jqinject.core import check
from jqinject.dot.frozen import frozen_param, stored_dot
from jqinject.dot.geometry.dimensions import Dimensions, scaled_axes
from jqinject.dot.kernels import block_scales, ragged
from jqinject.dot.kernels.convolution import Convolution, Filters
from jqinject.dot.kernels.integer import LEAST_GROUP, Affine, IntegerOperand, affine_of, has_integers
from jqinject.quant_tensor import (
    Groups,
    QuantTensor,
    as_array,
    grouped_integers,
    in_pieces,
    is_concrete,
    is_grouped,
    is_quantized,
    on_integers,
    on_minifloats,
    on_table,
    smaller_groups,
)

Arrays: TypeAlias = tuple[jax.Array, jax.Array]
ContractionKind = Literal["auto", "float", "int", "fp8"]
KINDS: tuple[ContractionKind, ...] = get_args(ContractionKind)
#: The check of a contraction that a user asked for.
OF_KINDS = check.among(KINDS)
OTHER_IS_FLOAT = "the other operand is float"
NO_COMMON_PAYLOAD = "they have no payload in common that backends contract"
NOT_KEPT = (
    "an operand keeps no integers, as in training, where rounding to them again costs more than it saves"
)
BY_BLOCKS = "on CUDA by jax.nn.scaled_matmul, on ROCm and TPU by jax.lax.scaled_dot"
UNFIT = f"scales vary where no contraction of integers takes them, or groups have fewer than {LEAST_GROUP} elements"


@dataclass(frozen=True)
class ChosenKernel:
    """The row of the table for two operands.

    Attributes:
        kernel: "integers", "gradients", "float8", "blocks", "stored" or "floats".
        numbers: "int", "fp8" or "float".
        where: the axes of the contraction; for "integers", of these.
        lhs, rhs: the operands.
        why: why operands with a payload are contracted as floats; else empty.
        integers: theirs, for "integers" and "gradients"; None of an operand that has none.
        groups: how a summed axis of both is cut in two in their integers; None if it is not.
        swapped: whether the integers are in the other order, as the left operand alone has groups.
    """

    kernel: str
    numbers: str
    where: Dimensions | Filters | ragged.Ragged | None
    lhs: Any
    rhs: Any
    why: str = ""
    integers: tuple[Affine, Affine] | None = None
    groups: tuple[Groups, Groups] | None = None
    swapped: bool = False

    @property
    def dims(self) -> Dimensions:
        """The axes of a `dot_general`."""
        assert isinstance(self.where, Dimensions), "neither a convolution nor a ragged contraction"
        return self.where

    def operands(self, values: Arrays | None = None) -> tuple[Any, Any]:
        """The integers in the order of `where`, beside the floats that receive the gradients; or floats without them.

        Args:
            values: these floats; None for the operands' own. Those of a stored right operand receive none.
        """
        assert self.integers is not None, "asked for where integers are contracted"
        left, right = (None, None) if values is None else values
        step = -1 if self.swapped else 1
        rows = zip(
            (self.lhs, self.rhs),
            (left, right),
            (self.swapped and left is None, self.kernel == "integers"),
            self.integers[::step],
            (self.groups or (None, None))[::step],
            strict=True,
        )
        operands = []
        for x, value, lacks_gradient, integers, groups in rows:
            if integers is None:
                operands.append(as_array(x) if value is None else value)
                continue
            if lacks_gradient and x.is_stored:
                value = None
            elif value is None:
                value = x.value
            dtype = x.dtype if value is None else value.dtype
            value = value if value is None or groups is None else groups.split(value)
            operands.append(IntegerOperand(integers, value, dtype))
        first, second = operands[::step]
        return first, second


def choose(
    lhs: Any,
    rhs: Any,
    where: Dimensions | Convolution | Filters | ragged.Ragged | None,
    numbers: ContractionKind = "auto",
    *,
    rounded: bool = True,
    swaps: bool = False,
    apart: Sequence[int] | None = None,
    gradient: bool = False,
    blocks: bool = False,
) -> ChosenKernel:
    """Choose the row of the table for two operands.

    Args:
        lhs, rhs: as for `contract`.
        where: the axes of the contraction; None for one that is none of these, which contracts floats.
        numbers: as for `contract`; where the operands do not have them, the choice has others.
        rounded: whether "auto" also takes integers that no quantizer kept, as it does in evaluation, and that are not
            stored: they are rounded again for the contraction.
        swaps: whether the operands may be swapped if only the left one has groups.
        apart: the pairs of summed axes along which scales of integers may vary, so that each index makes a whole
            output; None for all of a `dot_general`'s.
        gradient: whether the gradient of the output arrives as integers, which backward products contract with those
            of the operands; "auto" then takes any integers forward.
        blocks: whether payloads with block scales are handed to platforms that take them.
    """
    where = where.filters if isinstance(where, Convolution) else where
    dims = where if isinstance(where, Dimensions) and numbers != "float" else None
    stored, why = isinstance(rhs, frozen_param.LowBitArray), ""
    both = has_integers(lhs, in_groups=True) and (
        rhs.form.has_integers if stored else has_integers(rhs, in_groups=True)
    )
    if both and where is not None and numbers in ("auto", "int"):
        has_payloads = (
            stored or lhs.is_stored or rhs.is_stored or None not in (lhs.kept_payload, rhs.kept_payload)
        )
        if not (rounded or gradient or numbers == "int" or has_payloads):
            why = NOT_KEPT
        elif apart is not None and dims is not None and not (lhs.is_grouped or rhs.is_grouped):
            why = _varying_scales(lhs, rhs, dims, apart)
        row = None if why else _integers(lhs, rhs, where, numbers, swaps)
        if row is not None:
            return row
        why = why or UNFIT
    reads = dims is not None and stored and stored_dot.reads_stored(rhs.form, lhs.dtype)
    if reads and not is_quantized(lhs):
        return ChosenKernel("stored", "float", where, lhs, rhs, OTHER_IS_FLOAT)
    tensor = rhs.operand() if stored else rhs
    if dims is not None and not why:
        why = _why_not_float8(lhs, tensor, dims)
        if why is None and numbers != "int":
            return ChosenKernel("float8", "fp8", where, lhs, tensor)
    if blocks and dims is not None and block_scales.has_blocks(lhs, tensor, dims):
        return ChosenKernel("blocks", "float", where, lhs, tensor, f"{why}; {BY_BLOCKS}")
    if gradient and dims is not None and not stored and (has_integers(lhs) or has_integers(rhs)):
        pair: Any = lhs, rhs
        integers: Any = tuple(affine_of(x) if has_integers(x) else None for x in pair)
        return ChosenKernel("gradients", "float", where, lhs, rhs, why or "", integers)
    return ChosenKernel(
        "stored" if reads else "floats", "float", where, lhs, rhs if reads else tensor, why or ""
    )


def check_choice(
    choice: ChosenKernel, where: Dimensions | Convolution | ragged.Ragged | None, numbers: ContractionKind
) -> None:
    """Raise unless a choice has the numbers that were asked for; `where` is None of an unusual ragged contraction.

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
    if not isinstance(where, Convolution):
        raise ValueError(
            f"contraction={numbers!r} of a ragged contraction needs two IntQuantTensors of at most 8 bits whose "
            f"scales do not vary along what is summed over; {both}.\n  cure: contraction='auto'"
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


def varies_along(x: QuantTensor, axes: Sequence[int]) -> bool:
    """Whether a scale or zero point of a QuantTensor without groups varies along some axes."""
    return not scaled_axes((x.scale.shape, x.zero_point.shape), x.ndim).isdisjoint(axes)


def _integers(
    lhs: Any, rhs: Any, where: Dimensions | Filters | ragged.Ragged, numbers: ContractionKind, swaps: bool
) -> ChosenKernel | None:
    """The choice for two operands of integers; None if their scales or groups do not fit."""
    stored = isinstance(rhs, frozen_param.LowBitArray)
    groups = rhs.form.contracted_groups if stored else rhs.groups if rhs.is_grouped else None
    grouped = groups is not None or lhs.is_grouped
    if isinstance(where, Dimensions):
        if grouped:
            return _in_groups(lhs, rhs, where, groups, numbers, swaps)
        where, right = rhs.integers_as_stored(where) if stored else (where, affine_of(rhs))
        return ChosenKernel("integers", "int", where, lhs, rhs, integers=(affine_of(lhs), right))
    tensor = rhs.operand() if stored else rhs
    if grouped or not (
        where.fit(lhs, tensor) if isinstance(where, Filters) else not _varying_scales(lhs, tensor, where.axes)
    ):
        return None
    both = affine_of(lhs), rhs.integers() if stored else affine_of(rhs)
    return ChosenKernel("integers", "int", where, lhs, rhs, integers=both) if where.take(*both) else None


def _why_not_float8(lhs: Any, rhs: Any, dims: Dimensions) -> str | None:
    """Why two operands are not contracted as 8-bit floats, empty if neither is quantized; None if they are."""
    if not all(on_minifloats(x) and x.is_contractible for x in (lhs, rhs)):
        quantized = [is_quantized(x) for x in (lhs, rhs)]
        return NO_COMMON_PAYLOAD if all(quantized) else OTHER_IS_FLOAT if any(quantized) else ""
    return _varying_scales(lhs, rhs, dims) or None


def _varying_scales(lhs: QuantTensor, rhs: QuantTensor, dims: Dimensions, apart: Sequence[int] = ()) -> str:
    """Which operand's scales vary along a sum, apart from some pairs of axes, as text; empty if neither's do."""
    for x, summed in ((lhs, dims.lhs_contract), (rhs, dims.rhs_contract)):
        if varies_along(x, [axis for pair, axis in enumerate(summed) if pair not in apart]):
            return f"of {describe(x)} the scales of shape {x.scale.shape} vary along what is summed over"
    return ""


def _in_groups(
    lhs: Any, rhs: Any, dims: Dimensions, groups: Groups | None, numbers: ContractionKind, swaps: bool
) -> ChosenKernel | None:
    """The choice for integers of which one operand has groups; None if these do not fit, or are smaller than pays."""
    if swaps and groups is None and not rhs.is_stored:
        common = _in_groups(rhs, lhs, dims.swapped(), lhs.groups, numbers, swaps=False)
        if common is not None:
            return replace(common, lhs=lhs, rhs=rhs, swapped=True)
    pieces: Any = rhs if groups is None or isinstance(rhs, frozen_param.LowBitArray) else in_pieces(rhs)
    groups = groups if pieces is rhs else pieces.groups
    common = _common_groups(lhs, groups, dims, 1 if numbers == "int" else LEAST_GROUP)
    if common is None:
        return None
    x, of_left, of_right = common
    left = _integers_in(x, of_left)
    if left is None:
        return None
    if isinstance(rhs, frozen_param.LowBitArray):
        right = rhs.integers(dims.rhs_contract)
    else:
        right = affine_of(pieces if groups is None else pieces.grouped)
    right = _cut(right, of_right) if groups is None else right
    dims = dims.in_groups(of_left.dim % len(dims.lhs))
    return ChosenKernel("integers", "int", dims, lhs, rhs, integers=(left, right), groups=(of_left, of_right))


def _common_groups(
    x: Any, of_weight: Groups | None, dims: Dimensions, least: int
) -> tuple[Any, Groups, Groups] | None:
    """How a summed axis of two operands, one of which has scales for groups, is cut in two, alike.

    Args:
        x: the left operand.
        of_weight: the groups of the right one, None if it has none.
        dims: of the contraction, without groups.
        least: how many numbers a group has at least.

    Returns:
        (the left operand, in groups that fit if it has any; how the axis of each is cut); None if none fits.
    """
    if of_weight is None and grouped_integers(x):
        x = in_pieces(x)
    own = x.groups if grouped_integers(x) else None
    groups = own if of_weight is None else of_weight
    ndim, summed = len(dims.rhs), dims.rhs_contract
    if of_weight is None:
        ndim, summed = len(dims.lhs), dims.lhs_contract
    if groups is None or groups.size < least or groups.dim % ndim not in summed:
        return None
    pair = summed.index(groups.dim % ndim)
    left, right = dims.lhs_contract[pair], dims.rhs_contract[pair]
    size, length = groups.size, x.shape[left]
    of_input = Groups(size, left - len(dims.lhs), length)
    if own is not None and own.size % size == 0 and own.size > size:
        x = smaller_groups(x, size)  # the weight is in pieces of groups that cross shards
        own = x.groups
    if own is not None and own != of_input:
        return None
    return x, of_input, Groups(size, right - len(dims.rhs), length)


def _integers_in(x: Any, groups: Groups) -> Affine | None:
    """The integers of an input in groups; None if it has none, or a scale that varies along the axis."""
    if grouped_integers(x):
        return affine_of(x.grouped) if has_integers(x.grouped) else None
    if not has_integers(x) or varies_along(x, (groups.dim % x.ndim,)):
        return None
    return _cut(affine_of(x), groups)


def _cut(x: Affine, groups: Groups) -> Affine:
    """Integers whose scale does not vary along an axis, with the axis in groups."""

    def apart(metadata: jax.Array) -> jax.Array:
        if metadata.ndim < -groups.dim:
            return metadata
        place = metadata.ndim + groups.dim
        return metadata.reshape((*metadata.shape[:place], 1, *metadata.shape[place:]))

    zero = None if x.zero_point is None else apart(x.zero_point)
    return Affine(groups.split(x.payload), apart(x.scale), zero)


def describe(x: Any) -> str:
    """An operand, as text."""
    if is_grouped(x):
        return f"{describe(x.grouped)} in groups of {x.groups.size}"
    if on_integers(x):
        return f"integers of {x.bit_width if is_concrete(x.bit_width) else 'learned'} bits"
    if on_minifloats(x):
        return f"{x.format} with scales of shape {x.scale.shape}"
    if on_table(x):
        return f"indices into a table of {len(x.codebook.table)} numbers"
    return f"an array of {np.dtype(x.dtype).name}"
