"""Statistics of the ends of a tensor: largest magnitudes, minima and percentiles.

Each is made of elements of some rank: the largest of `n` is the n-th smallest. So percentiles, unless they are
interpolated, are elements of the tensor too.
"""

import math
import operator
from functools import lru_cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core import check, component
from jqinject.core.statistics.statistic import Reduction
from jqinject.ops import cut, lean
from jqinject.ops import reductions as ops
from jqinject.ops.processes import Bound, one_operation
from jqinject.ops.reductions import Axes, Measured, Tensors, map_tensors, rank_between


def not_above_zero(x: jax.Array) -> jax.Array:
    """`min(x, 0)`; at 0 the gradient goes to `x`."""
    return lean.choose(x > 0, 0.0, x)


def safe_sqrt(x: jax.Array) -> jax.Array:
    """`sqrt(x)` with gradient 0 at 0."""
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), jnp.sqrt(jnp.where(zero, jnp.ones_like(x), x)))


def _place(x: Tensors, value: jax.Array, k: int, positions: Tensors, over: ops.Over) -> jax.Array:
    """Where the k-th smallest element is: the first of equals. Reference cases of torch choose another by the rank."""
    return ops.locate(x, value, positions, over)


def _by_maximum(x: jax.Array) -> jax.Array:
    """Magnitudes."""
    return jnp.maximum(x, -x)


def _by_sign(x: jax.Array) -> jax.Array:
    """Magnitudes."""
    return jax.lax.sign(x) * x


TIES = check.among((None, "first", "shared", "near"))


class Ranked(Reduction):
    """Base of statistics of elements of some ranks: by default, of the last and the first, or of percentiles.

    Attributes:
        ends: the "high" end, the "low" one, or both, the high one first.
        of_magnitude: whether magnitudes are ranked.
        slope_at_zero: whether magnitudes have the slope 1 at 0, as `jnp.abs`; else they have none, unless `ties` is
            "near".
        ties: which of several equal elements has the gradient: the "first"; all of them, in equal "shared" parts;
            likewise all that are "near", a few units in the last place from an end that is at least (at most) 0, since
            a compiler may compute the tensor again, and round anew, for the gradient. None is the first along axes, and
            shared parts over the whole tensor.
    """

    ends: ClassVar[tuple[str, ...]] = ("high",)
    of_magnitude: ClassVar[bool] = False
    slope_at_zero: ClassVar[bool] = False
    ties: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        where = type(self).__name__
        TIES(self.ties, where, "ties")
        check.ordered(*self.percentiles, where, ("low_percentile_q", "high_percentile_q"))

    @property
    def percentiles(self) -> tuple[float, float]:
        """The percentiles of the low and of the high end, 0 to 100: those of the fields, or all elements."""
        own = vars(self)
        return own.get("low_percentile_q", 0.0), own.get("high_percentile_q", 100.0)

    def ranks(self, count: int) -> tuple[int, ...]:
        """The 1-based ranks of the ends among `count` elements."""
        low, high = self.percentiles
        ranks = {"high": ops.rank_high(high, count), "low": ops.rank_low(low, count)}
        return tuple(ranks[end] for end in self.ends)

    def measure(self, x: Tensors) -> Any:
        """The elements of those ranks."""
        ranked, over = map_tensors(jnp.abs, x) if self.of_magnitude else x, self.over
        count, ends_measured = over.count(x), []
        ends = {1: over.min, count: over.max}
        for rank in _ranks(self, count):
            ends_measured.append(ends[rank](ranked) if rank in ends else ops.kth_smallest(ranked, rank, over))
        return tuple(ends_measured)

    def locate(self, x: Tensors, measured: Measured) -> tuple[jax.Array, ...]:
        """Where they are, or how many share the gradient."""
        return self._located(x, measured, *self._marks(x, measured))

    def change(self, dx: Tensors, x: Tensors, measured: Measured, located: Measured) -> tuple[jax.Array, ...]:
        """How they change; what else was measured, behind them, stays."""
        return self._changed(dx, x, measured, located, *self._marks(x, measured))

    def changed(self, dx: Tensors, x: Tensors, measured: Any) -> Any:
        """See the base; what both parts need is computed once."""
        marks = self._marks(x, measured)
        return self._changed(dx, x, measured, self._located(x, measured, *marks), *marks)

    def _marks(self, x: Tensors, measured: Measured) -> tuple[Any, Any]:
        """Signs, if magnitudes are ranked that have no slope at 0; positions, or which elements share the gradient."""
        sloped, first = self._rule == "near" or self.slope_at_zero, self._rule == "first"
        signs = map_tensors(jax.lax.sign, x) if self.of_magnitude and not sloped else None
        return signs, self.over.positions(x) if first else self._hits(self._ranked(x, signs), measured)

    def _located(self, x: Tensors, measured: Measured, signs: Any, marks: Any) -> tuple[jax.Array, ...]:
        over = self.over
        # Ranked by another operation than in `_changed`, or the compiler would make one array for both.
        by = None if not self.of_magnitude else _by_sign if signs is None else _by_maximum
        if self._rule == "first":
            # Two ends would share an array of floats, which is twice one of integers in 16 bits.
            positions = over.positions(x, in_floats=len(self.ends) == 1)
            ranked = x if by is None else map_tensors(by, x)
            ends = zip(measured, self.ranks(over.count(x)), strict=False)
            return tuple(_place(ranked, end, rank, positions, over) for end, rank in ends)
        counts = []
        for end, is_low in zip(measured, (False, True), strict=False):
            hit = Bound(ops.hit, (by, self._rule == "near", is_low))
            # Of the zeros that fill up a group, those that are near hit too.
            fills = self._rule == "near" and isinstance(over.axes, cut.Cut)
            zeros = (end == 0).astype(jnp.float32) if fills else None
            counts.append(
                over.sum(map_tensors(lambda x, hit=hit, end=end: one_operation(hit, x, end), x), zeros)
            )
        return tuple(counts)

    def _changed(
        self, dx: Tensors, x: Tensors, measured: Measured, located: Measured, signs: Any, marks: Any
    ) -> tuple[jax.Array, ...]:
        over, near, dx = self.over, self._rule == "near", self._ranked_change(dx, x, signs)
        if self._rule == "first":
            fixed = tuple(map(jnp.zeros_like, measured[len(located) :]))
            return (*(ops.picked(dx, place, marks, over) for place in located), *fixed)

        def change_of_end(end: jax.Array, hits: Tensors, count: jax.Array) -> jax.Array:
            # At 0 an end has half of the gradient, as in `jnp.maximum`.
            weight = lean.choose(end == 0, 0.5, 1.0) if near else 1.0
            moved = over.sum(map_tensors(lambda hit, dx: lean.choose(hit, dx, 0.0), hits, dx))
            # The count is nan where an infinite end was compared with itself.
            return moved * (weight / lean.choose(count >= 1.0, count, 1.0))

        return tuple(map(change_of_end, measured, marks, located))

    def _ranked(self, x: Tensors, signs: Any) -> Any:
        # Not `abs`, which `measure` has: the compiler would make one array of both, where each is fused as it is.
        if signs is not None:
            return map_tensors(jax.lax.mul, signs, x)
        return map_tensors(_by_maximum, x) if self.of_magnitude else x

    def _ranked_change(self, dx: Tensors, x: Tensors, signs: Any) -> Any:
        if signs is not None:
            return map_tensors(jax.lax.mul, signs, dx)
        return map_tensors(lambda x, dx: jax.jvp(jnp.abs, (x,), (dx,))[1], x, dx) if self.of_magnitude else dx

    @property
    def _rule(self) -> str:
        return self.ties or ("shared" if self.stats_reduce_dim is None else "first")

    def _hits(self, ranked: Tensors, measured: Measured) -> list[Any]:
        """Which elements are each of those measured: the upper end, and the lower if there are two."""
        near = self._rule == "near"
        ends = zip((operator.ge, operator.le) if near else (operator.eq, operator.eq), measured, strict=False)
        return [
            map_tensors(lambda x, by=by, end=end: by(x, end * ops.ALMOST if near else end), ranked)
            for by, end in ends
        ]


@lru_cache(maxsize=1024)
def _ranks(stat: Ranked, count: int) -> tuple[int, ...]:
    return stat.ranks(count)


@component.frozen_value
class _Extreme(Ranked):
    """Abstract: of all elements."""

    stats_reduce_dim: Axes = None
    keepdim: bool = False

    @property
    def measure_has_derivative(self) -> bool:
        """See the base: JAX does not differentiate a maximum over mapped axes."""
        return not self.over.names


@component.frozen_value
class AbsMax(_Extreme):
    """`factor * max |x|`.

    Args:
        stats_reduce_dim: the axis or axes to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        factor: below 1, it clips the largest magnitudes.
        ties: which of equal magnitudes has the gradient: see `Ranked`. Qwix and AQT have "near".
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Raises:
        ValueError: `factor` is not positive, or there is no such rule for ties.

    Example:
        >>> AbsMax()(jnp.array([1.0, -3.0, 2.0]))
        Array(3., dtype=float32)
        >>> AbsMax(stats_reduce_dim=1)(jnp.array([[1.0, -3.0], [0.5, 0.0]]))
        Array([3. , 0.5], dtype=float32)
        >>> jax.grad(AbsMax(ties="near"))(jnp.array([-3.0, 3.0, 2.0]))
        Array([-0.5,  0.5,  0. ], dtype=float32)
    """

    of_magnitude: ClassVar[bool] = True
    factor: check.Positive = 1.0
    ties: Any = None


class SignedAbsMax(_Extreme):
    """`-sign(x_m) * |x_m|`, `x_m` the element of largest magnitude: the extreme lands on the smallest
    integer.

    Needs `SignedFloatRestrictValue`. Among equal magnitudes, the first gets the gradient.

    Args:
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> SignedAbsMax()(jnp.array([1.0, 3.0, 2.0]))
        Array(-3., dtype=float32)
    """

    of_magnitude: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    ties = "first"

    def measure(self, x: Tensors) -> Any:
        """The largest magnitude, and minus the sign of the first element with it."""
        ((largest,), lowest) = super().measure(x), self.over.min(x)
        positions = self.over.positions(x)
        of_largest = ops.locate(map_tensors(jnp.abs, x), largest, positions, self.over)
        negative = (lowest == -largest) & (of_largest == ops.locate(x, lowest, positions, self.over))
        return largest, jnp.where(largest == 0, 0.0, jnp.where(negative, 1.0, -1.0))

    def statistic(self, measured: Measured) -> jax.Array:
        """The signed largest magnitude."""
        return self.finished(measured[1] * measured[0])


@component.frozen_value
class MinMax(_Extreme):
    """`factor * min(min x, 0)` and `factor * max(max x, 0)`: the ends of a range around 0.

    Args:
        stats_reduce_dim: the axis or axes to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        factor: below 1, it clips both ends.
        ties: which of equal elements has the gradient: see `Ranked`.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Raises:
        ValueError: `factor` is not positive, or there is no such rule for ties.

    Source: Qwix's `minmax[,factor]`.

    Example:
        >>> MinMax()(jnp.array([1.0, 3.0]))
        (Array(0., dtype=float32), Array(3., dtype=float32))
    """

    signed: ClassVar[bool] = True
    ends: ClassVar[tuple[str, ...]] = ("high", "low")
    factor: check.Positive = 1.0
    ties: Any = "near"

    def measure(self, x: Tensors) -> tuple[jax.Array, jax.Array]:
        """Both ends, zero included."""
        high, low = super().measure(x)
        return jnp.maximum(high, 0.0), jnp.minimum(low, 0.0)

    def statistic(self, measured: Measured) -> tuple[jax.Array, jax.Array]:
        """Both ends, the lower first."""
        high, low = measured
        return self.finished(low), self.finished(high)


class Width(Ranked):
    """Base of widths between two ranks, zero included."""

    ends: ClassVar[tuple[str, ...]] = ("high", "low")

    def statistic(self, measured: Measured) -> jax.Array:
        """The width."""
        high, low = measured
        return self.finished(ops.magnitude(high - not_above_zero(low)))


class LowOrZero(Ranked):
    """Base of low ends, or 0."""

    ends: ClassVar[tuple[str, ...]] = ("low",)
    signed: ClassVar[bool] = True

    def statistic(self, measured: Measured) -> jax.Array:
        """The element of that rank, or 0."""
        return self.finished(not_above_zero(measured[0]))


class AbsMinMax(Width, _Extreme):
    """`max(x) - min(x, 0)`: the width of the range, zero included.

    Args:
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> AbsMinMax()(jnp.array([-1.0, 3.0])), AbsMinMax()(jnp.array([1.0, 3.0]))
        (Array(4., dtype=float32), Array(3., dtype=float32))
    """


class NegativeMinOrZero(LowOrZero, _Extreme):
    """`min(min(x), 0)`: the zero point statistic for `AbsMinMax`.

    Args:
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> NegativeMinOrZero()(jnp.array([-1.0, 3.0])), NegativeMinOrZero()(jnp.array([1.0, 3.0]))
        (Array(-1., dtype=float32), Array(0., dtype=float32))
    """


@component.frozen_value
class AbsMaxAve(Ranked):
    """The mean over channels of `max |x|`: one number.

    Args:
        stats_reduce_dim: the axis inside a channel (1 with `OverOutputChannelView`).
        axis_name: a mapped axis that channels are spread over, or a tuple of them.

    Raises:
        ValueError: when `stats_reduce_dim` is None.

    Example:
        >>> AbsMaxAve(stats_reduce_dim=1)(jnp.array([[1.0, -3.0], [0.5, 0.0]]))
        Array(1.75, dtype=float32)
    """

    of_magnitude: ClassVar[bool] = True
    needs_axis: ClassVar[bool] = True
    stats_reduce_dim: Axes

    def statistic(self, measured: Measured) -> jax.Array:
        """The mean of the channels' largest magnitudes."""
        return jnp.sum(measured[0]) / max(measured[0].size, 1)


class AbsMaxL2(AbsMaxAve):
    """`||m||_2 / sqrt(C)`, `m` the `max |x|` of each of `C` channels: one number.

    Args:
        stats_reduce_dim: the axis inside a channel (1 with `OverOutputChannelView`).
        axis_name: a mapped axis that channels are spread over, or a tuple of them.

    Raises:
        ValueError: when `stats_reduce_dim` is None.

    Example:
        >>> AbsMaxL2(stats_reduce_dim=1)(jnp.array([[3.0, -3.0], [3.0, 0.0]]))
        Array(3., dtype=float32)
    """

    def statistic(self, measured: Measured) -> jax.Array:
        """The norm of the channels' largest magnitudes."""
        (largest,) = measured
        return safe_sqrt(jnp.sum(largest * largest)) / math.sqrt(max(largest.size, 1))


@component.frozen_value
class AbsPercentile(Ranked):
    """The k-th smallest of `|x|`, `k = floor(q/100 * n + 1/2)` of `n` elements.

    Among equal elements, the first gets the gradient. Ranks below 1 become 1.

    Args:
        high_percentile_q: q, 0 to 100.
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them; ranks are those of the whole.

    Raises:
        ValueError: when q is not in 0 .. 100.

    Example:
        >>> AbsPercentile(50.0)(jnp.array([1.0, -4.0, 2.0, 3.0]))
        Array(2., dtype=float32)
    """

    of_magnitude: ClassVar[bool] = True
    ties = "first"
    high_percentile_q: check.Percentage
    stats_reduce_dim: Axes = None
    keepdim: bool = False


class InterpolatedAbsPercentile(AbsPercentile):
    """The number at the place `q/100 * (n - 1)` of `n` sorted magnitudes, from 0: between its neighbours, as NumPy's
    percentile. nan if one of them is.

    Arguments: see `AbsPercentile`. Magnitudes have the slope 1 at 0.

    Example:
        >>> InterpolatedAbsPercentile(50.0)(jnp.array([1.0, -4.0, 2.0, 3.0]))
        Array(2.5, dtype=float32)
    """

    slope_at_zero: ClassVar[bool] = True

    def ranks(self, count: int) -> tuple[int, ...]:
        """Those of both neighbours, and of the last: nan if any is nan."""
        low, high, _ = rank_between(self.high_percentile_q, count)
        return low, high, count

    def measure(self, x: Tensors) -> Any:
        """The elements of those ranks, and the weight of the upper neighbour."""
        *_, weight = rank_between(self.high_percentile_q, self.over.count(x))
        return (*super().measure(x), jnp.float32(weight))

    def statistic(self, measured: Measured) -> jax.Array:
        """The number between."""
        low, high, *fixed = measured
        largest, weight = jax.lax.stop_gradient(fixed)
        between = low * (1 - weight) + high * weight
        return self.finished(jnp.where(jnp.isnan(largest), jnp.nan, between))


@component.frozen_value
class NegativePercentileOrZero(LowOrZero):
    """The k-th smallest of `x`, `k = ceil(q/100 * n)`, or 0 if that is positive.

    Args:
        low_percentile_q: q, 0 to 100.
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them; ranks are those of the whole.

    Raises:
        ValueError: when q is not in 0 .. 100.

    Example:
        >>> NegativePercentileOrZero(50.0)(jnp.array([-3.0, -1.0, 2.0, 3.0]))
        Array(-1., dtype=float32)
    """

    ties = "first"
    low_percentile_q: check.Percentage
    stats_reduce_dim: Axes = None
    keepdim: bool = False


@component.frozen_value
class PercentileInterval(Width):
    """`|x_(high) - min(x_(low), 0)|`: the width between two percentiles, zero included.

    `x_(low)` is the element of rank `ceil(low/100 * n)`, `x_(high)` that of rank `floor(high/100 * n + 1/2)`.

    Args:
        low_percentile_q: the low percentile, 0 to 100.
        high_percentile_q: the high one, not less.
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them; ranks are those of the whole.

    Raises:
        ValueError: when a percentile is not in 0 .. 100, or low > high.

    Example:
        >>> PercentileInterval(25.0, 75.0)(jnp.array([-3.0, -1.0, 2.0, 3.0]))
        Array(5., dtype=float32)
    """

    ties = "first"
    low_percentile_q: check.Percentage
    high_percentile_q: check.Percentage
    stats_reduce_dim: Axes = None
    keepdim: bool = False
