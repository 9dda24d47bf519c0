"""The clipping range with the least quantization error among several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jqinject.core.calibration.ranges import AbsMaxRange, Axes, ClippingRange
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.ops.devices.mapped import Names
from jqinject.ops.devices.over import Over
from jqinject.ops.power import divide


@checked_arguments
@dataclass(frozen=True)
class MSERange:
    """The symmetric range with the least mean squared quantization error, among fractions of `max |x|`.

    Tries `max |x| * k / candidates`, `k` from `candidates` down to 1, with `2^bits - 1` steps, and takes the first with
    the least error over the axes that share a scale.

    Args:
        bits: of the integers.
        candidates: how many ranges to try.
        fractions: the fractions to try in this order instead, as AQT's `SnrBasedAutoCalibration`.
        narrow_range: leave out -2^(bits-1).

    Raises:
        ValueError: `bits` is below 2 or `candidates` below 1; a fraction is not positive.

    Example:
        >>> MSERange(bits=2, fractions=(1.0, 0.5))(jnp.array([1.0, -1.0, 0.3, 8.0]), (0,)).high
        Array([8.], dtype=float32)
    """

    takes_cut: ClassVar[bool] = True
    bits: int = 8
    candidates: int = 50
    fractions: tuple[float, ...] | None = None
    narrow_range: bool = False

    def __post_init__(self) -> None:
        if self.bits < 2 or self.candidates < 1:
            raise ValueError(
                f"MSERange: needs at least 2 bits and 1 candidate, got bits={self.bits}, candidates={self.candidates}"
            )
        if self.fractions is not None and not all(fraction > 0 for fraction in self.fractions):
            raise ValueError(f"MSERange: fractions must be above 0, got {self.fractions!r}")

    def __call__(self, x: jax.Array, axes: Axes, names: Names = ()) -> ClippingRange:
        """See the class."""
        x = jax.lax.stop_gradient(x)
        over = Over.along(axes, names)
        whole = AbsMaxRange()(x, axes, names).high
        bound = 2.0 ** (self.bits - 1)

        def try_one(
            best: tuple[jax.Array, jax.Array], fraction: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            high = whole * fraction
            scale = jnp.where(high > 0, divide(high, bound - 0.5), 1.0)
            again = jnp.clip(jnp.round(divide(x, scale)), self.narrow_range - bound, bound - 1) * scale
            error = over.sum(jnp.square(again - x))
            better = error < best[0]
            return (jnp.where(better, error, best[0]), jnp.where(better, high, best[1])), None

        start = (jnp.full(whole.shape, jnp.inf, jnp.float32), whole)
        return ClippingRange(jax.lax.scan(try_one, start, self._tried())[0][1])

    def _tried(self) -> jax.Array:
        """The fractions of the largest magnitude, in order."""
        if self.fractions is not None:
            return jnp.array(self.fractions, jnp.float32)
        return divide(jnp.arange(self.candidates, 0, -1, dtype=jnp.float32), self.candidates)
