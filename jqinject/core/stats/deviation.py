"""The deviation of a tensor, as a range to quantize: clipping at a number of standard deviations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jqinject.core.construction.checked_arguments import checked_arguments
from jqinject.core.stats.two_phase import TwoPhaseStat, finish
from jqinject.ops.devices.over import Axes, Tensors, each


@checked_arguments
@dataclass(frozen=True)
class SigmaStd(TwoPhaseStat):
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

    takes_several: ClassVar[bool] = True
    sigma: float
    stats_reduce_dim: Axes = None
    keepdim: bool = False
    about_mean: bool = False
    std_dev_epsilon: float = 1e-8
    axis_name: Any = None

    def measure(self, x: Tensors) -> Any:
        """The deviation."""
        over, count = self.over, self.over.count(x)
        mean = over.sum(x) / count if self.about_mean else jnp.float32(0)
        # A power of two that keeps squares of large numbers finite.
        unit = jnp.where(over.max(each(jnp.abs, x)) > 2.0**48, 2.0**80, 1.0)
        squares = over.sum(each(lambda x: jnp.square((x - mean) / unit), x), of_zero=jnp.square(mean / unit))
        return unit * jnp.sqrt(squares / count)

    def change(self, dx: Tensors, x: Tensors, measured: Any, located: Any) -> Any:
        """It passes no gradient."""
        return jnp.zeros_like(measured)

    def statistic(self, measured: Any) -> jax.Array:
        """The statistic."""
        stat = self.sigma * measured + self.std_dev_epsilon
        return finish(stat, self.stats_reduce_dim, self.keepdim)
