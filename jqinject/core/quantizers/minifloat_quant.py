"""Quantization to the minifloats of a dtype within a range, as Qwix and AQT do."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Rounding, View, is_nearest
from jqinject.core.clamp import Identity
from jqinject.core.component import component
from jqinject.core.memory.clipping_range import RangeScaling
from jqinject.core.quantizers.quantizer import Quantizer, through_ends
from jqinject.core.rounding import RoundSte
from jqinject.core.statistics.ranges import ClippingRange
from jqinject.ops.fake_quant import quantize_on_grid
from jqinject.ops.float8_cast import FLOAT8_DTYPES, to_float8
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.minifloat import from_float_steps


@component
class MinifloatQuant(Quantizer):
    """To the minifloats of a dtype and back, with the gradient of clipping to the range that the scale comes from.

    Args:
        scaling_impl: the scale, `RangeScaling` of a symmetric range.
        q_dtype: a dtype of 8-bit floats or narrower.
        input_view_impl: applied to `x` first.
        float_to_int_impl: how to round.

    Raises:
        TypeError: `q_dtype` is no minifloat; (when called) `x` is not a float array.
        ValueError: (when called) the range is not symmetric.

    Source: Qwix, AQT.

    Example:
        >>> from jqinject.core import AbsMaxRange
        >>> MinifloatQuant(RangeScaling(AbsMaxRange()), jnp.float4_e2m1fn)(jnp.array([5.9, -12.0, 0.0])).value
        Array([  6., -12.,   0.], dtype=float32)
    """

    has_zero_point = False  # type: ignore[assignment]
    scaling_impl: RangeScaling  # type: ignore[assignment]
    q_dtype: Any
    input_view_impl: View = Identity()
    float_to_int_impl: Rounding = RoundSte()

    def __post_init__(self) -> None:
        vars(self)["q_dtype"] = FloatGrid.of_dtype(self.q_dtype).dtype

    @property
    def grid(self) -> FloatGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        rounding = self.float_to_int_impl
        return FloatGrid.of_dtype(self.q_dtype) if is_nearest(rounding) else None

    def _numbers(self) -> tuple[FloatGrid, float]:
        grid = FloatGrid.of_dtype(self.q_dtype)
        return grid, grid.largest

    def _round(
        self,
        x: jax.Array,
        scale: jax.Array,
        zero_point: Any,
        ends: ClippingRange | None,
        grid: Any,
        keep: bool,
    ) -> tuple[jax.Array, None]:
        rounding = self.float_to_int_impl
        compute = partial(_rounded, grid, x.dtype, rounding)
        flags = {"to_range": not self.scaling_impl.scale_stop_grad, "pure": type(rounding) is RoundSte}
        return through_ends(compute, x.astype(jnp.float32), ends, scale, **flags).astype(x.dtype), None


def _rounded(grid: FloatGrid, dtype: Any, rounding: Rounding, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Numbers of a grid, float32, that `dtype` holds."""
    if type(rounding) is not RoundSte:
        return quantize_on_grid(x, grid, scale, None, rounding, dtype).astype(jnp.float32)
    if grid.dtype not in FLOAT8_DTYPES:
        return quantize_on_grid(x, grid, scale, dtype=dtype).astype(jnp.float32)
    steps = to_float8(x, scale, grid.dtype).astype(jnp.float32)
    return from_float_steps(steps, scale, dtype).astype(jnp.float32)
