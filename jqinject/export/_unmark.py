"""Turns marks into ONNX's operations for quantized numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.export._fold import Rule, is_known
from jqinject.export._grid import container, requantized, stored_integers
from jqinject.export._marks import MARK
from jqinject.export._minifloats import rounded, stored_float8
from jqinject.ops import max_int, min_int


def rules(opset: int) -> dict[str, Rule]:
    """The rules by which `evaluate` replaces marks."""

    def unmark(operands: Sequence[Any], facts: Mapping[str, Any]) -> Sequence[Any]:
        kind = _integers if facts["format"] is None else _minifloats
        return [kind(operands, facts, opset)]

    return {MARK.name: unmark}


def _integers(operands: Sequence[Any], facts: Mapping[str, Any], opset: int) -> Any:
    x, value, *grid = operands
    if not is_known(*grid):
        return value
    scale, zero_point, bits = (np.asarray(part, np.float32) for part in grid)
    dtype = container(int(bits), facts["signed"], opset)
    if is_known(value):
        return stored_integers(np.asarray(value), scale, zero_point, dtype).astype(value.dtype)
    if not facts["nearest"]:  # the value is already on its grid, within its bounds
        return requantized(value, scale, zero_point, dtype, None, value)
    span = (facts["signed"], facts["narrow_range"], int(bits))
    return requantized(x, scale, zero_point, dtype, (min_int(*span), max_int(*span)), value)


def _minifloats(operands: Sequence[Any], facts: Mapping[str, Any], opset: int) -> Any:
    x, value, scale, *_ = operands
    if is_known(value, scale):
        return stored_float8(np.asarray(value), np.asarray(scale, np.float32), facts["format"], opset)
    return (
        rounded(x.astype(jnp.float32), scale, facts["format"]).astype(value.dtype)
        if facts["nearest"]
        else value
    )
