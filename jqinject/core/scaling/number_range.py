"""How many steps of the grid the scale maps a range to.

| component | of | result |
|---|---|---|
| `int_scaling_impl(bit_width)` | integers | the steps from 0 to the largest |
| `float_scaling_impl` | minifloats | their largest number |
| `trunc_scaling_impl(q, b_in, b_out, signed)` | truncated accumulators | the divisor |
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core import _protocols, check, clamping, component
from jqinject.ops import lean, minifloat
from jqinject.ops.power import exp2, max_int, min_int


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
        return -min_int(True, narrow, bit_width) if signed else max_int(False, narrow, bit_width)


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
        return max_int(signed, self.narrow_range, bit_width)


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
        return max_int(signed, False, bit_width) + 1


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
        return exp2(jnp.asarray(input_bit_width, jnp.float32) - jnp.asarray(output_bit_width, jnp.float32))


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
