"""Divisors of truncated accumulators: `trunc_scaling_impl(q, b_in, b_out, signed)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jqinject.core._protocols import Clamp, IntScalingImpl, Scaling
from jqinject.core.clamp import TensorClamp
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.ops.power import exp2


def _ratio(input_bit_width: Any, output_bit_width: Any) -> jax.Array:
    """`2**(b_in - b_out)`, float32."""
    return exp2(jnp.asarray(input_bit_width, jnp.float32) - jnp.asarray(output_bit_width, jnp.float32))


@dataclass(frozen=True)
class TruncMsbScaling:
    """Keeps the most significant bits: `2**(b_in - b_out)`.

    Example:
        >>> float(TruncMsbScaling()(jnp.ones(3), 12, 8, True))
        16.0
    """

    def __call__(
        self, scaling_input: Any, input_bit_width: Any, output_bit_width: Any, signed: bool
    ) -> jax.Array:
        """The divisor, float32. It depends on the bit widths alone."""
        return _ratio(input_bit_width, output_bit_width)


@checked_arguments
class TruncScalingWrapper(Component):
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

    tensor_clamp_impl: Clamp = TensorClamp()

    def __init__(
        self,
        trunc_int_scaling_impl: IntScalingImpl,
        scaling_impl: Scaling,
        tensor_clamp_impl: Clamp | None = None,
    ) -> None:
        self.trunc_int_scaling_impl: Any = trunc_int_scaling_impl
        self.scaling_impl = scaling_impl
        set_given(self, tensor_clamp_impl=tensor_clamp_impl)

    def __call__(
        self, scaling_input: jax.Array, input_bit_width: Any, output_bit_width: Any, signed: bool
    ) -> jax.Array:
        """The divisor, float32."""
        scale = self.scaling_impl(scaling_input, self.trunc_int_scaling_impl(output_bit_width, signed))
        all_bits = _ratio(input_bit_width, output_bit_width)
        least, most = jnp.minimum(all_bits, 1.0), jnp.maximum(all_bits, 1.0)
        return self.tensor_clamp_impl(scale, min_val=least, max_val=most)
