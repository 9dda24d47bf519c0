"""Statistics of the ends of a tensor: largest magnitudes, minima, percentiles.

Statistics of the largest and smallest elements.

Order statistics: percentiles without interpolation, so the result is an element of the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core import check
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.statistics.statistic import TwoPhaseStat, finish
from jqinject.ops import reductions as ops
from jqinject.ops.clamp import choose
from jqinject.ops.reductions import Axes, Over, Tensors, each


def not_above_zero(x: jax.Array) -> jax.Array:
    """`min(x, 0)`; at 0 the gradient goes to `x`."""
    return choose(x > 0, 0.0, x)


def require_axis(stats_reduce_dim: Axes, where: str) -> None:
    """Raise ValueError if a statistic that needs channels would reduce the whole tensor."""
    if stats_reduce_dim is None:
        raise ValueError(
            f"{where} works over channels: give stats_reduce_dim (1 with OverOutputChannelView). "
            "For one statistic of the whole tensor use AbsMax or AbsAve."
        )


class _LargestMagnitude(TwoPhaseStat):
    """Base of statistics of `max |x|`."""

    def measure(self, x: Tensors) -> Any:
        """The largest magnitude."""
        return self.over.max(each(jnp.abs, x))

    def locate(self, x: Tensors, measured: Any) -> Any:
        """Where it is."""
        return ops.locate_extreme(each(jnp.abs, x), measured, self.over)

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """How it changes."""
        dx = ops.change_of_magnitude(x, dx)
        # Over axes its position is enough.
        return ops.change_of_extreme(
            dx, x if self.over.keeps else each(jnp.abs, x), measured, located, self.over
        )


@checked_arguments
@dataclass(frozen=True)
class AbsMax(_LargestMagnitude):
    """`max |x|`.

    Over the whole tensor, ties share the gradient; over an axis, the first gets it.

    Args:
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> AbsMax()(jnp.array([1.0, -3.0, 2.0]))
        Array(3., dtype=float32)
        >>> AbsMax(stats_reduce_dim=1)(jnp.array([[1.0, -3.0], [0.5, 0.0]]))
        Array([3. , 0.5], dtype=float32)
    """

    takes_several: ClassVar[bool] = True
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    axis_name: Any = None

    def statistic(self, measured: Any) -> jax.Array:
        """The largest magnitude."""
        return finish(measured, self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class SignedAbsMax(TwoPhaseStat):
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

    takes_several: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    axis_name: Any = None

    def measure(self, x: Tensors) -> Any:
        """The largest magnitude, and minus the sign of the first element with it."""
        magnitude = each(jnp.abs, x)
        found = self.over.max(magnitude)
        lowest = self.over.min(x)
        first = ops.locate(magnitude, found, self.over) == ops.locate(x, lowest, self.over)
        negative = (lowest == -found) & first
        return found, jnp.where(found == 0, 0.0, jnp.where(negative, 1.0, -1.0))

    def locate(self, x: Tensors, measured: Any) -> Any:
        """Where it is."""
        return ops.locate(each(jnp.abs, x), measured[0], self.over)

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """How it changes; its sign stays."""
        found = ops.picked(ops.change_of_magnitude(x, dx), located, self.over)
        return found, jnp.zeros_like(measured[1])

    def statistic(self, measured: Any) -> jax.Array:
        """The signed largest magnitude."""
        found, sign = measured
        return finish(sign * found, self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class AbsMinMax(TwoPhaseStat):
    """`max(x) - min(x, 0)`: the width of the range, zero included.

    Args:
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> AbsMinMax()(jnp.array([-1.0, 3.0])), AbsMinMax()(jnp.array([1.0, 3.0]))
        (Array(4., dtype=float32), Array(3., dtype=float32))
    """

    takes_several: ClassVar[bool] = True
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    axis_name: Any = None

    def measure(self, x: Tensors) -> Any:
        """Largest and smallest element."""
        return self.over.max(x), self.over.min(x)

    def locate(self, x: Tensors, measured: Any) -> Any:
        """Where they are."""
        return tuple(ops.locate_extreme(x, end, self.over) for end in measured)

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """How they change."""
        ends = zip(measured, located, strict=True)
        return tuple(ops.change_of_extreme(dx, x, end, found, self.over) for end, found in ends)

    def statistic(self, measured: Any) -> jax.Array:
        """The width."""
        largest, smallest = measured
        return finish(ops.magnitude(largest - not_above_zero(smallest)), self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class NegativeMinOrZero(TwoPhaseStat):
    """`min(min(x), 0)`: the zero point statistic for `AbsMinMax`.

    Args:
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> NegativeMinOrZero()(jnp.array([-1.0, 3.0])), NegativeMinOrZero()(jnp.array([1.0, 3.0]))
        (Array(-1., dtype=float32), Array(0., dtype=float32))
    """

    takes_several: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    axis_name: Any = None

    def measure(self, x: Tensors) -> Any:
        """The smallest element."""
        return self.over.min(x)

    def locate(self, x: Tensors, measured: Any) -> Any:
        """Where it is."""
        return ops.locate_extreme(x, measured, self.over)

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """How it changes."""
        return ops.change_of_extreme(dx, x, measured, located, self.over)

    def statistic(self, measured: Any) -> jax.Array:
        """The smallest element, or 0."""
        return finish(not_above_zero(measured), self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class AbsMaxAve(_LargestMagnitude):
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

    takes_several: ClassVar[bool] = True
    stats_reduce_dim: Axes
    axis_name: Any = None

    def __post_init__(self) -> None:
        require_axis(self.stats_reduce_dim, "AbsMaxAve")

    def statistic(self, measured: Any) -> jax.Array:
        """The mean of the channels' largest magnitudes."""
        return jnp.sum(measured) / max(measured.size, 1)


@checked_arguments
@dataclass(frozen=True)
class AbsMaxL2(_LargestMagnitude):
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

    takes_several: ClassVar[bool] = True
    stats_reduce_dim: Axes
    axis_name: Any = None

    def __post_init__(self) -> None:
        require_axis(self.stats_reduce_dim, "AbsMaxL2")

    def statistic(self, measured: Any) -> jax.Array:
        """The norm of the channels' largest magnitudes."""
        return safe_sqrt(jnp.sum(measured * measured)) / math.sqrt(max(measured.size, 1))


def safe_sqrt(x: jax.Array) -> jax.Array:
    """`sqrt(x)` with gradient 0 at 0."""
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), jnp.sqrt(jnp.where(zero, jnp.ones_like(x), x)))


def _place(x: Tensors, value: jax.Array, k: int, over: Over) -> jax.Array:
    """Where the k-th smallest element is: the first of equals."""
    return ops.locate(x, value, over)


@checked_arguments
@dataclass(frozen=True)
class AbsPercentile(TwoPhaseStat):
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

    takes_several: ClassVar[bool] = True
    high_percentile_q: float
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    axis_name: Any = None

    def __post_init__(self) -> None:
        check.percentile(self.high_percentile_q, "AbsPercentile", "high_percentile_q")

    def measure(self, x: Tensors) -> Any:
        """The element of that rank."""
        return ops.kth_smallest(each(jnp.abs, x), self._rank(x), self.over)

    def locate(self, x: Tensors, measured: Any) -> Any:
        """Where it is."""
        return _place(each(jnp.abs, x), measured, self._rank(x), self.over)

    def _rank(self, x: Tensors) -> int:
        return ops.rank_high(self.high_percentile_q, self.over.count(x))

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """How it changes."""
        return ops.picked(ops.change_of_magnitude(x, dx), located, self.over)

    def statistic(self, measured: Any) -> jax.Array:
        """The element of that rank."""
        return finish(measured, self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class NegativePercentileOrZero(TwoPhaseStat):
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

    takes_several: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    low_percentile_q: float
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    axis_name: Any = None

    def __post_init__(self) -> None:
        check.percentile(self.low_percentile_q, "NegativePercentileOrZero", "low_percentile_q")

    def measure(self, x: Tensors) -> Any:
        """The element of that rank."""
        return ops.kth_smallest(x, self._rank(x), self.over)

    def locate(self, x: Tensors, measured: Any) -> Any:
        """Where it is."""
        return _place(x, measured, self._rank(x), self.over)

    def _rank(self, x: Tensors) -> int:
        return ops.rank_low(self.low_percentile_q, self.over.count(x))

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """How it changes."""
        return ops.picked(dx, located, self.over)

    def statistic(self, measured: Any) -> jax.Array:
        """The element of that rank, or 0."""
        return finish(not_above_zero(measured), self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class PercentileInterval(TwoPhaseStat):
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

    takes_several: ClassVar[bool] = True
    low_percentile_q: float
    high_percentile_q: float
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    axis_name: Any = None

    def __post_init__(self) -> None:
        low = check.percentile(self.low_percentile_q, "PercentileInterval", "low_percentile_q")
        high = check.percentile(self.high_percentile_q, "PercentileInterval", "high_percentile_q")
        if low > high:
            raise ValueError(f"PercentileInterval: low_percentile_q={low} is above high_percentile_q={high}.")

    def measure(self, x: Tensors) -> Any:
        """The elements of both ranks."""
        return tuple(ops.kth_smallest(x, k, self.over) for k in self._ranks(x))

    def locate(self, x: Tensors, measured: Any) -> Any:
        """Where they are."""
        ends = zip(measured, self._ranks(x), strict=True)
        return tuple(_place(x, end, k, self.over) for end, k in ends)

    def _ranks(self, x: Tensors) -> tuple[int, int]:
        n = self.over.count(x)
        return ops.rank_low(self.low_percentile_q, n), ops.rank_high(self.high_percentile_q, n)

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """How they change."""
        return tuple(ops.picked(dx, part, self.over) for part in located)

    def statistic(self, measured: Any) -> jax.Array:
        """The width."""
        low, high = measured
        return finish(ops.magnitude(high - not_above_zero(low)), self.stats_reduce_dim, self.keepdim)
