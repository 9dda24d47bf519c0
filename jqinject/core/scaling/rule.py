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

From a number to a scale: restrict, bound from below, divide by integer steps. How many steps of the grid the scale maps
a range to:

| component | of | result |
|---|---|---|
| `int_scaling_impl(bit_width)` | integers | the steps from 0 to the largest |
| `float_scaling_impl` | minifloats | their largest number |
| `trunc_scaling_impl(q, b_in, b_out, signed)` | truncated accumulators | the divisor |
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols, check, clamping, component, rounding
from jqinject.ops import clamps, fake_quant, lean, minifloat, power, ste

POWERS_OF_TWO = np.dtype(jnp.float8_e8m0fnu)
#: The minimum divided by the integer steps (at most 2**31) to make a scale. It keeps x / scale and its derivative
#: finite for tensors of ordinary magnitude, and a tensor of zeros from becoming nan.
SCALE_FLOOR = 2.0**-64
#: The largest float32 below 128, where `2**x` overflows.
_MOST_LOG2 = 127.99999237060547


def _finite_power(exponent: jax.Array, most: float) -> jax.Array:
    """`2**exponent`, finite for finite exponents: the largest float32 numbers have a rounded logarithm of 128."""
    too_large = jnp.isfinite(exponent) & (exponent > most)
    return power.exp2(jnp.where(too_large, most, exponent))


class Unchanged:
    """Abstract: a restriction of values that are learned as they are."""

    def restrict_init_float(self, x: object) -> Any:
        """The number in the domain in which it is learned."""
        return x

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """The array in the domain in which it is learned."""
        return self.restrict_init_float(x)


class _Log2:
    """Abstract: a restriction of positive values that are learned as their log2."""

    def restrict_init_float(self, x: float) -> float:
        """`log2(x)`; raises ValueError unless `x > 0`."""
        if not x > 0:
            raise ValueError(
                f"{type(self).__name__} learns log2 of the value, so the value must be positive, got {x!r}. Give a "
                "positive initial value (scaling_init), or use FloatRestrictValue."
            )
        return math.log2(x)

    def restrict_init_tensor(self, x: jax.Array) -> jax.Array:
        """`log2(x)`."""
        return power.log2(x)


@dataclass(frozen=True)
class FloatRestrictValue(Unchanged):
    """Any value of at least 0, learned directly: `|x|`, with gradient +1 at 0.

    Example:
        >>> restrict = FloatRestrictValue()
        >>> restrict.restrict_init_float(-3.0), float(restrict(-3.0))
        (3.0, 3.0)
    """

    keeps_positive = True

    def restrict_init_float(self, x: Any) -> Any:
        """`|x|`."""
        return abs(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`|x|`."""
        return ste.abs_binary_sign_grad(x)


@dataclass(frozen=True)
class SignedFloatRestrictValue(Unchanged):
    """Any value, of either sign."""

    keeps_positive = True
    keeps_sign = True

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x


@component.frozen_value
class ScaledRestrictValue(Unchanged):
    """Any value, times a constant: as `restrict_scale_threshold_impl`, a factor of every scale.

    Args:
        scale_factor: the constant.

    Example:
        >>> ScaledRestrictValue(4 / 3)(jnp.float32(0.75))
        Array(1., dtype=float32)
    """

    scale_factor: float

    def restrict_init_float(self, x: Any) -> Any:
        """`x / scale_factor`."""
        return x / self.scale_factor

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x * scale_factor`."""
        return x * self.scale_factor


@component.frozen_value
class ZeroRestrictValue(Unchanged):
    """Any value, but 0 below `least_scale`: as `restrict_scale_threshold_impl`, the scale of zeros.

    A row of zeros then stays one in a table that has no 0.

    Args:
        least_scale: the smallest one that is not 0.

    Example:
        >>> ZeroRestrictValue(0.5)(jnp.array([0.25, 3.0]))
        Array([0., 3.], dtype=float32)
    """

    least_scale: float = 2 * SCALE_FLOOR

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x`, or 0."""
        return jnp.where(x < self.least_scale, 0.0, x)


@dataclass(frozen=True)
class LogFloatRestrictValue(_Log2):
    """Any positive value, learned as its log2.

    Example:
        >>> restrict = LogFloatRestrictValue()
        >>> restrict.restrict_init_float(8.0), float(restrict(3.0))
        (3.0, 8.0)
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """`2**x`."""
        return _finite_power(x, _MOST_LOG2)


@component.component
class PowerOfTwoRestrictValue(_Log2, component.Component):
    """Powers of two, learned as the exponent; the exponent is rounded with a straight-through gradient.

    Args:
        restrict_value_float_to_int_impl: how the exponent is rounded; None means `RoundSte()`.

    Example:
        >>> restrict = PowerOfTwoRestrictValue()
        >>> float(restrict(restrict.restrict_init_float(6.0)))
        8.0
    """

    scale_dtype = POWERS_OF_TWO

    restrict_value_float_to_int_impl: _protocols.Rounding | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`2**round(x)`."""
        return _finite_power((self.restrict_value_float_to_int_impl or rounding.RoundSte())(x), 127.0)


@component.component
class IntRestrictValue(Unchanged, component.Component):
    """Whole numbers, with a straight-through gradient.

    Args:
        restrict_value_float_to_int_impl: how the value is rounded; None means `RoundSte()`.

    Example:
        >>> float(IntRestrictValue()(2.6))
        3.0
    """

    restrict_value_float_to_int_impl: _protocols.Rounding | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`round(x)`."""
        return (self.restrict_value_float_to_int_impl or rounding.RoundSte())(x)


RESTRICTIONS = ("restrict_scaling_impl", "restrict_threshold_impl", "restrict_scale_threshold_impl")
ONE = np.float32(1)


def clamp_scale(x: jax.Array, scaling_min_val: float | None) -> jax.Array:
    """Keep `|x|` at least `scaling_min_val`, and at least `SCALE_FLOOR` in any case; gradient 1."""
    return clamps.signed_clamp_min_ste(x, max(scaling_min_val or 0.0, SCALE_FLOOR))


@component.component
class ScaleRule(component.Component):
    """How a number becomes a scale: `s = after(restrict(v) / restrict_threshold(t))`, `|v|` bounded from below.

    A statistic is clamped, taken to the domain of the restriction, restricted, clamped again and divided by the
    restricted threshold. A stored number is already in that domain. If there are both, the statistic is used,
    unrestricted, while collecting.

    Args:
        restrict_scaling_impl: which values are allowed.
        restrict_threshold_impl: likewise for the threshold; None means `restrict_scaling_impl`.
        restrict_scale_threshold_impl: applied to the quotient; None means nothing.
        floor: the minimum before the division.
        of_magnitude: the number is a statistic, and never negative.

    Example:
        >>> rule = ScaleRule(PowerOfTwoRestrictValue())
        >>> float(rule.to_stored(jnp.float32(8.0))), float(rule.from_stored(jnp.float32(3.0)))
        (3.0, 8.0)
    """

    restrict_scaling_impl: _protocols.Restrict = FloatRestrictValue()
    restrict_threshold_impl: _protocols.Restrict | None = None
    restrict_scale_threshold_impl: _protocols.Restrict | None = None
    floor: float = SCALE_FLOOR
    of_magnitude: bool = False
    # Known for all calls: the numbers that the restriction leaves unchanged, and those to expect.
    keeps_stored: bool = field(init=False, default=True)
    keeps_threshold: bool = field(init=False, default=True)
    stores_statistic: bool = field(init=False, default=False)
    least: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        restrict, of_threshold = self.restrict_scaling_impl, self.restrict_threshold_impl
        keeps_positive = _protocols.class_fact(type(restrict), "keeps_positive") is True
        keeps_stored = keeps_positive and not _protocols.keeps_sign(restrict)
        vars(self).update(
            keeps_stored=keeps_stored,
            keeps_threshold=_protocols.class_fact(type(of_threshold or restrict), "keeps_positive") is True,
            stores_statistic=keeps_stored and self.of_magnitude,
            least=self.floor if self.of_magnitude else None,
        )

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The dtype of the quotient's restriction; without one, that of powers of two if both parts are such."""
        threshold, after = self.restrict_threshold_impl, self.restrict_scale_threshold_impl
        last = _protocols.scale_dtype(after)
        if last not in (None, POWERS_OF_TWO):
            return last
        parts = (self.restrict_scaling_impl, *(part for part in (threshold, after) if part is not None))
        return POWERS_OF_TWO if all(_protocols.scale_dtype(part) == POWERS_OF_TWO for part in parts) else None

    @property
    def scale_factor(self) -> jax.Array | None:
        """The `scale_factor` of the quotient's restriction."""
        return _protocols.scale_factor(self.restrict_scale_threshold_impl)

    def clamped(self, stat: jax.Array) -> jax.Array:
        """The statistic, its magnitude bounded from below; gradient 1."""
        if self.of_magnitude:
            return fake_quant.to_scale(self.floor, False, 1.0, stat, ONE)
        return clamps.signed_clamp_min_ste(stat, self.floor)

    def to_stored(self, value: jax.Array) -> jax.Array:
        """From a value to the domain in which it is learned."""
        return abs(value) if self.keeps_stored else self.restrict_scaling_impl.restrict_init_tensor(value)

    def from_stored(self, stored: jax.Array) -> jax.Array:
        """From the domain in which it is learned to the value."""
        return self.restrict_scaling_impl(stored)

    def steps(self, threshold: _protocols.Threshold) -> jax.Array:
        """The number of integer steps as the restriction allows it: the next power of two, for instance."""
        restrict = self.restrict_threshold_impl or self.restrict_scaling_impl
        return restrict(restrict.restrict_init_tensor(jnp.asarray(threshold, dtype=jnp.float32)))


@component.frozen_value
class IntScaling:
    """Steps from zero to the end of the range: `-min_int` if signed, `max_int` if not.

    | bits | signed | signed, narrow | unsigned | unsigned, narrow |
    |------|--------|----------------|----------|------------------|
    | 8    | 128    | 127            | 255      | 254              |
    | 4    | 8      | 7              | 15       | 14               |

    Args:
        narrow_range: whether one value of the range is left out.
        signed: whether the integers have a sign; may be passed in the call instead.

    Example:
        >>> IntScaling(narrow_range=True, signed=True)(8)
        127
    """

    is_constant = True
    _none = "with narrow_range=True leaves 0 as the only integer. Use narrow_range=False, more bits"
    narrow_range: bool
    signed: bool | None = None

    def __call__(self, bit_width: int | jax.Array, signed: bool | None = None) -> int | jax.Array:
        """The number of steps: a Python int for an int bit width, else a float32 array.

        Raises:
            ValueError: when signedness is unknown, or the range has no steps (1 bit, narrow).
        """
        where, signed = type(self).__name__, self.signed if signed is None else signed
        if signed is None:
            raise ValueError(
                f"{where}: whether the integers are signed is not known. Build it with signed=True or False."
            )
        steps = self._steps(signed, bit_width)
        if isinstance(steps, int) and steps == 0:
            raise ValueError(
                f"{where}: {bit_width} bit {self._none}, or BinaryQuant for the two values -scale and +scale."
            )
        return steps

    def _steps(self, signed: bool, bit_width: int | jax.Array) -> int | jax.Array:
        narrow = self.narrow_range
        return -power.min_int(True, narrow, bit_width) if signed else power.max_int(False, narrow, bit_width)


class MaxIntScaling(IntScaling):
    """The largest integer: 127 of signed 8 bits, whether or not -128 is used; 1 of signed 2 bits.

    Args:
        narrow_range: whether one value of the range is left out.
        signed: whether the integers have a sign; may be passed in the call instead.

    Raises:
        ValueError: (when called) signedness is unknown, or the largest integer is 0 (1 bit).

    Example:
        >>> MaxIntScaling(narrow_range=False, signed=True)(8)
        127
    """

    _none = "has no integer above 0. Use more bits"

    def _steps(self, signed: bool, bit_width: int | jax.Array) -> int | jax.Array:
        return power.max_int(signed, self.narrow_range, bit_width)


@component.frozen_value
class PowerOfTwoIntScaling(IntScaling):
    """Steps as a power of two: `max_int + 1` of the full range, 128 for signed 8 bits and 256 for unsigned.

    Args:
        signed: whether the integers have a sign; may be passed in the call instead.

    Example:
        >>> PowerOfTwoIntScaling(signed=True)(8)
        128
    """

    narrow_range: bool = field(init=False, repr=False, default=False)

    def _steps(self, signed: bool, bit_width: int | jax.Array) -> int | jax.Array:
        return power.max_int(signed, False, bit_width) + 1


@component.frozen_value
class SingleArgStatelessBuffer:
    """A constant instead of a one-argument component: `int_scaling_impl` for scales that already count floats per step.

    Args:
        value: the constant.

    Example:
        >>> SingleArgStatelessBuffer(1.0)(8)
        1.0
    """

    is_constant = True
    value: check.Step

    def __call__(self, bit_width: lean.Bits | None = None) -> float:
        """The constant."""
        return self.value


@component.frozen_value
class FloatScaling:
    """The number that the statistic is scaled to: the largest of the format.

    Args:
        max_available_float: largest number; None if all codes are numbers.

    Example:
        >>> FloatScaling()(4, 1.875, 7), FloatScaling(max_available_float=448.0)(4, 1.875, 7)
        (480.0, 448.0)
    """

    max_available_float: check.Positive | None = None

    def __call__(self, exponent_bit_width: lean.Bits, max_mantissa: Any, exponent_bias: Any) -> Any:
        """A Python float for constant widths, else a float32 array."""
        return minifloat.max_float(exponent_bit_width, max_mantissa, exponent_bias, self.max_available_float)


@dataclass(frozen=True)
class TruncMsbScaling:
    """Keeps the most significant bits: `2**(b_in - b_out)`.

    Example:
        >>> float(TruncMsbScaling()(jnp.ones(3), 12, 8, True))
        16.0
    """

    def __call__(
        self, scaling_input: Any, input_bit_width: lean.Bits, output_bit_width: lean.Bits, signed: bool
    ) -> jax.Array:
        """The divisor, float32. It depends on the bit widths alone."""
        bits = jnp.asarray(input_bit_width, jnp.float32) - jnp.asarray(output_bit_width, jnp.float32)
        return power.exp2(bits)


@component.component
class TruncScalingWrapper(component.Component):
    """Any scale of the integers, as a divisor: `clamp(scaling_impl(q, trunc_int_scaling_impl(b_out, signed)), 1,
    2**(b_in - b_out))`; values beyond the remaining bits saturate.

    Args:
        trunc_int_scaling_impl: how many integer steps the scaled value spans, such as `PowerOfTwoIntScaling`.
        scaling_impl: the scale of the integers.
        tensor_clamp_impl: how to clamp; None means `TensorClamp()`.

    Example:
        >>> from jqinject.core import ConstScaling, PowerOfTwoIntScaling
        >>> wrapper = TruncScalingWrapper(PowerOfTwoIntScaling(), ConstScaling(512.0))
        >>> float(wrapper(jnp.ones(3), 12, 8, True))
        4.0
    """

    trunc_int_scaling_impl: Any
    scaling_impl: _protocols.Scaling
    tensor_clamp_impl: _protocols.Clamp | None = None

    def __call__(
        self, scaling_input: jax.Array, input_bit_width: Any, output_bit_width: Any, signed: bool
    ) -> jax.Array:
        """The divisor, float32."""
        scale = self.scaling_impl(scaling_input, self.trunc_int_scaling_impl(output_bit_width, signed))
        all_bits = TruncMsbScaling()(scaling_input, input_bit_width, output_bit_width, signed)
        least, most = jnp.minimum(all_bits, 1.0), jnp.maximum(all_bits, 1.0)
        return (self.tensor_clamp_impl or clamping.TensorClamp())(scale, min_val=least, max_val=most)
