"""ONNX's two operations for quantized numbers, and the integers that they take.

QuantizeLinear: q = saturate(round(x / scale) + zero_point)        DequantizeLinear: y = (q - zero_point) * scale
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.export._fold import Rule
from jqinject.program.jaxpr import Primitive

QUANTIZE = Primitive("jqinject_quantize_linear")
DEQUANTIZE = Primitive("jqinject_dequantize_linear")
QUANTIZE.def_abstract_eval(lambda x, scale, zero_point, axis: x.update(dtype=zero_point.dtype))
DEQUANTIZE.def_abstract_eval(lambda q, scale, *zero_point, axis: q.update(dtype=scale.dtype))

# Constants are not folded through these two.
KEPT: dict[str, Rule] = {
    QUANTIZE.name: lambda operands, params: [QUANTIZE.bind(*operands, **params)],
    DEQUANTIZE.name: lambda operands, params: [DEQUANTIZE.bind(*operands, **params)],
}
# Earlier opsets have both operations only for bytes (and 32-bit integers to dequantize).
OPSET_OF_16_BITS = 21
# The allowed distance of a stored value from an integer, in steps, due to float rounding.
OFF_GRID = 0.01


@dataclass(frozen=True)
class _Grid:
    """Scale and zero point of an array: scalars, or vectors along `axis`."""

    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None

    def operands(self, dtype: Any) -> tuple[jax.Array, ...]:
        """The operands of the two operations; 32-bit integers have no zero point."""
        scale = jnp.asarray(self.scale, jnp.float32)
        return (scale,) if dtype == np.int32 else (scale, jnp.asarray(self.zero_point.astype(dtype)))

    def fits(self, dtype: Any) -> bool:
        """Whether a dtype can hold the zero point."""
        if dtype == np.int32:
            return not self.zero_point.any()
        return _holds(dtype, self.zero_point) and bool(np.all(self.zero_point == np.rint(self.zero_point)))


def container(bits: int, signed: bool, opset: int) -> Any:
    """The dtype that holds integers of this bit width; None if the opset has none."""
    if bits <= 8:
        return np.dtype(np.int8 if signed else np.uint8)
    if bits <= 16 and opset >= OPSET_OF_16_BITS:
        return np.dtype(np.int16 if signed else np.uint16)
    return np.dtype(np.int32) if bits <= 32 else None


def grid_of(scale: np.ndarray, zero_point: np.ndarray, ndim: int) -> _Grid | None:
    """The grid; None if scale or zero point vary along several axes, which the two operations do not support."""
    shape = np.broadcast_shapes((1,) * ndim, scale.shape, zero_point.shape)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if len(axes) > 1:
        return None
    flat = [np.broadcast_to(part, shape).reshape(-1 if axes else ()) for part in (scale, zero_point)]
    return _Grid(flat[0], flat[1], axes[0] if axes else None)


def stored_integers(value: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, dtype: Any) -> Any:
    """A known value as stored integers and DequantizeLinear; unchanged if it is not on its grid."""
    value = value.astype(np.float32)
    steps = value / scale + zero_point
    integers = np.rint(steps)
    off_grid = not np.all(np.abs(steps - integers) <= OFF_GRID)
    if off_grid or dtype is None or not _holds(dtype, integers):
        return jnp.asarray(value)
    stored = jnp.asarray(integers.astype(dtype))
    grid = grid_of(scale, zero_point, value.ndim)
    if grid is not None and grid.fits(dtype):
        return DEQUANTIZE.bind(stored, *grid.operands(dtype), axis=grid.axis)
    one = _Grid(np.ones((), np.float32), np.zeros((), np.float32), None)
    return (DEQUANTIZE.bind(stored, *one.operands(dtype), axis=None) - zero_point) * scale


def requantized(
    x: Any,
    scale: np.ndarray,
    zero_point: np.ndarray,
    dtype: Any,
    bounds: tuple[int, int] | None,
    value: Any,
) -> Any:
    """`x` through both operations; `value`, the computation, if they cannot express it."""
    grid = grid_of(scale, zero_point, x.ndim)
    if grid is None or dtype is None or dtype == np.int32 or not grid.fits(dtype):
        return value
    x = x.astype(jnp.float32)
    # QuantizeLinear clamps to the range of the dtype.
    if bounds is not None and bounds[0] > np.iinfo(dtype).min:
        x = jnp.maximum(x, (np.float32(bounds[0]) - zero_point) * scale)
    if bounds is not None and bounds[1] < np.iinfo(dtype).max:
        x = jnp.minimum(x, (np.float32(bounds[1]) - zero_point) * scale)
    operands = grid.operands(dtype)
    integers = QUANTIZE.bind(x, *operands, axis=grid.axis)
    return DEQUANTIZE.bind(integers, *operands, axis=grid.axis).astype(value.dtype)


def _holds(dtype: Any, numbers: np.ndarray) -> bool:
    info = np.iinfo(dtype)
    exact = numbers.astype(np.float64)  # float32 cannot represent 2147483647
    return bool(np.all((exact >= info.min) & (exact <= info.max)))
