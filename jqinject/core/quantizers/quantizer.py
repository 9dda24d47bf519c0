"""The one result of quantization, and the skeleton that every quantizer with a scale shares.

    grid        = the numbers of this call                    `_numbers`
    scale       = scaling_impl(x, number that it maps to)
    zero_point  = zero_point_impl(x, scale, bits)             None without one
    value       = round(x) by these, in the quantizer's view  `_round`

A quantizer states the parts on the right; layout, search, payload and result are written here. A scaling whose
scale and zero point come from one range (`RangeScaling`) finds both at once, and the gradient then goes through the
ends of that range instead of the scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Scaling, View, by_range, class_fact, groups_of, scale_dtype, searches
from jqinject.core.check import MOST_STEPS
from jqinject.core.clamping import Identity
from jqinject.core.component import Component, component
from jqinject.core.state import QuantStat, float_array
from jqinject.core.statistics.ranges import ClippingRange
from jqinject.core.statistics.search import Candidate, Search, scale_of, zero_point_of
from jqinject.core.views import beside, cut_of, in_layout
from jqinject.ops.clamp import within_range
from jqinject.ops.fake_quant import Offset, known_zero
from jqinject.ops.ste import with_gradient_of
from jqinject.quant_tensor import CodebookQuantTensor, FloatQuantTensor, IntQuantTensor, Levels
from jqinject.quant_tensor.public_tensors import int_grid

Rounded = tuple[jax.Array, jax.Array | None]  # a value, and its payload if it is kept


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
    def cast(cls, x: jax.Array, payload: jax.Array, scale: jax.Array, grid: Any) -> Quantized:
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

    def quant_tensor(self, *, training: bool) -> Any:
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
            tensor._store(*numbers, int_grid(bits, grid.signed), training, self.payload)
            return tensor
        if self.carrier is not None:
            return FloatQuantTensor.cast(self.carrier, self.payload, self.scale, grid, training)
        more = (self.payload, self.levels, self.scale_dtype)
        return FloatQuantTensor(self.value, self.scale, grid, training, *more)


def _shown(zero_point: jax.Array | None) -> jax.Array:
    """The zero point as an array, also of a grid without one: concrete then, while a program is traced too."""
    return known_zero() if zero_point is None else zero_point


def through_ends(
    compute: Callable[..., Any],
    x: jax.Array,
    ends: ClippingRange | None,
    *where: Any,
    to_range: bool = True,
    pure: bool = True,
) -> Any:
    """The number `compute(x, *where)` with the gradient of clipping `x` to the ends of a range.

    Args:
        compute: rounds to a value, or to a value and its payload.
        x: float32.
        ends: the range; None passes the whole gradient.
        where: scale and zero point, which get no gradient.
        to_range: whether the ends get the gradient where `x` lies beyond them.
        pure: whether `compute` is a function without state; else it is called once, outside the derivative.
    """
    if ends is not None and pure:
        return within_range(compute, x, ends.high, ends.low, *where, to_range=to_range)
    y = compute(*jax.tree.map(jax.lax.stop_gradient, (x, *where)))
    if ends is not None:
        return within_range(_second, x, ends.high, ends.low, y, to_range=to_range)
    return (with_gradient_of(x, y[0]), y[1]) if isinstance(y, tuple) else with_gradient_of(x, y)


def _second(x: jax.Array, y: Any) -> Any:
    return y


@component
class DelayWrapper(Component):
    """Returns `x` in the first `quant_delay_steps` calls, `y` after.

    Every call counts, in training and evaluation. State: `countdown`, the calls left; none without a delay.

    Args:
        quant_delay_steps: the number of calls that pass through; None or 0 for no delay.

    Raises:
        TypeError: when it is neither None nor an integer.

    Example:
        >>> delay = DelayWrapper(1)
        >>> [float(delay(jnp.float32(0.3), jnp.float32(0.25))) for _ in range(2)]
        [0.30000001192092896, 0.25]
    """

    is_scale_free = True
    quant_delay_steps: InitVar[int | None]
    countdown: QuantStat | None = field(default=None, init=False)

    def __post_init__(self, quant_delay_steps: int | None) -> None:
        steps = delay_steps(quant_delay_steps, "DelayWrapper")
        if steps:
            self.countdown = QuantStat(float_array(steps))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """`x` while the delay lasts, else `y`."""
        if self.countdown is None:
            return y
        left = self.countdown.get_value()
        self.countdown.set_value(jnp.maximum(left - 1, 0))
        return jnp.where(left > 0, x, y)


def delay_steps(quant_delay_steps: int | None, where: str) -> int:
    """The number of delayed calls; 0 for None.

    Raises:
        TypeError: when it is neither None nor an integer.
        ValueError: when it is negative, or more than a counter can hold.
    """
    steps = check.optional(check.between(0, MOST_STEPS, check.integer))
    return steps(quant_delay_steps, where, "quant_delay_steps") or 0


class Delayed(Component):
    """Abstract: what quantizes after `quant_delay_steps` calls, its one `InitVar`.

    Attributes:
        delay: returns `x` until then; None if it does not wait.
    """

    delay: DelayWrapper | None = None

    def __post_init__(self, quant_delay_steps: int | None) -> None:
        steps = delay_steps(quant_delay_steps, type(self).__name__)
        if steps:
            self.delay = DelayWrapper(steps)


@cache
def _is_none(finder: type) -> bool:
    """Whether what finds a zero point, by its class, finds none."""
    return finder is NoneType or class_fact(finder, "has_zero_point") is False


class Quantizer(Component):
    """Abstract: a quantizer whose scale comes from a component; see the module for its parts.

    Attributes:
        scaling_impl: the scale.
        zero_point_impl: the zero point; None without one.
        input_view_impl: applied to the tensor before it is rounded.
    """

    scaling_impl: Scaling
    input_view_impl: View = Identity()

    @property
    def has_zero_point(self) -> bool:
        """Whether the zero point may differ from 0: what the component that finds it says."""
        finder: Any = (
            self.scaling_impl if by_range(type(self.scaling_impl)) else getattr(self, "zero_point_impl", None)
        )
        return finder is not None and getattr(finder, "has_zero_point", True)

    @property
    def scale_dtype(self) -> np.dtype | None:
        """The `scale_dtype` of the scaling."""
        return scale_dtype(self.scaling_impl)

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
        return self._quantize(x, scale, zero_point, ends, grid, keep)

    def by_scale(
        self, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None = None, keep: bool = False
    ) -> Quantized:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        x = check.float_input(x, type(self).__name__)
        return self._quantize(x, scale, zero_point, None, self._numbers()[0], keep)

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
        return self._quantize(x, scale, self._zero_point(x, scale, grid, of_zero), None, grid, False)

    def freeze_range(self) -> None:
        """Make constants of an averaged range, its scale and its zero point: see `RangeScaling.freeze`."""
        scaling: Any = self.scaling_impl
        if by_range(type(scaling)):
            grid, threshold = self._numbers()
            scaling.freeze(threshold, grid.bit_width if grid.is_integer else None)

    @abstractmethod
    def _numbers(self) -> tuple[Any, Any]:
        """The grid of this call, and which of its numbers the scale maps the statistic to; None for 1."""

    def _round(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, ends: Any, grid: Any, keep: bool
    ) -> Rounded:
        """The value of a viewed tensor in its dtype, and the payload if `keep` and there is one."""
        raise TypeError(
            f"{type(self).__name__} rounds by scales of its own, so it takes none.\n  cure: call it with the tensor"
        )

    def _zero_point(self, x: jax.Array, scale: jax.Array, grid: Any, task: Any) -> jax.Array | None:
        finder: Any = getattr(self, "zero_point_impl", None)
        return None if _is_none(type(finder)) else zero_point_of(finder, x, scale, grid.bit_width, task)

    def _quantize(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, ends: Any, grid: Any, keep: bool
    ) -> Quantized:
        view = self.input_view_impl
        if type(view) is Identity:
            value, payload = self._round(x, scale, zero_point, ends, grid, keep)
            return Quantized(value, scale, zero_point, grid, payload)
        cut = cut_of(view, x) if keep and zero_point is not None else None
        if cut is not None and cut.zeros(x.shape):
            keep = False  # padding zeros would become integers other than the zero point
        scale, zero_point = beside(view, x, scale, zero_point)
        rounded = partial(self._round, grid=grid, keep=keep)
        value, payload = in_layout(view, rounded, x, scale, zero_point, ends)
        return Quantized(value, scale, zero_point, grid, payload)
