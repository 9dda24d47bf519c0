"""How a layer contracts: as integers, as 8-bit floats, as floats, or as its operands allow."""

from __future__ import annotations

from typing import Literal, get_args

ContractionKind = Literal["auto", "float", "int", "fp8"]
CONTRACTIONS: tuple[ContractionKind, ...] = get_args(ContractionKind)


def checked_contraction(layer: str, contraction: ContractionKind) -> ContractionKind:
    """`contraction`, if it is one of `ContractionKind`.

    Raises:
        ValueError: it is not.
    """
    if contraction not in CONTRACTIONS:
        known = ", ".join(map(repr, CONTRACTIONS))
        raise ValueError(f"{layer}: contraction must be one of {known}, got {contraction!r}")
    return contraction
