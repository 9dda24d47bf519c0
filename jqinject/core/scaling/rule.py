"""From a statistic to a scale: restriction, threshold, least value.

Restrictions: which values a scale (or bit width) may take, and the domain in which it is learned.

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

From a number to a scale: restrict, bound from below, divide by integer steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jqinject.core import check
from jqinject.core._protocols import (
    Restrict,
    Rounding,
    Stat,
    class_fact,
    keeps_sign,
    never_negative,
    scale_dtype,
)
from jqinject.core.component import Component, component, set_given
from jqinject.core.memory.memory import Memory
from jqinject.core.memory.number import Number, taken
from jqinject.core.rounding import RoundSte
from jqinject.core.statistics.search import Task
from jqinject.ops.clamp import choose, signed_clamp_min_ste
from jqinject.ops.power import divide, exp2, log2, quotient
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

    def __post_init__(self) -> None:
        check.fields(self, scale_factor=check.number)

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


@component
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

    restrict_value_float_to_int_impl: Rounding | None = None

    def restrict_init_float(self, x: float) -> float:
        """`log2(x)`; raises ValueError unless `x > 0`."""
        return _log2_of(x, "PowerOfTwoRestrictValue")

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`log2(x)`."""
        return log2(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`2**round(x)`."""
        return _finite_power((self.restrict_value_float_to_int_impl or RoundSte())(x), 127.0)


@component
class IntRestrictValue(Component):
    """Whole numbers, with a straight-through gradient.

    Args:
        restrict_value_float_to_int_impl: how the value is rounded; None means `RoundSte()`.

    Example:
        >>> float(IntRestrictValue()(2.6))
        3.0
    """

    restrict_value_float_to_int_impl: Rounding | None = None

    def restrict_init_float(self, x: float) -> float:
        """`x`."""
        return x

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x

    def __call__(self, x: jax.Array) -> jax.Array:
        """`round(x)`."""
        return (self.restrict_value_float_to_int_impl or RoundSte())(x)


POWERS_OF_TWO = np.dtype(jnp.float8_e8m0fnu)
SCALE_FLOOR = 2.0**-64
"""The minimum divided by the integer steps (at most 2**31) to make a scale. It keeps x / scale and its derivative
finite for tensors of ordinary magnitude, and a tensor of zeros from becoming nan."""


def clamp_scale(x: jax.Array, scaling_min_val: float | None) -> jax.Array:
    """Keep `|x|` at least `scaling_min_val`, and at least `SCALE_FLOOR` in any case; gradient 1."""
    return signed_clamp_min_ste(x, max(scaling_min_val or 0.0, SCALE_FLOOR))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _to_scale(
    floor: float, of_magnitude: bool, steps: float | None, x: jax.Array, divisor: jax.Array
) -> jax.Array:
    value = jnp.maximum(jnp.abs(x) if of_magnitude else x, floor)
    if steps is None:
        return quotient(value, divisor)
    if steps == 1:
        return value
    # For a power of two, multiplying by the reciprocal gives the same number.
    return value / steps if math.frexp(steps)[0] == 0.5 else quotient(value, jnp.float32(steps))


def _to_scale_jvp(
    floor: float, of_magnitude: bool, steps: float | None, primals: Any, tangents: Any
) -> tuple[jax.Array, Any]:
    (x, divisor), (dx, ddivisor) = primals, tangents
    scale = _to_scale(floor, of_magnitude, steps, *primals)
    known = jnp.float32(steps) if steps is not None else divisor
    changes = []
    if not isinstance(dx, SymbolicZero):
        changes.append(dx * choose(x >= 0, jnp.ones_like(x), -1.0) if of_magnitude else dx)
    if not isinstance(ddivisor, SymbolicZero):
        changes.append(-scale * ddivisor)
    if not changes:
        return scale, jnp.zeros_like(scale)
    change = sum(changes[1:], changes[0])
    return scale, jnp.broadcast_to(change if steps == 1 else change / known, scale.shape)


_to_scale.defjvp(_to_scale_jvp, symbolic_zeros=True)


def to_scale(
    x: jax.Array, floor: float, steps: float | jax.Array | None, *, of_magnitude: bool = False
) -> jax.Array:
    """`max(x, floor) / steps`, correctly rounded in every program (see `divide`); the gradient passes the maximum.

    Args:
        x: float32: a statistic that is at least 0, or with `of_magnitude` any number.
        floor: the minimum, above 0.
        steps: how many steps of the scale span it, above 0; None means 1.
        of_magnitude: take `|x|`, with the gradient +1 at 0.

    Returns:
        The scale, float32. nan stays nan.

    Example:
        >>> to_scale(jnp.float32(254.0), 1e-3, 127.0)
        Array(2., dtype=float32)
        >>> jax.grad(to_scale)(jnp.float32(0.0), 1e-3, 4.0)
        Array(0.25, dtype=float32)
    """
    if isinstance(steps, jax.Array):
        return _to_scale(floor, of_magnitude, None, x, steps)
    return _to_scale(floor, of_magnitude, float(steps or 1), x, jnp.float32(1))


class ScaleRule(Component):
    """How a number becomes a scale: `s = after(restrict(v) / restrict_threshold(t))`, `|v|` bounded from below.

    A statistic is clamped, taken to the domain of the restriction, restricted, clamped again and divided by the
    restricted threshold. A stored number is already in that domain. If there are both, the statistic is used,
    unrestricted, while collecting.

    Args:
        restrict_scaling_impl: which values are allowed; None means `FloatRestrictValue()`.
        restrict_threshold_impl: likewise for the threshold; None means `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        scaling_min_val: the minimum before the division; never less than 2**-64.
        of: the statistic, if there is one.
        where: the component, for errors.

    Raises:
        ValueError: `scaling_min_val` is negative or not finite.

    Example:
        >>> from jqinject.core import AbsMax, PowerOfTwoRestrictValue
        >>> rule = ScaleRule(PowerOfTwoRestrictValue(), of=AbsMax())
        >>> float(rule.scale(Number(statistic=jnp.float32(6.0)), 2))
        4.0
    """

    restrict_scaling_impl: Restrict = FloatRestrictValue()
    restrict_threshold_impl: Restrict | None = None
    restrict_scale_threshold_impl: Restrict | None = None
    floor: float = SCALE_FLOOR
    # Known for all calls: the numbers that the restriction leaves unchanged, and those to expect.
    keeps_positive: bool = True
    keeps_stored: bool = True
    keeps_threshold: bool = True
    of_magnitude: bool = False
    stores_statistic: bool = False
    least: float | None = None

    def __init__(
        self,
        restrict_scaling_impl: Restrict | None = None,
        restrict_threshold_impl: Restrict | None = None,
        restrict_scale_threshold_impl: Restrict | None = None,
        scaling_min_val: float | None = None,
        *,
        of: Stat | None = None,
        where: str = "ScaleRule",
    ) -> None:
        restrict = restrict_scaling_impl or FloatRestrictValue()
        keeps, of_magnitude = _keeps_positive(restrict), never_negative(of)
        floor = max(check.minimum(scaling_min_val, where, "scaling_min_val") or 0.0, SCALE_FLOOR)
        keeps_stored = keeps and not keeps_sign(restrict)
        set_given(
            self,
            restrict_scaling_impl=restrict_scaling_impl,
            restrict_threshold_impl=restrict_threshold_impl,
            restrict_scale_threshold_impl=restrict_scale_threshold_impl,
            floor=floor,
            keeps_positive=keeps,
            keeps_stored=keeps_stored,
            keeps_threshold=_keeps_positive(restrict_threshold_impl or restrict),
            of_magnitude=of_magnitude,
            stores_statistic=keeps_stored and of_magnitude,
            least=floor if of_magnitude else None,
        )

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The dtype of the quotient's restriction; without one, that of powers of two if both parts are such."""
        threshold, after = self.restrict_threshold_impl, self.restrict_scale_threshold_impl
        last = scale_dtype(after)
        if last not in (None, POWERS_OF_TWO):
            return last
        parts = (self.restrict_scaling_impl, *(part for part in (threshold, after) if part is not None))
        return POWERS_OF_TWO if all(scale_dtype(part) == POWERS_OF_TWO for part in parts) else None

    def clamped(self, stat: jax.Array) -> jax.Array:
        """The statistic, its magnitude bounded from below; gradient 1."""
        return (
            to_scale(stat, self.floor, None) if self.of_magnitude else signed_clamp_min_ste(stat, self.floor)
        )

    def to_stored(self, value: jax.Array) -> jax.Array:
        """From a value to the domain in which it is learned."""
        return abs(value) if self.keeps_stored else self.restrict_scaling_impl.restrict_init_tensor(value)

    def from_stored(self, stored: jax.Array) -> jax.Array:
        """From the domain in which it is learned to the value."""
        return self.restrict_scaling_impl(stored)

    def scale(self, number: Number, threshold: Any) -> jax.Array:
        """The scale, float32.

        Args:
            number: the source's number.
            threshold: the number of integer steps; None means 1.
        """
        stat, stored, collecting = number
        after, steps = self.restrict_scale_threshold_impl, threshold
        if threshold is not None and not (
            self.keeps_threshold and isinstance(threshold, int | float) and threshold > 0
        ):
            steps = self._steps(threshold)
        if collecting is not None:
            if not (self.stores_statistic and self.keeps_threshold and after is None):
                clamped = self.clamped(stat)
                unrestricted = clamped if threshold is None else divide(clamped, threshold)
                return choose(collecting, unrestricted, self.scale(Number(stored=stored), threshold))
            stored = choose(collecting, stat, stored)
        elif stored is None and not (self.of_magnitude and self.keeps_positive):
            stored = self.to_stored(self.clamped(stat))
        if stored is None or self.keeps_stored:
            scale = to_scale(
                stat if stored is None else stored, self.floor, steps, of_magnitude=stored is not None
            )
        else:
            value = signed_clamp_min_ste(self.from_stored(stored), self.floor)
            scale = value if steps is None else divide(value, steps)
        return scale if after is None else after(scale)

    def _steps(self, threshold: Any) -> jax.Array:
        """The number of integer steps as the restriction allows it: the next power of two, for instance."""
        restrict = self.restrict_threshold_impl or self.restrict_scaling_impl
        return restrict(restrict.restrict_init_tensor(jnp.asarray(threshold, dtype=jnp.float32)))


RESTRICTIONS = (
    "restrict_scaling_impl",
    "restrict_threshold_impl",
    "restrict_scale_threshold_impl",
    "scaling_min_val",
)


class MemoryScaling(Memory):
    """Abstract: a scale by a rule from the number of a memory.

    A subclass is a dataclass of its constructor's arguments, and states the kind of policy.
    """

    rule: ScaleRule

    def __post_init__(self) -> None:
        self.begin(taken(self))

    def begin(self, arguments: dict[str, Any], stored: Any = None) -> None:
        """Set the rule, and what the base sets."""
        stats, where = arguments.get("scaling_stats_impl"), type(self).__name__
        rule = ScaleRule(*(arguments.get(name) for name in RESTRICTIONS), of=stats, where=where)
        self.rule = rule
        super().begin(arguments, stored)

    def __call__(self, x: jax.Array | None = None, threshold: Any = None, task: Task = None) -> jax.Array:
        """The scale of `x`, float32.

        Args:
            x: the tensor.
            threshold: the number of integer steps; None means 1.
            task: for a statistic that is searched.
        """
        return self.rule.scale(self.number(x, task), threshold)


def _keeps_positive(restrict: Restrict) -> bool:
    return bool(class_fact(type(restrict), "keeps_positive"))
