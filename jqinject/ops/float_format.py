"""Formats of minifloats, and their largest numbers.

The range of a minifloat, and its valid codes.

Minifloat formats: bit widths, bias, codes that are not numbers, and range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
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


MOST_EXPONENT_BITS = 8
MOST_MANTISSA_BITS = 22  # float32 must also hold the implicit bit and the rounding bit


@dataclass(frozen=True)
class FloatFormat:
    """A minifloat format: static, compared by value.

    A number is `(-1)**sign * mantissa * 2**(field - bias)` with the mantissa in [1, 2), or for the exponent field 0
    `(-1)**sign * fraction * 2**(1 - bias)` with the fraction in [0, 1).

    Attributes:
        exponent_bit_width: 1 to 8.
        mantissa_bit_width: 0 to 22, without the implicit 1.
        exponent_bias: subtracted from the exponent field; None means `2**(e - 1) - 1`.
        signed: whether there is a sign bit.
        saturating: whether numbers that are too large become the largest; else inf, or nan if there is no inf.
        inf_values: mantissas, in binary, that mean inf together with the largest exponent; None for no inf.
        nan_values: likewise for nan.
        max_available_float: the largest number; None if all codes are numbers.

    Raises:
        TypeError: a width is not an int.
        ValueError: a width is out of range; float32 cannot hold the numbers; no format has these codes.

    Example:
        >>> FloatFormat(4, 3).max_value, FloatFormat(4, 3, nan_values=("111",), max_available_float=448.0).dtype
        (480.0, dtype(float8_e4m3fn))
        >>> FloatFormat.of_dtype("float4_e2m1fn").max_value
        6.0
    """

    exponent_bit_width: int
    mantissa_bit_width: int
    exponent_bias: int | None = None
    signed: bool = True
    saturating: bool = True
    inf_values: tuple[str, ...] | None = None
    nan_values: tuple[str, ...] | None = None
    max_available_float: float | None = None

    def __post_init__(self) -> None:
        checked_width("exponent_bit_width", self.exponent_bit_width, 1, MOST_EXPONENT_BITS)
        checked_width("mantissa_bit_width", self.mantissa_bit_width, 0, MOST_MANTISSA_BITS)
        if self.exponent_bias is None:
            object.__setattr__(self, "exponent_bias", 2 ** (self.exponent_bit_width - 1) - 1)
        check_codes(self.mantissa_bit_width, self.inf_values, self.nan_values, self.saturating)
        least = 1 - self.bias - self.mantissa_bit_width
        if least < -126 or self.max_value > float(np.finfo(np.float32).max):
            raise ValueError(
                f"a minifloat of {self.exponent_bit_width} bits of exponent, {self.mantissa_bit_width} of mantissa and "
                f"bias {self.exponent_bias} has numbers that float32, in which it is computed, does not hold.\n"
                "  cure: fewer bits of exponent, another exponent_bias, or max_available_float"
            )

    @property
    def bias(self) -> int:
        """The exponent bias."""
        assert self.exponent_bias is not None, "set at construction"
        return self.exponent_bias

    @property
    def bit_width(self) -> int:
        """Bits of one number."""
        return int(self.signed) + self.exponent_bit_width + self.mantissa_bit_width

    @property
    def max_value(self) -> float:
        """The largest number."""
        codes = 2**self.exponent_bit_width - 1 - self.bias
        all_codes = math.inf if codes > 127 else math.ldexp(2.0 - 2.0**-self.mantissa_bit_width, codes)
        return all_codes if self.max_available_float is None else min(all_codes, self.max_available_float)

    @property
    def min_value(self) -> float:
        """The least number: `-max_value`, or 0 without a sign."""
        return -self.max_value if self.signed else 0.0

    @property
    def smallest_subnormal(self) -> float:
        """The least number above 0."""
        return 2.0 ** (1 - self.bias - self.mantissa_bit_width)

    @property
    def dtype(self) -> np.dtype | None:
        """The JAX dtype that is exactly this format, or None."""
        for dtype, known in DTYPE_FORMATS.items():
            same = _numbers_of(self) == _numbers_of(known)
            overflow = self.saturating or (self.inf_values is None) == (known.inf_values is None)
            if same and overflow:
                return dtype
        return None

    @property
    def payload_dtype(self) -> np.dtype:
        """The dtype that its numbers are stored in: its own if backends convert to it, else that of its codes."""
        dtype = self.dtype
        return self.code_dtype if dtype is None or dtype in NOT_CONVERTED else dtype

    @property
    def code_dtype(self) -> np.dtype:
        """The narrowest unsigned integers that hold its codes one by one: uint8, uint16 or uint32."""
        return np.dtype(next(f"uint{bits}" for bits in (8, 16, 32) if self.bit_width <= bits))

    @property
    def is_ocp(self) -> bool:
        """Whether it is one of OCP's 8-bit formats, e4m3 or e5m2, with their codes for inf and nan."""
        return self.signed and _widths_and_codes(self) in _OCP

    @property
    def is_fnuz(self) -> bool:
        """Whether it is e4m3 or e5m2 with a bias one higher, no inf, and the code of negative 0 for nan."""
        return self.signed and _widths_and_codes(self) in _FNUZ

    def __str__(self) -> str:
        if self.dtype is not None:
            return self.dtype.name
        sign = "" if self.signed else "unsigned "
        return f"{sign}e{self.exponent_bit_width}m{self.mantissa_bit_width} up to {self.max_value:g}"

    @classmethod
    def of_dtype(cls, dtype: Any) -> FloatFormat:
        """The format of one of JAX's narrow float dtypes.

        Raises:
            TypeError: for any other dtype.
        """
        found = DTYPE_FORMATS.get(np.dtype(dtype))
        if found is None:
            names = ", ".join(known.name for known in DTYPE_FORMATS)
            raise TypeError(f"{np.dtype(dtype).name} is no minifloat; JAX has {names}")
        return found


def _numbers_of(form: FloatFormat) -> tuple[Any, ...]:
    return (form.exponent_bit_width, form.mantissa_bit_width, form.bias, form.signed, form.max_value)


def _widths_and_codes(form: FloatFormat) -> tuple[Any, ...]:
    nan = None if form.nan_values is None else frozenset(form.nan_values)
    return (form.exponent_bit_width, form.mantissa_bit_width, form.bias, form.inf_values, nan)


_OCP = (
    (4, 3, 7, None, frozenset({"111"})),
    (5, 2, 15, ("00",), frozenset({"01", "10", "11"})),
)
_FNUZ = ((4, 3, 8, None, None), (5, 2, 16, None, None))


def _ieee(exponent: int, mantissa: int) -> FloatFormat:
    """A format whose largest exponent encodes only inf and nan."""
    codes = tuple(format(code, f"0{mantissa}b") for code in range(2**mantissa))
    largest = max_available_float(exponent, mantissa, 2 ** (exponent - 1) - 1, codes[1:], codes[:1])
    return FloatFormat(
        exponent,
        mantissa,
        saturating=False,
        inf_values=codes[:1],
        nan_values=codes[1:],
        max_available_float=largest,
    )


DTYPE_FORMATS: Mapping[np.dtype, FloatFormat] = {
    np.dtype(jnp.float8_e4m3fn): FloatFormat(
        4, 3, saturating=False, nan_values=("111",), max_available_float=448.0
    ),
    np.dtype(jnp.float8_e5m2): _ieee(5, 2),
    np.dtype(jnp.float8_e4m3fnuz): FloatFormat(4, 3, 8),
    np.dtype(jnp.float8_e5m2fnuz): FloatFormat(5, 2, 16),
    np.dtype(jnp.float8_e4m3b11fnuz): FloatFormat(4, 3, 11),
    np.dtype(jnp.float8_e4m3): _ieee(4, 3),
    np.dtype(jnp.float8_e3m4): _ieee(3, 4),
    np.dtype("float6_e3m2fn"): FloatFormat(3, 2),
    np.dtype("float6_e2m3fn"): FloatFormat(2, 3),
    np.dtype(jnp.float4_e2m1fn): FloatFormat(2, 1),
}
# Dtypes that JAX knows by name but has no compiled conversion for.
NOT_CONVERTED = (np.dtype("float6_e3m2fn"), np.dtype("float6_e2m3fn"))


def _static(default: Any) -> Any:
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnedFloatFormat:
    """A format whose widths are learned: arrays, differentiable; a pytree.

    Attributes:
        exponent_bit_width: float32 scalar or a number.
        mantissa_bit_width: likewise.
        exponent_bias: likewise.
        signed, saturating, inf_values, nan_values, max_available_float: as in `FloatFormat`.
    """

    exponent_bit_width: Any
    mantissa_bit_width: Any
    exponent_bias: Any
    signed: bool = _static(True)
    saturating: bool = _static(True)
    inf_values: tuple[str, ...] | None = _static(None)
    nan_values: tuple[str, ...] | None = _static(None)
    max_available_float: float | None = _static(None)

    dtype = None

    @property
    def bias(self) -> Any:
        """The exponent bias."""
        return self.exponent_bias

    @property
    def bit_width(self) -> Any:
        """Bits of one number."""
        return self.exponent_bit_width + self.mantissa_bit_width + int(self.signed)

    @property
    def max_value(self) -> Any:
        """The largest number."""
        widths = (self.exponent_bit_width, max_mantissa(self.mantissa_bit_width), self.exponent_bias)
        largest = max_float(*widths)
        if self.max_available_float is None:
            return largest
        return jnp.minimum(largest, self.max_available_float)

    def __str__(self) -> str:
        return "a minifloat of learned widths"

    def known(self) -> FloatFormat:
        """The format with the current widths, if these are not traced.

        Raises:
            ValueError: the widths are not whole numbers.
        """
        widths = [float(width) for width in (self.exponent_bit_width, self.mantissa_bit_width, self.bias)]
        if not all(width.is_integer() for width in widths):
            raise ValueError(
                f"a minifloat with widths {widths[0]:g} and {widths[1]:g} and bias {widths[2]:g} has no codes: they "
                "have to be whole numbers"
            )
        exponent, mantissa, bias = (int(width) for width in widths)
        codes = (self.signed, self.saturating, self.inf_values, self.nan_values, self.max_available_float)
        return FloatFormat(exponent, mantissa, bias, *codes)
