"""Quantization to the minifloats of a dtype within a range, as Qwix and AQT do."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Rounding, View, is_nearest
from jqinject.core.clamp import Identity
from jqinject.core.component import component
from jqinject.core.memory.clipping_range import RangeScaling
from jqinject.core.quantizers.nearest_grids import MinifloatGrid
from jqinject.core.quantizers.quantizer import Quantizer, through_ends
from jqinject.core.statistics.ranges import ClippingRange
from jqinject.ops.float_format import FloatFormat


@component
class MinifloatQuant(Quantizer):
    """To the minifloats of a dtype and back, with the gradient of clipping to the range that the scale comes from.

    Args:
        scaling_impl: the scale, `RangeScaling` of a symmetric range.
        q_dtype: a dtype of 8-bit floats or narrower.
        input_view_impl: applied to `x` first; None for no view.
        float_to_int_impl: how to round; None for nearest.

    Raises:
        TypeError: `q_dtype` is no minifloat; (when called) `x` is not a float array.
        ValueError: (when called) the range is not symmetric.

    Source: Qwix, AQT.

    Example:
        >>> from jqinject.core import AbsMaxRange
        >>> MinifloatQuant(RangeScaling(AbsMaxRange()), jnp.float4_e2m1fn)(jnp.array([5.9, -12.0, 0.0])).value
        Array([  6., -12.,   0.], dtype=float32)
    """

    has_zero_point = False
    scaling_impl: RangeScaling
    q_dtype: Any
    input_view_impl: View | None = None  # type: ignore[assignment]
    float_to_int_impl: Rounding | None = None

    def __post_init__(self) -> None:
        vars(self)["q_dtype"] = FloatFormat.of_dtype(self.q_dtype).dtype
        vars(self)["input_view_impl"] = self.input_view_impl or Identity()

    @property
    def grid(self) -> MinifloatGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        nearest = self.float_to_int_impl is None or is_nearest(self.float_to_int_impl)
        return MinifloatGrid(self._grid(), np.dtype(np.float32)) if nearest else None

    def _grid(self) -> FloatFormat:
        return FloatFormat.of_dtype(self.q_dtype)

    def _threshold(self, grid: FloatFormat) -> float:
        return grid.max_value

    def _round(
        self,
        x: jax.Array,
        scale: jax.Array,
        zero_point: Any,
        ends: ClippingRange | None,
        grid: Any,
        keep: bool,
    ) -> tuple[jax.Array, None]:
        numbers, rounding = MinifloatGrid(grid, np.dtype(x.dtype)), self.float_to_int_impl
        compute = numbers.nearest if rounding is None else partial(numbers.rounded, rounding)
        flags = {"to_range": not self.scaling_impl.scale_stop_grad, "pure": rounding is None}
        return through_ends(compute, x.astype(jnp.float32), ends, scale, **flags).astype(x.dtype), None
