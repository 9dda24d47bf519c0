"""Order statistics: percentiles without interpolation, so the result is an element of the tensor."""

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
