"""Percentiles: elements of a rank, or between two."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core import check
from jqinject.core.component import frozen_value
from jqinject.core.statistics.extremes import LowOrZero, Ranked, Width
from jqinject.ops.reductions import Axes, Tensors, rank_between


@frozen_value
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

    @property
    def percentiles(self) -> tuple[float, float]:
        """The percentiles of both ends."""
        return 0.0, self.high_percentile_q


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
        """Those of both neighbours, and of the last: nan, if there is one."""
        low, high, _ = rank_between(self.high_percentile_q, count)
        return low, high, count

    def measure(self, x: Tensors) -> Any:
        """The elements of those ranks, and the weight of the upper neighbour."""
        *_, weight = rank_between(self.high_percentile_q, self.over.count(x))
        return (*super().measure(x), jnp.float32(weight))

    def statistic(self, measured: Any) -> jax.Array:
        """The number between."""
        low, high, *fixed = measured
        largest, weight = jax.lax.stop_gradient(fixed)
        between = low * (1 - weight) + high * weight
        return self.finished(jnp.where(jnp.isnan(largest), jnp.nan, between))


@frozen_value
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

    @property
    def percentiles(self) -> tuple[float, float]:
        """The percentiles of both ends."""
        return self.low_percentile_q, 100.0


@frozen_value
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

    @property
    def percentiles(self) -> tuple[float, float]:
        """The percentiles of both ends."""
        return self.low_percentile_q, self.high_percentile_q
