"""Rounding of a power-of-two scale's exponent: up only if something would be clamped."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import BitWidth
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.ops.power import exp2, log2
from jqinject.ops.ste import ceil_ste


def midmax_mantissa_bias(
    mantissa_bit_width: int, nan_values: tuple[str, ...] | None, inf_values: tuple[str, ...] | None
) -> float:
    """How many mantissa bits the codes of inf and nan cost at the largest exponent.

    Args:
        mantissa_bit_width: bits of the mantissa.
        nan_values, inf_values: mantissas that mean nan and inf together with the largest exponent, or None.

    Returns:
        `log2(codes + 1)`; 0 if no codes, or all but one, remain at the largest exponent.

    Example:
        >>> midmax_mantissa_bias(3, ("111",), None), midmax_mantissa_bias(2, ("01", "10", "11"), ("00",))
        (1.0, 0.0)
    """
    excess = (len(nan_values or ()) + len(inf_values or ())) % 2**mantissa_bit_width
    return 0.0 if excess == 0 or excess + 1 == 2**mantissa_bit_width else math.log2(excess + 1)


@checked_arguments
class RoundMidMaxSte(Component):
    """`ceil(x - log2(2 - 2^(bias - m - 1)))`, straight-through: rounds an exponent up only if necessary.

    Magnitudes up to half a step above the largest number round down to it; only beyond is the next power of two needed.

    Args:
        mantissa_bit_width_impl: bits of the mantissa, m.
        midmax_mantissa_bit_bias: bits of it that the codes of inf and nan cost at the largest exponent.

    Source: Brevitas.

    Example:
        >>> from jqinject.core import MantissaWidthConst
        >>> RoundMidMaxSte(MantissaWidthConst(1))(jnp.array([1.8, 1.81]))
        Array([1., 2.], dtype=float32)
    """

    mantissa_bit_width_impl: BitWidth
    bias: float

    def __init__(self, mantissa_bit_width_impl: BitWidth, midmax_mantissa_bit_bias: float = 0.0) -> None:
        assign(self, mantissa_bit_width_impl=mantissa_bit_width_impl, bias=float(midmax_mantissa_bit_bias))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` rounded, of its shape."""
        width: Any = self.mantissa_bit_width_impl()
        if isinstance(width, int):
            return ceil_ste(x - math.log2(2.0 - 2.0 ** (self.bias - width - 1)))
        return ceil_ste(x - log2(2.0 - exp2(self.bias - jnp.asarray(width, jnp.float32) - 1)))
