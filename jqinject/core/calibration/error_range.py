"""The clipping range with the least quantization error among several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.calibration.ranges import AbsMaxRange, Axes, ClippingRange
from jqinject.core.construction import check
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.ops.devices.mapped import Names
from jqinject.ops.devices.over import Over
from jqinject.ops.minifloats.float_format import FloatFormat
from jqinject.ops.minifloats.float_grid import to_float_grid
from jqinject.ops.power import divide


@checked_arguments
@dataclass(frozen=True)
class MSERange:
    """The symmetric range with the least mean squared quantization error, among fractions of `max |x|`.

    Tries `max |x| * k / candidates`, `k` from `candidates` down to 1, with `range_steps` from 0 to the end, and takes
    the first with the least error over the axes that share a scale. The numbers are those that a `CalibratedQuant` with
    arguments of the same names rounds to.

    Args:
        bit_width: of the integers.
        candidates: how many ranges to try.
        fractions: the fractions to try in this order instead, as AQT's `SnrBasedAutoCalibration`.
        narrow_range: leave out -2^(bit_width-1).
        range_steps: steps from 0 to the end of the range; None means 2^(bit_width-1) - 1/2.
        q_dtype: a dtype of 8-bit floats or narrower instead of integers: its largest number is the end of the range.
        preserve_zero: False if only odd integers are used (`RoundToOddSte`), for half-integers.

    Raises:
        ValueError: `bit_width` is below 2 or `candidates` below 1; a fraction is not positive.

    Example:
        >>> MSERange(bit_width=2, fractions=(1.0, 0.5))(jnp.array([1.0, -1.0, 0.3, 8.0]), (0,)).high
        Array([8.], dtype=float32)
    """

    takes_cut: ClassVar[bool] = True
    bit_width: int = 8
    candidates: int = 50
    fractions: tuple[float, ...] | None = None
    narrow_range: bool = False
    range_steps: float | None = None
    q_dtype: np.dtype | None = None
    preserve_zero: bool = True

    def __post_init__(self) -> None:
        check.bit_width(self.bit_width, "MSERange", least=2)
        check.at_least(self.candidates, 1, "MSERange", "candidates")
        if self.fractions is not None and not all(fraction > 0 for fraction in self.fractions):
            raise ValueError(f"MSERange: fractions must be above 0, got {self.fractions!r}")

    def __call__(self, x: jax.Array, axes: Axes, names: Names = ()) -> ClippingRange:
        """See the class."""
        x = jax.lax.stop_gradient(x)
        over = Over.along(axes, names)
        whole = AbsMaxRange()(x, axes, names).high
        steps, rounded = self._grid()

        def try_one(
            best: tuple[jax.Array, jax.Array], fraction: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            high = whole * fraction
            scale = jnp.where(high > 0, divide(high, steps), 1.0)
            error = over.sum(jnp.square(rounded(divide(x, scale)) * scale - x))
            better = error < best[0]
            return (jnp.where(better, error, best[0]), jnp.where(better, high, best[1])), None

        start = (jnp.full(whole.shape, jnp.inf, jnp.float32), whole)
        return ClippingRange(jax.lax.scan(try_one, start, self._tried())[0][1])

    def _grid(self) -> tuple[float, Callable[[jax.Array], jax.Array]]:
        """The steps to the end of the range, and how numbers in steps are rounded."""
        if self.q_dtype is not None:
            form = FloatFormat.of_dtype(self.q_dtype)
            largest, widths = form.max_value, (form.mantissa_bit_width, form.bias)
            return largest, lambda x: jnp.clip(to_float_grid(x, *widths, jnp.round), -largest, largest)
        edge = 2.0 ** (self.bit_width - 1)
        lowest, highest = self.narrow_range - edge, edge - 1
        steps = self.range_steps or edge - 0.5
        if self.preserve_zero:
            return steps, lambda x: jnp.clip(jnp.round(x), lowest, highest)
        return steps, lambda x: jnp.clip(2.0 * jnp.floor(0.5 * x) + 1.0, lowest, highest)

    def _tried(self) -> jax.Array:
        """The fractions of the largest magnitude, in order."""
        if self.fractions is not None:
            return jnp.array(self.fractions, jnp.float32)
        return divide(jnp.arange(self.candidates, 0, -1, dtype=jnp.float32), self.candidates)
