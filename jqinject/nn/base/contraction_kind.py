"""How a layer contracts: as integers, as 8-bit floats, as floats, or as its operands allow."""

from __future__ import annotations

from jqinject.dot.tensors.decision import KINDS
from jqinject.dot.tensors.decision import ContractionKind as ContractionKind


def checked_contraction(layer: str, contraction: ContractionKind) -> ContractionKind:
    """`contraction`, if it is one of `ContractionKind`.

    Raises:
        ValueError: it is not.
    """
    if contraction not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise ValueError(f"{layer}: contraction must be one of {known}, got {contraction!r}")
    return contraction
