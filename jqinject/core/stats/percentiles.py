"""Order statistics: percentiles without interpolation, so that the result is an element of the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core.construction import check
from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.stats.extremes import not_above_zero
from jqinject.core.stats.two_phase import TwoPhaseStat, finish
from jqinject.ops import stats as ops
from jqinject.ops.devices.over import Axes, Over, Tensors, each


def _kth(x: Tensors, k: int, over: Over) -> ops.Selected:
    return ops.locate(x, ops.kth_smallest(x, k, over), over)


@checked_arguments
@dataclass(frozen=True)
class AbsPercentile(TwoPhaseStat):
    """The k-th smallest of `|x|`, `k = floor(q/100 * n + 1/2)` of `n` elements.

    Of equal elements the first gets the gradient. A rank below 1 counts as 1.

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
        k = ops.rank_high(self.high_percentile_q, self.over.count(x))
        return _kth(each(jnp.abs, x), k, self.over)

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """The element of that rank."""
        stat = ops.select(each(ops.magnitude, x), measured, self.over)
        return finish(stat, self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class NegativePercentileOrZero(TwoPhaseStat):
    """The k-th smallest of `x`, `k = ceil(q/100 * n)`, or 0 where that is positive.

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
        k = ops.rank_low(self.low_percentile_q, self.over.count(x))
        return _kth(x, k, self.over)

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """The element of that rank, or 0."""
        stat = not_above_zero(ops.select(x, measured, self.over))
        return finish(stat, self.stats_reduce_dim, self.keepdim)


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
        n = self.over.count(x)
        low = _kth(x, ops.rank_low(self.low_percentile_q, n), self.over)
        return low, _kth(x, ops.rank_high(self.high_percentile_q, n), self.over)

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """The width."""
        low, high = (ops.select(x, part, self.over) for part in measured)
        return finish(ops.magnitude(high - not_above_zero(low)), self.stats_reduce_dim, self.keepdim)
