"""Clamping to the range of a minifloat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Clamp
from jqinject.core.clamp import TensorClamp
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.facts import is_nearest
from jqinject.ops.minifloats.float_range import check_codes, max_float


def largest_float(exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any, end: float | None) -> Any:
    """The largest number of a format, at most `end`."""
    largest = max_float(exponent_bit_width, max_mantissa, exponent_bias)
    if end is None:
        return largest
    return min(largest, end) if isinstance(largest, float) else jnp.minimum(largest, end)


@checked_arguments
@dataclass(frozen=True)
class FloatClamp:
    """Clamp to the largest minifloat, or, without saturation, turn larger values into inf or nan.

    nan stays nan. Infinities become inf if the format has it, else nan.

    Args:
        tensor_clamp_impl: how to clamp, and where the gradient goes; None means `TensorClamp()`.
        signed: whether there are negative numbers.
        inf_values: mantissas, in binary, that mean inf together with the largest exponent; None for no inf.
        nan_values: likewise for nan.
        max_available_float: largest number; None if all codes are numbers.
        saturating: clamp.

    Raises:
        ValueError: invalid codes; neither saturation, inf nor nan.

    Example:
        >>> FloatClamp(signed=True)(jnp.array([500.0, -3.0]), 4, 1.875, 7)
        Array([480.,  -3.], dtype=float32)
        >>> clamp = FloatClamp(signed=True, nan_values=("111",), max_available_float=448.0, saturating=False)
        >>> clamp(jnp.array([500.0, -3.0]), 4, 1.875, 7)
        Array([nan, -3.], dtype=float32)
    """

    tensor_clamp_impl: Clamp | None = None
    signed: bool = True
    inf_values: tuple[str, ...] | None = None
    nan_values: tuple[str, ...] | None = None
    max_available_float: float | None = None
    saturating: bool = True

    def __post_init__(self) -> None:
        for name in ("inf_values", "nan_values"):
            codes = getattr(self, name)
            if codes is not None:
                object.__setattr__(self, name, tuple(codes))
        check_codes(None, self.inf_values, self.nan_values, self.saturating)

    @property
    def is_nearest(self) -> bool:
        """Whether it only clamps to the largest number."""
        return self.saturating and (self.tensor_clamp_impl is None or is_nearest(self.tensor_clamp_impl))

    def __call__(
        self, x: jax.Array, exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any
    ) -> jax.Array:
        """`x` clamped, float32."""
        largest = largest_float(exponent_bit_width, max_mantissa, exponent_bias, self.max_available_float)
        least = -largest if self.signed else 0.0
        clamp = self.tensor_clamp_impl or TensorClamp()
        y = clamp(x, min_val=least, max_val=largest)
        above = x > largest if not self.saturating else jnp.isposinf(x)
        below = x < least if not self.saturating else jnp.isneginf(x)
        if self.inf_values is None:
            return jnp.where(above | below, jnp.nan, y)
        return jnp.where(above, jnp.inf, jnp.where(below, -jnp.inf, y))


@checked_arguments
@dataclass(frozen=True)
class FloatSaturate:
    """Clamp to the largest minifloat, infinities too, as conversions of hardware do; nan stays nan.

    Args:
        signed: whether there are negative numbers.
        inf_values, nan_values: as of `FloatClamp`.
        max_available_float: largest number; None if all codes are numbers.

    Example:
        >>> FloatSaturate()(jnp.array([500.0, -jnp.inf, jnp.nan]), 4, 1.875, 7)
        Array([ 480., -480.,   nan], dtype=float32)
    """

    signed: bool = True
    inf_values: tuple[str, ...] | None = None
    nan_values: tuple[str, ...] | None = None
    max_available_float: float | None = None
    saturating = True

    def __post_init__(self) -> None:
        for name in ("inf_values", "nan_values"):
            codes = getattr(self, name)
            if codes is not None:
                object.__setattr__(self, name, tuple(codes))

    def __call__(
        self, x: jax.Array, exponent_bit_width: Any, max_mantissa: Any, exponent_bias: Any
    ) -> jax.Array:
        """`x` clamped, float32."""
        largest = largest_float(exponent_bit_width, max_mantissa, exponent_bias, self.max_available_float)
        return TensorClamp()(x, min_val=-largest if self.signed else 0.0, max_val=largest)
