"""Clipping ranges of batches, averaged, and their scales and zero points."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols, check, clamping, state
from jqinject.core.component import Component, component, set_view
from jqinject.core.memory.memory import Memory
from jqinject.core.memory.memory_policy import MemoryPolicy, mean, mean_after
from jqinject.core.statistics.ranges import OF_NO_AXES, AbsMaxRange, ClippingRange, FixedRange, RangeMethod
from jqinject.core.statistics.statistic import in_groups, with_gather_warning
from jqinject.ops import fake_quant, power, ste
from jqinject.ops.cut import Cut
from jqinject.ops.groups import checked_group_size
from jqinject.ops.lean import choose, shaped
from jqinject.ops.sharding import Names, is_split, names_at_hand, places_over, sum_over


def _check_apart(group_dim: int, channelwise_axes: Sequence[int]) -> None:
    """Refuse to group an axis that has a range for each index."""
    if group_dim in channelwise_axes:
        raise ValueError(
            f"RangeScaling: axis {group_dim} cannot have a range for each index and be cut into groups that share "
            f"one, got channelwise_axes={tuple(channelwise_axes)}, group_dim={group_dim}.\n"
            "  cure: take the axis out of channelwise_axes"
        )


def _within(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({axis % ndim for axis in axes if -ndim <= axis < ndim}))


def others(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    """All other axes of a tensor."""
    excluded = _within(ndim, axes)
    return tuple(axis for axis in range(ndim) if axis not in excluded)


MEAN = ("counter", "sum_of_max", "sum_of_min")


@component
class SimpleMovingAverage(Memory):
    """The mean of the ranges of all batches seen: `sum of ends / count`, the present batch included.

    With a `momentum` it is exponential instead: `mean <- (1 - momentum) * mean + momentum * batch`, from the
    first batch on.

    A batch with an end that is inf, nan or too large for the sum stays out. In evaluation before the first batch, the
    range is that of the given tensor.

    State: one `record`, float32, of `counter`, `sum_of_max` and `sum_of_min`, the sums of the upper and lower ends. The
    mean of 2^24 batches is final.

    Args:
        restart: start afresh at every batch, for a constant range.
        momentum: the weight of a new batch, in (0, 1]; None weighs all batches alike.

    Raises:
        ValueError: `momentum` is not in (0, 1].

    Source: Qwix's `SimpleMovingAverage`.

    Example:
        >>> mean = SimpleMovingAverage()
        >>> for high in (1.0, 3.0):
        ...     found = mean(ClippingRange(jnp.float32(high)), update=True)
        >>> found.high, mean.counter[...]
        (Array(2., dtype=float32), Array(2., dtype=float32))
    """

    sum_of_max, sum_of_min = state.Part(), state.Part()
    restart: bool = False
    momentum: float | None = None

    def __post_init__(self) -> None:
        weight = check.momentum(self.momentum, "SimpleMovingAverage", "momentum")
        sums = {"sum_of_max": 0.0, "sum_of_min": 0.0}
        self.remember(MemoryPolicy("mean", weight, restart=self.restart), sums)

    def __call__(self, batch: ClippingRange, update: bool) -> ClippingRange:
        """The mean range.

        Args:
            batch: the range of the present batch, one number for each end.
            update: whether it enters.

        Returns:
            The range, shaped as `batch`; differentiable in `batch` where it entered.
        """
        count, *sums = (self.record.get_raw_value()[name] for name in MEAN)
        ends = tuple([shaped(end, count.shape) for end in (batch.high, batch.lowest)])
        if update:
            ends, count, sums, _ = mean_after(self.policy, ends, count, tuple(sums))
            self.record.set_value(dict(zip(MEAN, (count, *sums), strict=True)))
        else:
            ends = mean(ends, count, tuple(sums))
        high, low = (shaped(end, batch.high.shape) for end in ends)
        return ClippingRange(high, None if batch.low is None else low)

    def has_range(self) -> bool | None:
        """None: the quantizer answers, which knows whether its range is fixed."""
        return None


def mean_of(record: dict[str, jax.Array], two_ends: bool) -> ClippingRange:
    """The mean range of the record of a `SimpleMovingAverage`; zeros if no batch has entered."""
    count, *sums = (record[name] for name in MEAN)
    high, low = (total / jnp.maximum(count, 1) for total in sums)
    return ClippingRange(high, low if two_ends else None)


@lru_cache(maxsize=256)
def _has_two_ends(method: RangeMethod) -> bool:
    scalar = jax.ShapeDtypeStruct((1,), jnp.float32)
    return jax.eval_shape(lambda x: method(x, (0,)), scalar).low is not None


LEAST_SCALE = float(np.sqrt(np.finfo(np.float32).tiny))
MOST_BITS = 24  # rounding is in float32, which holds no wider integers


@component
class RangeSteps(Component):
    """`int_scaling_impl` of symmetric ranges: the steps from 0 to the end of the range, `2^(b-1) - 1/2` if not given.

    The range then ends at the far edge of the last bucket; of AQT's other integers:

    | preserve_zero | preserve_max_val | bit_width | range_steps | float_to_int_impl |
    |---|---|---|---|---|
    | yes | no | b | 2^(b-1) - 0.5, the far edge of the last bucket | |
    | yes | yes | b | 2^(b-1) - 1, its centre | |
    | no | no | b + 1, in half steps | 2^b | `RoundToOddSte` |
    | no | yes | b + 1, in half steps | 2^b - 1 | `RoundToOddSte` |

    Args:
        range_steps: the steps; None for those of the bit width.

    Example:
        >>> RangeSteps()(8), RangeSteps(range_steps=127.0)(8)
        (127.5, 127.0)
    """

    is_constant = True
    range_steps: float | None = None

    def __call__(self, bit_width: int) -> float:
        """The steps of so many bits."""
        bits = check.bit_width(bit_width, "RangeSteps", least=2)
        if bits > MOST_BITS:
            raise ValueError(f"RangeSteps: bit_width must be at most {MOST_BITS}, got {bits}")
        return self.range_steps or 2.0 ** (bits - 1) - 0.5


@component
class RangeZeroPoint(Component):
    """`zero_point_impl` beside a `RangeScaling`: the zero point comes with the scale, from one range.

    Raises:
        TypeError: (when called) the scale is found by another component.
    """

    def __call__(self, x: jax.Array, scale: jax.Array, bit_width: Any) -> jax.Array:
        """Not called: see the class."""
        raise TypeError("RangeZeroPoint: the scale comes from no range.\n  cure: scaling_impl = RangeScaling")


TAKES_CUT = "a range method that takes a Cut as axes and says takes_cut = True; see jqinject.core.RangeMethod"


@component
class RangeScaling(Component):
    """Scale and zero point of a clipping range, which is found once a call: Qwix's and AQT's quantizers.

    Static: `range = averaging_impl(mean over batch_axes of calibration_impl(x))`, one per tensor, updated in training
    mode only and including the present batch. Dynamic (`averaging_impl=None`): `range = calibration_impl(x)` of the
    given tensor, one for each index of `channelwise_axes`.

    A symmetric range has `scale = high / steps` (`RangeSteps`; of minifloats their largest number) and no zero point.
    With two ends, `scale = (high - low) / (2^b - 1)` and `zero_point = round(-2^(b-1) - low / scale)`. A scale below
    1.1e-19 (of zeros, say) becomes 1. Numbers of a symmetric range are multiplied by the reciprocal of their scale.

    The gradient goes straight through to `x` inside the range, and to the ends of the range outside.

    State: none but that of the average; once frozen, a `record` of `high`, `scale`, perhaps `low` and `zero_point`.

    Args:
        calibration_impl: finds the range.
        averaging_impl: averages it over batches: `SimpleMovingAverage`; None does not average.
        channelwise_axes: axes with a range for each index.
        shared_axes: the axes that share a range, instead of `channelwise_axes`: `(-1,)` for one per row.
        batch_axes: axes with a range for each index, averaged to that of the batch; Qwix uses `(0,)`.
        scale_stop_grad: whether to stop the range's gradient.
        clip_gradient: whether clipping stops the gradient of `x`, outside the range or, with `narrow_range`, beyond the
            last integers; False passes all of it.
        input_view_impl: the view that cuts groups, each with a range.
        restrict_scaling_impl: which values a scale may take; None for any.
        axis_name: a mapped axis (of `shard_map`, `pmap` or `vmap`) that the tensor is spread over, or a tuple of them:
            the range is that of the whole tensor, or with `batch_axes` the mean over all examples.

    Raises:
        ValueError: a static range with `channelwise_axes` or groups; groups along one of the `channelwise_axes`; blocks
            over two axes; (when called) groups that do not fill the axis; a range with a zero point for minifloats.

    Source: Qwix. Differs from Qwix: non-finite ranges never enter the average; arithmetic is float32.

    Example:
        >>> scaling = RangeScaling(AbsMaxRange())
        >>> scaling(jnp.array([0.4, -1.5, 0.0]), 7.5)
        Array([0.2], dtype=float32)
    """

    by_range = True
    calibration_impl: RangeMethod = AbsMaxRange()
    averaging_impl: SimpleMovingAverage | None = None
    channelwise_axes: tuple[int, ...] = ()
    shared_axes: tuple[int, ...] | None = None
    batch_axes: tuple[int, ...] = ()
    scale_stop_grad: bool = False
    clip_gradient: bool = True
    input_view_impl: _protocols.View = clamping.Identity()
    restrict_scaling_impl: _protocols.Restrict | None = None
    axis_name: Any = None
    record: state.QuantStat | None = field(default=None, init=False)
    frozen_for: tuple[Any, int | None] | None = field(default=None, init=False)
    use_running_average: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.use_running_average = False  # of the instance: an attribute that appears later retraces
        groups = self.groups
        if self.averaging_impl is not None and (tuple(self.channelwise_axes) or groups is not None):
            raise ValueError(
                "RangeScaling: an averaged range is one for the tensor, got channelwise_axes="
                f"{self.channelwise_axes!r}, groups={groups!r}.\n"
                "  cure: averaging_impl=None, for a range of the given tensor"
            )
        if groups is not None:
            _check_apart(groups[1], self.channelwise_axes)
            if (width := _protocols.block_width(self.input_view_impl)) > 1:
                checked_group_size((groups[0], width), "RangeScaling")

    set_view = set_view

    @property
    def groups(self) -> tuple[int, int] | None:
        """Group size and grouped axis; None without groups."""
        return _protocols.groups_of(self.input_view_impl)

    @property
    def has_zero_point(self) -> bool:
        """Whether the zero point may be nonzero: the range has two ends, as far as its method's structure says."""
        method = self.calibration_impl
        return (_has_two_ends if isinstance(method, Hashable) else _has_two_ends.__wrapped__)(method)

    @property
    def is_dynamic(self) -> bool:
        """Whether the range is that of the given tensor: neither averaged nor fixed."""
        return self.averaging_impl is None and not isinstance(self.calibration_impl, FixedRange)

    def has_range(self) -> bool | None:
        """Whether a batch has entered the average; None without an average or with a fixed range. See `StaticRange`."""
        if self.averaging_impl is None or isinstance(self.calibration_impl, FixedRange):
            return None
        return state.all_counted(self.averaging_impl.counter.get_value())

    def begin_calibration(self) -> None:
        """Restart the average."""
        if self.averaging_impl is not None:
            self.averaging_impl.begin_calibration()
        if self.record is not None:
            del self.record
        self.use_running_average = False

    def end_calibration(self) -> None:
        """Make constants of the average again, if it was frozen; else no effect: the range is the average."""
        if self.frozen_for is not None:
            self.freeze(*self.frozen_for)

    def clipping_range(self, x: jax.Array) -> ClippingRange:
        """The range for quantizing `x`, float32; in training mode it enters the average.

        Args:
            x: float array.
        """
        x, names = x.astype(jnp.float32), names_at_hand(self.axis_name, self.use_running_average)
        if self.record is not None:
            return self.averaged_range()
        if self.averaging_impl is None:
            return self._of_tensor(x, names)
        return self.averaging_impl(self._of_batch(x, names), not self.use_running_average)

    def averaged_range(self, ndim: int = 0) -> ClippingRange:
        """The range averaged so far, without a tensor.

        Args:
            ndim: the number of axes, each of size 1, that its ends get.
        """
        if self.record is None:
            assert self.averaging_impl is not None, "a range of the given tensor is not averaged"
            ends = mean_of(self.averaging_impl.record.get_raw_value(), self.has_zero_point)
        else:
            arrays = self.record.get_raw_value()
            ends = ClippingRange(arrays["high"], arrays.get("low"))
        return jax.tree.map(lambda end: shaped(end, (1,) * ndim), ends)

    def freeze(self, threshold: _protocols.Threshold = None, bit_width: int | None = None) -> None:
        """Make constants of the averaged range, its scale and its zero point: a call no longer measures or averages.

        A range of the given tensor, or one that no batch has entered, stays as it is. The average is kept.

        Args:
            threshold, bit_width: as for `measure`.
        """
        if self.record is not None or self.has_range() is not True:
            return

        def numbers(record: dict[str, jax.Array]) -> dict[str, jax.Array]:
            ends = mean_of(record, self.has_zero_point)  # of every layer, in a stack
            scale, zero_point = self._scaled(ends, threshold, bit_width)
            two_ends = {} if ends.low is None else {"low": ends.low, "zero_point": zero_point}
            return {"high": ends.high, "scale": scale, **two_ends}

        arrays = cast(SimpleMovingAverage, self.averaging_impl).record.get_raw_value()
        abstract = isinstance(arrays["counter"], jax.ShapeDtypeStruct)
        self.record = state.QuantStat(jax.eval_shape(numbers, arrays) if abstract else numbers(arrays))
        self.frozen_for = threshold, bit_width

    def unfreeze(self) -> None:
        """Go on averaging."""
        for name in ("record", "frozen_for"):
            if vars(self).get(name) is not None:
                delattr(self, name)

    def _along(self, x: jax.Array, axes: tuple[int, ...] | Cut | None, names: Names) -> ClippingRange:
        """The range along axes and mapped axes; custom range methods need not accept `names`."""
        method: Callable[..., ClippingRange] = self.calibration_impl
        return method(x, axes, names) if names else method(x, axes)

    def _of_batch(self, x: jax.Array, names: Names) -> ClippingRange:
        """The range of a batch, without axes: of the whole tensor, or the mean over `batch_axes`."""
        if not self.batch_axes:
            axes = None if type(self.calibration_impl) in OF_NO_AXES else tuple(range(x.ndim))
            return jax.tree.map(lambda end: shaped(end, ()), self._along(x, axes, names))
        # An example with its own range lies on one device.
        extremes = self._along(x, others(x.ndim, self.batch_axes), ())

        def mean(ends: jax.Array) -> jax.Array:
            return sum_over(jnp.sum(ends), names) / (ends.size * places_over(names))

        return jax.tree.map(mean, extremes)

    def _of_tensor(self, x: jax.Array, names: Names) -> ClippingRange:
        """The range of the given tensor, in the shape of the view."""
        view, method, groups = self.input_view_impl, self.calibration_impl, self.groups
        if groups is None:
            return self._along(x, self._shared(x.ndim, None), names)
        axis = groups[1] % x.ndim
        shared = self._shared(x.ndim, axis)
        cut = in_groups(view, shared, x)
        if cut is not None and not _protocols.takes_cut(method):
            x = with_gather_warning(
                method, x, (axis,), f"needs groups of {groups[0]}, which cross shards", TAKES_CUT
            )
            cut = None
        if cut is None:
            return self._along(view(x), shared, names)
        ends = self._along(x, cut, names)
        return ends if is_split(x) else jax.tree.map(cut.in_two, ends)

    def _shared(self, ndim: int, cut: int | None) -> tuple[int, ...]:
        """The axes that share a range, of a tensor of `ndim` axes, after the groups of the `cut` one became two."""
        if self.shared_axes is not None:
            axes = _within(ndim, self.shared_axes)
        else:
            axes = others(ndim, self.channelwise_axes)
            if cut is not None:
                _check_apart(cut, _within(ndim, self.channelwise_axes))
        return axes if cut is None else tuple(axis + (axis >= cut) for axis in axes)

    def __call__(self, x: jax.Array, threshold: Any = None) -> jax.Array:
        """The scale of a symmetric range, in numbers of a minifloat."""
        return self.measure(x, threshold, None)[0]

    def measure(
        self, x: jax.Array, threshold: _protocols.Threshold, bit_width: int | None
    ) -> tuple[jax.Array, jax.Array | None, ClippingRange]:
        """Scale, zero point (None without one), and the range that they come from.

        Args:
            x: float32.
            threshold: what the end of a symmetric range maps to.
            bit_width: of signed integers; None for minifloats.
        """
        ends = self.clipping_range(x)
        if self.record is not None:
            arrays = self.record.get_raw_value()
            return arrays["scale"], arrays.get("zero_point"), ends
        return *self._scaled(ends, threshold, bit_width), ends

    def _scaled(
        self, ends: ClippingRange, threshold: Any, bit_width: int | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Scale and zero point of a range."""
        zero_point = None
        if ends.low is None:
            # XLA compiles a division by a constant as in `by_reciprocal`, so Qwix's integers have these scales.
            divided = power.divide if bit_width is None else power.by_reciprocal
            scale = not_tiny(divided(ends.high, threshold))
        elif bit_width is None:
            raise ValueError(
                f"RangeScaling: minifloats have no zero point, and {self.calibration_impl!r} finds a range that is not "
                "symmetric.\n  cure: AbsMaxRange, RMSRange, or FixedRange(-high, high)"
            )
        else:
            scale, zero_point, _ = _of_two_ends(bit_width, ends.high, ends.low)
        if (restrict := self.restrict_scaling_impl) is not None:
            scale = restrict(restrict.restrict_init_tensor(scale))
        return scale, zero_point


def scale_and_zero_point(
    ends: ClippingRange, bit_width: int, range_steps: float | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Float per integer step of a range, and the integer that represents 0; see `RangeScaling`.

    Args:
        ends: the range, float32.
        bit_width: of signed integers.
        range_steps: steps from 0 to the end of a symmetric range; None for `2^(b-1) - 1/2`.

    Returns:
        Scale and zero point (None if the range is symmetric), float32, shaped as the range.

    Source: Qwix.

    Example:
        >>> scale_and_zero_point(ClippingRange(jnp.float32(3.0), jnp.float32(-1.0)), 2)
        (Array(1.3333334, dtype=float32), Array(-1., dtype=float32))
    """
    if ends.low is None:
        return not_tiny(power.by_reciprocal(ends.high, RangeSteps(range_steps)(bit_width))), None
    return _of_two_ends(bit_width, ends.high, ends.low)[:2]


@ste.custom_jvp(0)
def _of_two_ends(bit_width: int, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scale, zero point, and whether the scale was too small."""
    lowest = -(2.0 ** (bit_width - 1))
    scale = fake_quant.quotient(high - low, jnp.float32(2**bit_width - 1))
    tiny = scale < LEAST_SCALE
    scale = choose(tiny, 1.0, scale)
    # A quotient of two arrays of one shape, not nested: XLA has nothing to rewrite.
    zero_point = ste.nearest(lowest - low / scale)
    # Float32 rounds the quotient by less than half a step, unless there are very many.
    return scale, zero_point if bit_width <= 16 else jax.lax.clamp(lowest, zero_point, -lowest - 1), tiny


@_of_two_ends.defjvp
def _(bit_width: int, primals: ste.Primals, tangents: ste.Tangents) -> tuple[Any, Any]:
    numbers = _of_two_ends.fun(bit_width, *primals)  # JAX differentiates it likewise, with more operations
    _, zero_point, tiny = numbers
    change = choose(tiny, 0.0, (tangents[0] - tangents[1]) / jnp.float32(2**bit_width - 1))
    return numbers, (change, jnp.zeros_like(zero_point), np.zeros(tiny.shape, jax.dtypes.float0))


def not_tiny(scale: jax.Array) -> jax.Array:
    """A scale, with values below 1.1e-19 replaced by 1."""
    return choose(scale < LEAST_SCALE, 1.0, scale)
