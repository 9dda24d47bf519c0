"""Statistics of the largest and smallest elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.stats.two_phase import TwoPhaseStat, finish
from jqinject.ops import stats as ops
from jqinject.ops.devices.over import Axes, Over, Tensors, each


def _max(x: Tensors, over: Over) -> ops.Selected | ops.Extreme:
    return ops.measure(x, over.max(x), over)


def _min(x: Tensors, over: Over) -> ops.Selected | ops.Extreme:
    return ops.measure(x, over.min(x), over)


def not_above_zero(x: jax.Array) -> jax.Array:
    """`min(x, 0)`; at 0 the gradient goes to `x`."""
    return jnp.where(x > 0, jnp.zeros_like(x), x)


def require_axis(stats_reduce_dim: Axes, where: str) -> None:
    """Raise ValueError when a statistic that needs channels is to reduce the whole tensor."""
    if stats_reduce_dim is None:
        raise ValueError(
            f"{where} works over channels: give stats_reduce_dim (1 with OverOutputChannelView). "
            "For one statistic of the whole tensor use AbsMax or AbsAve."
        )


@checked_arguments
@dataclass(frozen=True)
class AbsMax(TwoPhaseStat):
    """`max |x|`.

    Elements that tie share the gradient over the whole tensor; over an axis the first of them gets it.

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

    def detached(self, x: Tensors) -> jax.Array:
        """The largest magnitude alone."""
        return finish(self.over.max(each(jnp.abs, x)), self.stats_reduce_dim, self.keepdim)

    def measure(self, x: Tensors) -> Any:
        """The largest magnitude and where it is."""
        return _max(each(jnp.abs, x), self.over)

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """The largest magnitude."""
        stat = ops.attach(each(ops.magnitude, x), measured, self.over)
        return finish(stat, self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class SignedAbsMax(TwoPhaseStat):
    """`-sign(x_m) * |x_m|`, `x_m` the element of largest magnitude: the extreme lands on the smallest
    integer.

    Needs `SignedFloatRestrictValue`. The first of equal magnitudes gets the gradient.

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
        """The largest magnitude, where it is, and the sign there."""
        magnitude = each(jnp.abs, x)
        found = ops.locate(magnitude, self.over.max(magnitude), self.over)
        lowest = self.over.min(x)
        first = ops.locate(x, lowest, self.over)
        negative = (lowest == -found.value) & (first.position == found.position)
        return found, jnp.where(found.value == 0, 0.0, jnp.where(negative, 1.0, -1.0))

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """The signed largest magnitude."""
        found, sign = measured
        stat = sign * ops.select(each(ops.magnitude, x), found, self.over)
        return finish(stat, self.stats_reduce_dim, self.keepdim)


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
        return _max(x, self.over), _min(x, self.over)

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """The width."""
        largest, smallest = (ops.attach(x, part, self.over) for part in measured)
        return finish(ops.magnitude(largest - not_above_zero(smallest)), self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class NegativeMinOrZero(TwoPhaseStat):
    """`min(min(x), 0)`: the zero point statistic that goes with `AbsMinMax`.

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
        return _min(x, self.over)

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """The smallest element, or 0."""
        smallest = not_above_zero(ops.attach(x, measured, self.over))
        return finish(smallest, self.stats_reduce_dim, self.keepdim)


@checked_arguments
@dataclass(frozen=True)
class AbsMaxAve(TwoPhaseStat):
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

    def measure(self, x: Tensors) -> Any:
        """The largest magnitude of each channel."""
        return _max(each(jnp.abs, x), self.over)

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """Their mean."""
        largest = ops.attach(each(ops.magnitude, x), measured, self.over)
        return jnp.sum(largest) / max(largest.size, 1)


@checked_arguments
@dataclass(frozen=True)
class AbsMaxL2(TwoPhaseStat):
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

    def measure(self, x: Tensors) -> Any:
        """The largest magnitude of each channel."""
        return _max(each(jnp.abs, x), self.over)

    def attach(self, x: Tensors, measured: Any) -> jax.Array:
        """Their norm."""
        largest = ops.attach(each(ops.magnitude, x), measured, self.over)
        return safe_sqrt(jnp.sum(largest * largest)) / math.sqrt(max(largest.size, 1))


def safe_sqrt(x: jax.Array) -> jax.Array:
    """`sqrt(x)` with gradient 0 at 0."""
    zero = x == 0
    return jnp.where(zero, jnp.zeros_like(x), jnp.sqrt(jnp.where(zero, jnp.ones_like(x), x)))
