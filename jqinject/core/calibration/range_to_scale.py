"""From a clipping range to a scale and a zero point."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core.calibration.ranges import ClippingRange
from jqinject.ops.choose import choose
from jqinject.ops.fake_quant import quotient
from jqinject.ops.power import by_reciprocal
from jqinject.ops.ste import nearest

LEAST_SCALE = float(np.sqrt(np.finfo(np.float32).tiny))


def scale_and_zero_point(
    found: ClippingRange, bit_width: int, range_steps: float | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Float per integer step of a range, and the integer that stands for 0.

    A symmetric range has `scale = high / (2^(b-1) - 1/2)` and no zero point. With two ends,
    `scale = (high - low) / (2^b - 1)` and `zero_point = round(-2^(b-1) - low / scale)`. A scale below 1.1e-19 (of
    zeros, say) becomes 1.

    Args:
        found: the range, float32.
        bit_width: of signed integers.
        range_steps: steps from 0 to the end of a symmetric range; None for `2^(b-1) - 1/2`.

    Returns:
        Scale and zero point (None if the range is symmetric), float32, shaped as the range.

    Source: Qwix.

    Example:
        >>> scale_and_zero_point(ClippingRange(jnp.float32(3.0), jnp.float32(-1.0)), 2)
        (Array(1.3333334, dtype=float32), Array(-1., dtype=float32))
    """
    lowest = -(2 ** (bit_width - 1))
    if found.low is None:
        return not_tiny(by_reciprocal(found.high, range_steps or -lowest - 0.5)), None
    return _of_two_ends(bit_width, found.high, found.low)[:2]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_two_ends(bit_width: int, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scale, zero point, and whether the scale was too small."""
    lowest = -(2.0 ** (bit_width - 1))
    scale = quotient(high - low, jnp.float32(2**bit_width - 1))
    tiny = scale < LEAST_SCALE
    scale = choose(tiny, 1.0, scale)
    # A quotient of two arrays of one shape, not nested: XLA has nothing to rewrite.
    return scale, jax.lax.clamp(lowest, nearest(lowest - low / scale), -lowest - 1), tiny


@_of_two_ends.defjvp
def _(bit_width: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found = _of_two_ends(bit_width, *primals)
    _, zero_point, tiny = found
    change = choose(tiny, 0.0, (tangents[0] - tangents[1]) / jnp.float32(2**bit_width - 1))
    return found, (change, jnp.zeros_like(zero_point), np.zeros(tiny.shape, jax.dtypes.float0))


def not_tiny(scale: jax.Array) -> jax.Array:
    """A scale, with values below 1.1e-19 replaced by 1."""
    return choose(scale < LEAST_SCALE, 1.0, scale)
