"""In which numbers two operands are contracted, and why: as integers, as 8-bit floats, or as floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from jqinject.dot.geometry.dimensions import Dimensions
from jqinject.dot.geometry.labels import Labelling, Labels, summed_labels
from jqinject.dot.kernels.integer import has_integers
from jqinject.dot.tensors.labelled_tensor import LabelledTensor
from jqinject.quant_tensor import (
    is_concrete,
    is_grouped,
    is_quantized,
    on_integers,
    on_minifloats,
    on_table,
)

ContractionKind = Literal["auto", "float", "int", "fp8"]
KINDS: tuple[ContractionKind, ...] = get_args(ContractionKind)
OTHER_IS_FLOAT = "the other operand is float"


@dataclass(frozen=True)
class Decision:
    """The numbers in which two operands are contracted.

    Attributes:
        kind: "int", "fp8" or "float".
        why: why an operand with a payload is contracted as dequantized floats; else empty.
    """

    kind: str
    why: str = ""


def decide(a: LabelledTensor, b: LabelledTensor, out: Labels, groups: bool = False) -> Decision:
    """The numbers in which two operands are contracted: payloads if both have them and their scales fit.

    A scale fits if it does not vary along a summed axis. Along tiles, those of integers may vary.

    Args:
        a, b: the operands.
        out: labels of the result.
        groups: whether scales of integers may vary along any summed axis: each of its indices then makes a whole
            output, which are summed in float32.
    """
    both = a.tensor, b.tensor
    summed = summed_labels(a.labels, b.labels, out)
    if all(map(has_integers, both)):
        kind, varying = "int", [not groups and varies(x, summed) for x in (a, b)]
    elif all(on_minifloats(x) and x.is_contractible for x in both):
        kind, varying = "fp8", [varies(x, summed, tiles=True) for x in (a, b)]
    else:
        return Decision("float", _why_not(*both))
    for x, unfit in zip(both, varying, strict=True):
        if unfit:
            return Decision(
                "float",
                f"of {described(x)} the scales of shape {x.scale.shape} vary along what is summed over",
            )
    return Decision(kind)


def decide_along(lhs: Any, rhs: Any, dims: Dimensions) -> Decision:
    """As `decide`, for the operands of a `dot_general`; scales of integers may vary along any summed axis."""
    labels = Labelling.of(dims)
    sides = LabelledTensor(lhs, labels.lhs), LabelledTensor(rhs, labels.rhs)
    return decide(*sides, labels.out, groups=True)


def varies(x: LabelledTensor, summed: Labels, tiles: bool = False) -> bool:
    """Whether a scale or zero point varies along a summed axis.

    Args:
        x: the operand.
        summed: the summed axes.
        tiles: whether tiles count among them.
    """
    tensor = x.tensor
    if not (on_integers(tensor) or on_minifloats(tensor)):
        return False
    for found in (tensor.scale, tensor.zero_point):
        sizes = (*(1,) * (tensor.ndim - found.ndim), *found.shape)
        for label, size in zip(x.labels, sizes, strict=True):
            if size != 1 and label in summed and (tiles or label[0] != "tile"):
                return True
    return False


def _why_not(a: Any, b: Any) -> str:
    """Why quantized operands are contracted as floats; empty if neither is quantized."""
    quantized = [is_quantized(x) for x in (a, b)]
    if not all(quantized):
        return OTHER_IS_FLOAT if any(quantized) else ""
    return "they have no payload in common that backends contract"


def described(x: Any) -> str:
    """An operand in words."""
    if is_grouped(x):
        return f"{described(x.grouped)} in groups of {x.groups.size}"
    return describe(x)


def describe(x: Any) -> str:
    """An operand in an error text."""
    if on_integers(x):
        return f"integers of {x.bit_width if is_concrete(x.bit_width) else 'learned'} bits"
    if on_minifloats(x):
        return f"{x.format} with scales of shape {x.scale.shape}"
    if on_table(x):
        return f"indices into a table of {len(x.codebook.table)} numbers"
    return f"an array of {x.dtype.name}"
