"""The one result of quantization, the skeleton that every quantizer with a scale shares, and integers.

    grid        = the numbers of this call                    `_numbers`
    scale       = scaling_impl(x, number that it maps to)
    zero_point  = zero_point_impl(x, scale, bits)             None without one
    value       = round(x) by these, in the quantizer's view  `_round`

A quantizer states the parts on the right; layout, search, payload and result are written here. A scaling whose
scale and zero point come from one range (`RangeScaling`) finds both at once, and the gradient then goes through the
ends of that range instead of the scale.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from functools import cache, lru_cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols, check, clamping, component, views
from jqinject.core._protocols import (
    by_range,
    class_fact,
    groups_of,
    is_nearest,
    scale_dtype,
    scale_factor,
    searches,
)
from jqinject.core.quantizers.delay import Delayed
from jqinject.core.rounding import RoundSte
from jqinject.core.statistics.ranges import ClippingRange, through_ends
from jqinject.core.statistics.search import Candidate, Search, scale_of, zero_point_of
from jqinject.ops import IntGrid, power
from jqinject.ops.fake_quant import Offset, Steps, in_range_of, quantize_in_steps
from jqinject.ops.grid import Grid
from jqinject.ops.lean import Bits, known_zero
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, IntQuantTensor, Levels
from jqinject.quant_tensor.public_tensors import int_grid as shared_int_grid

Rounded = tuple[jax.Array, jax.Array | None]  # a value, and its payload if it is kept


class GridStep(NamedTuple):
    """What a tensor is rounded by.

    Attributes:
        scale: float per step of the grid, float32.
        zero_point: the number that represents 0, float32; None without one.
        ends: those of the range that the gradient goes through; None if it goes through the scale.
        factor: what the tensor is multiplied by instead of divided by the scale; None if it is divided.
    """

    scale: jax.Array
    zero_point: Offset = None
    ends: ClippingRange | None = None
    factor: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """What every quantizer returns: a pytree.

    It unpacks as Brevitas's results do: value, scale, zero point and bit width; of minifloats value, scale, zero point,
    the three widths, and the codes for inf and nan; of a decoupled quantizer also the scale and zero point before
    rounding.

    Attributes:
        value: the quantized tensor in float, dtype and shape of the input (groups may lie along two axes).
        scale: float per step of the grid, float32, broadcasts with `value`.
        zero_point: the integer that represents 0, float32, broadcasts with `value`; None without one.
        grid: the numbers: integers (`IntGrid`), minifloats or a table.
        payload: the numbers in the grid's storage dtype; None if not kept.
        pre_scale, pre_zero_point: what a decoupled quantizer divides by and adds before rounding, float32; else None.
        scale_dtype: a dtype of 8 bits that holds the scale; None if unknown.
        levels: the numbers and both scales of a scale in two levels; else None.
        carrier: the tensor that was cast to the payload, if the value is dequantized when it is read; else None.

    Example:
        >>> from jqinject.ops import IntGrid
        >>> value, scale, zero_point, bit_width = Quantized(jnp.ones(2), jnp.float32(0.5), None, IntGrid(4))
        >>> zero_point, bit_width
        (Array(0., dtype=float32), 4)
    """

    value: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    grid: Any
    payload: jax.Array | None = None
    pre_scale: jax.Array | None = None
    pre_zero_point: jax.Array | None = None
    scale_dtype: np.dtype | None = field(default=None, metadata={"static": True})
    levels: Levels | None = None
    carrier: jax.Array | None = None

    @classmethod
    def cast(cls, x: jax.Array, payload: jax.Array, scale: jax.Array, grid: Any) -> "Quantized":
        """The result of a cast of `x` to an 8-bit float, whose value is dequantized when it is read."""
        result = object.__new__(cls)
        vars(result).update(scale=scale, zero_point=None, grid=grid, payload=payload, carrier=x)
        return result

    if not TYPE_CHECKING:  # it would hide misspelt names

        def __getattr__(self, name: str) -> Any:
            if name != "value":
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
            return self.quant_tensor(training=False).value

    @property
    def bit_width(self) -> Any:
        """Bits of one number: a Python int when constant, else a float32 scalar."""
        return self.grid.bit_width

    def __iter__(self) -> Iterator[Any]:
        form, numbers = self.grid, (self.value, self.scale, _shown(self.zero_point))
        if form.is_minifloat:
            widths = (form.exponent_bit_width, form.mantissa_bit_width, form.exponent_bias)
            return iter((*numbers, *widths, form.saturating, form.inf_values, form.nan_values))
        pre = () if self.pre_scale is None else (self.pre_scale, _shown(self.pre_zero_point))
        return iter((*numbers, self.bit_width, *pre))

    def quant_tensor(self, *, training: bool) -> CodebookQuantTensor | IntQuantTensor | FloatQuantTensor:
        """The tensor that flows between layers.

        Args:
            training: whether it was quantized in training mode.

        Returns:
            The QuantTensor of the grid's kind.
        """
        grid = self.grid
        if grid.is_table:
            return CodebookQuantTensor(self.value, self.scale, grid, training)
        if not grid.is_minifloat:
            bits, numbers = grid.bit_width, (self.value, self.scale, self.zero_point)
            if type(bits) is not int:
                return IntQuantTensor(*numbers, bits, grid.signed, training, self.payload)
            tensor = object.__new__(IntQuantTensor)
            tensor._store(*numbers, shared_int_grid(bits, grid.signed), training, self.payload)
            return tensor
        if self.carrier is not None:
            return FloatQuantTensor.cast(self.carrier, self.payload, self.scale, grid, training)
        more = (self.payload, self.levels, self.scale_dtype)
        return FloatQuantTensor(self.value, self.scale, grid, training, *more)


def _shown(zero_point: jax.Array | None) -> jax.Array:
    """The zero point as an array, also of a grid without one: concrete then, while a program is traced too."""
    return known_zero() if zero_point is None else zero_point


@cache
def _is_none(finder: type) -> bool:
    """Whether what finds a zero point, by its class, finds none."""
    return finder is NoneType or class_fact(finder, "has_zero_point") is False


class Quantizer(component.Component):
    """Abstract: a quantizer whose scale comes from a component; see the module for its parts.

    Attributes:
        scaling_impl: the scale.
        zero_point_impl: the zero point; None without one.
        input_view_impl: applied to the tensor before it is rounded.
    """

    scaling_impl: _protocols.Scaling
    input_view_impl: _protocols.View = clamping.Identity()

    @property
    def has_zero_point(self) -> bool:
        """Whether the zero point may differ from 0: what the component that finds it says."""
        scaling = self.scaling_impl
        finder: Any = scaling if by_range(type(scaling)) else getattr(self, "zero_point_impl", None)
        return finder is not None and getattr(finder, "has_zero_point", True)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

    @property
    def scale_factor(self) -> jax.Array | None:
        """The `scale_factor` of the scaling."""
        return scale_factor(self.scaling_impl)

    @property
    def groups(self) -> tuple[int, int] | None:
        """The groups of `input_view_impl`."""
        return groups_of(self.input_view_impl)

    def __call__(self, x: jax.Array, *, keep: bool = False) -> Quantized:
        """`x` quantized; scale and zero point float32.

        Args:
            x: a float array.
            keep: whether the result also has the payload, if the grid has one of at most 8 bits.
        """
        if not isinstance(x, jax.Array) or x.dtype != jnp.float32:
            x = check.float_input(x, type(self).__name__)
        x32, scaling = x.astype(jnp.float32), cast(Any, self.scaling_impl)
        grid, threshold = self._numbers()
        zero_point = ends = None
        if by_range(type(scaling)):
            bits = grid.bit_width if grid.is_integer else None
            scale, zero_point, ends = scaling.measure(x32, threshold, bits)
            ends = ends if scaling.clip_gradient else None
        else:
            searched = (Search(self),) if getattr(scaling, "searches", False) else ()
            scale = scaling(x32, threshold, *searched)
            finder: Any = getattr(self, "zero_point_impl", None)
            if not _is_none(type(finder)):
                settle = getattr(scaling, "settle", None) if x.size and searches(finder) else None
                tried = scale if settle is None else settle(scale, threshold)
                zero_point = self._zero_point(x32, scale, grid, Search(self, tried))
        return self._quantize(x, GridStep(scale, zero_point, ends), grid, keep)

    def by_scale(
        self, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None = None, keep: bool = False
    ) -> Quantized:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        x = check.float_input(x, type(self).__name__)
        return self._quantize(x, GridStep(scale, zero_point), self._numbers()[0], keep)

    def try_candidate(self, x: jax.Array, candidate: Candidate) -> Quantized:
        """`x` quantized with a candidate in place of the searched statistic.

        Args:
            x: float32.
            candidate: for the scale, or with a scale for the zero point.
        """
        grid, threshold = self._numbers()
        scale, of_zero = candidate.scale, candidate
        if scale is None:
            scale, of_zero = scale_of(self.scaling_impl, x, threshold, candidate), Candidate(None)
        return self._quantize(x, GridStep(scale, self._zero_point(x, scale, grid, of_zero)), grid, False)

    def freeze_range(self) -> None:
        """Make constants of an averaged range, its scale and its zero point: see `RangeScaling.freeze`."""
        scaling: Any = self.scaling_impl
        if by_range(type(scaling)):
            grid, threshold = self._numbers()
            scaling.freeze(threshold, grid.bit_width if grid.is_integer else None)

    @abstractmethod
    def _numbers(self) -> tuple[Any, Any]:
        """The grid of this call, and which of its numbers the scale maps the statistic to; None for 1."""

    def _round(self, x: jax.Array, step: GridStep, grid: Grid, keep: bool) -> Rounded:
        """The value of a viewed tensor in its dtype, and the payload if `keep` and there is one."""
        raise TypeError(
            f"{type(self).__name__} rounds by scales of its own, so it takes none.\n  cure: call it with the tensor"
        )

    def _zero_point(self, x: jax.Array, scale: jax.Array, grid: Grid, task: Any) -> jax.Array | None:
        finder: Any = getattr(self, "zero_point_impl", None)
        return None if _is_none(type(finder)) else zero_point_of(finder, x, scale, grid.bit_width, task)

    def _quantize(self, x: jax.Array, step: GridStep, grid: Grid, keep: bool) -> Quantized:
        view, scale, zero_point = self.input_view_impl, step.scale, step.zero_point
        if type(view) is clamping.Identity:
            value, payload = self._round(x, step, grid, keep)
            return Quantized(value, scale, zero_point, grid, payload)
        cut = views.cut_of(view, x) if keep and zero_point is not None else None
        if cut is not None and cut.zeros(x.shape):
            keep = False  # padding zeros would become integers other than the zero point
        scale, zero_point = views.beside(view, x, scale, zero_point)
        rounded = partial(self._round, grid=grid, keep=keep)
        value, payload = views.in_layout(view, rounded, x, step._replace(scale=scale, zero_point=zero_point))
        return Quantized(value, scale, zero_point, grid, payload)


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


@component.component
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
    input_view_impl: _protocols.View = clamping.Identity()
    float_to_int_impl: _protocols.Rounding = RoundSte()
    tensor_clamp_impl: _protocols.Clamp = clamping.TensorClamp()
    quant_delay_steps: InitVar[int | None] = 0

    @property
    def is_nearest(self) -> bool:
        """Whether rounding and clamping are QuantizeLinear's, and the layout is that of the input."""
        row_major = isinstance(self.input_view_impl, clamping.Identity)
        return row_major and self.delay is None and is_nearest(self.float_to_int_impl, self.tensor_clamp_impl)

    def min_int(self, bit_width: Bits) -> Bits:
        """Smallest integer of `bit_width` bits. See `jqinject.ops.min_int`."""
        return int_grid(self, bit_width).bounds[0]

    def max_int(self, bit_width: Bits) -> Bits:
        """Largest integer of `bit_width` bits. See `jqinject.ops.max_int`."""
        return int_grid(self, bit_width).bounds[1]

    def to_int(self, scale: jax.Array, zero_point: Offset, bit_width: Bits, x: jax.Array) -> jax.Array:
        """The integers of `x`, as float32, differentiable."""

        def steps(x: jax.Array, scale: jax.Array, zero_point: Offset) -> jax.Array:
            return self.steps_to_int(scale, zero_point, bit_width, x)

        return views.in_layout(self.input_view_impl, steps, x, scale, zero_point)

    def steps_to_int(self, scale: jax.Array, zero_point: Offset, bit_width: Bits, x: jax.Array) -> jax.Array:
        """Like `to_int`, for a tensor that is already viewed."""
        y = power.divide(x.astype(jnp.float32), scale)
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
        return views.in_layout(self.input_view_impl, rounded, x, GridStep(scale, zero_point))[0]

    def rounded(self, x: jax.Array, step: GridStep, grid: IntGrid, keep: bool = False) -> Rounded:
        """A viewed tensor quantized and back in its dtype, and its integers.

        Args:
            x: viewed, float.
            step: scale and zero point, as they broadcast against it.
            grid: the integers.
            keep: whether to return the integers as int8 or uint8; None if they are wider, delayed, or the bit width is
                learned.
        """
        parts = type(self.float_to_int_impl), type(self.tensor_clamp_impl)
        scale, zero_point, keep = step.scale, step.zero_point, keep and self.delay is None
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


def int_grid(int_quant: Any, bit_width: Bits) -> IntGrid:
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
    signed: bool, narrow_range: bool, bit_width: _protocols.BitWidth, steps: _protocols.IntScalingImpl
) -> tuple[IntGrid, Any]:
    """The grid and the threshold of constant components."""
    grid = IntGrid(bit_width(), signed, narrow_range)
    return grid, steps(grid.bit_width)


class RoundedByIntQuant(Quantizer):
    """Abstract: a quantizer whose `int_quant` rounds, to as many bits as its `bit_width_impl` says."""

    int_quant: _protocols.IntQuantizer
    bit_width_impl: _protocols.BitWidth
    int_scaling_impl: Any

    @property
    def input_view_impl(self) -> _protocols.View:  # type: ignore[override]
        """The view of an `IntQuant`; one of a user's own views the tensor itself."""
        return self.int_quant.input_view_impl if isinstance(self.int_quant, IntQuant) else clamping.Identity()

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

    def _quantize(self, x: jax.Array, step: GridStep, grid: Any, keep: bool) -> Quantized:
        rounds = self.int_quant
        in_place = isinstance(rounds, IntQuant) and type(rounds.input_view_impl) is clamping.Identity
        if not in_place or by_range(type(self.scaling_impl)):
            return super()._quantize(x, step, grid, keep)
        value, payload = cast(IntQuant, rounds).rounded(x, step, grid, keep)
        return Quantized(value, step.scale, step.zero_point, grid, payload)

    def _round(self, x: jax.Array, step: GridStep, grid: Any, keep: bool) -> Rounded:
        scale, zero_point, ends, _ = step
        rounds, scaling = self.int_quant, cast(Any, self.scaling_impl)
        if not isinstance(rounds, IntQuant):
            zero = jnp.zeros((), jnp.float32) if zero_point is None else zero_point
            return rounds(scale, zero, grid.bit_width, x.astype(jnp.float32)).astype(x.dtype), None
        if not by_range(type(scaling)):
            return rounds.rounded(x, step, grid, keep)
        # The gradient goes through the ends of the range.
        low, high = (cast(Any, np.float32(bound)) for bound in grid.bounds)
        if ends is not None and grid.narrow_range and zero_point is None:
            ends = ClippingRange(jax.lax.stop_gradient(scale) * high)
        function = class_fact(type(rounds.float_to_int_impl), "elementwise")
        how = Steps(
            function or rounds.float_to_int_impl,
            by_reciprocal=zero_point is None,
            repeated=views.cut_of(self.input_view_impl, x) is not None,
            payload=_payload_dtype(grid) if keep and rounds.delay is None else None,
        )
        compute, to_range = partial(how.quantized, low=low, high=high), not scaling.scale_stop_grad
        numbers = x.astype(jnp.float32), ends, scale, zero_point
        y = through_ends(compute, *numbers, to_range=to_range, pure=function is not None)
        value, payload = (y, None) if how.payload is None else y
        return rounds._finished(value, scale, x), payload
