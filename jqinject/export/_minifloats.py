"""Marked minifloats in ONNX: stored 8-bit floats, and a rounding that does not need the bits of a float."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.export._grid import DEQUANTIZE, grid_of
from jqinject.ops import FloatGrid
from jqinject.ops.float8_cast import FLOAT8_DTYPES

# Earlier opsets have no 8-bit floats.
OPSET_OF_FLOAT8 = 19


def stored_float8(value: np.ndarray, scale: np.ndarray, form: FloatGrid, opset: int) -> Any:
    """A known value as stored 8-bit floats and DequantizeLinear; unchanged if ONNX has no such floats.

    Args:
        value: the dequantized numbers.
        scale: float32, broadcasts with them.
        form: their format.
        opset: version of ONNX's operators.
    """
    grid = grid_of(scale, np.zeros((), np.float32), value.ndim)
    dtype = form.dtype
    if dtype is None or dtype not in FLOAT8_DTYPES or opset < OPSET_OF_FLOAT8 or grid is None:
        return jnp.asarray(value)
    payload = (value.astype(np.float32) / scale).astype(dtype)
    if not np.array_equal((payload.astype(np.float32) * scale).astype(value.dtype), value, equal_nan=True):
        return jnp.asarray(value)
    restored = DEQUANTIZE.bind(jnp.asarray(payload), jnp.asarray(grid.scale, jnp.float32), axis=grid.axis)
    return restored.astype(value.dtype)


def rounded(x: Any, scale: Any, form: FloatGrid) -> jax.Array:
    """The nearest numbers of a saturating format, by comparisons: ONNX cannot read float bits before opset 26.

    Args:
        x: float32.
        scale: broadcasts with it.
        form: the format.
    """
    steps = jnp.clip(x / scale, *form.bounds)
    exponents = np.arange(2 - form.exponent_bias, np.floor(np.log2(form.largest)) + 1)
    starts = jnp.asarray(2.0**exponents, jnp.float32)  # of the binades above the subnormal numbers
    binade = jnp.sum((jnp.abs(steps)[..., None] >= starts).astype(jnp.int32), axis=-1)
    apart = jnp.asarray(form.smallest_subnormal * 2.0 ** np.arange(len(starts) + 1), jnp.float32)[binade]
    y = jnp.clip(jnp.round(steps / apart) * apart, *form.bounds) * scale
    return jnp.where(jnp.isinf(x), x if form.inf_values is not None else jnp.nan, y)
