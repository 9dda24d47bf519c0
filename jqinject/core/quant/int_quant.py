"""Uniform integer quantization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import (
    BitWidth,
    Clamp,
    IntQuantizer,
    IntScalingImpl,
    QuantResult,
    ResultWithPayload,
    Rounding,
    Scaling,
    Settles,
    View,
    ZeroPoint,
)
from jqinject.core.clamp import Identity, TensorClamp, TensorClampSte
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.delay import DelayWrapper, delay_of
from jqinject.core.facts import groups_of, has_zero_point, is_nearest, scale_dtype, searches
from jqinject.core.rounding import CeilSte, DPURoundSte, FloorSte, RoundSte, RoundToZeroSte
from jqinject.core.stats.search import Candidate, Search, scale_of, zero_point_of
from jqinject.core.view import cut_of, in_layout
from jqinject.ops import fake_quantize, int_range, ste
from jqinject.ops.choose import is_known_zero, known_zero
from jqinject.ops.fake_quant import Steps, in_range_of
from jqinject.ops.power import divide


@dataclass(frozen=True)
class IntGrid:
    """Which integers are used: static, equal by value."""

    signed: bool
    narrow_range: bool


ELEMENTWISE: dict[type, Callable[[jax.Array], jax.Array]] = {
    RoundSte: ste.nearest,
    CeilSte: jax.lax.ceil,
    FloorSte: jax.lax.floor,
    RoundToZeroSte: ste.toward_zero,
    DPURoundSte: ste.nearest_ties_up_below_zero,
}
"""What rounding components compute that are elementwise and keep no state; the others run as they are."""
CLAMPS_STRAIGHT = {TensorClamp: False, TensorClampSte: True}


@lru_cache(maxsize=256)
def _bounds(grid: IntGrid, bit_width: int) -> tuple[Any, Any]:
    """The smallest and the largest integer."""
    rest = grid.signed, grid.narrow_range, bit_width
    return int_range.min_int(*rest), int_range.max_int(*rest)


@checked_arguments
class IntQuant(Component):
    """To integers and back: `y = (clamp(round(x / s + z), min_int(b), max_int(b)) - z) * s`.

    `s` is the scale, `z` the zero point, `b` the bit width, all given at the call. The arithmetic is float32
    whatever the dtype of `x`; `y` comes back in the dtype of `x`. nan stays nan; an infinite `x` saturates
    where the scale is finite.

    Args:
        narrow_range: leave out one value: -128 of signed, 255 of unsigned 8 bits.
        signed: whether the integers have a sign.
        input_view_impl: applied to `x` first; None means nothing.
        float_to_int_impl: how to round; None means `RoundSte()`.
        tensor_clamp_impl: how to clamp; None means `TensorClamp()`.
        quant_delay_steps: calls that return `x` as it is, before quantization starts.

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
        """Those of `input_view_impl`."""
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
        """As `to_int`, of a tensor that is laid out already."""
        y = divide(x.astype(jnp.float32), scale) + zero_point
        y = self.float_to_int_impl(y)
        return self.tensor_clamp_impl(y, min_val=self.min_int(bit_width), max_val=self.max_int(bit_width))

    def __call__(self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array) -> jax.Array:
        """`x` quantized and back in float, in the dtype of `x` and the layout of `input_view_impl`."""
        return self._quantized(scale, zero_point, bit_width, x, None)[0]

    def with_payload(
        self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """As a call, and the integers beside it, int8 or uint8; None for wider ones, and of a learned bit width."""
        bytes_of = np.dtype(np.int8 if self.grid.signed else np.uint8)
        narrow = isinstance(bit_width, int) and bit_width <= 8 and self.delay is None
        return self._quantized(scale, zero_point, bit_width, x, bytes_of if narrow else None)

    def _quantized(
        self, scale: jax.Array, zero_point: jax.Array, bit_width: Any, x: jax.Array, payload: np.dtype | None
    ) -> tuple[jax.Array, jax.Array | None]:
        x = check.float_input(x, "IntQuant")
        cut = None if payload is None else cut_of(self.input_view_impl, x)
        if cut is not None and cut.missing(x) and not is_known_zero(zero_point):
            payload = None  # the zeros that fill up a group would be integers other than the zero point
        made = partial(self._made, bit_width=bit_width, payload=payload)
        return in_layout(self.input_view_impl, made, x, scale, zero_point)

    def _made(
        self, x: jax.Array, scale: jax.Array, zero_point: jax.Array, bit_width: Any, payload: np.dtype | None
    ) -> tuple[jax.Array, jax.Array | None]:
        how = self._elementwise(zero_point, payload)
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

    def _elementwise(self, zero_point: jax.Array, payload: np.dtype | None) -> Steps | None:
        """Rounding and clamping as one elementwise function without state, where they are that: the leaner way."""
        rounding = ELEMENTWISE.get(type(self.float_to_int_impl))
        straight = CLAMPS_STRAIGHT.get(type(self.tensor_clamp_impl))
        if rounding is None or straight is None:
            return None
        return Steps(rounding, straight, centered=is_known_zero(zero_point), payload=payload)


@checked_arguments
class RescalingIntQuant(Component):
    """Integer quantization whose scale, zero point and bit width come from components.

    `b = bit_width_impl()`, `s = scaling_impl(x, int_scaling_impl(b))`, `z = zero_point_impl(x, s, b)`,
    `y = int_quant(s, z, b, x)`.

    A tensor of zeros is quantized to zeros, with a finite scale greater than 0.

    Args:
        int_quant: to integers and back, `IntQuant`.
        scaling_impl: the scale.
        int_scaling_impl: how many integer steps the scaled value spans.
        zero_point_impl: the zero point.
        bit_width_impl: the bit width.

    Raises:
        TypeError: (at the call) when `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst, ConstScaling, IntScaling, ZeroZeroPoint
        >>> quant = RescalingIntQuant(
        ...     int_quant=IntQuant(narrow_range=True, signed=True),
        ...     scaling_impl=ConstScaling(0.1),
        ...     int_scaling_impl=IntScaling(narrow_range=True, signed=True),
        ...     zero_point_impl=ZeroZeroPoint(),
        ...     bit_width_impl=BitWidthConst(4),
        ... )
        >>> result = quant(jnp.array([0.042, -0.053, 0.31, -0.44]))
        >>> [round(v, 4) for v in result.value.tolist()], result.bit_width
        ([0.0429, -0.0571, 0.1, -0.1], 4)
    """

    int_quant: IntQuantizer
    scaling_impl: Scaling
    int_scaling_impl: IntScalingImpl
    zero_point_impl: ZeroPoint
    bit_width_impl: BitWidth
    searches: bool = False

    def __init__(
        self,
        int_quant: IntQuantizer,
        scaling_impl: Scaling,
        int_scaling_impl: IntScalingImpl,
        zero_point_impl: ZeroPoint,
        bit_width_impl: BitWidth,
    ) -> None:
        assign(
            self,
            int_quant=int_quant,
            scaling_impl=scaling_impl,
            int_scaling_impl=int_scaling_impl,
            zero_point_impl=zero_point_impl,
            bit_width_impl=bit_width_impl,
        )
        set_given(self, searches=searches(scaling_impl) or searches(zero_point_impl))

    @property
    def has_zero_point(self) -> bool:
        """That of `zero_point_impl`."""
        return has_zero_point(self.zero_point_impl)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """That of the scaling's scales."""
        return scale_dtype(self.scaling_impl)

    @property
    def groups(self) -> tuple[int, int] | None:
        """Those of `int_quant`."""
        return groups_of(self.int_quant)

    @property
    def is_nearest(self) -> bool:
        """That of `int_quant`."""
        return is_nearest(self.int_quant)

    def __call__(self, x: jax.Array) -> QuantResult:
        """`x` quantized; scale and zero point float32."""
        return self._quantized(x, keep=False)

    def keeping_payload(self, x: jax.Array) -> QuantResult:
        """As a call; the result has the integers beside the value."""
        return self._quantized(x, keep=True)

    def _quantized(self, x: jax.Array, keep: bool) -> QuantResult:
        x = check.float_input(x, "RescalingIntQuant")
        x32 = x.astype(jnp.float32)
        bit_width = self.bit_width_impl()
        threshold = self.int_scaling_impl(bit_width)
        scale, zero_point = self._measured(x32, bit_width, threshold)
        if isinstance(self.int_quant, IntQuant):
            if keep:
                value, payload = self.int_quant.with_payload(scale, zero_point, bit_width, x)
                return ResultWithPayload.of(value, scale, zero_point, bit_width, payload)
            return QuantResult(self.int_quant(scale, zero_point, bit_width, x), scale, zero_point, bit_width)
        value = self.int_quant(scale, zero_point, bit_width, x32).astype(x.dtype)
        return QuantResult(value, scale, zero_point, bit_width)

    def try_scale(self, x: jax.Array, statistic: jax.Array) -> QuantResult:
        """What `x` would be if `statistic` were what the scale is made from; the zero point is not searched.

        Args:
            x: float32.
            statistic: in the place of the searched one.
        """
        bit_width = self.bit_width_impl()
        threshold = self.int_scaling_impl(bit_width)
        scale = scale_of(self.scaling_impl, x, threshold, Candidate(statistic))
        return self.try_zero_point(x, scale, None)

    def try_zero_point(self, x: jax.Array, scale: jax.Array, statistic: jax.Array | None) -> QuantResult:
        """What `x` would be if `statistic` were what the zero point is made from.

        Args:
            x: float32.
            scale: the scale.
            statistic: in the place of the searched one; None for what the search starts from.
        """
        bit_width = self.bit_width_impl()
        zero_point = zero_point_of(self.zero_point_impl, x, scale, bit_width, Candidate(statistic))
        return QuantResult(self.int_quant(scale, zero_point, bit_width, x), scale, zero_point, bit_width)

    def _measured(self, x: jax.Array, bit_width: Any, threshold: Any) -> tuple[jax.Array, jax.Array]:
        """Scale and zero point."""
        scaling, zero_point = self.scaling_impl, self.zero_point_impl
        if not self.searches:
            scale = scaling(x, threshold)
            return scale, zero_point(x, scale, bit_width)
        scale = scale_of(scaling, x, threshold, Search(self))
        tried = scale
        if x.size and searches(zero_point) and isinstance(scaling, Settles):
            tried = scaling.settle(scale, threshold)
        return scale, zero_point_of(zero_point, x, scale, bit_width, Search(self, tried))


@checked_arguments
class PrescaledRestrictIntQuant(Component):
    """Integer quantization by a scale given at the call, zero point 0: biases, whose scale is input times
    weight scale.

    Args:
        int_quant: to integers and back, `IntQuant`.
        bit_width_impl: the bit width.

    Raises:
        TypeError: (at the call) when `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst
        >>> quant = PrescaledRestrictIntQuant(IntQuant(narrow_range=False, signed=True), BitWidthConst(32))
        >>> quant(jnp.array([0.3, -0.26]), jnp.float32(0.125)).value
        Array([ 0.25, -0.25], dtype=float32)
    """

    has_zero_point = False
    int_quant: IntQuantizer
    bit_width_impl: BitWidth

    def __init__(self, int_quant: IntQuantizer, bit_width_impl: BitWidth) -> None:
        assign(self, int_quant=int_quant, bit_width_impl=bit_width_impl)

    def __call__(self, x: jax.Array, scale: jax.Array) -> QuantResult:
        """`x` quantized by `scale`; zero point float32."""
        x = check.float_input(x, "PrescaledRestrictIntQuant")
        scale = jnp.asarray(scale).astype(jnp.float32)
        bit_width = self.bit_width_impl()
        zero_point = known_zero()
        value = self.int_quant(scale, zero_point, bit_width, x).astype(x.dtype)
        return QuantResult(value, scale, zero_point, bit_width)
