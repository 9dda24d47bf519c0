"""Quantizers to tables of numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Clamp, GradientMask, Scaling, View
from jqinject.core.clamping import Identity, TensorClamp
from jqinject.core.component import component
from jqinject.core.quantizers.quantizer import Quantizer, Rounded
from jqinject.ops.fake_quant import Offset
from jqinject.ops.grid import Codebook
from jqinject.ops.power import divide
from jqinject.ops.ste import with_gradient_where


@component
class CodebookQuant(Quantizer):
    """To the nearest number of a table and back: `y = table[argmin |x / s - table|] * s`.

    `s = scaling_impl(x, largest magnitude of the table)`. The arithmetic is float32; ties go to the lower number; nan
    stays nan. The gradient goes straight through to `x` where `x / s` is within the table's range, else as
    `tensor_clamp_impl` decides; with a `gradient_mask_impl` to `x` alone, where the mask is True.

    Args:
        scaling_impl: the scale.
        codebook: a `jqinject.ops.Codebook`; or the numbers of a table, in ascending order.
        input_view_impl: applied to `x` first.
        tensor_clamp_impl: how to clamp to the table's ends.
        gradient_mask_impl: where the gradient goes; None leaves it to the clamp.

    Raises:
        ValueError: the numbers are not a table.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> quant = CodebookQuant(ConstScaling(2.0), (-1.0, 0.0, 0.25, 1.0))
        >>> quant(jnp.array([0.4, -3.0])).value
        Array([ 0.5, -2. ], dtype=float32)
    """

    scaling_impl: Scaling
    codebook: Any
    input_view_impl: View = Identity()
    tensor_clamp_impl: Clamp = TensorClamp()
    gradient_mask_impl: GradientMask | None = None

    def __post_init__(self) -> None:
        vars(self)["codebook"] = Codebook.of(self.codebook)

    @property
    def grid(self) -> Codebook:
        """The numbers at scale 1 that it rounds to nearest on: the table, which is also its `format`."""
        return self.codebook

    format = grid

    def _numbers(self) -> tuple[Codebook, float]:
        return self.codebook, self.codebook.largest

    def _round(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, ends: Any, grid: Any, keep: bool
    ) -> Rounded:
        steps = divide(x.astype(jnp.float32), scale)
        inside = self.tensor_clamp_impl(steps, *grid.bounds)
        nearest = grid.round(inside)
        mask = self.gradient_mask_impl
        if mask is not None:
            return with_gradient_where(x, (nearest * scale).astype(x.dtype), mask(steps, nearest)), None
        passed = jax.lax.stop_gradient(nearest) + (inside - jax.lax.stop_gradient(inside))
        return (passed * scale).astype(x.dtype), None
