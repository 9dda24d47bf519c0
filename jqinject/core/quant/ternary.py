"""Quantization to three values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Scaling
from jqinject.core.construction import check
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.delay import DelayWrapper, delay_of
from jqinject.core.facts import scale_dtype
from jqinject.core.quant.grids import TableGrid
from jqinject.core.quant.int_quant import QuantResult
from jqinject.ops.fake_quant import known_zero
from jqinject.ops.minifloats.nearest_code import Codebook
from jqinject.ops.ste import ternary_sign_ste


@checked_arguments
class TernaryQuant(Component):
    """`y = sign(x) * s` where `|x| > threshold * s`, else 0; the gradient passes where `y` is nonzero.

    Args:
        scaling_impl: the scale `s`, called with `x` alone.
        threshold: numbers up to this fraction of the scale become 0.
        quant_delay_steps: calls that return `x` unchanged; None for no delay.

    Raises:
        ValueError: when `threshold` is negative or not finite.
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import ConstScaling
        >>> TernaryQuant(ConstScaling(1.0), 0.5)(jnp.array([0.04, -0.6, 3.3])).value
        Array([ 0., -1.,  1.], dtype=float32)
    """

    has_zero_point = False
    delay: DelayWrapper | None = None

    def __init__(self, scaling_impl: Scaling, threshold: float, quant_delay_steps: int | None = None) -> None:
        if not math.isfinite(threshold) or threshold < 0:
            raise ValueError(
                f"TernaryQuant: threshold is a fraction of the scale, expected >= 0, got {threshold!r}."
            )
        self.scaling_impl = scaling_impl
        self.threshold = float(threshold)
        set_given(self, delay=delay_of(quant_delay_steps, "TernaryQuant"))

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    def __call__(self, x: jax.Array) -> QuantResult:
        """`x` quantized; zero point 0, bit width 2."""
        x = check.float_input(x, "TernaryQuant")
        scale = self.scaling_impl(x.astype(jnp.float32))
        return QuantResult(self._rounded(x, scale), scale, known_zero(), 2)

    def by_scale(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, keep: bool) -> QuantResult:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        x = check.float_input(x, "TernaryQuant")
        return QuantResult(self._rounded(x, scale), scale, known_zero(), 2)

    @property
    def grid(self) -> TableGrid:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        return TableGrid(Codebook((-1.0, 0.0, 1.0)))

    def _rounded(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mask = (jnp.abs(x32) > self.threshold * scale).astype(jnp.float32)
        y = (mask * ternary_sign_ste(x32) * scale).astype(x.dtype)
        return y if self.delay is None else self.delay(x, y)
