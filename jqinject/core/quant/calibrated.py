"""Quantization to a clipping range that is calibrated: from the tensor at hand, or averaged over batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core._protocols import Restrict, Rounding
from jqinject.core.calibration import (
    OF_NO_AXES,
    AbsMaxRange,
    ClippingRange,
    FixedRange,
    RangeMethod,
    SimpleMovingAverage,
)
from jqinject.core.calibration.axes import axes_that_share, check_apart, others
from jqinject.core.calibration.range_to_scale import not_tiny, scale_and_zero_point
from jqinject.core.construction import check
from jqinject.core.construction.assign import assign, set_given
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.construction.component import Component
from jqinject.core.facts import is_nearest, takes_cut
from jqinject.core.quant.float_quant import FloatQuantResult
from jqinject.core.quant.grids import Grid, IntegerGrid, MinifloatGrid
from jqinject.core.quant.int_quant import QuantResult, ResultWithPayload
from jqinject.core.state.variables import all_counted
from jqinject.ops.choose import shaped
from jqinject.ops.clip import within_range
from jqinject.ops.devices.cut import Cut, cut_in_place
from jqinject.ops.devices.explicit_axes import is_split
from jqinject.ops.devices.mapped import Names, names_at_hand, places_over, sum_over
from jqinject.ops.fake_quant import in_range_of, known_zero
from jqinject.ops.groups import check_divides, checked_group_size, fitting_size, split_groups
from jqinject.ops.minifloats.float_format import FloatFormat
from jqinject.ops.power import divide
from jqinject.ops.ste import with_gradient_of

MOST_BITS = 24  # float32, in which numbers are rounded, holds no wider whole numbers
Ends = TypeVar("Ends", ClippingRange, jax.Array)


@checked_arguments
class CalibratedQuant(Component):
    """To integers (or 8-bit floats) and back, within a calibrated clipping range.

    Static: `range = averaging_impl(mean over batch_axes of calibration_impl(x))`, one for the tensor, moved in training
    mode only; the present batch counts. Dynamic, with `averaging_impl=None`: `range = calibration_impl(x)` of the
    tensor at hand, one for each index of `channelwise_axes`.

    `y = (clamp(round(x / s + z), -2^(b-1), 2^(b-1) - 1) - z) * s`, ties to even, `s`, `z` from `scale_and_zero_point`.
    The gradient passes straight through where `x` lies in the range, and reaches the range where it does not.

    AQT's integers are four choices of `bit_width`, `range_steps` and rounding, all with `narrow_range`:

    | preserve_zero | preserve_max_val | bit_width | range_steps | float_to_int_impl |
    |---|---|---|---|---|
    | yes | no | b | 2^(b-1) - 0.5, the far edge of the last bucket | |
    | yes | yes | b | 2^(b-1) - 1, its centre | |
    | no | no | b + 1, in half steps | 2^b | `RoundToOddSte` |
    | no | yes | b + 1, in half steps | 2^b - 1 | `RoundToOddSte` |

    Args:
        calibration_impl: finds the range.
        averaging_impl: averages it over batches: `SimpleMovingAverage`; None for none.
        bit_width: of signed integers, at least 2; not looked at with a `q_dtype`.
        q_dtype: a dtype of 8-bit floats or narrower instead of integers; the range has to be symmetric then.
        channelwise_axes: axes with a range for each index.
        shared_axes: the axes that share a range, in the place of `channelwise_axes`: `(-1,)` for one a row.
        batch_axes: axes with a range for each index, whose mean is the range of a batch: `(0,)` is Qwix's way.
        scale_stop_grad: whether the range has no gradient; by default it has that of what it was found in.
        group_size: cut the axis `group_dim` into groups of so many elements, each with a range; the result then has two
            axes in its place (groups, elements of a group). None for no groups.
        group_dim: the axis that is cut.
        group_padding: fill up the last group with zeros, which count in means and percentiles; False refuses it.
        restrict_scaling_impl: which values a scale may take; None for any.
        narrow_range: leave out -2^(b-1).
        range_steps: how many steps the end of a symmetric range is; None for 2^(b-1) - 1/2.
        float_to_int_impl: how to round; None for to nearest.
        clip_gradient: whether the gradient stops at what is clipped, which lies out of the range or, with
            `narrow_range`, beyond the last integers; False passes all of it to `x`.
        axis_name: a mapped axis (of `shard_map`, `pmap` or `vmap`) that the tensor is spread over, or a tuple of them:
            the range is that of the whole tensor; with `batch_axes`, the mean of all examples.

    Raises:
        TypeError: `bit_width` is no integer; (at the call) `x` is no float array.
        ValueError: `bit_width` is below 2 or above 24; a range with a zero point for a `q_dtype`;
            a static range with `channelwise_axes` or groups; groups along one of the `channelwise_axes`; (at the call)
            groups that do not fill the axis.

    Source: Qwix. Differs from Qwix: a range that is not finite never enters the average; arithmetic is float32.

    Example:
        >>> quant = CalibratedQuant(AbsMaxRange(), bit_width=4)
        >>> result = quant(jnp.array([0.4, -1.5, 0.0]))
        >>> result.value, result.scale
        (Array([ 0.4, -1.6,  0. ], dtype=float32), Array([0.2], dtype=float32))
    """

    calibration_impl: RangeMethod
    averaging_impl: SimpleMovingAverage | None = None
    bit_width: int
    q_dtype: np.dtype | None = None
    channelwise_axes: tuple[int, ...] = ()
    shared_axes: tuple[int, ...] | None = None
    batch_axes: tuple[int, ...] = ()
    scale_stop_grad: bool = False
    group_size: int | None = None
    group_dim: int = -1
    group_padding: bool = False
    restrict_scaling_impl: Restrict | None = None
    narrow_range: bool = False
    range_steps: float | None = None
    float_to_int_impl: Rounding | None = None
    clip_gradient: bool = True
    axis_name: Any = None
    use_running_average: bool = False

    def __init__(
        self,
        calibration_impl: RangeMethod | None = None,
        averaging_impl: SimpleMovingAverage | None = None,
        bit_width: int = 8,
        q_dtype: Any = None,
        channelwise_axes: Sequence[int] = (),
        batch_axes: Sequence[int] = (),
        shared_axes: Sequence[int] | None = None,
        scale_stop_grad: bool = False,
        group_size: int | None = None,
        group_dim: int | None = None,
        restrict_scaling_impl: Restrict | None = None,
        group_padding: bool = False,
        axis_name: Any = None,
        narrow_range: bool = False,
        range_steps: float | None = None,
        float_to_int_impl: Rounding | None = None,
        clip_gradient: bool = True,
    ) -> None:
        bits = check.bit_width(bit_width, "CalibratedQuant", least=2)
        if bits > MOST_BITS:
            raise ValueError(f"CalibratedQuant: bit_width must be at most {MOST_BITS}, got {bits}")
        if averaging_impl is not None and (tuple(channelwise_axes) or group_size is not None):
            raise ValueError(
                f"CalibratedQuant: an averaged range is one for the tensor, got channelwise_axes={channelwise_axes!r}, "
                f"group_size={group_size!r}.\n  cure: averaging_impl=None, for a range of the tensor at hand"
            )
        if group_size is not None:
            checked_group_size(group_size, "CalibratedQuant")
            check_apart(group_dim, channelwise_axes)
        assign(
            self,
            calibration_impl=calibration_impl or AbsMaxRange(),
            bit_width=bits,
            use_running_average=False,
        )
        set_given(
            self,
            averaging_impl=averaging_impl,
            q_dtype=None if q_dtype is None else _minifloat_dtype(q_dtype),
            channelwise_axes=tuple(channelwise_axes),
            batch_axes=tuple(batch_axes),
            scale_stop_grad=bool(scale_stop_grad),
            shared_axes=None if shared_axes is None else tuple(shared_axes),
            group_size=group_size,
            group_dim=group_dim,
            group_padding=bool(group_padding),
            restrict_scaling_impl=restrict_scaling_impl,
            axis_name=axis_name,
            narrow_range=narrow_range,
            range_steps=range_steps,
            float_to_int_impl=float_to_int_impl,
            clip_gradient=clip_gradient,
        )

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Switch between training and evaluation, for `nnx.view`.

        Args:
            use_running_average: evaluation mode: the average is used and not moved.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def has_range(self) -> bool | None:
        """Whether a batch has entered the average; None without one, and of a fixed range. See `StaticRange`."""
        if self.averaging_impl is None or isinstance(self.calibration_impl, FixedRange):
            return None
        return all_counted(self.averaging_impl.count.get_value())

    def begin_calibration(self) -> None:
        """From now on average batches anew."""
        if self.averaging_impl is not None:
            self.averaging_impl.reset()
        self.use_running_average = False

    def end_calibration(self) -> None:
        """Nothing: the range is the average."""

    def clipping_range(self, x: jax.Array) -> ClippingRange:
        """The range that `x` is quantized in, float32; in training mode it enters the average.

        Args:
            x: float array.
        """
        x, cut = self._laid(x.astype(jnp.float32))
        return self._kept(self._range(x, not self.use_running_average, cut), x.ndim)

    def _laid(self, x: jax.Array) -> tuple[jax.Array, Cut | None]:
        """A tensor in groups; or where groups may cross its shards, as it lies, and how to cut it."""
        if self.group_size is None:
            return x, None
        if not self.group_padding:
            check_divides(x.shape[self.group_dim], self.group_size, "CalibratedQuant")
        size = fitting_size(self.group_size, x.shape[self.group_dim])
        axis = self.group_dim % x.ndim
        in_place = takes_cut(self.calibration_impl) and self._axes_that_share(x.ndim + 1) == (axis + 1,)
        cut = cut_in_place(x, size, axis) if in_place else None
        return (split_groups(x, size, axis) if cut is None else x), cut

    def averaged_range(self, ndim: int = 0) -> ClippingRange:
        """The range averaged so far, without a tensor.

        Args:
            ndim: how many axes, each of size 1, its ends are to have.
        """
        return self._kept(self._range(jnp.zeros((1,) * ndim, jnp.float32), update=False), ndim)

    def _kept(self, found: Ends, ndim: int) -> Ends:
        """Numbers that are one for the tensor as arrays of its number of axes."""
        if self.averaging_impl is None:
            return found
        return jax.tree.map(lambda end: shaped(end, (1,) * ndim), found)

    def _range(self, x: jax.Array, update: bool, cut: Cut | None = None) -> ClippingRange:
        """The range of a tensor; where it is averaged, of no axes; where it is cut, of the shape with two axes."""
        if cut is not None:
            found = self._found(x, cut, self._names())
            return found if is_split(x) else jax.tree.map(cut.in_two, found)
        if self.averaging_impl is None:
            return self._found(x, self._axes_that_share(x.ndim), self._names())
        if self.averaging_impl.settled and not update:
            known = isinstance(self.calibration_impl, Hashable)
            return self.averaging_impl.mean((_form if known else _found_form)(self.calibration_impl, x.ndim))
        return self.averaging_impl(self._of_batch(x), update)

    def _axes_that_share(self, ndim: int) -> tuple[int, ...]:
        """The axes along which a range is one, of a tensor that has its groups as two axes."""
        cut = None if self.group_size is None else self.group_dim
        return axes_that_share(ndim, self.shared_axes, self.channelwise_axes, cut)

    def _names(self) -> Names:
        return names_at_hand(self.axis_name, self.use_running_average)

    def _of_batch(self, x: jax.Array) -> ClippingRange:
        """The range of a batch, one for the tensor."""
        names = self._names()
        if not self.batch_axes:
            whole = type(self.calibration_impl) in OF_NO_AXES
            axes = None if whole else tuple(range(x.ndim))
            found = self._found(x, axes, names)
            return jax.tree.map(lambda end: shaped(end, ()), found)
        # Where every example has a range, an example lies on one device.
        found = self._found(x, others(x.ndim, self.batch_axes), ())

        def mean(ends: jax.Array) -> jax.Array:
            return sum_over(jnp.sum(ends), names) / (ends.size * places_over(names))

        return jax.tree.map(mean, found)

    def _found(self, x: jax.Array, axes: tuple[int, ...] | Cut | None, names: Names) -> ClippingRange:
        # A range method of the user's own need not know of mapped axes.
        method: Callable[..., ClippingRange] = self.calibration_impl
        return method(x, axes, names) if names else method(x, axes)

    @property
    def groups(self) -> tuple[int, int] | None:
        """Elements of a group, and the axis that is cut; None without groups."""
        return None if self.group_size is None else (self.group_size, self.group_dim)

    @property
    def is_dynamic(self) -> bool:
        """Whether the range is that of the tensor at hand: neither averaged nor fixed."""
        return self.averaging_impl is None and not isinstance(self.calibration_impl, FixedRange)

    @property
    def is_nearest(self) -> bool:
        """Whether it does what QuantizeLinear does: integers, without groups."""
        rounds_so = self.float_to_int_impl is None or is_nearest(self.float_to_int_impl)
        return self.q_dtype is None and self.group_size is None and rounds_so

    def __call__(self, x: jax.Array) -> QuantResult | FloatQuantResult:
        """`x` quantized; scale and zero point float32."""
        return self._quantized(x, keep=False)

    def keeping_payload(self, x: jax.Array) -> QuantResult | FloatQuantResult:
        """As a call; the result has integers of at most 8 bits beside the value."""
        return self._quantized(x, keep=True)

    def _quantized(self, x: jax.Array, keep: bool) -> QuantResult | FloatQuantResult:
        x, cut = self._laid(check.float_input(x, "CalibratedQuant"))
        x32 = x.astype(jnp.float32)
        found = self._range(x32, not self.use_running_average, cut)
        if self.q_dtype is not None:
            return self._minifloats(x, x32, found, cut)
        scale, zero_point = scale_and_zero_point(found, self.bit_width, self.range_steps)
        scale = self._restricted(scale)
        offset = known_zero() if zero_point is None else zero_point
        # Without a zero point the extreme lies on a tie, and goes where Qwix's does.
        filled = (
            cut is not None and cut.missing(x) and zero_point is not None
        )  # with integers other than its zero
        payload = np.dtype(np.int8) if keep and self.bit_width <= 8 and not filled else None
        edge = 2.0 ** (self.bit_width - 1)
        grid = IntegerGrid(self.narrow_range - edge, edge - 1.0, zero_point is None, payload, cut is not None)
        if self.narrow_range and zero_point is None:
            found = ClippingRange(jax.lax.stop_gradient(scale) * (edge - 1.0))
        made = self._rounded(grid, x32, cut, found, scale, offset)
        value, kept = (made, None) if payload is None else made
        scale = self._kept(scale, x.ndim)
        if zero_point is not None:
            offset = self._kept(offset, x.ndim)
        return ResultWithPayload.of(in_range_of(value, scale, x.dtype), scale, offset, self.bit_width, kept)

    def _minifloats(
        self, x: jax.Array, x32: jax.Array, found: ClippingRange, cut: Cut | None
    ) -> FloatQuantResult:
        if found.low is not None:
            raise ValueError(
                f"CalibratedQuant: {self.q_dtype} has no zero point, and {self.calibration_impl!r} finds a range that "
                "is not symmetric.\n  cure: AbsMaxRange, RMSRange, or FixedRange(-high, high)"
            )
        assert self.q_dtype is not None
        form = FloatFormat.of_dtype(self.q_dtype)
        scale = self._restricted(not_tiny(divide(found.high, form.max_value)))
        value = self._rounded(MinifloatGrid(form, x.dtype), x32, cut, found, scale)
        return FloatQuantResult(value.astype(x.dtype), self._kept(scale, x.ndim), form)

    def _restricted(self, scale: jax.Array) -> jax.Array:
        restrict = self.restrict_scaling_impl
        return scale if restrict is None else restrict(restrict.restrict_init_tensor(scale))

    def _rounded(
        self, grid: Grid, x: jax.Array, cut: Cut | None, found: ClippingRange, *where: jax.Array
    ) -> Any:
        """`x` on a grid, in groups, with the gradient of clipping it to the range.

        Args:
            grid: the numbers, and the payload that is kept.
            x: float32, in groups if there are any, but as it lies if it is cut.
            cut: how.
            found: the range.
            where: scale, and zero point, of the grid.
        """
        if cut is not None:
            found, where = jax.tree.map(lambda number: cut.spread(number, x), (found, where))
            made = self._rounded(grid, x, None, found, *where)
            return made if is_split(x) else jax.tree.map(lambda y: split_groups(y, cut.size, cut.axis), made)
        rounding = self.float_to_int_impl
        if rounding is None and self.clip_gradient:
            return within_range(
                grid.nearest, x, found.high, found.low, *where, to_range=not self.scale_stop_grad
            )
        fixed = jax.tree.map(jax.lax.stop_gradient, (x, *where))
        made = grid.nearest(*fixed) if rounding is None else grid.rounded(rounding, *fixed)
        if self.clip_gradient:
            return within_range(_made, x, found.high, found.low, made, to_range=not self.scale_stop_grad)
        return (
            (with_gradient_of(x, made[0]), made[1]) if isinstance(made, tuple) else with_gradient_of(x, made)
        )


def _made(x: jax.Array, made: Any) -> Any:
    return made


def _found_form(method: RangeMethod, ndim: int) -> ClippingRange:
    """The range that a method finds of a tensor of `ndim` axes, one for the tensor: abstract."""
    one = jax.ShapeDtypeStruct((1,) * ndim, jnp.float32)
    found = jax.eval_shape(lambda x: method(x, tuple(range(ndim))), one)
    return jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), found)


_form = lru_cache(maxsize=256)(_found_form)


def _minifloat_dtype(dtype: Any) -> np.dtype:
    form = FloatFormat.of_dtype(dtype)
    assert form.dtype is not None, "read from a dtype"
    return form.dtype
