"""To integers and back, by a given scale, zero point and bit width; and a quantizer's result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Clamp, Rounding, View
from jqinject.core.clamp import Identity, TensorClamp
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.delay import DelayWrapper, delay_of
from jqinject.core.facts import class_fact, groups_of, is_nearest
from jqinject.core.rounding import RoundSte
from jqinject.core.view import beside, cut_of, in_layout
from jqinject.ops import fake_quantize, int_range
from jqinject.ops.fake_quant import Steps, in_range_of, is_known_zero
from jqinject.ops.power import divide
from jqinject.quant_tensor import IntQuantTensor


class QuantResult(NamedTuple):
    """What a quantizer returns.

    Attributes:
        value: the quantized tensor in float, dtype and shape of the input.
        scale: float per integer step, float32, broadcasts with `value`.
        zero_point: the integer that stands for 0, float32, broadcasts with `value`.
        bit_width: a Python int when constant, else a float32 scalar.
    """

    value: jax.Array
    scale: jax.Array
    zero_point: jax.Array
    bit_width: int | jax.Array

    def quant_tensor(self, *, signed: bool, training: bool) -> IntQuantTensor:
        """The tensor that flows between layers.

        Args:
            signed: whether the integers have a sign.
            training: whether it was quantized in training mode.

        Returns:
            An `IntQuantTensor`.
        """
        return IntQuantTensor(*self, signed, training)


class ResultWithPayload(QuantResult):
    """A `QuantResult` that keeps its integers.

    Attributes:
        payload: the integers, in the narrowest whole-byte dtype; None if absent.
    """

    payload: jax.Array | None = None

    @classmethod
    def of(
        cls,
        value: jax.Array,
        scale: jax.Array,
        zero_point: jax.Array,
        bit_width: Any,
        payload: jax.Array | None,
    ) -> ResultWithPayload:
        """Construct a result."""
        result = cls(value, scale, zero_point, bit_width)
        result.payload = payload
        return result

    def quant_tensor(self, *, signed: bool, training: bool) -> IntQuantTensor:
        """See `QuantResult`; the tensor also keeps the integers."""
        return IntQuantTensor(*self, signed, training, self.payload)


@dataclass(frozen=True)
class IntGrid:
    """Which integers are used: static, compared by value."""

    signed: bool
    narrow_range: bool


@cache
def _steps(rounding: type, clamp: type, centered: bool, payload: np.dtype | None) -> Steps | None:
    """Rounding and clamping as one stateless elementwise function, or None."""
    function, passes = class_fact(rounding, "elementwise"), class_fact(clamp, "passes_gradient")
    if function is None or passes is None:
        return None
    first = bool(class_fact(clamp, "clamps_first"))
    return Steps(function, passes, centered, payload=payload, clamps_first=first)


@lru_cache(maxsize=256)
def _bounds(grid: IntGrid, bit_width: int) -> tuple[Any, Any]:
    """The smallest and the largest integer."""
    rest = grid.signed, grid.narrow_range, bit_width
    return int_range.min_int(*rest), int_range.max_int(*rest)


@checked_arguments
class IntQuant(Component):
    """To integers and back: `y = (clamp(round(x / s + z), min_int(b), max_int(b)) - z) * s`.

    `s` is the scale, `z` the zero point, `b` the bit width, all passed to the call. The arithmetic is float32 for any
    dtype of `x`; `y` has the dtype of `x`. nan stays nan; an infinite `x` saturates if the scale is finite.

    Args:
        narrow_range: leave out one value: -128 of signed, 255 of unsigned 8 bits.
        signed: whether the integers have a sign.
        input_view_impl: applied to `x` first; None for no view.
        float_to_int_impl: how to round; None means `RoundSte()`.
        tensor_clamp_impl: how to clamp; None means `TensorClamp()`.
        quant_delay_steps: calls that return `x` unchanged before quantization starts.

    Example:
        >>> quant = IntQuant(narrow_range=True, signed=True)
        >>> x = jnp.array([0.042, -0.053, 0.31, -0.44])
        >>> quant(jnp.float32(0.01), jnp.float32(0), 4, x).round(4)
        Array([ 0.04, -0.05,  0.07, -0.07], dtype=float32)
        >>> quant.to_int(jnp.float32(0.01), jnp.float32(0), 4, x)
        Array([ 4., -5.,  7., -7.], dtype=float32)
    """

    grid: IntGrid
    input_view_impl: View = Identity()
    float_to_int_impl: Rounding = RoundSte()
    tensor_clamp_impl: Clamp = TensorClamp()
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
        assign(self, grid=IntGrid(bool(signed), bool(narrow_range)))
        set_given(
            self,
            input_view_impl=input_view_impl,
            float_to_int_impl=float_to_int_impl,
            tensor_clamp_impl=tensor_clamp_impl,
            delay=delay_of(quant_delay_steps, "IntQuant"),
        )

    @property
    def signed(self) -> bool:
        """Whether the integers have a sign."""
        return self.grid.signed

    @property
    def narrow_range(self) -> bool:
        """Whether one value of the range is left out."""
        return self.grid.narrow_range

    @property
    def groups(self) -> tuple[int, int] | None:
        """The groups of `input_view_impl`."""
        return groups_of(self.input_view_impl)

    @property
    def is_nearest(self) -> bool:
        """Whether rounding and clamping are QuantizeLinear's, and the layout is that of the input."""
        as_it_is = isinstance(self.input_view_impl, Identity)
        waits = self.delay is not None and self.delay.countdown is not None
        return as_it_is and not waits and is_nearest(self.float_to_int_impl, self.tensor_clamp_impl)

    def min_int(self, bit_width: Any) -> Any:
        """Smallest integer of `bit_width` bits. See `jqinject.ops.min_int`."""
        return int_range.min_int(self.signed, self.narrow_range, bit_width)

    def max_int(self, bit_width: Any) -> Any:
        """Largest integer of `bit_width` bits. See `jqinject.ops.max_int`."""
        return int_range.max_int(self.signed, self.narrow_range, bit_width)

    def _bounds_of(self, bit_width: Any) -> tuple[Any, Any]:
        return self.min_int(bit_width), self.max_int(bit_width)

    def to_int(self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array) -> jax.Array:
        """The integers of `x`, as float32, differentiable."""

        def steps(x: jax.Array, scale: jax.Array, zero_point: jax.Array) -> jax.Array:
            return self.steps_to_int(scale, zero_point, bit_width, x)

        return in_layout(self.input_view_impl, steps, x, scale, zero_point)

    def steps_to_int(
        self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array
    ) -> jax.Array:
        """Like `to_int`, for a tensor that is already viewed."""
        y = divide(x.astype(jnp.float32), scale) + zero_point
        y = self.float_to_int_impl(y)
        return self.tensor_clamp_impl(y, min_val=self.min_int(bit_width), max_val=self.max_int(bit_width))

    def beside(self, x: jax.Array, scale: jax.Array, zero_point: jax.Array) -> tuple[jax.Array, ...]:
        """Scale and zero point as they broadcast against the quantized `x`."""
        if isinstance(self.input_view_impl, Identity):
            return scale, zero_point
        return beside(self.input_view_impl, x, scale, zero_point)

    def __call__(self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array) -> jax.Array:
        """`x` quantized and back in float, in the dtype of `x` and the layout of `input_view_impl`."""
        return self._quantized(scale, zero_point, bit_width, x, None)[0]

    def with_payload(
        self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Like a call, plus the integers as int8 or uint8; None if they are wider or the bit width is learned."""
        bytes_of = np.dtype(np.int8 if self.grid.signed else np.uint8)
        narrow = isinstance(bit_width, int) and bit_width <= 8 and self.delay is None
        return self._quantized(scale, zero_point, bit_width, x, bytes_of if narrow else None)

    def _quantized(
        self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array, payload: np.dtype | None
    ) -> tuple[jax.Array, jax.Array | None]:
        view = self.input_view_impl
        if not isinstance(x, jax.Array) or x.dtype != jnp.float32:
            x = check.float_input(x, "IntQuant")
        if isinstance(view, Identity):
            return self._made(x, scale, zero_point, bit_width, payload)
        cut = None if payload is None else cut_of(view, x)
        if cut is not None and cut.missing(x) and not is_known_zero(zero_point):
            payload = None  # padding zeros would become integers other than the zero point
        made = partial(self._made, bit_width=bit_width, payload=payload)
        return in_layout(view, made, x, scale, zero_point)

    def _made(
        self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, bit_width: Any, payload: np.dtype | None
    ) -> tuple[jax.Array, jax.Array | None]:
        rounding, clamp = type(self.float_to_int_impl), type(self.tensor_clamp_impl)
        how = _steps(rounding, clamp, is_known_zero(zero_point), payload)
        kept = None
        if how is None:
            integers = self.steps_to_int(scale, zero_point, bit_width, x)
            y = (integers - zero_point) * scale
            kept = None if payload is None else jax.lax.stop_gradient(integers).astype(payload)
        else:
            bounds = _bounds(self.grid, bit_width) if type(bit_width) is int else self._bounds_of(bit_width)
            y = fake_quantize(x.astype(jnp.float32), scale, zero_point, *bounds, how)
            y, kept = (y, None) if payload is None else y
        y = in_range_of(y, scale, x.dtype)
        return y if self.delay is None else self.delay(x, y), kept
