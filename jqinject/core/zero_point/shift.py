"""The symmetric zero point, and zero points from distances in floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import IntQuantizer
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.ops.fake_quant import known_zero
from jqinject.ops.groups import ungrouped
from jqinject.ops.power import divide


@dataclass(frozen=True)
class ZeroZeroPoint:
    """The zero point 0: symmetric quantization.

    Example:
        >>> float(ZeroZeroPoint()(jnp.ones(3), jnp.float32(1), 8))
        0.0
    """

    has_zero_point = False

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
    return divide(z, scale) + least


@checked_arguments
class ScaleShiftQuantZeroPoint(Component):
    """A zero point whose distance in floats is itself quantized: `quantized(z) / scale + min_int`.

    Source: Brevitas's `_ScaleShiftQuantZeroPoint`.

    Args:
        zp_int_quant: quantizes the distance; the first part of its result is used.
        int_quant: gives the integer range.
        zero_point_dequantized_shape: shape of the quantized distance; None means that of the distance, even if
            `zp_int_quant` is grouped.

    Example:
        >>> from jqinject.core import BitWidthConst, ConstScaling, IntQuant, IntScaling, RescalingIntQuant
        >>> steps = RescalingIntQuant(IntQuant(False, False), ConstScaling(1.5), IntScaling(False, False),
        ...     ZeroZeroPoint(), BitWidthConst(2))
        >>> shift = ScaleShiftQuantZeroPoint(steps, IntQuant(narrow_range=False, signed=False))
        >>> float(shift(jnp.float32(0.9), jnp.float32(0.25), 4))
        4.0
    """

    zero_point_dequantized_shape: tuple[int, ...] | None = None

    def __init__(
        self,
        zp_int_quant: Callable[[jax.Array], tuple[Any, ...]],
        int_quant: IntQuantizer,
        zero_point_dequantized_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.zp_int_quant = zp_int_quant
        self.int_quant = int_quant
        if zero_point_dequantized_shape is not None:
            self.zero_point_dequantized_shape = tuple(zero_point_dequantized_shape)

    def __call__(self, zero_point: jax.Array, scale: jax.Array, bit_width: Any) -> jax.Array:
        """The zero point of a range that reaches `zero_point` below zero, float32."""
        quantized, *_ = self.zp_int_quant(zero_point)
        shape = self.zero_point_dequantized_shape
        quantized = ungrouped(quantized, zero_point) if shape is None else quantized.reshape(shape)
        return divide(quantized, scale) + self.int_quant.min_int(bit_width)
