"""The range of a minifloat, and its valid codes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jqinject.ops.power import exp2


def max_mantissa(mantissa_bit_width: Any) -> Any:
    """The largest mantissa of a bit width, including the implicit 1: `2 - 2**-m`.

    Example:
        >>> max_mantissa(3), max_mantissa(0)
        (1.875, 1.0)
    """
    if isinstance(mantissa_bit_width, int):
        return 2.0 - 2.0**-mantissa_bit_width
    return 2.0 - exp2(-mantissa_bit_width)


def max_float(exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any) -> Any:
    """The largest number of a minifloat all of whose codes are numbers: `max_mantissa * 2**(2**e - 1 - bias)`.

    Args:
        exponent_bit_width: e.
        max_mantissa: the largest mantissa, including the implicit 1; see `ops.max_mantissa`.
        exponent_bias: subtracted from the exponent field.

    Returns:
        A Python float if all are Python numbers, else a float32 array, differentiable.

    Example:
        >>> max_float(4, 1.875, 7), max_float(2, 1.5, 1)
        (480.0, 6.0)
    """
    if all(isinstance(given, int | float) for given in (exponent_bit_width, max_mantissa, exponent_bias)):
        return math.ldexp(max_mantissa, 2**exponent_bit_width - 1 - int(exponent_bias))
    largest = 2**exponent_bit_width if isinstance(exponent_bit_width, int) else exp2(exponent_bit_width)
    return max_mantissa * exp2(largest - 1.0 - exponent_bias)


def max_available_float(
    exponent_bit_width: int,
    mantissa_bit_width: int,
    exponent_bias: int,
    nan_values: tuple[str, ...] | None,
    inf_values: tuple[str, ...] | None,
    saturating: bool = True,
) -> float:
    """The largest number below the codes for inf and nan: the one before the least of them.

    Args:
        exponent_bit_width: of the format.
        mantissa_bit_width: of the format.
        exponent_bias: of the format.
        nan_values: mantissas, in binary, that mean nan together with the largest exponent; None for no nan.
        inf_values: likewise for inf.
        saturating: whether numbers that are too large become the largest.

    Returns:
        The number.

    Raises:
        ValueError: a code is not a mantissa; inf without nan; neither, and not saturating.

    Example:
        >>> max_available_float(4, 3, 7, ("111",), None), max_available_float(5, 2, 15, ("01", "10", "11"), ("00",))
        (448.0, 57344.0)
    """
    check_codes(mantissa_bit_width, inf_values, nan_values, saturating)
    codes = [int(code, 2) for code in (*(nan_values or ()), *(inf_values or ()))]
    top = 2**exponent_bit_width - 1 - exponent_bias
    steps = 2**mantissa_bit_width
    if not codes:
        return math.ldexp(2 * steps - 1, top - mantissa_bit_width)
    if min(codes) == 0:  # the largest exponent has no numbers left
        return math.ldexp(2 * steps - 1, top - 1 - mantissa_bit_width)
    return math.ldexp(steps + min(codes) - 1, top - mantissa_bit_width)


def check_codes(
    mantissa_bit_width: Any,
    inf_values: tuple[str, ...] | None,
    nan_values: tuple[str, ...] | None,
    saturating: bool,
) -> None:
    """Refuse codes for inf and nan that no format has.

    Raises:
        ValueError: see `max_available_float`.
    """
    for name, codes in (("inf_values", inf_values), ("nan_values", nan_values)):
        for code in codes or ():
            if not (isinstance(code, str) and code and set(code) <= {"0", "1"}):
                raise ValueError(f"{name}: a code is a text of 0s and 1s such as '111', got {code!r}")
            if isinstance(mantissa_bit_width, int) and len(code) != mantissa_bit_width:
                raise ValueError(
                    f"{name}: the code {code!r} has {len(code)} bits, the mantissa has {mantissa_bit_width}.\n"
                    "  cure: write all bits of the mantissa, no more"
                )
    if inf_values is not None and nan_values is None:
        raise ValueError("a format with codes for inf has some for nan too.\n  cure: declare nan_values")
    if not saturating and nan_values is None:
        raise ValueError(
            "saturating = False, and the format has neither inf nor nan that a number which is too large could become."
            "\n  cure: saturating = True, or declare nan_values (and inf_values)"
        )


def checked_width(name: str, width: Any, least: int, most: int) -> None:
    """Refuse a bit width that no minifloat has.

    Raises:
        TypeError: it is not an int.
        ValueError: it is out of range.
    """
    if isinstance(width, bool) or not isinstance(width, int | np.integer):
        raise TypeError(f"{name} must be an int, got {width!r}")
    if not least <= width <= most:
        raise ValueError(f"{name} must be in {least} .. {most}, got {width}")
