"""Statistics of averages: means, deviations and norms."""

from collections.abc import Callable
from dataclasses import InitVar
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core import check, component, state
from jqinject.core.statistics.extremes import safe_sqrt
from jqinject.core.statistics.statistic import Reduction, finish
from jqinject.ops import reductions as ops
from jqinject.ops.reductions import Axes, Measured, Tensors, map_tensors, parts_of


@component.frozen_value
class AbsAve(Reduction):
    """`mean |x|`.

    Args:
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> AbsAve()(jnp.array([1.0, -3.0]))
        Array(2., dtype=float32)
    """

    stats_reduce_dim: Axes = None

    def measure(self, x: Tensors) -> jax.Array:
        """The mean magnitude."""
        return self.over.sum(map_tensors(jnp.abs, x)) / self.over.count(x)

    def change(self, dx: Tensors, x: Tensors, measured: Measured, located: Measured) -> jax.Array:
        """How it changes."""
        weight = jnp.float32(1 / self.over.count(x))
        return self.over.sum(map_tensors(lambda dx: dx * weight, ops.change_of_magnitude(x, dx)))


def _squares(over: ops.Over, x: Tensors, mean: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A unit, and the sum of the squares of distances from a mean in this unit.

    It is a power of two that keeps squares of large numbers, and of their rounding errors, finite.
    """
    unit = jnp.where(largest > 2.0**48, 2.0**80, 1.0)
    return unit, over.sum(map_tensors(lambda x: jnp.square((x - mean) / unit), x), jnp.square(mean / unit))


@component.frozen_value
class MeanSigmaStd(Reduction):
    """`mean |x| + sigma * sqrt(var |x| + epsilon)`, `var` unbiased.

    Differs from Brevitas: the variance of a single number is 0 (there: nan).

    Args:
        sigma: how many standard deviations.
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        std_dev_epsilon: added to the variance.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> MeanSigmaStd(sigma=2.0)(jnp.array([1.0, -1.0, 1.0]))
        Array(1.0002, dtype=float32)
    """

    signed: ClassVar[bool] = True  # by a negative sigma
    sigma: check.NonNegative
    stats_reduce_dim: Axes = None
    std_dev_epsilon: check.Positive = 1e-8

    def measure(self, x: Tensors) -> tuple[jax.Array, jax.Array]:
        """Mean of |x|, and `sqrt(unbiased variance + epsilon)`; the variance of one number is 0."""
        over, magnitude = self.over, map_tensors(jnp.abs, x)
        n = over.count(x)
        mean = over.sum(magnitude) / n
        unit, squares = _squares(over, magnitude, mean, over.max(magnitude))
        return mean, unit * jnp.sqrt(squares / max(n - 1, 1) + self.std_dev_epsilon / unit / unit)

    def change(
        self, dx: Tensors, x: Tensors, measured: Measured, located: Measured
    ) -> tuple[jax.Array, jax.Array]:
        """How both change."""
        mean, deviation = jax.lax.stop_gradient(measured)
        n = self.over.count(x)
        divisor = jnp.where(deviation > 0, deviation, 1.0) * max(n - 1, 1)
        dx = ops.change_of_magnitude(x, dx)

        def along_deviation(dx: jax.Array, x: jax.Array) -> jax.Array:
            return (jnp.abs(jax.lax.stop_gradient(x)) - mean) / divisor * dx

        along_mean = map_tensors(lambda dx: dx * jnp.float32(1 / n), dx)
        return self.over.sum(along_mean), self.over.sum(map_tensors(along_deviation, dx, x))

    def statistic(self, measured: Measured) -> jax.Array:
        """The statistic."""
        mean, deviation = measured
        return self.finished(mean + self.sigma * deviation)


@component.component
class MeanLearnedSigmaStd(component.InnerModule):
    """`MeanSigmaStd` with a learned `sigma`, the parameter `value`.

    Args:
        sigma: initial number of standard deviations.
        stats_output_shape: shape of the parameter: () or that of the statistic, `(channels,)`.
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        std_dev_epsilon: added to the variance.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Example:
        >>> stat = MeanLearnedSigmaStd(2.0)
        >>> stat(jnp.array([1.0, -1.0, 1.0])), stat.value.get_value()
        (Array(1.0002, dtype=float32), Array(2., dtype=float32))
    """

    takes_several = takes_axes = takes_cut = is_scale_free = True
    signed = False
    sigma: InitVar[float]
    stats_output_shape: InitVar[tuple[int, ...]] = ()
    stats_reduce_dim: Axes = None
    std_dev_epsilon: check.Positive = 1e-8
    axis_name: Any = None

    def __post_init__(self, sigma: float, stats_output_shape: tuple[int, ...]) -> None:
        where = type(self).__name__
        check.between(0, float("inf"))(sigma, where, "sigma")
        shape = check.shape(stats_output_shape, where, "stats_output_shape")
        self.value = state.QuantParam(state.float_array(sigma, shape))

    def __call__(self, x: Tensors) -> jax.Array:
        """The statistic of `x`."""
        return self.along(self.stats_reduce_dim)(x)

    def along(self, axes: Axes) -> Callable[[Tensors], jax.Array]:
        """The statistic over other axes."""
        fixed = MeanSigmaStd(0.0, axes, self.std_dev_epsilon, axis_name=self.axis_name)

        def learned(x: Tensors) -> jax.Array:
            if not any(part.size for part in parts_of(x)):
                return fixed(x)
            mean, deviation = (finish(part, axes, False) for part in fixed.measured(x))
            sigma = self.value.get_value().reshape(deviation.shape if deviation.ndim else ())
            return mean + sigma * deviation

        return learned


@component.frozen_value
class L1Norm(Reduction):
    """`sum |x|` of each channel; the reduced axis is kept with size 1.

    Args:
        stats_reduce_dim: the axis inside a channel (1 with `OverOutputChannelView`).
        axis_name: a mapped axis that channels are spread over, or a tuple of them.

    Raises:
        ValueError: when `stats_reduce_dim` is None.

    Example:
        >>> L1Norm(stats_reduce_dim=1)(jnp.array([[1.0, -3.0]]))
        Array([[4.]], dtype=float32)
    """

    needs_axis: ClassVar[bool] = True
    keepdim = True
    stats_reduce_dim: Axes = None

    def measure(self, x: Tensors) -> jax.Array:
        """The norm."""
        return self.over.sum(map_tensors(ops.magnitude, x))


class L2Norm(L1Norm):
    """`sqrt(sum x**2)` of each channel; the reduced axis is kept with size 1; gradient 0 for a channel of
    zeros.

    Args:
        stats_reduce_dim: the axis inside a channel (1 with `OverOutputChannelView`).
        axis_name: a mapped axis that channels are spread over, or a tuple of them.

    Raises:
        ValueError: when `stats_reduce_dim` is None.

    Example:
        >>> L2Norm(stats_reduce_dim=1)(jnp.array([[3.0, -4.0]]))
        Array([[5.]], dtype=float32)
    """

    def measure(self, x: Tensors) -> jax.Array:
        """The norm."""
        return safe_sqrt(self.over.sum(map_tensors(jnp.square, x)))

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """How it changes."""
        norm, x = jax.lax.stop_gradient((measured, x))
        divisor = jnp.where(norm > 0, norm, 1.0)
        return self.over.sum(map_tensors(lambda x, dx: x / divisor * dx, x, dx))


@component.frozen_value
class SigmaStd(Reduction):
    """`sigma * d + epsilon`, `d = sqrt(mean (x - m)**2)`, `m` 0 or the mean of x; without gradient.

    Differs from `MeanSigmaStd`, which measures magnitudes and passes gradients.

    Args:
        sigma: how many deviations.
        stats_reduce_dim: the axis to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        about_mean: whether `m` is the mean, and `d` the standard deviation; else `d` is the root mean square.
        std_dev_epsilon: added in the end.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Source: Panferov et al., 2025, "QuEST: Stable Training of LLMs with 1-Bit Weights and Activations".

    Example:
        >>> SigmaStd(sigma=2.0)(jnp.array([1.0, -1.0, 1.0])).round(3)
        Array(2., dtype=float32)
        >>> SigmaStd(sigma=2.0, about_mean=True)(jnp.array([4.0, 6.0])).round(3)
        Array(2., dtype=float32)
    """

    sigma: check.NonNegative
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    about_mean: bool = False
    std_dev_epsilon: check.Positive = 1e-8

    def measure(self, x: Tensors) -> jax.Array:
        """The deviation."""
        over, count = self.over, self.over.count(x)
        mean = over.sum(x) / count if self.about_mean else jnp.float32(0)
        unit, squares = _squares(over, x, mean, over.max(map_tensors(jnp.abs, x)))
        return unit * jnp.sqrt(squares / count)

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """It passes no gradient."""
        return jnp.zeros_like(measured)

    def statistic(self, measured: Any) -> jax.Array:
        """The statistic."""
        return self.finished(self.sigma * measured + self.std_dev_epsilon)


@component.frozen_value
class RMS(Reduction):
    """`factor * sqrt(mean x^2)`, with a gradient, which is 0 for zeros.

    Args:
        factor: the statistic in root mean squares.
        stats_reduce_dim: the axis or axes to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Raises:
        ValueError: `factor` is not positive.

    Source: Qwix's `rms,factor`.

    Example:
        >>> RMS()(jnp.array([1.0, 7.0])), RMS(factor=2.0)(jnp.array([1.0, 7.0]))
        (Array(5., dtype=float32), Array(10., dtype=float32))
    """

    factor: check.Positive = 1.0
    stats_reduce_dim: Axes = None
    keepdim: bool = False

    def measure(self, x: Tensors) -> jax.Array:
        """The mean square."""
        return self.over.sum(map_tensors(jnp.square, x)) / max(self.over.count(x), 1)

    def statistic(self, measured: Any) -> jax.Array:
        """The root."""
        return self.finished(safe_sqrt(measured))


@component.frozen_value
class AbsMean(Reduction):
    """`factor * (mean over x != 0 of |x|^p)^(1/p)`.

    Args:
        factor: the statistic in means.
        p: exponent of the mean.
        count_zeros: include zeros in the mean; `p=2` is then `RMS`.
        stats_reduce_dim: the axis or axes to reduce, None for the whole tensor.
        keepdim: keep the reduced axis with size 1.
        axis_name: a mapped axis that the tensor is spread over, or a tuple of them.

    Raises:
        ValueError: `factor` or `p` is not positive.

    Source: AQT's `AbsMeanCalibration`.

    Example:
        >>> AbsMean()(jnp.array([1.5, 0.0, -1.5, 3.0]))
        Array(2., dtype=float32)
    """

    factor: check.Positive = 1.0
    p: check.Positive = 1.0
    count_zeros: bool = False
    stats_reduce_dim: Axes = None
    keepdim: bool = False

    def measure(self, x: Tensors) -> tuple[jax.Array, jax.Array]:
        """The sum of the powers, and how many count."""
        counted = map_tensors(
            lambda x: (jnp.full(x.shape, True) if self.count_zeros else x != 0.0).astype(jnp.float32), x
        )
        count = self.over.sum(counted, float(self.count_zeros))
        return self.over.sum(map_tensors(lambda x: jnp.abs(x) ** self.p, x)), jnp.maximum(count, 1.0)

    def statistic(self, measured: Measured) -> jax.Array:
        """The mean."""
        total, count = measured
        # The root's derivative at 0 is infinite, so useless.
        mean = jnp.where(total > 0, total / count, 1.0) ** (1.0 / self.p)
        return self.finished(jnp.where(total > 0, mean, 0.0))
