"""Which numbers two QuantTensors have in common: integers, 8-bit floats, or floats."""

from __future__ import annotations

from typing import Any, Literal

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.kernels.float8_dot import has_output_scales
from jqinject.dot.kernels.integer import has_integers
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, IntQuantTensor, is_concrete

ContractionKind = Literal["auto", "float", "int", "fp8"]
KINDS = ("auto", "float", "int", "fp8")


def contraction_kind(lhs: Any, rhs: Any, dims: Dimensions, asked: str = "auto") -> str:
    """Which numbers are contracted: "int", "fp8" or "float".

    Args:
        lhs, rhs: QuantTensors or arrays.
        dims: of the contraction.
        asked: "auto" takes integers or 8-bit floats if both operands have them.

    Raises:
        ValueError: `asked` is unknown, or the operands do not have those numbers.
    """
    if asked not in KINDS:
        raise ValueError(f"contraction must be one of {', '.join(map(repr, KINDS))}; got {asked!r}")
    if asked == "float":
        return "float"
    found = "float"
    if isinstance(lhs, IntQuantTensor) and isinstance(rhs, IntQuantTensor):
        found = "int" if has_integers(lhs) and has_integers(rhs) else "float"
    elif isinstance(lhs, FloatQuantTensor) and isinstance(rhs, FloatQuantTensor):
        contracted = lhs.is_contractible and rhs.is_contractible
        found = "fp8" if contracted and has_output_scales(lhs, rhs, dims) else "float"
    if asked not in ("auto", found):
        raise ValueError(
            f"contraction={asked!r} needs {_NEEDS[asked]}; got {describe(lhs)} and {describe(rhs)}.\n"
            f"  cure: quantize both so, or contraction={'auto'!r}"
        )
    return found


_NEEDS = {
    "int": "two IntQuantTensors of at most 8 bits, known before the program runs",
    "fp8": "two FloatQuantTensors in 8-bit formats of hardware, whose scales do not vary along what is summed over",
}


def describe(x: Any) -> str:
    """An operand in an error text."""
    if isinstance(x, IntQuantTensor):
        return f"integers of {x.bit_width if is_concrete(x.bit_width) else 'learned'} bits"
    if isinstance(x, FloatQuantTensor):
        return f"{x.format} with scales of shape {x.scale.shape}"
    if isinstance(x, CodebookQuantTensor):
        return f"indices into a table of {len(x.codebook.values)} numbers"
    return f"an array of {x.dtype.name}"
