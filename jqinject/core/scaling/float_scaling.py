"""The number that minifloat scales map to: the largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.float_clamp import largest_float


@checked_arguments
@dataclass(frozen=True)
class FloatScaling:
    """The number that the statistic is scaled to: the largest of the format.

    Args:
        max_available_float: largest number; None if all codes are numbers.
        inf_values, nan_values, saturating: unused.

    Example:
        >>> FloatScaling()(4, 1.875, 7), FloatScaling(max_available_float=448.0)(4, 1.875, 7)
        (480.0, 448.0)
    """

    max_available_float: float | None = None
    inf_values: tuple[str, ...] | None = None
    nan_values: tuple[str, ...] | None = None
    saturating: bool = True

    def __call__(self, exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any) -> Any:
        """A Python float for constant widths, else a float32 array."""
        return largest_float(exponent_bit_width, max_mantissa, exponent_bias, self.max_available_float)
