"""Clipping ranges of a tensor, as Qwix and AQT calibrate them: statistics, fixed, or that of several with least error.

A range is symmetric, `[-high, high]`, or has two ends around 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import _protocols, check, component
from jqinject.core.rounding import RoundToOddSte
from jqinject.core.statistics import extremes, means, search
from jqinject.core.statistics.statistic import Reduction
from jqinject.ops import clamps, cut, float_grid, power, reductions, sharding, ste
from jqinject.ops.grid import IntGrid

Axes = Sequence[int] | cut.Cut


class ClippingRange(NamedTuple):
    """The interval that a quantizer's numbers span; float32, size 1 along axes that share a scale.

    Attributes:
        high: the upper end, at least 0.
        low: the lower end, at most 0; None means `-high` (symmetric).
    """

    high: jax.Array
    low: jax.Array | None = None

    @property
    def lowest(self) -> jax.Array:
        """The lower end, also of a symmetric range."""
        return -self.high if self.low is None else self.low


class RangeMethod(Protocol):
    """`calibration_impl`: the range of a float32 tensor shared by `axes` and by the mapped axes `names`.

    With `takes_cut = True` next to its `__call__` it also takes a `Cut` for the axes: each end of the range then has
    the shape of the tensor, or size 1 along the axis that is cut, and size 1 along the `beside` of the `Cut`: further
    axes that share it. Otherwise, a tensor whose groups cross shards is gathered.
    """

    def __call__(self, x: jax.Array, axes: Sequence[int], names: sharding.Names = (), /) -> ClippingRange: ...


class _OfStatistic:
    """Base of ranges whose end, or lower and upper end, is a statistic with the range's fields as arguments.

    Attributes:
        statistic: makes the statistic.
    """

    takes_cut: ClassVar[bool] = True
    statistic: ClassVar[Callable[..., Reduction]]
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ValueError(f"{type(self).__name__}: factor must be a positive number, got {self.factor!r}")

    def __call__(self, x: jax.Array, axes: Axes | None, names: sharding.Names = ()) -> ClippingRange:
        """See the class."""
        if isinstance(axes, cut.Cut):
            axes = replace(axes, spreads=True)
        elif axes is not None:
            axes = tuple(axes)
        ends = self.statistic(**vars(self), stats_reduce_dim=axes, keepdim=True, axis_name=names)(x)
        return ClippingRange(*reversed(ends)) if isinstance(ends, tuple) else ClippingRange(ends)


@component.frozen_value
class AbsMaxRange(_OfStatistic):
    """`high = factor * max |x|`, symmetric.

    Args:
        factor: below 1, it clips the largest magnitudes.

    Raises:
        ValueError: `factor` is not positive.

    Source: Qwix's `absmax[,factor]`.

    Example:
        >>> AbsMaxRange()(jnp.array([[1.0, -3.0]]), (1,)).high
        Array([[3.]], dtype=float32)
    """

    statistic = staticmethod(partial(extremes.AbsMax, ties="near"))
    factor: float = 1.0


@component.frozen_value
class RMSRange(_OfStatistic):
    """`high = factor * sqrt(mean x^2)`, symmetric.

    Args:
        factor: the end in root mean squares.

    Raises:
        ValueError: `factor` is not positive.

    Source: Qwix's `rms,factor`.
    """

    statistic = means.RMS
    factor: float = 4.0


@component.frozen_value
class AbsMeanRange(_OfStatistic):
    """`high = factor * (mean over x != 0 of |x|^p)^(1/p)`, symmetric.

    Args:
        factor: the end in means.
        p: exponent of the mean.
        count_zeros: include zeros in the mean; `p=2` is then `RMSRange`.

    Raises:
        ValueError: `factor` or `p` is not positive.

    Source: AQT's `AbsMeanCalibration`.

    Example:
        >>> AbsMeanRange()(jnp.array([1.5, 0.0, -1.5, 3.0]), (0,)).high
        Array([2.], dtype=float32)
    """

    statistic = means.AbsMean
    factor: float = 1.0
    p: check.Positive = 1.0
    count_zeros: bool = False


@component.frozen_value
class MinMaxRange(_OfStatistic):
    """`low = factor * min(min x, 0)`, `high = factor * max(max x, 0)`.

    Args:
        factor: below 1, it clips both ends.

    Raises:
        ValueError: `factor` is not positive.

    Source: Qwix's `minmax[,factor]`.

    Example:
        >>> found = MinMaxRange()(jnp.array([1.0, 3.0]), (0,))
        >>> found.low, found.high
        (Array([0.], dtype=float32), Array([3.], dtype=float32))
    """

    statistic = extremes.MinMax
    factor: float = 1.0


@dataclass(frozen=True)
class NonzeroRange:
    """The range of another method, with 1 in place of 0: zeros are scaled as if their range ended at 1.

    Args:
        calibration: finds a symmetric range.

    Source: AQT's calibrations.

    Example:
        >>> NonzeroRange(AbsMaxRange())(jnp.array([[0.0, 0.0], [2.0, -3.0]]), (1,)).high
        Array([[1.],
               [3.]], dtype=float32)
    """

    calibration: RangeMethod

    @property
    def takes_cut(self) -> bool:
        """Whether the other method takes a `Cut`."""
        return _protocols.takes_cut(self.calibration)

    def __call__(self, x: jax.Array, axes: Any, names: sharding.Names = ()) -> ClippingRange:
        """See the class."""
        ends = self.calibration(x, axes, names) if names else self.calibration(x, axes)
        return ends._replace(high=jnp.where(ends.high == 0.0, 1.0, ends.high))


#: Methods that accept None for the axes: the range of the whole tensor, as scalars.
OF_NO_AXES = (AbsMaxRange, MinMaxRange)


@component.frozen_value
class FixedRange:
    """A range known beforehand, for the whole tensor.

    Args:
        low: the lower end, at most 0.
        high: the upper end, at least 0. The range is symmetric if `low == -high`.

    Raises:
        ValueError: the range is empty or does not contain 0.

    Source: Qwix's `fixed,low,high`.

    Example:
        >>> FixedRange(-1.0, 3.0)(jnp.ones((2, 2)), (0, 1)).high
        Array([[3.]], dtype=float32)
    """

    takes_cut: ClassVar[bool] = True
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (self.low <= 0 <= self.high and self.low < self.high and math.isfinite(self.high - self.low)):
            raise ValueError(
                f"FixedRange: the range must contain 0 and must not be empty, got [{self.low}, {self.high}]"
            )

    def __call__(self, x: jax.Array, axes: Axes, names: sharding.Names = ()) -> ClippingRange:
        """See the class."""
        shape = (1,) * x.ndim
        high = jnp.full(shape, self.high, jnp.float32)
        return ClippingRange(high, None if self.low == -self.high else jnp.full(shape, self.low, jnp.float32))


@component.frozen_value
class AbsPercentileRange(_OfStatistic):
    """`high` is a percentile of `|x|`, symmetric, interpolated between its neighbours.

    Args:
        percentile: from 0 to 100.

    Raises:
        ValueError: `percentile` is out of range.

    Example:
        >>> AbsPercentileRange(50.0)(jnp.array([1.0, -2.0, 100.0]), (0,)).high
        Array([2.], dtype=float32)
    """

    percentile: Annotated[float, check.between(0, 100, why="", expected="must be from 0 to 100")] = 99.9

    @staticmethod
    def statistic(percentile: float, **arguments: Any) -> Reduction:
        """The statistic of a whole tensor."""
        return extremes.InterpolatedAbsPercentile(percentile, **arguments)


@component.frozen_value
class MSERange:
    """The symmetric range with the least mean squared quantization error, among fractions of `max |x|`.

    Tries `max |x| * k / candidates`, `k` from `candidates` down to 1, with `range_steps` from 0 to the end, and takes
    the first with the least error over the axes that share a scale. The numbers are those of a quantizer
    with arguments of the same names.

    Args:
        bit_width: of the integers.
        candidates: how many ranges to try.
        fractions: the fractions to try in this order instead, as AQT's `SnrBasedAutoCalibration`.
        narrow_range: leave out -2^(bit_width-1).
        range_steps: steps from 0 to the end of the range; None means 2^(bit_width-1) - 1/2.
        q_dtype: a dtype of 8-bit floats or narrower instead of integers: its largest number is the end of the range.
        preserve_zero: False if only odd integers are used (`RoundToOddSte`), for half-integers.

    Raises:
        ValueError: `bit_width` is below 2 or `candidates` below 1; a fraction is not positive.

    Example:
        >>> MSERange(bit_width=2, fractions=(1.0, 0.5))(jnp.array([1.0, -1.0, 0.3, 8.0]), (0,)).high
        Array([8.], dtype=float32)
    """

    takes_cut: ClassVar[bool] = True
    bit_width: Any = 8
    candidates: check.Count = 50
    fractions: tuple[float, ...] | None = None
    narrow_range: bool = False
    range_steps: float | None = None
    q_dtype: np.dtype | None = None
    preserve_zero: bool = True

    def __post_init__(self) -> None:
        check.bit_width(self.bit_width, "MSERange", least=2)
        if self.fractions is not None and not all(fraction > 0 for fraction in self.fractions):
            raise ValueError(f"MSERange: fractions must be above 0, got {self.fractions!r}")

    def __call__(self, x: jax.Array, axes: Axes, names: sharding.Names = ()) -> ClippingRange:
        """See the class."""
        x = jax.lax.stop_gradient(x)
        over = reductions.Over(axes if isinstance(axes, cut.Cut) else tuple(axes), names)
        largest = AbsMaxRange()(x, axes, names).high
        if self.q_dtype is None:
            grid = IntGrid(self.bit_width, narrow_range=self.narrow_range)
            steps = self.range_steps or 2.0 ** (self.bit_width - 1) - 0.5
        else:
            grid = float_grid.FloatGrid.of_dtype(self.q_dtype)
            steps = grid.largest
        rounding: Any = ste.nearest if self.preserve_zero or self.q_dtype is not None else RoundToOddSte()
        if self.fractions is not None:
            fractions = jnp.array(self.fractions, jnp.float32)
        else:
            fractions = power.divide(jnp.arange(self.candidates, 0, -1, dtype=jnp.float32), self.candidates)

        def error(high: jax.Array) -> jax.Array:
            scale = jnp.where(high > 0, power.divide(high, steps), 1.0)
            return over.sum(jnp.square(grid.round(power.divide(x, scale), rounding) * scale - x))

        start = (largest, jnp.full(largest.shape, jnp.inf, jnp.float32))
        return ClippingRange(search.least_of(start, lambda fraction: largest * fraction, error, fractions)[0])


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
        return clamps.within_range(compute, x, ends.high, ends.low, *where, to_range=to_range)
    y = compute(*jax.tree.map(jax.lax.stop_gradient, (x, *where)))
    if ends is not None:
        return clamps.within_range(_second, x, ends.high, ends.low, y, to_range=to_range)
    return (ste.with_gradient_of(x, y[0]), y[1]) if isinstance(y, tuple) else ste.with_gradient_of(x, y)


def _second(x: jax.Array, y: object) -> Any:
    return y
