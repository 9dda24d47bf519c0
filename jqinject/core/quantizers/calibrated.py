"""Quantization to a calibrated clipping range: of the given tensor, or averaged over batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core._protocols import Restrict, Rounding, is_nearest, takes_cut
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.component import Component, assign, set_given, set_view
from jqinject.core.memory.clipping_range import (
    SimpleMovingAverage,
    abstract_range,
    axes_that_share,
    check_axes,
    not_tiny,
    range_along,
    range_of_batch,
    scale_and_zero_point,
)
from jqinject.core.quantizers.float_quant import FloatQuantResult
from jqinject.core.quantizers.nearest_grids import (
    Grid,
    IntegerGrid,
    MinifloatGrid,
    minifloat_dtype,
    on_grid,
)
from jqinject.core.quantizers.quantizer import Quantized
from jqinject.core.state import all_counted
from jqinject.core.statistics.ranges import AbsMaxRange, ClippingRange, FixedRange, RangeMethod
from jqinject.ops.clamp import shaped
from jqinject.ops.cut import Cut, cut_in_place, told_if_gathered
from jqinject.ops.fake_quant import in_range_of
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.grid import IntGrid
from jqinject.ops.groups import check_divides, fitting_size, split_groups
from jqinject.ops.power import divide
from jqinject.ops.sharding import Names, is_split, names_at_hand
from jqinject.ops.ste import with_gradient_of

MOST_BITS = 24  # rounding is in float32, which holds no wider integers
Ends = TypeVar("Ends", ClippingRange, jax.Array)


@checked_arguments
class CalibratedQuant(Component):
    """To integers (or 8-bit floats) and back, within a calibrated clipping range.

    Static: `range = averaging_impl(mean over batch_axes of calibration_impl(x))`, one per tensor, updated in training
    mode only and including the present batch. Dynamic (`averaging_impl=None`): `range = calibration_impl(x)` of the
    given tensor, one for each index of `channelwise_axes`.

    `y = (clamp(round(x / s + z), -2^(b-1), 2^(b-1) - 1) - z) * s`, ties to even, `s`, `z` from `scale_and_zero_point`.
    The gradient goes straight through to `x` inside the range, and to the range outside.

    AQT's integers are four choices of `bit_width`, `range_steps` and rounding, all with `narrow_range`:

    | preserve_zero | preserve_max_val | bit_width | range_steps | float_to_int_impl |
    |---|---|---|---|---|
    | yes | no | b | 2^(b-1) - 0.5, the far edge of the last bucket | |
    | yes | yes | b | 2^(b-1) - 1, its centre | |
    | no | no | b + 1, in half steps | 2^b | `RoundToOddSte` |
    | no | yes | b + 1, in half steps | 2^b - 1 | `RoundToOddSte` |

    Args:
        calibration_impl: finds the range.
        averaging_impl: averages it over batches: `SimpleMovingAverage`; None does not average.
        bit_width: of signed integers, at least 2; ignored with a `q_dtype`.
        q_dtype: a dtype of 8-bit floats or narrower instead of integers; needs a symmetric range.
        channelwise_axes: axes with a range for each index.
        shared_axes: the axes that share a range, instead of `channelwise_axes`: `(-1,)` for one per row.
        batch_axes: axes with a range for each index, averaged to that of the batch; Qwix uses `(0,)`.
        scale_stop_grad: whether to stop the range's gradient.
        group_size: size of the groups that `group_dim` is cut into, each with a range; the result then has two axes in
            its place (groups, elements of a group). None for no groups.
        group_dim: the axis to cut.
        group_padding: pad the last group with zeros, which count in means and percentiles; False refuses padding.
        restrict_scaling_impl: which values a scale may take; None for any.
        narrow_range: leave out -2^(b-1).
        range_steps: steps from 0 to the end of a symmetric range; None means 2^(b-1) - 1/2.
        float_to_int_impl: how to round; None for nearest.
        clip_gradient: whether clipping stops the gradient of `x`, outside the range or, with `narrow_range`, beyond the
            last integers; False passes all of it.
        axis_name: a mapped axis (of `shard_map`, `pmap` or `vmap`) that the tensor is spread over, or a tuple of them:
            the range is that of the whole tensor, or with `batch_axes` the mean over all examples.

    Raises:
        TypeError: `bit_width` is not an integer; (when called) `x` is not a float array.
        ValueError: `bit_width` is below 2 or above 24; a range with a zero point for a `q_dtype`;
            a static range with `channelwise_axes` or groups; groups along one of the `channelwise_axes`; (when called)
            groups that do not fill the axis.

    Source: Qwix. Differs from Qwix: non-finite ranges never enter the average; arithmetic is float32.

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
        check_axes(averaging_impl is not None, channelwise_axes, group_size, group_dim)
        assign(
            self,
            calibration_impl=calibration_impl or AbsMaxRange(),
            bit_width=bits,
            use_running_average=False,
        )
        set_given(
            self,
            averaging_impl=averaging_impl,
            q_dtype=None if q_dtype is None else minifloat_dtype(q_dtype),
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

    set_view = set_view

    def has_range(self) -> bool | None:
        """Whether a batch has entered the average; None without an average or with a fixed range. See `StaticRange`."""
        if self.averaging_impl is None or isinstance(self.calibration_impl, FixedRange):
            return None
        return all_counted(self.averaging_impl.count.get_value())

    def begin_calibration(self) -> None:
        """Restart the average."""
        if self.averaging_impl is not None:
            self.averaging_impl.reset()
        self.use_running_average = False

    def end_calibration(self) -> None:
        """No effect: the range is the average."""

    def clipping_range(self, x: jax.Array) -> ClippingRange:
        """The range for quantizing `x`, float32; in training mode it enters the average.

        Args:
            x: float array.
        """
        x, cut = self._laid(x.astype(jnp.float32))
        return self._kept(self._range(x, not self.use_running_average, cut), x.ndim)

    def _laid(self, x: jax.Array) -> tuple[jax.Array, Cut | None]:
        """A tensor in groups; or, if groups may cross its shards, unchanged with how to cut it."""
        if self.group_size is None:
            return x, None
        axis = self.group_dim % x.ndim
        if not self.group_padding:
            check_divides(x.shape[axis], self.group_size, "CalibratedQuant")
        size = fitting_size(self.group_size, x.shape[axis])
        shared = self._axes_that_share(x.ndim + 1)
        cut = cut_in_place(x, size, axis) if x.size > 0 and axis + 1 in shared else None
        if cut is None:
            return split_groups(x, size, axis), None
        if not takes_cut(self.calibration_impl):
            return split_groups(told_if_gathered(x, (axis,), self._gathers(x, size, axis)), size, axis), None
        return x, replace(cut, beside=tuple(each - (each > axis) for each in shared if each != axis + 1))

    def _gathers(self, x: jax.Array, size: int, axis: int) -> str:
        return (
            f"{type(self.calibration_impl).__name__} needs groups of {size}, which cross shards: a tensor of shape "
            f"{x.shape} is gathered for it if it is sharded along axis {axis}.\n"
            "  cure: a range method that takes a Cut for its axes and says takes_cut = True; see "
            "jqinject.core.RangeMethod"
        )

    def averaged_range(self, ndim: int = 0) -> ClippingRange:
        """The range averaged so far, without a tensor.

        Args:
            ndim: the number of axes, each of size 1, that its ends get.
        """
        return self._kept(self._range(jnp.zeros((1,) * ndim, jnp.float32), update=False), ndim)

    def _kept(self, found: Ends, ndim: int) -> Ends:
        """Per-tensor numbers with as many axes as the tensor."""
        if self.averaging_impl is None:
            return found
        return jax.tree.map(lambda end: shaped(end, (1,) * ndim), found)

    def _range(self, x: jax.Array, update: bool, cut: Cut | None = None) -> ClippingRange:
        """The range of a tensor; a scalar if averaged, in the grouped shape if cut."""
        if cut is not None:
            found = range_along(self.calibration_impl, x, cut, self._names())
            return found if is_split(x) else jax.tree.map(cut.in_two, found)
        if self.averaging_impl is None:
            return range_along(self.calibration_impl, x, self._axes_that_share(x.ndim), self._names())
        if self.averaging_impl.settled and not update:
            return self.averaging_impl.mean(abstract_range(self.calibration_impl, x.ndim))
        found = range_of_batch(self.calibration_impl, x, self.batch_axes, self._names())
        return self.averaging_impl(found, update)

    def _axes_that_share(self, ndim: int) -> tuple[int, ...]:
        """The axes that share a range, in a tensor whose groups are two axes."""
        cut = None if self.group_size is None else self.group_dim
        return axes_that_share(ndim, self.shared_axes, self.channelwise_axes, cut)

    def _names(self) -> Names:
        return names_at_hand(self.axis_name, self.use_running_average)

    @property
    def groups(self) -> tuple[int, int] | None:
        """Group size and grouped axis; None without groups."""
        return None if self.group_size is None else (self.group_size, self.group_dim)

    @property
    def has_zero_point(self) -> bool:
        """Whether the zero point may be nonzero: the range has two ends, as far as its method's structure says."""
        return self.q_dtype is None and abstract_range(self.calibration_impl, 1).low is not None

    @property
    def is_dynamic(self) -> bool:
        """Whether the range is that of the given tensor: neither averaged nor fixed."""
        return self.averaging_impl is None and not isinstance(self.calibration_impl, FixedRange)

    @property
    def is_nearest(self) -> bool:
        """Whether it does what QuantizeLinear does: integers, without groups."""
        rounds_so = self.float_to_int_impl is None or is_nearest(self.float_to_int_impl)
        return self.q_dtype is None and self.group_size is None and rounds_so

    def __call__(self, x: jax.Array) -> Quantized | FloatQuantResult:
        """`x` quantized; scale and zero point float32."""
        return self._quantized(x, keep=False)

    def keeping_payload(self, x: jax.Array) -> Quantized | FloatQuantResult:
        """Like a call; the result also has integers of at most 8 bits."""
        return self._quantized(x, keep=True)

    def by_scale(
        self, x: jax.Array, scale: jax.Array, zero_point: jax.Array | None, keep: bool
    ) -> Quantized | FloatQuantResult:
        """Return the result for `x` with a given scale and zero point; with its payload if `keep`."""
        x = check.float_input(x, "CalibratedQuant")
        if self.group_size is not None:
            x = split_groups(x, fitting_size(self.group_size, x.shape[self.group_dim]), self.group_dim)
        x32 = x.astype(jnp.float32)
        if self.q_dtype is not None:
            form = FloatGrid.of_dtype(self.q_dtype)
            numbers = MinifloatGrid(form, np.dtype(np.float32)).nearest(x32, scale)
            value = with_gradient_of(x32, jax.lax.stop_gradient(numbers))
            return FloatQuantResult(value.astype(x.dtype), scale, form)
        narrow, edge = keep and self.bit_width <= 8, 2.0 ** (self.bit_width - 1)
        integers = np.dtype(np.int8) if narrow else None
        kept = IntegerGrid(self.narrow_range - edge, edge - 1.0, not self.has_zero_point, integers)
        made = kept.nearest(jax.lax.stop_gradient(x32), scale, zero_point)
        value, payload = made if narrow else (made, None)
        value = in_range_of(with_gradient_of(x32, value), scale, x.dtype)
        return Quantized(value, scale, zero_point, IntGrid(self.bit_width, True, self.narrow_range), payload)

    @property
    def grid(self) -> Any:
        """The numbers at scale 1 that it rounds to nearest on; None if it does something else."""
        if self.float_to_int_impl is not None and not is_nearest(self.float_to_int_impl):
            return None
        if self.q_dtype is not None:
            return FloatGrid.of_dtype(self.q_dtype)
        return IntGrid(self.bit_width, True, self.narrow_range)

    def _quantized(self, x: jax.Array, keep: bool) -> Quantized | FloatQuantResult:
        x, cut = self._laid(check.float_input(x, "CalibratedQuant"))
        x32 = x.astype(jnp.float32)
        found = self._range(x32, not self.use_running_average, cut)
        if self.q_dtype is not None:
            return self._minifloats(x, x32, found, cut)
        scale, zero_point = scale_and_zero_point(found, self.bit_width, self.range_steps)
        scale = self._restricted(scale)
        # Without a zero point the extreme is a tie, rounded as in Qwix.
        padded = (
            cut is not None and cut.missing(x) and zero_point is not None
        )  # with integers other than its zero
        payload = np.dtype(np.int8) if keep and self.bit_width <= 8 and not padded else None
        edge = 2.0 ** (self.bit_width - 1)
        grid = IntegerGrid(self.narrow_range - edge, edge - 1.0, zero_point is None, payload, cut is not None)
        if self.narrow_range and zero_point is None:
            found = ClippingRange(jax.lax.stop_gradient(scale) * (edge - 1.0))
        made = self._rounded(grid, x32, cut, found, scale, zero_point)
        value, kept = (made, None) if payload is None else made
        scale = self._kept(scale, x.ndim)
        if zero_point is not None:
            zero_point = self._kept(zero_point, x.ndim)
        numbers = IntGrid(self.bit_width, True, self.narrow_range)
        return Quantized(in_range_of(value, scale, x.dtype), scale, zero_point, numbers, kept)

    def _minifloats(
        self, x: jax.Array, x32: jax.Array, found: ClippingRange, cut: Cut | None
    ) -> FloatQuantResult:
        if found.low is not None:
            raise ValueError(
                f"CalibratedQuant: {self.q_dtype} has no zero point, and {self.calibration_impl!r} finds a range that "
                "is not symmetric.\n  cure: AbsMaxRange, RMSRange, or FixedRange(-high, high)"
            )
        assert self.q_dtype is not None
        form = FloatGrid.of_dtype(self.q_dtype)
        scale = self._restricted(not_tiny(divide(found.high, form.largest)))
        value = self._rounded(MinifloatGrid(form, x.dtype), x32, cut, found, scale)
        return FloatQuantResult(value.astype(x.dtype), self._kept(scale, x.ndim), form)

    def _restricted(self, scale: jax.Array) -> jax.Array:
        restrict = self.restrict_scaling_impl
        return scale if restrict is None else restrict(restrict.restrict_init_tensor(scale))

    def _rounded(self, grid: Grid, x: jax.Array, cut: Cut | None, found: ClippingRange, *where: Any) -> Any:
        """`x` on a grid, in groups; `x` is not yet in groups if it is cut."""
        if cut is not None:
            found, where = jax.tree.map(lambda number: cut.spread(number, x), (found, where))
        clips, to_range = self.clip_gradient, not self.scale_stop_grad
        made = on_grid(grid, self.float_to_int_impl, x, found, where, clips, to_range)
        if cut is None or is_split(x):
            return made
        return jax.tree.map(lambda each: split_groups(each, cut.size, cut.axis), made)
