"""The symmetric zero point, and from a distance in floats to a zero point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import IntQuantizer
from jqinject.core.variables import known_zero
from jqinject.ops.power import in_steps


@dataclass(frozen=True)
class ZeroZeroPoint:
    """Zero is the integer 0: symmetric quantization.

    Example:
        >>> float(ZeroZeroPoint()(jnp.ones(3), jnp.float32(1), 8))
        0.0
    """

    def __call__(self, x: Any = None, scale: Any = None, bit_width: Any = None) -> jax.Array:
        """A float32 zero."""
        return known_zero()


def shift(
    z: jax.Array,
    scale: jax.Array,
    bit_width: Any,
    int_quant: IntQuantizer,
    quantize: bool,
    to_int: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """The zero point of a range that reaches `z` below zero.

    Args:
        z: distance in floats.
        scale: float per integer step.
        bit_width: the bit width.
        int_quant: gives `min_int`, rounding and clamping.
        quantize: round and clamp to an integer of the range.
        to_int: how; None means `int_quant.to_int`.

    Returns:
        `clamp(round(z / scale + min_int))` or `z / scale + min_int`.
    """
    least = int_quant.min_int(bit_width)
    if quantize:
        least = jnp.asarray(least, dtype=jnp.float32)
        return (to_int or int_quant.to_int)(scale, least, bit_width, z)
    return in_steps(z, scale) + least
