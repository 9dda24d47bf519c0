"""Powers of two that blocks share, by the rules of the microscaling formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Stat, View
from jqinject.core.construction.assign import assign
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.scaling.scale_rule import POWERS_OF_TWO
from jqinject.core.sources import Dynamic
from jqinject.core.stats.search import Task
from jqinject.ops.minifloats.shared_exponent import (
    ceil_exponent,
    even_exponent,
    floor_exponent,
    round_up_exponent,
    scale_of_exponent,
)

_SMALLEST_NORMAL = 2.0**-126


class ExponentRule(Protocol):
    """From a block's largest magnitude and the format's largest number to an exponent, int32 from -127 to 128 (nan).

    `least_divisor` is what numbers are divided by in a block whose scale is 2**-127, a subnormal number, and
    `divisor_of_nan` in one with a nan: by inf, so that its other numbers become 0, or by nan.
    """

    @property
    def divisor_of_nan(self) -> float: ...

    @property
    def least_divisor(self) -> float: ...
    def __call__(self, amax: jax.Array, largest: float, /) -> jax.Array: ...


@dataclass(frozen=True)
class FloorExponent:
    """`floor(log2 amax) - emax`: the block's largest numbers may be clamped. See `jqinject.ops`."""

    least_divisor = _SMALLEST_NORMAL
    divisor_of_nan = float("inf")

    def __call__(self, amax: jax.Array, largest: float) -> jax.Array:
        """The exponents."""
        return floor_exponent(amax, largest)


@dataclass(frozen=True)
class CeilExponent:
    """`ceil(log2 amax) - emax`."""

    least_divisor = _SMALLEST_NORMAL
    divisor_of_nan = float("inf")

    def __call__(self, amax: jax.Array, largest: float) -> jax.Array:
        """The exponents."""
        return ceil_exponent(amax, largest)


@checked_arguments
@dataclass(frozen=True)
class EvenExponent:
    """`floor(log2 amax') - emax`, `amax'` rounded to the format's mantissa.

    Args:
        mantissa_bit_width: bits of the format's mantissa.
    """

    mantissa_bit_width: int
    least_divisor = _SMALLEST_NORMAL
    divisor_of_nan = float("inf")

    def __call__(self, amax: jax.Array, largest: float) -> jax.Array:
        """The exponents."""
        return even_exponent(amax, largest, self.mantissa_bit_width)


@dataclass(frozen=True)
class RoundUpExponent:
    """`ceil(log2(amax / largest))`: the least with which nothing is clamped."""

    least_divisor = 1.0
    divisor_of_nan = float("nan")

    def __call__(self, amax: jax.Array, largest: float) -> jax.Array:
        """The exponents."""
        return round_up_exponent(amax, largest)


@checked_arguments
class SharedExponentScaling(Dynamic):
    """A power of two for each group or block of the given tensor, from its largest magnitude. No state, no gradient.

    A block of zeros has the scale 2**-127, one with a nan has the scale nan.

    Args:
        input_view_impl: the grouping view.
        scaling_stats_impl: the magnitude of a group, keeping the reduced axis with size 1.
        exponent_impl: from a magnitude to an exponent: `FloorExponent`, `CeilExponent`, `EvenExponent`,
            `RoundUpExponent`.

    Raises:
        TypeError: (when called) the format's largest number is not known beforehand.

    Example:
        >>> from jqinject.core import AbsMax, DynamicOverSubChannelBlockView
        >>> view, largest = DynamicOverSubChannelBlockView(2, -1), AbsMax(stats_reduce_dim=-1, keepdim=True)
        >>> scaling = SharedExponentScaling(view, largest, RoundUpExponent())
        >>> scaling(jnp.array([448.0, -3.0, 449.0, 0.0]), 448.0).tolist()
        [[1.0], [2.0]]
    """

    exponent_impl: ExponentRule

    def __init__(self, input_view_impl: View, scaling_stats_impl: Stat, exponent_impl: Any) -> None:
        super().__init__(scaling_stats_impl, input_view_impl, in_groups=True)
        assign(self, exponent_impl=exponent_impl)

    @property
    def scale_dtype(self) -> np.dtype:
        """That of powers of two."""
        return POWERS_OF_TWO

    def __call__(self, x: jax.Array, threshold: Any = None, task: Task = None) -> jax.Array:
        """The scales of `x`, float32, in the grouped shape with 1 along the elements of a group."""
        if not isinstance(threshold, int | float):
            raise TypeError(
                "SharedExponentScaling needs the largest number of the format as a number, got "
                f"{type(threshold).__name__}.\n  cure: constant bit widths, without bit_width_impl_type = 'parameter'"
            )
        amax = self.number(jax.lax.stop_gradient(x), None, task).statistic  # pyright: ignore
        assert amax is not None, "a dynamic source has a statistic"
        return scale_of_exponent(self.exponent_impl(amax, float(threshold)))

    def divisor(self, scale: jax.Array) -> jax.Array:
        """What numbers are divided by: the scale, or where it is subnormal or nan what the rule says."""
        rule = self.exponent_impl
        known = jnp.where(scale < _SMALLEST_NORMAL, rule.least_divisor, scale)
        return jnp.where(jnp.isnan(scale), rule.divisor_of_nan, known)
