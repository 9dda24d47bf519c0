"""To integers and back, by a given scale, zero point and bit width."""

from __future__ import annotations

from dataclasses import InitVar, field
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Clamp, Rounding, View, class_fact, groups_of, is_nearest
from jqinject.core.clamp import Identity, TensorClamp
from jqinject.core.component import Component, component
from jqinject.core.quantizers.quantizer import DelayWrapper, start_delay
from jqinject.core.rounding import RoundSte
from jqinject.core.views import in_layout
from jqinject.ops import IntGrid, fake_quantize
from jqinject.ops.fake_quant import Offset, Steps, in_range_of
from jqinject.ops.power import divide


@cache
def _steps(rounding: type, clamp: type, payload: np.dtype | None) -> Steps | None:
    """Rounding and clamping as one stateless elementwise function, or None."""
    function, passes = class_fact(rounding, "elementwise"), class_fact(clamp, "passes_gradient")
    if function is None or passes is None:
        return None
    first = bool(class_fact(clamp, "clamps_first"))
    return Steps(function, passes, payload=payload, clamps_first=first)


@lru_cache(maxsize=256)
def _bounds(signed: bool, narrow_range: bool, bit_width: int) -> tuple[Any, Any]:
    """The smallest and the largest integer."""
    return IntGrid(bit_width, signed, narrow_range).bounds


@component
class IntQuant(Component):
    """To integers and back: `y = (clamp(round(x / s + z), min_int(b), max_int(b)) - z) * s`.

    `s` is the scale, `z` the zero point (None without one), `b` the bit width, all passed to the call. The arithmetic
    is float32 for any dtype of `x`; `y` has the dtype of `x`. nan stays nan; an infinite `x` saturates if the scale is
    finite.

    Args:
        narrow_range: leave out one value: -128 of signed, 255 of unsigned 8 bits.
        signed: whether the integers have a sign.
        input_view_impl: applied to `x` first.
        float_to_int_impl: how to round.
        tensor_clamp_impl: how to clamp.
        quant_delay_steps: calls that return `x` unchanged before quantization starts.

    Example:
        >>> quant = IntQuant(narrow_range=True, signed=True)
        >>> x = jnp.array([0.042, -0.053, 0.31, -0.44])
        >>> quant(jnp.float32(0.01), None, 4, x).round(4)
        Array([ 0.04, -0.05,  0.07, -0.07], dtype=float32)
        >>> quant.to_int(jnp.float32(0.01), None, 4, x)
        Array([ 4., -5.,  7., -7.], dtype=float32)
    """

    narrow_range: bool
    signed: bool
    input_view_impl: View = Identity()
    float_to_int_impl: Rounding = RoundSte()
    tensor_clamp_impl: Clamp = TensorClamp()
    quant_delay_steps: InitVar[int | None] = 0
    delay: DelayWrapper | None = field(default=None, init=False)

    def __post_init__(self, quant_delay_steps: int | None) -> None:
        check.fields(self, narrow_range=check.flag, signed=check.flag)
        start_delay(self, quant_delay_steps)

    @property
    def groups(self) -> tuple[int, int] | None:
        """The groups of `input_view_impl`."""
        return groups_of(self.input_view_impl)

    @property
    def is_nearest(self) -> bool:
        """Whether rounding and clamping are QuantizeLinear's, and the layout is that of the input."""
        row_major = isinstance(self.input_view_impl, Identity)
        waits = self.delay is not None and self.delay.countdown is not None
        return row_major and not waits and is_nearest(self.float_to_int_impl, self.tensor_clamp_impl)

    def min_int(self, bit_width: Any) -> Any:
        """Smallest integer of `bit_width` bits. See `jqinject.ops.min_int`."""
        return self._bounds(bit_width)[0]

    def max_int(self, bit_width: Any) -> Any:
        """Largest integer of `bit_width` bits. See `jqinject.ops.max_int`."""
        return self._bounds(bit_width)[1]

    def _bounds(self, bit_width: Any) -> tuple[Any, Any]:
        form = self.signed, self.narrow_range
        return _bounds(*form, bit_width) if type(bit_width) is int else IntGrid(bit_width, *form).bounds

    def payload_dtype(self, bit_width: Any) -> np.dtype | None:
        """int8 or uint8; None if integers are wider, of a learned bit width, or delayed."""
        narrow = isinstance(bit_width, int) and bit_width <= 8 and self.delay is None
        return np.dtype(np.int8 if self.signed else np.uint8) if narrow else None

    def to_int(self, scale: jax.Array, zero_point: Offset, bit_width: Any, x: jax.Array) -> jax.Array:
        """The integers of `x`, as float32, differentiable."""

        def steps(x: jax.Array, scale: jax.Array, zero_point: Offset) -> jax.Array:
            return self.steps_to_int(scale, zero_point, bit_width, x)

        return in_layout(self.input_view_impl, steps, x, scale, zero_point)

    def steps_to_int(self, scale: jax.Array, zero_point: Offset, bit_width: Any, x: jax.Array) -> jax.Array:
        """Like `to_int`, for a tensor that is already viewed."""
        y = divide(x.astype(jnp.float32), scale)
        y = self.float_to_int_impl(y if zero_point is None else y + zero_point)
        low, high = self._bounds(bit_width)
        return self.tensor_clamp_impl(y, min_val=low, max_val=high)

    def from_int(self, q: jax.Array, scale: jax.Array, zero_point: Offset, x: jax.Array) -> jax.Array:
        """The floats of the integers `q`, in the dtype of `x`; `x` itself while quantization is delayed."""
        return self.finish((q if zero_point is None else q - zero_point) * scale, scale, x)

    def __call__(self, scale: jax.Array, zero_point: Offset, bit_width: Any, x: jax.Array) -> jax.Array:
        """`x` quantized and back in float, in the dtype of `x` and the layout of `input_view_impl`."""
        x = check.float_input(x, type(self).__name__)
        rounded = partial(self.rounded, bit_width=bit_width)
        return in_layout(self.input_view_impl, rounded, x, scale, zero_point)[0]

    def rounded(
        self,
        x: jax.Array,
        scale: jax.Array,
        zero_point: Offset,
        bit_width: Any,
        keep: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """A viewed tensor quantized and back in its dtype, and its integers.

        Args:
            x: viewed, float.
            scale, zero_point: as they broadcast against it.
            bit_width: the bit width.
            keep: whether to return the integers as int8 or uint8; None if they are wider or the bit width is learned.
        """
        payload = self.payload_dtype(bit_width) if keep else None
        how = _steps(type(self.float_to_int_impl), type(self.tensor_clamp_impl), payload)
        x32, kept = x.astype(jnp.float32), None
        if how is None:
            integers = self.steps_to_int(scale, zero_point, bit_width, x)
            y = (integers if zero_point is None else integers - zero_point) * scale
            kept = jax.lax.stop_gradient(integers).astype(payload) if payload else None
        else:
            y = fake_quantize(x32, scale, zero_point, *self._bounds(bit_width), how)
            y, kept = (y, None) if payload is None else y
        return self.finish(y, scale, x), kept

    def finish(self, y: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
        """Floats `y` in the dtype of `x`; `x` itself while quantization is delayed."""
        y = in_range_of(y, scale, x.dtype)
        return y if self.delay is None else self.delay(x, y)
