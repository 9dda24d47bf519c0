"""Statistics of means, deviations and norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.core import _check
from jqinject.core.arguments import checked_arguments
from jqinject.core.stats.extremes import require_axis, safe_sqrt
from jqinject.core.stats.two_phase import TwoPhaseStat, finish
from jqinject.core.variables import QuantParam, float_array
from jqinject.ops import stats as ops


def _count(x: jax.Array, axis: int | None) -> int:
    return x.size if axis is None else x.shape[axis]


@checked_arguments
@dataclass(frozen=True)
class AbsAve(TwoPhaseStat):
    """`mean |x|`.

    Args:
        stats_reduce_dim: the axis to reduce, None for the whole tensor.

    Example:
        >>> AbsAve()(jnp.array([1.0, -3.0]))
        Array(2., dtype=float32)
    """

    stats_reduce_dim: int | None = None

    def measure(self, x: jax.Array) -> Any:
        """The mean magnitude."""
        return jnp.mean(jnp.abs(x), axis=self.stats_reduce_dim, keepdims=self.stats_reduce_dim is not None)

    def attach(self, x: jax.Array, measured: Any) -> jax.Array:
        """The mean magnitude."""
        weights = jnp.float32(1 / _count(x, self.stats_reduce_dim))
        stat = ops.attach_gradient(ops.magnitude(x), measured, weights)
        return finish(stat, self.stats_reduce_dim, False)


def _measure_spread(x: jax.Array, axis: int | None, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Mean of |x|, and `sqrt(unbiased variance + epsilon)`; the variance of one number is 0."""
    keep = axis is not None
    magnitude = jnp.abs(x)
    mean = jnp.mean(magnitude, axis=axis, keepdims=keep)
    squares = jnp.sum(jnp.square(magnitude - mean), axis=axis, keepdims=keep)
    return mean, jnp.sqrt(squares / max(_count(x, axis) - 1, 1) + epsilon)


def _attach_spread(
    x: jax.Array, measured: tuple[jax.Array, jax.Array], axis: int | None
) -> tuple[jax.Array, jax.Array]:
    mean, deviation = measured
    magnitude = ops.magnitude(x)
    n = _count(x, axis)
    divisor = jnp.where(deviation > 0, deviation, 1.0) * max(n - 1, 1)
    slope = (jax.lax.stop_gradient(magnitude) - mean) / divisor
    return (
        ops.attach_gradient(magnitude, mean, jnp.float32(1 / n)),
        ops.attach_gradient(magnitude, deviation, slope),
    )


@checked_arguments
@dataclass(frozen=True)
class MeanSigmaStd(TwoPhaseStat):
    """`mean |x| + sigma * sqrt(var |x| + epsilon)`, `var` unbiased.

    Differs from Brevitas: the variance of a single number is 0 (there: nan).

    Args:
        sigma: how many standard deviations.
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        std_dev_epsilon: added to the variance.

    Example:
        >>> MeanSigmaStd(sigma=2.0)(jnp.array([1.0, -1.0, 1.0]))
        Array(1.0002, dtype=float32)
    """

    sigma: float
    stats_reduce_dim: int | None = None
    std_dev_epsilon: float = 1e-8

    def measure(self, x: jax.Array) -> Any:
        """Mean and deviation."""
        return _measure_spread(x, self.stats_reduce_dim, self.std_dev_epsilon)

    def attach(self, x: jax.Array, measured: Any) -> jax.Array:
        """The statistic."""
        mean, deviation = _attach_spread(x, measured, self.stats_reduce_dim)
        return finish(mean + self.sigma * deviation, self.stats_reduce_dim, False)


@checked_arguments
class MeanLearnedSigmaStd(nnx.Module):
    """`MeanSigmaStd` with a learned `sigma`, the parameter `value`.

    Args:
        sigma: initial number of standard deviations.
        stats_output_shape: shape of the parameter: () or that of the statistic, `(channels,)`.
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        std_dev_epsilon: added to the variance.

    Example:
        >>> stat = MeanLearnedSigmaStd(2.0)
        >>> stat(jnp.array([1.0, -1.0, 1.0])), stat.value.get_value()
        (Array(1.0002, dtype=float32), Array(2., dtype=float32))
    """

    signed = False

    def __init__(
        self,
        sigma: float,
        stats_output_shape: tuple[int, ...] = (),
        stats_reduce_dim: int | None = None,
        std_dev_epsilon: float = 1e-8,
    ) -> None:
        shape = _check.shape(stats_output_shape, "MeanLearnedSigmaStd", "stats_output_shape")
        self.value = QuantParam(float_array(sigma, shape))
        self.stats_reduce_dim = stats_reduce_dim
        self.std_dev_epsilon = std_dev_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """The statistic of `x`."""
        axis = self.stats_reduce_dim
        fixed = MeanSigmaStd(0.0, axis, self.std_dev_epsilon)
        if x.size == 0:
            return fixed(x)
        x = x.astype(jnp.float32)
        measured = fixed.measure(jax.lax.stop_gradient(x))
        mean, deviation = (finish(part, axis, False) for part in _attach_spread(x, measured, axis))
        return mean + self.value.get_value().reshape(-1 if deviation.ndim else ()) * deviation


@checked_arguments
@dataclass(frozen=True)
class L1Norm(TwoPhaseStat):
    """`sum |x|` of each channel; the reduced axis is kept with size 1.

    Args:
        stats_reduce_dim: the axis inside a channel (1 with `OverOutputChannelView`).

    Raises:
        ValueError: when `stats_reduce_dim` is None.

    Example:
        >>> L1Norm(stats_reduce_dim=1)(jnp.array([[1.0, -3.0]]))
        Array([[4.]], dtype=float32)
    """

    stats_reduce_dim: int | None = None

    def __post_init__(self) -> None:
        require_axis(self.stats_reduce_dim, "L1Norm")

    def measure(self, x: jax.Array) -> Any:
        """The norm."""
        return jnp.sum(jnp.abs(x), axis=self.stats_reduce_dim, keepdims=True)

    def attach(self, x: jax.Array, measured: Any) -> jax.Array:
        """The norm."""
        return ops.attach_gradient(ops.magnitude(x), measured, jnp.float32(1))


@checked_arguments
@dataclass(frozen=True)
class L2Norm(TwoPhaseStat):
    """`sqrt(sum x**2)` of each channel; the reduced axis is kept with size 1; gradient 0 for a channel of
    zeros.

    Args:
        stats_reduce_dim: the axis inside a channel (1 with `OverOutputChannelView`).

    Raises:
        ValueError: when `stats_reduce_dim` is None.

    Example:
        >>> L2Norm(stats_reduce_dim=1)(jnp.array([[3.0, -4.0]]))
        Array([[5.]], dtype=float32)
    """

    stats_reduce_dim: int | None = None

    def __post_init__(self) -> None:
        require_axis(self.stats_reduce_dim, "L2Norm")

    def measure(self, x: jax.Array) -> Any:
        """The norm."""
        return safe_sqrt(jnp.sum(jnp.square(x), axis=self.stats_reduce_dim, keepdims=True))

    def attach(self, x: jax.Array, measured: Any) -> jax.Array:
        """The norm."""
        slope = jax.lax.stop_gradient(x) / jnp.where(measured > 0, measured, 1.0)
        return ops.attach_gradient(x, measured, slope)
