"""Restrictions: which values a scale (or bit width) may take, and the domain in which it is learned.

A restriction is a pair of maps. `restrict_init_float` / `restrict_init_tensor` map a value to the domain in which it is
stored and trained (such as log2); calling the restriction maps it back.

| class                      | stored as     | value                  |
|----------------------------|---------------|------------------------|
| `FloatRestrictValue`       | `|x|`         | `|x|`                  |
| `SignedFloatRestrictValue` | `x`           | `x`                    |
| `LogFloatRestrictValue`    | `log2(x)`     | `2**x`                 |
| `PowerOfTwoRestrictValue`  | `log2(x)`     | `2**round(x)`          |
| `IntRestrictValue`         | `x`           | `round(x)`             |
| `ScaledRestrictValue`      | `x / c`       | `c * x`                |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Rounding
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.rounding import RoundSte
from jqinject.ops.power import exp2, log2
from jqinject.ops.ste import abs_binary_sign_grad

_MOST_LOG2 = 127.99999237060547
"""The largest float32 below 128, where `2**x` overflows."""


def _finite_power(exponent: jax.Array, most: float) -> jax.Array:
    """`2**exponent`, finite for finite exponents: the largest float32 numbers have a rounded logarithm of 128."""
    too_large = jnp.isfinite(exponent) & (exponent > most)
    return exp2(jnp.where(too_large, most, exponent))


def _log2_of(x: float, where: str) -> float:
    if not x > 0:
        raise ValueError(
            f"{where} learns log2 of the value, so the value must be positive, got {x!r}. Give a "
            "positive initial value "
            "(scaling_init), or use FloatRestrictValue."
        )
    return math.log2(x)


@dataclass(frozen=True)
class FloatRestrictValue:
    """Any value of at least 0, learned directly: `|x|`, with gradient +1 at 0.

    Example:
        >>> restrict = FloatRestrictValue()
        >>> restrict.restrict_init_float(-3.0), float(restrict(-3.0))
        (3.0, 3.0)
    """

    keeps_positive = True

    def restrict_init_float(self, x: float) -> float:
        """`|x|`."""
        return abs(x)

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`|x|`."""
        return abs(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`|x|`."""
        return abs_binary_sign_grad(x)


@dataclass(frozen=True)
class SignedFloatRestrictValue:
    """Any value, of either sign."""

    keeps_positive = True
    keeps_sign = True

    def restrict_init_float(self, x: float) -> float:
        """`x`."""
        return x

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x


@checked_arguments
@dataclass(frozen=True)
class ScaledRestrictValue:
    """Any value, times a constant: as `restrict_scale_threshold_impl`, a factor of every scale.

    Args:
        scale_factor: the constant.

    Example:
        >>> ScaledRestrictValue(4 / 3)(jnp.float32(0.75))
        Array(1., dtype=float32)
    """

    scale_factor: float

    def restrict_init_float(self, x: float) -> float:
        """`x / scale_factor`."""
        return x / self.scale_factor

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`x / scale_factor`."""
        return x / self.scale_factor

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x * scale_factor`."""
        return x * self.scale_factor


@dataclass(frozen=True)
class LogFloatRestrictValue:
    """Any positive value, learned as its log2.

    Example:
        >>> restrict = LogFloatRestrictValue()
        >>> restrict.restrict_init_float(8.0), float(restrict(3.0))
        (3.0, 8.0)
    """

    def restrict_init_float(self, x: float) -> float:
        """`log2(x)`; raises ValueError unless `x > 0`."""
        return _log2_of(x, "LogFloatRestrictValue")

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`log2(x)`."""
        return log2(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`2**x`."""
        return _finite_power(x, _MOST_LOG2)


@checked_arguments
class PowerOfTwoRestrictValue(Component):
    """Powers of two, learned as the exponent; the exponent is rounded with a straight-through gradient.

    Args:
        restrict_value_float_to_int_impl: how the exponent is rounded; None means `RoundSte()`.

    Example:
        >>> restrict = PowerOfTwoRestrictValue()
        >>> float(restrict(restrict.restrict_init_float(6.0)))
        8.0
    """

    scale_dtype = np.dtype(jnp.float8_e8m0fnu)

    def __init__(self, restrict_value_float_to_int_impl: Rounding | None = None) -> None:
        self.float_to_int_impl = restrict_value_float_to_int_impl or RoundSte()

    def restrict_init_float(self, x: float) -> float:
        """`log2(x)`; raises ValueError unless `x > 0`."""
        return _log2_of(x, "PowerOfTwoRestrictValue")

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`log2(x)`."""
        return log2(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`2**round(x)`."""
        return _finite_power(self.float_to_int_impl(x), 127.0)


@checked_arguments
class IntRestrictValue(Component):
    """Whole numbers, with a straight-through gradient.

    Args:
        restrict_value_float_to_int_impl: how the value is rounded; None means `RoundSte()`.

    Example:
        >>> float(IntRestrictValue()(2.6))
        3.0
    """

    def __init__(self, restrict_value_float_to_int_impl: Rounding | None = None) -> None:
        self.float_to_int_impl = restrict_value_float_to_int_impl or RoundSte()

    def restrict_init_float(self, x: float) -> float:
        """`x`."""
        return x

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        """`round(x)`."""
        return self.float_to_int_impl(x)
