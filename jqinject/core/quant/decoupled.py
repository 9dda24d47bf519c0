"""Integer quantization whose scale before rounding and scale after rounding differ."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import BitWidth, Clamp, IntScalingImpl, Rounding, Scaling, View, ZeroPoint
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.delay import DelayWrapper, delay_of
from jqinject.core.facts import has_zero_point, scale_dtype
from jqinject.core.quant.int_quant import IntQuant, QuantResult
from jqinject.ops.fake_quant import in_range_of
from jqinject.ops.power import divide
from jqinject.quant_tensor import IntQuantTensor


class DecoupledQuantResult(NamedTuple):
    """What a decoupled quantizer returns: a `QuantResult`, with the scale and zero point used for rounding.

    Attributes:
        value, scale, zero_point, bit_width: see `QuantResult`.
        pre_scale: what the tensor was divided by before rounding, float32.
        pre_zero_point: what was added before rounding, float32.
    """

    value: jax.Array
    scale: jax.Array
    zero_point: jax.Array
    bit_width: int | jax.Array
    pre_scale: jax.Array
    pre_zero_point: jax.Array

    def quant_tensor(self, *, signed: bool, training: bool) -> IntQuantTensor:
        """See `QuantResult.quant_tensor`."""
        return QuantResult(*self[:4]).quant_tensor(signed=signed, training=training)


@checked_arguments
class DecoupledIntQuant(Component):
    """To integers by one scale and back by another: `y = (clamp(round(x / p + v), min_int(b), max_int(b)) - z) * s`.

    `p` and `v` are scale and zero point before rounding, `s` and `z` those after, `b` the bit width, all passed to the
    call. The arithmetic is float32; `y` has the dtype of `x`.

    Args:
        narrow_range: leave out one value: -128 of signed, 255 of unsigned 8 bits.
        signed: whether the integers have a sign.
        input_view_impl: applied to `x` first; None for no view.
        float_to_int_impl: how to round; None means `RoundSte()`.
        tensor_clamp_impl: how to clamp; None means `TensorClamp()`.
        quant_delay_steps: calls that return `x` unchanged before quantization starts.

    Example:
        >>> quant = DecoupledIntQuant(narrow_range=True, signed=True)
        >>> x, zero = jnp.array([0.042, -0.053, 0.31, -0.44]), jnp.float32(0)
        >>> quant(jnp.float32(0.02), zero, jnp.float32(0.01), zero, 4, x).round(4)
        Array([ 0.02, -0.03,  0.07, -0.07], dtype=float32)
    """

    grid: IntQuant
    delay: DelayWrapper | None = None

    def __init__(
        self,
        narrow_range: bool,
        signed: bool,
        input_view_impl: View | None = None,
        float_to_int_impl: Rounding | None = None,
        tensor_clamp_impl: Clamp | None = None,
        quant_delay_steps: int | None = 0,
    ) -> None:
        assign(
            self, grid=IntQuant(narrow_range, signed, input_view_impl, float_to_int_impl, tensor_clamp_impl)
        )
        set_given(self, delay=delay_of(quant_delay_steps, "DecoupledIntQuant"))

    @property
    def signed(self) -> bool:
        """Whether the integers have a sign."""
        return self.grid.signed

    @property
    def narrow_range(self) -> bool:
        """Whether one value of the range is left out."""
        return self.grid.narrow_range

    def min_int(self, bit_width: Any) -> Any:
        """Smallest integer of `bit_width` bits. See `jqinject.ops.min_int`."""
        return self.grid.min_int(bit_width)

    def max_int(self, bit_width: Any) -> Any:
        """Largest integer of `bit_width` bits. See `jqinject.ops.max_int`."""
        return self.grid.max_int(bit_width)

    def to_int(
        self, pre_scale: jax.Array, pre_zero_point: jax.Array, bit_width: Any, x: jax.Array
    ) -> jax.Array:
        """The integers of `x`, as float32, differentiable."""
        return self.grid.to_int(pre_scale, pre_zero_point, bit_width, x)

    def from_int(self, q: jax.Array, scale: jax.Array, zero_point: jax.Array, x: jax.Array) -> jax.Array:
        """The floats of the integers `q`, in the dtype of `x`; `x` itself while quantization is delayed."""
        y = in_range_of((q - zero_point) * scale, scale, x.dtype)
        return y if self.delay is None else self.delay(x, y)

    def __call__(
        self,
        pre_scale: jax.Array,
        pre_zero_point: jax.Array,
        scale: jax.Array,
        zero_point: jax.Array,
        bit_width: Any,
        x: jax.Array,
    ) -> jax.Array:
        """`x` quantized and back in float, in the dtype of `x`."""
        x = check.float_input(x, "DecoupledIntQuant")
        return self.from_int(self.to_int(pre_scale, pre_zero_point, bit_width, x), scale, zero_point, x)


class DecoupledQuantizer(Component):
    """Abstract: the components of a decoupled quantizer, and what they make of a tensor."""

    decoupled_int_quant: DecoupledIntQuant
    pre_scaling_impl: Any
    scaling_impl: Scaling
    int_scaling_impl: IntScalingImpl
    pre_zero_point_impl: ZeroPoint
    zero_point_impl: ZeroPoint
    bit_width_impl: BitWidth

    def __init__(
        self,
        decoupled_int_quant: DecoupledIntQuant,
        pre_scaling_impl: Any,
        scaling_impl: Scaling,
        int_scaling_impl: IntScalingImpl,
        pre_zero_point_impl: ZeroPoint,
        zero_point_impl: ZeroPoint,
        bit_width_impl: BitWidth,
    ) -> None:
        assign(
            self,
            decoupled_int_quant=decoupled_int_quant,
            pre_scaling_impl=pre_scaling_impl,
            scaling_impl=scaling_impl,
            int_scaling_impl=int_scaling_impl,
            pre_zero_point_impl=pre_zero_point_impl,
            zero_point_impl=zero_point_impl,
            bit_width_impl=bit_width_impl,
        )

    @property
    def has_zero_point(self) -> bool:
        """See `zero_point_impl`."""
        return has_zero_point(self.zero_point_impl)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    def quantized(
        self, x: jax.Array, x32: jax.Array, pre_threshold: jax.Array, within: Any
    ) -> DecoupledQuantResult:
        """The result for a pre-scale; `within` has the last word on the integers."""
        bits = self.bit_width_impl()
        steps = self.int_scaling_impl(bits)
        pre_scale = divide(pre_threshold, steps)
        pre_zero_point = self.pre_zero_point_impl(x32, pre_scale, bits)
        scale = self.scaling_impl(x32, steps)
        zero_point = self.zero_point_impl(x32, scale, bits)
        q = within(self.decoupled_int_quant.to_int(pre_scale, pre_zero_point, bits, x32))
        value = self.decoupled_int_quant.from_int(q, scale, zero_point, x)
        return DecoupledQuantResult(value, scale, zero_point, bits, pre_scale, pre_zero_point)


class DecoupledRescalingIntQuant(DecoupledQuantizer):
    """Integer quantization that rounds by one scale and rescales by another.

    `b = bit_width_impl()`, `t = int_scaling_impl(b)`, `p = pre_scaling_impl(x) / t`,
    `v = pre_zero_point_impl(x, p, b)`, `s = scaling_impl(x, t)`, `z = zero_point_impl(x, s, b)`,
    `y = decoupled_int_quant(p, v, s, z, b, x)`.

    Args:
        decoupled_int_quant: to integers and back, `DecoupledIntQuant`.
        pre_scaling_impl: the scale before rounding.
        scaling_impl: the scale after rounding.
        int_scaling_impl: how many integer steps the scaled value spans.
        pre_zero_point_impl: what is added before rounding.
        zero_point_impl: the zero point.
        bit_width_impl: the bit width.

    Raises:
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst, ConstScaling, IntScaling, ZeroZeroPoint
        >>> quant = DecoupledRescalingIntQuant(
        ...     DecoupledIntQuant(narrow_range=True, signed=True), ConstScaling(0.7), ConstScaling(1.4),
        ...     IntScaling(narrow_range=True, signed=True), ZeroZeroPoint(), ZeroZeroPoint(), BitWidthConst(4))
        >>> result = quant(jnp.array([0.3, -0.7]))
        >>> [round(v, 4) for v in result.value.tolist()], round(float(result.pre_scale), 4)
        ([0.6, -1.4], 0.1)
    """

    def __call__(self, x: jax.Array) -> DecoupledQuantResult:
        """`x` quantized; scales and zero points float32."""
        x = check.float_input(x, "DecoupledRescalingIntQuant")
        x32 = x.astype(jnp.float32)
        return self.quantized(x, x32, self.pre_scaling_impl(x32), lambda q: q)
