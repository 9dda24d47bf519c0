"""Minifloat formats: bit widths, bias, codes that are not numbers, and the codes of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jqinject.ops import fake_quant, power, ste
from jqinject.ops.grid import Grid, Rounding, narrowest
from jqinject.ops.minifloat import (
    MOST_EXPONENT_BITS,
    MOST_MANTISSA_BITS,
    check_codes,
    checked_width,
    float_steps,
    from_float_steps,
    max_available_float,
    max_float,
    max_mantissa,
    to_float_grid,
)


@dataclass(frozen=True)
class FloatGrid(Grid):
    """A minifloat format.

    A number is `(-1)**sign * mantissa * 2**(field - bias)` with the mantissa in [1, 2), or for the exponent field 0
    `(-1)**sign * fraction * 2**(1 - bias)` with the fraction in [0, 1).

    Attributes:
        exponent_bit_width: 1 to 8; or an array if learned.
        mantissa_bit_width: 0 to 22, without the implicit 1; or an array if learned.
        exponent_bias: subtracted from the exponent field; None means `2**(e - 1) - 1`.
        signed: whether there is a sign bit.
        saturating: whether numbers that are too large become the largest; else inf, or nan if there is no inf.
        inf_values: mantissas, in binary, that mean inf together with the largest exponent; None for no inf.
        nan_values: likewise for nan.
        max_available_float: the largest number; None if all codes are numbers.

    Raises:
        TypeError: a width is neither an int nor an array.
        ValueError: a width is out of range; float32 cannot hold the numbers; no format has these codes.

    Example:
        >>> FloatGrid(4, 3).largest, FloatGrid(4, 3, nan_values=("111",), max_available_float=448.0).dtype
        (480.0, dtype(float8_e4m3fn))
        >>> form = FloatGrid.of_dtype("float4_e2m1fn")
        >>> form.bounds, form.round(jnp.array([2.6, -9.0]))
        ((-6.0, 6.0), Array([ 3., -6.], dtype=float32))
    """

    exponent_bit_width: Any
    mantissa_bit_width: Any
    exponent_bias: Any = None
    signed: bool = True
    saturating: bool = True
    inf_values: tuple[str, ...] | None = None
    nan_values: tuple[str, ...] | None = None
    max_available_float: float | None = None
    is_minifloat = True
    learnable = ("exponent_bit_width", "mantissa_bit_width", "exponent_bias")

    def __post_init__(self) -> None:
        for name in self.learnable:
            if isinstance(width := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(width))
        exponent, mantissa, bias = self.widths
        if not isinstance(exponent, jax.Array):
            checked_width("exponent_bit_width", exponent, 1, MOST_EXPONENT_BITS)
        if not isinstance(mantissa, jax.Array):
            checked_width("mantissa_bit_width", mantissa, 0, MOST_MANTISSA_BITS)
        if bias is None:
            bias = power.power(exponent - 1) - 1
            object.__setattr__(self, "exponent_bias", bias)
        check_codes(mantissa, self.inf_values, self.nan_values, self.saturating)
        if self.is_learned:
            return
        least = 1 - bias - mantissa
        if least < -126 or self.largest > float(np.finfo(np.float32).max):
            raise ValueError(
                f"a minifloat of {exponent} bits of exponent, {mantissa} of mantissa and bias {bias} has "
                "numbers that float32, in which it is computed, does not hold.\n"
                "  cure: fewer bits of exponent, another exponent_bias, or max_available_float"
            )

    @classmethod
    def of_dtype(cls, dtype: DTypeLike) -> FloatGrid:
        """The grid of one of JAX's narrow float dtypes.

        Raises:
            TypeError: for any other dtype.
        """
        form = DTYPE_GRIDS.get(np.dtype(dtype))
        if form is None:
            names = ", ".join(narrow.name for narrow in DTYPE_GRIDS)
            raise TypeError(f"{np.dtype(dtype).name} is no minifloat; JAX has {names}")
        return form

    @property
    def widths(self) -> tuple[Any, Any, Any]:
        """Bits of the exponent and of the mantissa, and the bias."""
        return self.exponent_bit_width, self.mantissa_bit_width, self.exponent_bias

    @property
    def bit_width(self) -> Any:
        """Bits of one number."""
        return self.exponent_bit_width + self.mantissa_bit_width + int(self.signed)

    @property
    def largest(self) -> Any:
        """The largest number."""
        exponent, mantissa, bias = self.widths
        return max_float(exponent, max_mantissa(mantissa), bias, self.max_available_float)

    @property
    def bounds(self) -> tuple[Any, Any]:
        """The least number, 0 without a sign, and the largest."""
        return (-self.largest if self.signed else 0.0), self.largest

    @property
    def smallest_subnormal(self) -> Any:
        """The least number above 0."""
        exponent = 1 - self.exponent_bias - self.mantissa_bit_width
        return power.exp2(exponent) if self.is_learned else 2.0**exponent

    @property
    def dtype(self) -> np.dtype | None:
        """The JAX dtype that is exactly this format, or None."""
        return None if self.is_learned else _dtype_of(self)

    @property
    def storage(self) -> np.dtype:
        """The dtype of payloads: its own if backends convert to it, else that of its codes."""
        dtype = self.dtype
        return self.code_dtype if dtype is None or dtype in NOT_CONVERTED else dtype

    @property
    def code_dtype(self) -> np.dtype:
        """The narrowest unsigned integers that hold its codes one by one: uint8, uint16 or uint32."""
        return narrowest(self.bit_width, "uint")

    @property
    def is_ocp(self) -> bool:
        """Whether it is one of OCP's 8-bit formats, e4m3 or e5m2, with their codes for inf and nan."""
        return self._is_one_of(jnp.float8_e4m3fn, jnp.float8_e5m2)

    @property
    def is_fnuz(self) -> bool:
        """Whether it is e4m3 or e5m2 with a bias one higher, no inf, and the code of negative 0 for nan."""
        return self._is_one_of(jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz)

    def _is_one_of(self, *dtypes: Any) -> bool:
        """Whether it has the widths and the codes of one of these, wherever its numbers end."""
        return not self.is_learned and any(
            _codes(self) == _codes(DTYPE_GRIDS[np.dtype(name)]) for name in dtypes
        )

    def unbounded(self, steps: jax.Array, rounding: Rounding) -> jax.Array:
        """The minifloats, float32, of any size."""
        return to_float_grid(steps, self.mantissa_bit_width, self.exponent_bias, rounding)

    def encode(self, steps: jax.Array) -> jax.Array:
        """Minifloats in `storage`: a float dtype that backends convert to, else their codes; no gradient.

        Example:
            >>> FloatGrid.of_dtype(jnp.float8_e4m3fn).encode(jnp.array([3.0]))
            Array([3], dtype=float8_e4m3fn)
        """
        return self.cast(jax.lax.stop_gradient(steps))

    def cast(self, steps: jax.Array) -> jax.Array:
        """As `encode`, for where the gradient is cut already: a cut is an operation of the traced program."""
        dtype = self.storage
        if jnp.issubdtype(dtype, jnp.integer):
            return self.codes(steps)
        if self.is_fnuz:  # the code of -0 is nan, which XLA's older loops return for small negative numbers
            steps = jnp.where(jnp.abs(steps) <= self.smallest_subnormal / 2, 0.0, steps)
        return steps.astype(dtype)

    def decode(self, payload: jax.Array) -> jax.Array:
        """The numbers that a payload or codes stand for, float32.

        Example:
            >>> FloatGrid(2, 1).decode(jnp.array([0, 2, 15, 1], jnp.uint8))
            Array([ 0. ,  1. , -6. ,  0.5], dtype=float32)
        """
        if jnp.issubdtype(payload.dtype, jnp.floating):
            return payload.astype(jnp.float32)
        mantissa, bias, sign_bit = self.mantissa_bit_width, self.exponent_bias, self._sign_bit
        wide = payload.astype(jnp.uint32)
        magnitude = wide & jnp.uint32(sign_bit - 1)
        field, fraction = (magnitude >> mantissa).astype(jnp.int32), magnitude & jnp.uint32(2**mantissa - 1)
        # From 2**128 on, which only codes of no numbers reach, it is inf.
        step = power.integer_power(jnp.clip(field, 1, 128 + bias + mantissa) - (bias + mantissa))
        value = jnp.where(field > 0, fraction + 2**mantissa, fraction).astype(jnp.float32) * step
        largest, nan, inf = self._last_codes
        if inf is not None:
            value = jnp.where(magnitude == inf, jnp.inf, value)
        if self.signed:
            value = jnp.where(wide & jnp.uint32(sign_bit) > 0, -value, value)
        if nan == sign_bit:
            return jnp.where(wide == nan, jnp.nan, value) if self.signed else value
        is_nan = magnitude > largest
        return jnp.where(is_nan if inf is None else is_nan & (magnitude != inf), jnp.nan, value)

    def codes(self, steps: jax.Array) -> jax.Array:
        """Sign, exponent field and mantissa as one unsigned integer, of `code_dtype`.

        nan takes its own code if the format has one, else that of negative 0, as in the FNUZ formats; inf takes its own
        code, else that of nan. A number that is not on the grid is rounded, and saturates.

        Args:
            steps: float array; no gradient.

        Example:
            >>> FloatGrid(2, 1).codes(jnp.array([0.0, 1.0, -6.0, 0.5]))
            Array([ 0,  2, 15,  1], dtype=uint8)
        """
        mantissa, bias = self.mantissa_bit_width, self.exponent_bias
        x = jax.lax.stop_gradient(steps).astype(jnp.float32)
        field = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> 23
        exponent = jnp.clip(field - 127, 1 - bias, 126 + mantissa)
        # A fraction that is rounded up to the next power of two carries into the exponent.
        fraction = jnp.round(jnp.abs(x) * power.integer_power(mantissa - exponent)).astype(jnp.int32)
        largest, nan, inf = self._last_codes
        codes = jnp.minimum(fraction + (exponent - (1 - bias) << mantissa), largest).astype(jnp.uint32)
        signs = jnp.where(jnp.signbit(x), jnp.uint32(self._sign_bit if self.signed else 0), jnp.uint32(0))
        codes = jnp.where(codes > 0, codes | signs, 0) if self.signed else jnp.where(x < 0, 0, codes)
        if inf is not None:
            codes = jnp.where(jnp.isinf(x), jnp.uint32(inf) | signs, codes)
        is_number = jnp.isfinite(x) if inf is None else ~jnp.isnan(x)
        return jnp.where(is_number, codes, jnp.uint32(nan)).astype(self.code_dtype)

    @property
    def _sign_bit(self) -> int:
        """The code of negative 0."""
        return 1 << (self.exponent_bit_width + self.mantissa_bit_width)

    @cached_property
    def _last_codes(self) -> tuple[int, int, int | None]:
        """The codes, without a sign, of the largest number, of nan and of inf.

        That of nan is that of negative 0 if the format has no other, that of inf None if it is stored as nan. If a
        number has the same code, the code means the number.
        """
        bits = self.mantissa_bit_width
        mantissa, exponent = math.frexp(self.largest)
        largest = (exponent - 1 + self.exponent_bias << bits) + int((2 * mantissa - 1) * 2**bits)
        top = (2**self.exponent_bit_width - 1) << bits
        nans, infs = (
            [top + int(code, 2) for code in codes or () if top + int(code, 2) > largest]
            for codes in (self.nan_values, self.inf_values)
        )
        return largest, nans[0] if nans else self._sign_bit, infs[0] if infs else None

    def known(self) -> FloatGrid:
        """The grid with its current widths as constants, if these are not traced.

        Raises:
            ValueError: the widths are not whole numbers.
        """
        widths = [float(width) for width in self.widths]
        if not all(width.is_integer() for width in widths):
            raise ValueError(
                f"a minifloat with widths {widths[0]:g} and {widths[1]:g} and bias {widths[2]:g} has no codes: they "
                "have to be whole numbers"
            )
        exponent, mantissa, bias = (int(width) for width in widths)
        return replace(self, exponent_bit_width=exponent, mantissa_bit_width=mantissa, exponent_bias=bias)

    def __str__(self) -> str:
        if self.is_learned:
            return "a minifloat of learned widths"
        if self.dtype is not None:
            return self.dtype.name
        sign = "" if self.signed else "unsigned "
        return f"{sign}e{self.exponent_bit_width}m{self.mantissa_bit_width} up to {self.largest:g}"


@cache
def _dtype_of(form: FloatGrid) -> np.dtype | None:
    for dtype, exact in DTYPE_GRIDS.items():
        same = (*form.widths, form.signed, form.largest) == (*exact.widths, exact.signed, exact.largest)
        if same and (form.saturating or (form.inf_values is None) == (exact.inf_values is None)):
            return dtype
    return None


def _codes(form: FloatGrid) -> tuple[Any, ...]:
    return (*form.widths, form.signed, form.inf_values, frozenset(form.nan_values or ()))


def _ieee(exponent: int, mantissa: int) -> FloatGrid:
    """A format whose largest exponent encodes only inf and nan."""
    codes = tuple(format(code, f"0{mantissa}b") for code in range(2**mantissa))
    inf, nan = codes[:1], codes[1:]
    largest = max_available_float(exponent, mantissa, 2 ** (exponent - 1) - 1, nan, inf)
    return FloatGrid(exponent, mantissa, None, True, False, inf, nan, largest)


DTYPE_GRIDS: Mapping[np.dtype, FloatGrid] = {
    np.dtype(jnp.float8_e4m3fn): FloatGrid(
        4, 3, saturating=False, nan_values=("111",), max_available_float=448.0
    ),
    np.dtype(jnp.float8_e5m2): _ieee(5, 2),
    np.dtype(jnp.float8_e4m3fnuz): FloatGrid(4, 3, 8),
    np.dtype(jnp.float8_e5m2fnuz): FloatGrid(5, 2, 16),
    np.dtype(jnp.float8_e4m3b11fnuz): FloatGrid(4, 3, 11),
    np.dtype(jnp.float8_e4m3): _ieee(4, 3),
    np.dtype(jnp.float8_e3m4): _ieee(3, 4),
    np.dtype("float6_e3m2fn"): FloatGrid(3, 2),
    np.dtype("float6_e2m3fn"): FloatGrid(2, 3),
    np.dtype(jnp.float4_e2m1fn): FloatGrid(2, 1),
}
# Dtypes that JAX knows by name but has no compiled conversion for.
NOT_CONVERTED = (np.dtype("float6_e3m2fn"), np.dtype("float6_e2m3fn"))


def quantize_on_grid(
    x: jax.Array,
    grid: Grid,
    scale: jax.Array,
    zero_point: jax.Array | None = None,
    rounding: Rounding = ste.nearest,
    dtype: DTypeLike = jnp.float32,
    *,
    by_reciprocal: bool = False,
) -> jax.Array:
    """Quantize and dequantize on any grid: `(grid.round(x / scale + zero_point) - zero_point) * scale`.

    It has no gradient of its own: how it passes `x` is up to the caller and the rounding.

    Args:
        x: a float32 array.
        grid: the numbers at scale 1.
        scale: float per step, not 0; broadcasts with `x`.
        zero_point: the number that represents 0, likewise; None if absent.
        rounding: to whole numbers; tables have one of their own.
        dtype: of the result, whose range it does not exceed.
        by_reciprocal: whether numbers that share a scale are multiplied by its reciprocal, as quantizers with a
            symmetric range do; see `jqinject.ops.by_reciprocal`.

    Example:
        >>> from jqinject.ops import FloatGrid, IntGrid
        >>> x = jnp.array([0.26, -0.9, 9.0])
        >>> quantize_on_grid(x, IntGrid(4), jnp.float32(0.5)), quantize_on_grid(x, FloatGrid(2, 1), jnp.float32(0.5))
        (Array([ 0.5, -1. ,  3.5], dtype=float32), Array([ 0.25, -1.  ,  3.  ], dtype=float32))
    """
    shared = by_reciprocal and scale.size != x.size
    steps = x * fake_quant.quotient(jnp.float32(1.0), scale) if shared else float_steps(x, scale)
    if zero_point is None:
        return from_float_steps(grid.round(steps, rounding), scale, dtype)
    return from_float_steps(grid.round(steps + zero_point, rounding) - zero_point, scale, dtype)
