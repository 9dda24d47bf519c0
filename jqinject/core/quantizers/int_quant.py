"""Integers: rounding and clamping by a given scale, and the delay of quantization.

Quantization that starts late: the first calls pass the tensor through.

The grid that a calibrated quantizer rounds to: scaled integers or minifloats.

To integers and back, by a given scale, zero point and bit width; and a quantizer's result.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Clamp, Rounding, View, class_fact, groups_of, is_nearest
from jqinject.core.check import MOST_STEPS
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.clamp import Identity, TensorClamp
from jqinject.core.component import Component, assign, set_given
from jqinject.core.rounding import RoundSte
from jqinject.core.state import QuantStat, float_array
from jqinject.core.statistics.ranges import ClippingRange
from jqinject.core.views import beside, cut_of, in_layout
from jqinject.ops import fake_quantize
from jqinject.ops import power as int_range
from jqinject.ops.clamp import bounded, within_range
from jqinject.ops.fake_quant import Steps, in_range_of, is_known_zero
from jqinject.ops.float8_cast import FLOAT8_DTYPES, to_float8
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.minifloat import float_steps, from_float_steps, to_float_grid
from jqinject.ops.power import divide
from jqinject.ops.ste import nearest, with_gradient_of
from jqinject.quant_tensor import IntQuantTensor


@checked_arguments
class DelayWrapper(Component):
    """Returns `x` in the first `quant_delay_steps` calls, `y` after.

    Every call counts, in training and evaluation. State: `countdown`, the calls left; none without a delay.

    Args:
        quant_delay_steps: the number of calls that pass through; None or at most 0 for no delay.

    Raises:
        TypeError: when it is neither None nor an integer.

    Example:
        >>> delay = DelayWrapper(1)
        >>> [float(delay(jnp.float32(0.3), jnp.float32(0.25))) for _ in range(2)]
        [0.30000001192092896, 0.25]
    """

    is_scale_free = True
    countdown: QuantStat | None = None

    def __init__(self, quant_delay_steps: int | None) -> None:
        steps = delay_steps(quant_delay_steps, "DelayWrapper")
        if steps > 0:
            self.countdown = QuantStat(float_array(steps))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """`x` while the delay lasts, else `y`."""
        if self.countdown is None:
            return y
        left = self.countdown.get_value()
        self.countdown.set_value(jnp.maximum(left - 1, 0))
        return jnp.where(left > 0, x, y)


def delay_steps(quant_delay_steps: int | None, where: str) -> int:
    """The number of delayed calls, at least 0.

    Raises:
        TypeError: when it is neither None nor an integer.
        ValueError: when a counter cannot hold it.
    """
    if quant_delay_steps is None:
        return 0
    try:
        steps = operator.index(quant_delay_steps)
    except TypeError:
        raise TypeError(
            f"{where}: quant_delay_steps must be an int or None, got {quant_delay_steps!r}."
        ) from None
    if steps > MOST_STEPS:
        raise ValueError(f"{where}: quant_delay_steps must be at most {MOST_STEPS}, got {steps}.")
    return max(steps, 0)


def delay_of(quant_delay_steps: int | None, where: str) -> DelayWrapper | None:
    """A `DelayWrapper`, or None without a delay."""
    steps = delay_steps(quant_delay_steps, where)
    return DelayWrapper(steps) if steps else None


class Grid(Protocol):
    """A scaled grid, possibly with a zero point; not differentiable."""

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> Any:
        """`x` rounded to nearest, float32; with a payload, both."""
        ...

    def rounded(self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> Any:
        """Like `nearest`, with a rounding component."""
        ...


@dataclass(frozen=True)
class IntegerGrid:
    """Integers from `low` to `high`: static, equal by value.

    Attributes:
        low, high: the ends.
        centered: whether the zero point is 0.
        payload: the dtype in which the integers are also returned; None does not return them.
        repeated: whether the scale is repeated for each number.
        divides: whether numbers are divided by the scale, instead of multiplied by its reciprocal.
    """

    low: float
    high: float
    centered: bool
    payload: np.dtype | None
    repeated: bool = False
    divides: bool = False

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> Any:
        """See `Grid`."""
        return self._by(nearest, x, scale, *zero_point)

    def rounded(self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> Any:
        """See `Grid`."""
        return self._by(rounding, x, scale, *zero_point)

    def _by(self, rounding: Rounding, x: jax.Array, scale: jax.Array, zero_point: jax.Array) -> Any:
        how = Steps(
            rounding,
            centered=self.centered,
            by_reciprocal=self.centered and not self.divides,
            repeated=self.repeated,
            payload=self.payload,
        )
        low: Any = np.float32(self.low)
        high: Any = np.float32(self.high)
        return how.quantized(x, scale, zero_point, low, high)


@dataclass(frozen=True)
class MinifloatGrid:
    """Numbers of a minifloat: static, equal by value.

    Attributes:
        form: the format.
        dtype: of the tensor that is quantized.
    """

    form: FloatGrid
    dtype: np.dtype

    def nearest(self, x: jax.Array, scale: jax.Array, *zero_point: jax.Array) -> jax.Array:
        """See `Grid`."""
        if self.form.dtype in FLOAT8_DTYPES:
            return self._floats(to_float8(x, scale, self.form.dtype).astype(jnp.float32), scale)
        return self.rounded(nearest, x, scale)

    def rounded(
        self, rounding: Rounding, x: jax.Array, scale: jax.Array, *zero_point: jax.Array
    ) -> jax.Array:
        """See `Grid`."""
        form = self.form
        steps = to_float_grid(float_steps(x, scale), form.mantissa_bit_width, form.exponent_bias, rounding)
        return self._floats(bounded(steps, jnp.float32(-form.largest), jnp.float32(form.largest)), scale)

    def _floats(self, steps: jax.Array, scale: jax.Array) -> jax.Array:
        return from_float_steps(steps, scale, self.dtype).astype(jnp.float32)


def on_grid(
    grid: Grid,
    rounding: Rounding | None,
    x: jax.Array,
    found: ClippingRange,
    where: tuple[jax.Array, ...],
    clip_gradient: bool,
    to_range: bool,
) -> Any:
    """`x` on a grid, with the gradient of clipping it to the range.

    Args:
        grid: the numbers, and the payload to keep.
        rounding: how to round; None for nearest.
        x: float32.
        found: the range.
        where: scale, and zero point, of the grid.
        clip_gradient: whether the gradient of `x` stops where it is clipped.
        to_range: whether the range then gets that gradient.
    """
    if rounding is None and clip_gradient:
        return within_range(grid.nearest, x, found.high, found.low, *where, to_range=to_range)
    fixed = jax.tree.map(jax.lax.stop_gradient, (x, *where))
    made = grid.nearest(*fixed) if rounding is None else grid.rounded(rounding, *fixed)
    if clip_gradient:
        return within_range(_made, x, found.high, found.low, made, to_range=to_range)
    return (with_gradient_of(x, made[0]), made[1]) if isinstance(made, tuple) else with_gradient_of(x, made)


def _made(x: jax.Array, made: Any) -> Any:
    return made


def minifloat_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype of a minifloat, from anything that names it."""
    form = FloatGrid.of_dtype(dtype)
    assert form.dtype is not None, "read from a dtype"
    return form.dtype


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
