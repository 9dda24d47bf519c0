"""Truncating integers to fewer bits: accumulators."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jqinject.core._protocols import BitWidth, Clamp, Rounding
from jqinject.core.clamp import TensorClamp
from jqinject.core.construction import check
from jqinject.core.construction.assign import set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.delay import DelayWrapper, delay_of
from jqinject.core.quant.int_quant import QuantResult
from jqinject.core.scaling.trunc_scaling import TruncMsbScaling
from jqinject.ops import int_range, round_ste
from jqinject.ops.power import divide


class TruncScaling(Protocol):
    """`trunc_scaling_impl`: what integers are divided by."""

    def __call__(
        self, scaling_input: jax.Array, input_bit_width: Any, output_bit_width: Any, signed: bool, /
    ) -> jax.Array: ...


@checked_arguments
class TruncIntQuant(Component):
    """Integers of one bit width as integers of another: `q = round(x / s + z)`, `q' = clamp(round'(q / t))`.

    `t = trunc_scaling_impl(q, b_in, b_out, signed)`, the result's scale is `s * t` and its zero point `z / t`. Scale,
    zero point, bit width and sign of `x` are passed to the call; the sign stays.

    Args:
        float_to_int_impl: how `q / t` is rounded.
        bit_width_impl: the bit width of the result.
        trunc_scaling_impl: what integers are divided by; None means `TruncMsbScaling()`.
        narrow_range: leave out one value of the result: -128 of signed, 255 of unsigned 8 bits.
        tensor_clamp_impl: how to clamp; None means `TensorClamp()`.
        quant_delay_steps: calls that return `x` unchanged before quantization starts.

    Raises:
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst, RoundSte
        >>> quant = TruncIntQuant(RoundSte(), BitWidthConst(4))
        >>> x = jnp.array([0.04, -0.05, 0.31, -0.44])
        >>> result = quant(x, jnp.float32(0.01), jnp.float32(0), 8, signed=True)
        >>> result.value.round(4), float(result.scale.round(4)), result.bit_width
        (Array([ 0.  , -0.  ,  0.32, -0.48], dtype=float32), 0.1599999964237213, 4)
    """

    trunc_scaling_impl: TruncScaling = TruncMsbScaling()
    tensor_clamp_impl: Clamp = TensorClamp()
    narrow_range: bool = False
    delay: DelayWrapper | None = None

    def __init__(
        self,
        float_to_int_impl: Rounding,
        bit_width_impl: BitWidth,
        trunc_scaling_impl: TruncScaling | None = None,
        narrow_range: bool = False,
        tensor_clamp_impl: Clamp | None = None,
        quant_delay_steps: int | None = 0,
    ) -> None:
        self.float_to_int_impl = float_to_int_impl
        self.bit_width_impl = bit_width_impl
        set_given(
            self,
            trunc_scaling_impl=trunc_scaling_impl,
            narrow_range=bool(narrow_range),
            tensor_clamp_impl=tensor_clamp_impl,
            delay=delay_of(quant_delay_steps, "TruncIntQuant"),
        )

    def __call__(
        self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, input_bit_width: Any, signed: bool
    ) -> QuantResult:
        """`x` requantized; scale and zero point float32."""
        x = check.float_input(x, "TruncIntQuant")
        x32 = x.astype(jnp.float32)
        bits = self.bit_width_impl()
        q = round_ste(divide(x32, scale) + zero_point)
        divisor = self.trunc_scaling_impl(q, input_bit_width, bits, signed)
        q = self.tensor_clamp_impl(
            self.float_to_int_impl(divide(q, divisor)),
            min_val=int_range.min_int(signed, self.narrow_range, bits),
            max_val=int_range.max_int(signed, self.narrow_range, bits),
        )
        out_scale, out_zero = scale * divisor, divide(jnp.asarray(zero_point, jnp.float32), divisor)
        value = ((q - out_zero) * out_scale).astype(x.dtype)
        value = value if self.delay is None else self.delay(x, value)
        return QuantResult(value, out_scale, out_zero, bits)
