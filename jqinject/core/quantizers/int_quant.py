"""Quantizers to integers: rounding by a given scale, zero point and bit width, and by those of components."""

from __future__ import annotations

from dataclasses import InitVar, replace
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import (
    BitWidth,
    Clamp,
    IntQuantizer,
    IntScalingImpl,
    Rounding,
    Scaling,
    View,
    ZeroPoint,
    by_range,
    class_fact,
    is_nearest,
)
from jqinject.core.clamping import Identity, TensorClamp
from jqinject.core.component import component
from jqinject.core.quantizers.quantizer import (
    Delayed,
    Quantized,
    Quantizer,
    Rounded,
    through_ends,
)
from jqinject.core.rounding import RoundSte
from jqinject.core.statistics.ranges import ClippingRange
from jqinject.core.views import cut_of, in_layout
from jqinject.ops import IntGrid
from jqinject.ops.fake_quant import Offset, Steps, in_range_of, quantize_in_steps
from jqinject.ops.power import divide


@lru_cache(maxsize=1024)
def _constants(rounding: type, clamp: type, grid: IntGrid, keep: bool) -> tuple[Steps | None, Any, Any]:
    """Rounding and clamping as one stateless elementwise function, or None; the least and the largest integer."""
    low, high = map(np.float32, grid.bounds)
    return _steps(rounding, clamp, _payload_dtype(grid) if keep else None), low, high


def _steps(rounding: type, clamp: type, payload: np.dtype | None = None) -> Steps | None:
    function, passes = class_fact(rounding, "elementwise"), class_fact(clamp, "passes_gradient")
    if function is None or passes is None:
        return None
    first = bool(class_fact(clamp, "clamps_first"))
    return Steps(function, passes, payload=payload, clamps_first=first)


def _payload_dtype(grid: IntGrid) -> np.dtype | None:
    """int8 or uint8; None if integers are wider, or of a learned bit width."""
    return grid.storage if type(grid.bit_width) is int and grid.bit_width <= 8 else None


@component
class IntQuant(Delayed):
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

    @property
    def is_nearest(self) -> bool:
        """Whether rounding and clamping are QuantizeLinear's, and the layout is that of the input."""
        row_major = isinstance(self.input_view_impl, Identity)
        return row_major and self.delay is None and is_nearest(self.float_to_int_impl, self.tensor_clamp_impl)

    def min_int(self, bit_width: Any) -> Any:
        """Smallest integer of `bit_width` bits. See `jqinject.ops.min_int`."""
        return int_grid(self, bit_width).bounds[0]

    def max_int(self, bit_width: Any) -> Any:
        """Largest integer of `bit_width` bits. See `jqinject.ops.max_int`."""
        return int_grid(self, bit_width).bounds[1]

    def to_int(self, scale: jax.Array, zero_point: Offset, bit_width: Any, x: jax.Array) -> jax.Array:
        """The integers of `x`, as float32, differentiable."""

        def steps(x: jax.Array, scale: jax.Array, zero_point: Offset) -> jax.Array:
            return self.steps_to_int(scale, zero_point, bit_width, x)

        return in_layout(self.input_view_impl, steps, x, scale, zero_point)

    def steps_to_int(self, scale: jax.Array, zero_point: Offset, bit_width: Any, x: jax.Array) -> jax.Array:
        """Like `to_int`, for a tensor that is already viewed."""
        y = divide(x.astype(jnp.float32), scale)
        y = self.float_to_int_impl(y if zero_point is None else y + zero_point)
        low, high = int_grid(self, bit_width).bounds
        return self.tensor_clamp_impl(y, min_val=low, max_val=high)

    def from_int(self, q: jax.Array, scale: jax.Array, zero_point: Offset, x: jax.Array) -> jax.Array:
        """The floats of the integers `q`, in the dtype of `x`; `x` itself while quantization is delayed."""
        return self._finished((q if zero_point is None else q - zero_point) * scale, scale, x)

    def __call__(self, scale: jax.Array, zero_point: Offset, bit_width: Any, x: jax.Array) -> jax.Array:
        """`x` quantized and back in float, in the dtype of `x` and the layout of `input_view_impl`."""
        x = check.float_input(x, type(self).__name__)
        rounded = partial(self.rounded, grid=int_grid(self, bit_width))
        return in_layout(self.input_view_impl, rounded, x, scale, zero_point)[0]

    def rounded(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, grid: IntGrid, keep: bool = False
    ) -> Rounded:
        """A viewed tensor quantized and back in its dtype, and its integers.

        Args:
            x: viewed, float.
            scale, zero_point: as they broadcast against it.
            grid: the integers.
            keep: whether to return the integers as int8 or uint8; None if they are wider, delayed, or the bit width is
                learned.
        """
        parts, keep = (
            (type(self.float_to_int_impl), type(self.tensor_clamp_impl)),
            keep and self.delay is None,
        )
        if type(grid.bit_width) is int:
            how, *ends = _constants(*parts, grid, keep)
        else:
            how, ends = _steps(*parts), [jnp.asarray(end, jnp.float32) for end in grid.bounds]
        integers = None
        if how is None:
            q = self.steps_to_int(scale, zero_point, grid.bit_width, x)
            y = (q if zero_point is None else q - zero_point) * scale
            payload = _payload_dtype(grid) if keep else None
            integers = jax.lax.stop_gradient(q).astype(payload) if payload else None
        else:
            y = quantize_in_steps(how, x.astype(jnp.float32), scale, zero_point, *ends)
            y, integers = (y, None) if how.payload is None else y
        if self.delay is None and x.dtype == jnp.float32:
            return y, integers
        return self._finished(y, scale, x), integers

    def _finished(self, y: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
        y = in_range_of(y, scale, x.dtype)
        return y if self.delay is None else self.delay(x, y)


def int_grid(int_quant: Any, bit_width: Any) -> IntGrid:
    """The integers of an `int_quant` of so many bits; one of a user's own states its range alone.

    Args:
        int_quant: rounds and clamps.
        bit_width: an int, or an array if learned.
    """
    if isinstance(int_quant, IntQuant):
        return IntGrid(bit_width, int_quant.signed, int_quant.narrow_range)
    signed = bool(int_quant.min_int(bit_width if isinstance(bit_width, int) else 8) < 0)
    return IntGrid(bit_width, signed, bool(getattr(int_quant, "narrow_range", False)))


@lru_cache(maxsize=1024)
def _constant(
    signed: bool, narrow_range: bool, bit_width: BitWidth, steps: IntScalingImpl
) -> tuple[IntGrid, Any]:
    """The grid and the threshold of constant components."""
    grid = IntGrid(bit_width(), signed, narrow_range)
    return grid, steps(grid.bit_width)


class _RoundedByIntQuant(Quantizer):
    """Abstract: a quantizer whose `int_quant` rounds, to as many bits as its `bit_width_impl` says."""

    int_quant: IntQuantizer
    bit_width_impl: BitWidth
    int_scaling_impl: Any

    @property
    def input_view_impl(self) -> View:  # type: ignore[override]
        """The view of an `IntQuant`; one of a user's own views the tensor itself."""
        return self.int_quant.input_view_impl if isinstance(self.int_quant, IntQuant) else Identity()

    @property
    def is_nearest(self) -> bool:
        """See `int_quant`."""
        return is_nearest(self.int_quant)

    def _numbers(self) -> tuple[IntGrid, Any]:
        rounds, bits, steps = self.int_quant, self.bit_width_impl, self.int_scaling_impl
        constant = class_fact(type(bits), "is_constant") and class_fact(type(steps), "is_constant")
        if constant and isinstance(rounds, IntQuant):
            return _constant(rounds.signed, rounds.narrow_range, bits, steps)
        grid = int_grid(rounds, bits())
        return grid, None if steps is None else steps(grid.bit_width)

    def _quantize(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, ends: Any, grid: Any, keep: bool
    ) -> Quantized:
        rounds = self.int_quant
        in_view = not isinstance(rounds, IntQuant) or type(rounds.input_view_impl) is not Identity
        if in_view or by_range(type(self.scaling_impl)):
            return super()._quantize(x, scale, zero_point, ends, grid, keep)
        value, payload = rounds.rounded(x, scale, zero_point, grid, keep)
        return Quantized(value, scale, zero_point, grid, payload)

    def _round(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, ends: Any, grid: Any, keep: bool
    ) -> Rounded:
        rounds, scaling = self.int_quant, cast(Any, self.scaling_impl)
        if not isinstance(rounds, IntQuant):
            zero = jnp.zeros((), jnp.float32) if zero_point is None else zero_point
            return rounds(scale, zero, grid.bit_width, x.astype(jnp.float32)).astype(x.dtype), None
        if not by_range(type(scaling)):
            return rounds.rounded(x, scale, zero_point, grid, keep)
        # The gradient goes through the ends of the range.
        low, high = (cast(Any, np.float32(bound)) for bound in grid.bounds)
        if ends is not None and grid.narrow_range and zero_point is None:
            ends = ClippingRange(jax.lax.stop_gradient(scale) * high)
        function = class_fact(type(rounds.float_to_int_impl), "elementwise")
        how = Steps(
            function or rounds.float_to_int_impl,
            by_reciprocal=zero_point is None,
            repeated=cut_of(self.input_view_impl, x) is not None,
            payload=_payload_dtype(grid) if keep and rounds.delay is None else None,
        )
        compute, to_range = partial(how.quantized, low=low, high=high), not scaling.scale_stop_grad
        numbers = x.astype(jnp.float32), ends, scale, zero_point
        y = through_ends(compute, *numbers, to_range=to_range, pure=function is not None)
        value, payload = (y, None) if how.payload is None else y
        return rounds._finished(value, scale, x), payload


@component
class RescalingIntQuant(_RoundedByIntQuant):
    """Integer quantization whose scale, zero point and bit width come from components.

    `b = bit_width_impl()`, `s = scaling_impl(x, int_scaling_impl(b))`, `z = zero_point_impl(x, s, b)`,
    `y = int_quant(s, z, b, x)`.

    With a `RangeScaling` scale and zero point come from one range, and the gradient goes through its ends.

    A tensor of zeros is quantized to zeros, with a finite scale greater than 0.

    Args:
        int_quant: to integers and back, `IntQuant`.
        scaling_impl: the scale.
        int_scaling_impl: how many integer steps the scaled value spans.
        zero_point_impl: the zero point; `RangeZeroPoint` if it comes with the scale from one range.
        bit_width_impl: the bit width.

    Raises:
        TypeError: (when called) `x` is not a float array.

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

    def __post_init__(self) -> None:
        if by_range(type(self.scaling_impl)):
            self._numbers()  # refuses bits that no range has

    @property
    def grid(self) -> IntGrid | None:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        if not is_nearest(getattr(self.int_quant, "float_to_int_impl", None)):
            return None
        grid = self._numbers()[0]
        return replace(grid, bit_width=float(grid.bit_width)) if grid.is_learned else grid


@component
class PrescaledRestrictIntQuant(_RoundedByIntQuant):
    """Integer quantization by a scale passed to the call, zero point 0: biases, whose scale is input times
    weight scale.

    Args:
        int_quant: to integers and back, `IntQuant`.
        bit_width_impl: the bit width.

    Raises:
        TypeError: (when called) `x` is not a float array.

    Example:
        >>> from jqinject.core import BitWidthConst
        >>> quant = PrescaledRestrictIntQuant(IntQuant(narrow_range=False, signed=True), BitWidthConst(32))
        >>> quant(jnp.array([0.3, -0.26]), jnp.float32(0.125)).value
        Array([ 0.25, -0.25], dtype=float32)
    """

    int_quant: IntQuantizer
    bit_width_impl: BitWidth
    scaling_impl = None  # type: ignore[assignment]
    int_scaling_impl = None
    has_zero_point = False  # type: ignore[assignment]
    scale_dtype = None  # type: ignore[assignment]

    def __call__(self, x: jax.Array, scale: jax.Array) -> Quantized:  # type: ignore[override]
        """`x` quantized by `scale`."""
        return self.by_scale(x, jnp.asarray(scale).astype(jnp.float32))
