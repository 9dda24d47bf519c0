"""Minifloat widths: exponent and mantissa bits, the largest mantissa, and the exponent bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jqinject.core._protocols import BitWidth, Rounding
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.ops.minifloats.float_format import MOST_EXPONENT_BITS, MOST_MANTISSA_BITS
from jqinject.ops.minifloats.float_range import checked_width, max_mantissa
from jqinject.ops.power import exp2


@checked_arguments
@dataclass(frozen=True)
class ExponentWidthConst:
    """A constant number of exponent bits.

    Args:
        bit_width: 1 to 8.

    Raises:
        TypeError: it is not an int.
        ValueError: it is out of range: a minifloat without exponent is an integer.

    Example:
        >>> ExponentWidthConst(4)()
        4
    """

    bit_width: int

    def __post_init__(self) -> None:
        checked_width("exponent_bit_width", self.bit_width, 1, MOST_EXPONENT_BITS)

    def __call__(self) -> int:
        """The bit width."""
        return self.bit_width


@checked_arguments
@dataclass(frozen=True)
class MantissaWidthConst:
    """A constant number of mantissa bits, without the implicit 1.

    Args:
        bit_width: 0 to 22.

    Raises:
        TypeError: it is not an int.
        ValueError: it is out of range.

    Example:
        >>> MantissaWidthConst(0)()
        0
    """

    bit_width: int

    def __post_init__(self) -> None:
        checked_width("mantissa_bit_width", self.bit_width, 0, MOST_MANTISSA_BITS)

    def __call__(self) -> int:
        """The bit width."""
        return self.bit_width


@checked_arguments
@dataclass(frozen=True)
class StaticMaxMantissa:
    """The largest mantissa for a constant number of bits, `2 - 2**-m`.

    Args:
        bit_width: m.

    Example:
        >>> StaticMaxMantissa(3)(3)
        1.875
    """

    bit_width: int

    def __post_init__(self) -> None:
        checked_width("mantissa_bit_width", self.bit_width, 0, MOST_MANTISSA_BITS)

    def __call__(self, mantissa_bit_width: Any = None) -> float:
        """The largest mantissa, whatever the argument."""
        return max_mantissa(self.bit_width)


@checked_arguments
@dataclass(frozen=True)
class ComputeMaxMantissa:
    """The largest mantissa for a learned number of bits, differentiable.

    Args:
        max_mantissa_round_impl: rounds `2**(m + 1) - 1`, the largest mantissa in whole steps, for a fractional m; None
            does not round.

    Example:
        >>> import jax.numpy as jnp
        >>> float(ComputeMaxMantissa()(jnp.float32(3)))
        1.875
    """

    max_mantissa_round_impl: Rounding | None = None

    def __call__(self, mantissa_bit_width: Any) -> Any:
        """The largest mantissa of `mantissa_bit_width` bits."""
        if self.max_mantissa_round_impl is None:
            return max_mantissa(mantissa_bit_width)
        steps = self.max_mantissa_round_impl(exp2(mantissa_bit_width + 1) - 1)
        return steps * exp2(-mantissa_bit_width)


@checked_arguments
@dataclass(frozen=True)
class StaticExponentBias:
    """A constant exponent bias.

    Args:
        exponent_bias: an int.

    Raises:
        TypeError: it is not an int.

    Example:
        >>> StaticExponentBias(7)()
        7
    """

    exponent_bias: int

    def __post_init__(self) -> None:
        checked_width("exponent_bias", self.exponent_bias, -(2**10), 2**10)

    def __call__(self) -> int:
        """The bias."""
        return self.exponent_bias


@checked_arguments
class ComputeExponentBias(Component):
    """The bias for e exponent bits: `2**(e - 1) - 1`.

    Args:
        exponent_bit_width_impl: e.

    Example:
        >>> ComputeExponentBias(ExponentWidthConst(4))()
        7
    """

    exponent_bit_width_impl: BitWidth

    def __init__(self, exponent_bit_width_impl: BitWidth) -> None:
        assign(self, exponent_bit_width_impl=exponent_bit_width_impl)

    def __call__(self) -> Any:
        """The bias: an int for constant bits, else a float32 array."""
        width = self.exponent_bit_width_impl()
        return 2 ** (width - 1) - 1 if isinstance(width, int) else exp2(width - 1.0) - 1.0
