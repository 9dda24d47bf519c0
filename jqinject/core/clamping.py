"""Components that clamp, and other functions as components: frozen, compared by value.

`tensor_clamp_impl(x, min_val, max_val)` clamps integers to bounds that it is called with, or to bounds of its own;
`FloatClamp` clamps to the range of a minifloat.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jqinject.core import check, component
from jqinject.core._protocols import Clamp, is_nearest
from jqinject.ops import clamps, exp2, log2
from jqinject.ops.lean import Bits
from jqinject.ops.minifloat import check_codes, max_float


@dataclass(frozen=True)
class Identity:
    """Returns its input.

    Example:
        >>> Identity()(3)
        3
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `x`."""
        return x


@dataclass(frozen=True)
class TensorClamp:
    """Clamp; where it clamps, the gradient goes to the bound. See `jqinject.ops.tensor_clamp`.

    Example:
        >>> import jax.numpy as jnp
        >>> TensorClamp()(jnp.array([-3.0, 0.5, 3.0]), -2.0, 2.0)
        Array([-2. ,  0.5,  2. ], dtype=float32)
    """

    is_nearest = True
    passes_gradient = False

    def __call__(self, x: ArrayLike, min_val: ArrayLike, max_val: ArrayLike) -> jax.Array:
        """Clamp `x` to `min_val` .. `max_val`."""
        return clamps.tensor_clamp(x, min_val, max_val)


class ClampBeforeRounding(TensorClamp):
    """Clamps as `TensorClamp`; in an `IntQuant`, numbers beyond a bound before rounding count as clamped already.

    The values are the same, the gradient of a number within half a step beyond a bound is not: it goes to the bound.
    By itself, and after a rounding that has state, it is `TensorClamp`.

    Source: LSQ, `round(clamp(x / s))`.
    """

    clamps_first = True


class TensorClampSte(TensorClamp):
    """Clamp; the gradient goes straight through to `x`. See `jqinject.ops.tensor_clamp_ste`."""

    passes_gradient = True

    def __call__(self, x: ArrayLike, min_val: ArrayLike, max_val: ArrayLike) -> jax.Array:
        """Clamp `x` to `min_val` .. `max_val`."""
        return clamps.tensor_clamp_ste(x, min_val, max_val)


@component.frozen_value
class ClampMin:
    """`max(x, min_val)`; no gradient where it clamps.

    Args:
        min_val: lower bound.
    """

    min_val: check.Bound

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp `x` from below."""
        return clamps.tensor_clamp(x, self.min_val, float("inf"))


class ScalarClampMinSte(ClampMin):
    """`max(x, min_val)` with gradient 1.

    Args:
        min_val: lower bound.
    """

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp `x` from below."""
        return clamps.scalar_clamp_min_ste(x, self.min_val)


class ScalarSignedClampMinSte(ClampMin):
    """Keep `x` at least `min_val` away from zero, with gradient 1. See `jqinject.ops.signed_clamp_min_ste`.

    Args:
        min_val: lower bound of the magnitude; its sign is ignored.
    """

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp the magnitude of `x` from below."""
        return clamps.signed_clamp_min_ste(x, abs(self.min_val))


@component.frozen_value
class ScalarClamp:
    """Clamp to fixed bounds; no gradient where it clamps.

    Args:
        min_val: lower bound.
        max_val: upper bound.

    Example:
        >>> import jax.numpy as jnp
        >>> ScalarClamp(-2.0, 2.0)(jnp.array([-3.0, 0.5, 3.0]))
        Array([-2. ,  0.5,  2. ], dtype=float32)
    """

    min_val: check.Bound
    max_val: check.Bound

    def __post_init__(self) -> None:
        check.ordered(self.min_val, self.max_val, type(self).__name__, ("min_val", "max_val"))

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp `x`."""
        return clamps.tensor_clamp(x, self.min_val, self.max_val)


class ScalarClampSte(ScalarClamp):
    """Clamp to fixed bounds with gradient 1.

    Args:
        min_val: lower bound.
        max_val: upper bound.
    """

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Clamp `x`."""
        return clamps.scalar_clamp_ste(x, self.min_val, self.max_val)


@component.frozen_value
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
    max_available_float: check.Positive | None = None
    saturating = True

    def bounds(
        self, exponent_bit_width: Bits, max_mantissa: object, exponent_bias: object
    ) -> tuple[Any, Any]:
        """The least and the largest number."""
        largest = max_float(exponent_bit_width, max_mantissa, exponent_bias, self.max_available_float)
        return -largest if self.signed else 0.0, largest

    def __call__(
        self, x: jax.Array, exponent_bit_width: Bits, max_mantissa: Any, exponent_bias: Any
    ) -> jax.Array:
        """`x` clamped, float32."""
        return TensorClamp()(x, *self.bounds(exponent_bit_width, max_mantissa, exponent_bias))


@component.frozen_value
class FloatClamp(FloatSaturate):
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
    saturating: bool = True

    def __post_init__(self) -> None:
        check_codes(None, self.inf_values, self.nan_values, self.saturating)

    @property
    def is_nearest(self) -> bool:
        """Whether it only clamps to the largest number."""
        return self.saturating and (self.tensor_clamp_impl is None or is_nearest(self.tensor_clamp_impl))

    def __call__(
        self, x: jax.Array, exponent_bit_width: Bits, max_mantissa: float | jax.Array, exponent_bias: Bits
    ) -> jax.Array:
        """`x` clamped, float32."""
        least, largest = self.bounds(exponent_bit_width, max_mantissa, exponent_bias)
        clamp = self.tensor_clamp_impl or TensorClamp()
        y = clamp(x, min_val=least, max_val=largest)
        above = x > largest if not self.saturating else jnp.isposinf(x)
        below = x < least if not self.saturating else jnp.isneginf(x)
        if self.inf_values is None:
            return jnp.where(above | below, jnp.nan, y)
        return jnp.where(above, jnp.inf, jnp.where(below, -jnp.inf, y))


@dataclass(frozen=True)
class PowerOfTwo:
    """`2**x`, float32, exact where it can be.

    Example:
        >>> float(PowerOfTwo()(5.0))
        32.0
    """

    def __call__(self, x: ArrayLike) -> jax.Array:
        """The power."""
        return exp2(x)


@dataclass(frozen=True)
class LogTwo:
    """`log2(x)`, float32, exact where it can be.

    Example:
        >>> float(LogTwo()(8.0))
        3.0
    """

    def __call__(self, x: ArrayLike) -> jax.Array:
        """The logarithm."""
        return log2(x)
