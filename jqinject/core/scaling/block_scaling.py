"""Scales that a block shares: powers of two, by the rules of the microscaling formats, and numbers of 8-bit floats.

A power of two may be rounded so that it grows only if something would be clamped. Scales in two levels are in
`two_level_scaling.py`.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols, check, component
from jqinject.core.memory.memory import Dynamic
from jqinject.core.scaling.rule import POWERS_OF_TWO, Unchanged
from jqinject.core.statistics.search import Task
from jqinject.ops import FLOAT8_DTYPES, float8_cast, groups, power, ste


def midmax_mantissa_bias(
    mantissa_bit_width: int, nan_values: tuple[str, ...] | None, inf_values: tuple[str, ...] | None
) -> float:
    """How many mantissa bits the codes of inf and nan cost at the largest exponent.

    Args:
        mantissa_bit_width: bits of the mantissa.
        nan_values, inf_values: mantissas that mean nan and inf together with the largest exponent, or None.

    Returns:
        `log2(codes + 1)`; 0 if no codes, or all but one, remain at the largest exponent.

    Example:
        >>> midmax_mantissa_bias(3, ("111",), None), midmax_mantissa_bias(2, ("01", "10", "11"), ("00",))
        (1.0, 0.0)
    """
    excess = (len(nan_values or ()) + len(inf_values or ())) % 2**mantissa_bit_width
    return 0.0 if excess == 0 or excess + 1 == 2**mantissa_bit_width else math.log2(excess + 1)


@component.component
class RoundMidMaxSte(component.Component):
    """`ceil(x - log2(2 - 2^(bias - m - 1)))`, straight-through: rounds an exponent up only if necessary.

    Magnitudes up to half a step above the largest number round down to it; only beyond is the next power of two needed.

    Args:
        mantissa_bit_width_impl: bits of the mantissa, m.
        midmax_mantissa_bit_bias: bits of it that the codes of inf and nan cost at the largest exponent.

    Source: Brevitas.

    Example:
        >>> from jqinject.core import MantissaWidthConst
        >>> RoundMidMaxSte(MantissaWidthConst(1))(jnp.array([1.8, 1.81]))
        Array([1., 2.], dtype=float32)
    """

    mantissa_bit_width_impl: _protocols.BitWidth
    midmax_mantissa_bit_bias: float = 0.0

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` rounded, of its shape."""
        width: Any = self.mantissa_bit_width_impl()
        bias = float(self.midmax_mantissa_bit_bias)
        if isinstance(width, int):
            return ste.ceil_ste(x - math.log2(2.0 - 2.0 ** (bias - width - 1)))
        return ste.ceil_ste(x - power.log2(2.0 - power.exp2(bias - jnp.asarray(width, jnp.float32) - 1)))


_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class FloorExponent:
    """`floor(log2 amax) - emax`: the block's largest numbers may be clamped. See `jqinject.ops`.

    From a block's largest magnitude and the format's largest number to an exponent, int32 from -127 to 128 (nan).
    `least_divisor` is what numbers are divided by in a block whose scale is 2**-127, a subnormal number, and
    `divisor_of_nan` in one with a nan: by inf, so that its other numbers become 0, or by nan.
    """

    least_divisor = _SMALLEST_NORMAL
    divisor_of_nan = float("inf")
    carry = 0

    def __call__(self, amax: jax.Array, largest: float) -> jax.Array:
        """The exponents."""
        return float8_cast.shared_exponent(amax, largest, self.carry)


class CeilExponent(FloorExponent):
    """`ceil(log2 amax) - emax`."""

    carry = float8_cast.FRACTION


@component.frozen_value
class EvenExponent(FloorExponent):
    """`floor(log2 amax') - emax`, `amax'` rounded to the format's mantissa.

    Args:
        mantissa_bit_width: bits of the format's mantissa.
    """

    mantissa_bit_width: int

    def __call__(self, amax: jax.Array, largest: float) -> jax.Array:
        """The exponents."""
        return float8_cast.shared_exponent(amax, largest, 1 << (22 - self.mantissa_bit_width))


class RoundUpExponent(FloorExponent):
    """`ceil(log2(amax / largest))`: the least with which nothing is clamped."""

    least_divisor = 1.0
    divisor_of_nan = float("nan")

    def __call__(self, amax: jax.Array, largest: float) -> jax.Array:
        """The exponents."""
        return float8_cast.round_up_exponent(amax, largest)


@component.component
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

    scale_dtype = POWERS_OF_TWO  # type: ignore[assignment]
    input_view_impl: _protocols.View
    scaling_stats_impl: _protocols.Stat
    exponent_impl: FloorExponent

    def __call__(self, x: jax.Array, threshold: Any = None, task: Task = None) -> jax.Array:
        """The scales of `x`, float32, in the grouped shape with 1 along the elements of a group."""
        if not isinstance(threshold, int | float):
            raise TypeError(
                "SharedExponentScaling needs the largest number of the format as a number, got "
                f"{type(threshold).__name__}.\n  cure: constant bit widths, without bit_width_impl_type = 'parameter'"
            )
        amax = self.number(jax.lax.stop_gradient(x), task).statistic  # pyright: ignore
        assert amax is not None, "a dynamic source has a statistic"
        return float8_cast.scale_of_exponent(self.exponent_impl(amax, float(threshold)))

    def divisor(self, scale: jax.Array) -> jax.Array:
        """What numbers are divided by: the scale, or where it is subnormal or nan what the rule says."""
        rule = self.exponent_impl
        normal = jnp.where(scale < _SMALLEST_NORMAL, rule.least_divisor, scale)
        return jnp.where(jnp.isnan(scale), rule.divisor_of_nan, normal)


@component.component
class QuantRestrictValue(Unchanged, component.Component):
    """Values quantized by another quantizer, such as 8-bit float group scales.

    As `restrict_scaling_impl` it also applies to the integer threshold, a scalar: if the quantizer is per channel, also
    declare `restrict_threshold_impl = FloatRestrictValue`.

    A value that would become 0 becomes the smallest nonzero one of its sign, so that it remains a valid scale.

    If the quantizer is itself grouped (16 scales share one scale, say), its result is reshaped to that of the values.

    Args:
        restrict_value_float_to_int_impl: the quantizer.
        scale_dequantized_shape: shape of the result; None for that of the values.

    Source: Brevitas. Differs from Brevitas: there a small scale may become 0.

    Example:
        >>> from jqinject.core import ExponentWidthConst, FloatClamp, FloatQuant, MantissaWidthConst, StaticExponentBias
        >>> e2m1 = FloatQuant(True, ExponentWidthConst(2), MantissaWidthConst(1), StaticExponentBias(1), FloatClamp())
        >>> QuantRestrictValue(e2m1)(jnp.array([5.1, 0.1]))
        Array([6. , 0.5], dtype=float32)
    """

    restrict_value_float_to_int_impl: _protocols.TensorQuant
    scale_dequantized_shape: check.Shape | None = None

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The dtype of the quantizer's minifloats if they have 8 bits."""
        form = _protocols.number_format(self.restrict_value_float_to_int_impl)
        return form.dtype if form.dtype in FLOAT8_DTYPES else None

    @property
    def scale_factor(self) -> jax.Array | None:
        """The quantizer's scale, if it is one constant number."""
        if not _protocols.is_constant(self.restrict_value_float_to_int_impl):
            return None
        result: Any = self.restrict_value_float_to_int_impl(jnp.ones(1))
        _, scale, *_ = result
        return scale.reshape(()) if scale.size == 1 else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` quantized, never 0."""
        result: Any = self.restrict_value_float_to_int_impl(x)
        value, scale, *_ = result
        grid = getattr(result, "grid", None)
        if grid is not None and grid.is_minifloat:
            scale = scale * grid.smallest_subnormal
        if value.ndim != x.ndim:
            scale = groups.ungrouped(jnp.broadcast_to(scale, value.shape), x)
            value = groups.ungrouped(value, x)
        least = jnp.where(x < 0, -scale, scale)
        restricted = jnp.where(value == 0, least, value)
        shape = self.scale_dequantized_shape
        return restricted if shape is None else restricted.reshape(shape)
