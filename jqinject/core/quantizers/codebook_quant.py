"""Quantizers to tables of numbers, and to codes that a solver chose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core._protocols import (
    Clamp,
    Factors,
    GradientMask,
    Scaling,
    View,
    grid_of,
    groups_of,
    has_zero_point,
    number_format,
    scale_dtype,
)
from jqinject.core.clamp import Identity, TensorClamp
from jqinject.core.component import InnerModule, component
from jqinject.core.quantizers.quantizer import Quantizer
from jqinject.core.state import QuantStat
from jqinject.ops.grid import Codebook, TableGrid
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
        if not isinstance(self.codebook, Codebook):
            vars(self)["codebook"] = TableGrid(tuple(self.codebook))

    @property
    def format(self) -> Codebook:
        """The table."""
        return self.codebook

    @property
    def grid(self) -> Codebook:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        return self.codebook

    def _grid(self) -> Codebook:
        return self.codebook

    def _threshold(self, grid: Codebook) -> float:
        return grid.largest

    def _round(
        self, x: jax.Array, scale: jax.Array, zero_point: Any, ends: Any, grid: Codebook, keep: bool
    ) -> tuple[jax.Array, None]:
        steps = divide(x.astype(jnp.float32), scale)
        inside = self.tensor_clamp_impl(steps, *grid.bounds)
        nearest = jnp.where(jnp.isnan(inside), inside, grid.decode(grid.encode(inside)))
        mask = self.gradient_mask_impl
        if mask is not None:
            return with_gradient_where(x, (nearest * scale).astype(x.dtype), mask(steps, nearest)), None
        passed = jax.lax.stop_gradient(nearest) + (inside - jax.lax.stop_gradient(inside))
        return (passed * scale).astype(x.dtype), None


class CommittedQuant(InnerModule):
    """Another quantizer, by scales and zero points that do not follow the weight.

    `y` is the number of the quantizer's grid that is nearest to `x`, at the scale that it had when it was committed.
    Numbers that are on the grid stay as they are, to the bit of their codes: loading, cloning, freezing and training
    start from what was chosen. The gradient goes straight through to `x` as in the quantizer itself; none reaches the
    scale.

    Args:
        quantizer: which has a grid.
        x: the weight whose scales are kept.

    Attributes:
        quantizer: the quantizer.
        committed_scale: its scale, float32.
        committed_zero_point: its zero point, float32; None if it has none.

    Raises:
        TypeError: the quantizer does not round to nearest on a grid that it knows.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> quant = CommittedQuant(CodebookQuant(ConstScaling(2.0), (-1.0, 0.0, 1.0)), jnp.array([1.6]))
        >>> quant(jnp.array([1.6, -4.1])).value
        Array([ 2., -2.], dtype=float32)
    """

    quantizer: Any

    def __init__(self, quantizer: Any, x: jax.Array) -> None:
        if grid_of(quantizer) is None:
            raise TypeError(
                f"{type(quantizer).__name__} does not round to nearest on a grid that it knows, so what was chosen for "
                "it cannot be kept.\n  cure: float_to_int_impl_type = 'round'; a quantizer of your own states its "
                "`grid` and `by_scale` (jqinject.core._protocols)"
            )
        stateful = isinstance(quantizer, nnx.Module)
        self.quantizer = nnx.data(quantizer) if stateful else nnx.static(quantizer)
        result = quantizer(x)
        self.committed_scale = QuantStat(jnp.asarray(result.scale, jnp.float32))
        zero_point = jnp.asarray(result.zero_point, jnp.float32) if has_zero_point(quantizer) else None
        self.committed_zero_point = nnx.data(None if zero_point is None else QuantStat(zero_point))

    @property
    def has_zero_point(self) -> bool:
        """See the quantizer."""
        return has_zero_point(self.quantizer)

    @property
    def groups(self) -> tuple[int, int] | None:
        """See the quantizer."""
        return groups_of(self.quantizer)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """See the quantizer."""
        return scale_dtype(self.quantizer)

    @property
    def format(self) -> Any:
        """See the quantizer."""
        return number_format(self.quantizer)

    @property
    def grid(self) -> Any:
        """See the quantizer."""
        return grid_of(self.quantizer)

    def rescaled(self, factors: Factors) -> dict[str, jax.Array]:
        """See `Rescales`."""
        if self.committed_zero_point is not None:
            factors.check_signs()
        return {"committed_scale": factors.times(self.committed_scale.get_value())}

    def by_scale(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, keep: bool) -> Any:
        """See the quantizer."""
        return self.quantizer.by_scale(x, scale, zero_point, keep)

    def __call__(self, x: jax.Array) -> Any:
        """`x` quantized by the kept scale."""
        return self._quantized(x, keep=False)

    def keeping_payload(self, x: jax.Array) -> Any:
        """Like a call; the result also has the payload."""
        return self._quantized(x, keep=True)

    def _quantized(self, x: jax.Array, keep: bool) -> Any:
        held = self.committed_zero_point
        zero_point = None if held is None else held.get_value()
        scale = jax.lax.stop_gradient(self.committed_scale.get_value())
        return self.quantizer.by_scale(x, scale, zero_point, keep)
