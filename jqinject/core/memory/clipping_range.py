"""Ranges of batches: reduced, averaged, and made a scale and a zero point.

Which axes of a tensor share a clipping range.

Averaging ranges over batches.

The clipping range of a batch.

From a clipping range to a scale and a zero point.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.core import check
from jqinject.core.checked_arguments import checked_arguments
from jqinject.core.memory.memory import Memory
from jqinject.core.memory.policy import Policy
from jqinject.core.state import Part
from jqinject.core.statistics.ranges import OF_NO_AXES, ClippingRange, RangeMethod
from jqinject.ops.clamp import choose, shaped
from jqinject.ops.cut import Cut
from jqinject.ops.groups import checked_group_size
from jqinject.ops.power import by_reciprocal, quotient
from jqinject.ops.sharding import Names, places_over, sum_over
from jqinject.ops.ste import nearest


def axes_that_share(
    ndim: int, shared: tuple[int, ...] | None, channels: tuple[int, ...], cut: int | None
) -> tuple[int, ...]:
    """The axes that share a range.

    Args:
        ndim: axes of the tensor, with groups counted as two.
        shared: the axes that share a range; None means all but `channels`.
        channels: the axes with a range for each index.
        cut: the axis that is cut into groups, if any.

    Example:
        >>> axes_that_share(3, None, (0,), None), axes_that_share(3, None, (0,), 1)
        ((1, 2), (2,))
    """
    if cut is None:
        return others(ndim, channels) if shared is None else _within(ndim, shared)
    cut = cut % (ndim - 1)
    if shared is not None:
        return tuple(axis + (axis >= cut) for axis in _within(ndim - 1, shared))
    channels = _within(ndim - 1, channels)
    check_apart(cut, channels)
    return others(ndim, (cut, *(axis + (axis > cut) for axis in channels)))


def check_axes(
    averaged: bool, channelwise_axes: Sequence[int], group_size: int | None, group_dim: int | None
) -> None:
    """Refuse several ranges where one is averaged, and groups along an axis that has a range for each index."""
    if averaged and (tuple(channelwise_axes) or group_size is not None):
        raise ValueError(
            f"CalibratedQuant: an averaged range is one for the tensor, got channelwise_axes={channelwise_axes!r}, "
            f"group_size={group_size!r}.\n  cure: averaging_impl=None, for a range of the given tensor"
        )
    if group_size is not None:
        checked_group_size(group_size, "CalibratedQuant")
        check_apart(group_dim, channelwise_axes)


def check_apart(group_dim: int | None, channelwise_axes: Sequence[int]) -> None:
    """Refuse to group an axis that has a range for each index."""
    if group_dim is not None and group_dim in channelwise_axes:
        raise ValueError(
            f"CalibratedQuant: axis {group_dim} cannot have a range for each index and be cut into groups that share "
            f"one, got channelwise_axes={tuple(channelwise_axes)}, group_dim={group_dim}.\n"
            "  cure: take the axis out of channelwise_axes"
        )


def _within(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({axis % ndim for axis in axes if -ndim <= axis < ndim}))


def others(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    """All other axes of a tensor."""
    kept = _within(ndim, axes)
    return tuple(axis for axis in range(ndim) if axis not in kept)


@checked_arguments
class SimpleMovingAverage(Memory):
    """The mean of the ranges of all batches seen: `sum of ends / count`, the present batch included.

    With a `momentum` it is exponential instead: `mean <- (1 - momentum) * mean + momentum * batch`, from the
    first batch on.

    A batch with an end that is inf, nan or too large for the sum stays out. In evaluation before the first batch, the
    range is that of the given tensor.

    State: one `record`, float32, of `counter`, `sum_of_max` and `sum_of_min`, the sums of the upper and lower ends. The
    mean of 2^24 batches is final.

    Attributes:
        settled: whether evaluation uses the mean alone, without measuring the given tensor. Set by `freeze`.

    Args:
        restart: start afresh at every batch, for a constant range.
        momentum: the weight of a new batch, in (0, 1]; None weighs all batches alike.

    Raises:
        ValueError: `momentum` is not in (0, 1].

    Source: Qwix's `SimpleMovingAverage`.

    Example:
        >>> mean = SimpleMovingAverage()
        >>> for high in (1.0, 3.0):
        ...     found = mean(ClippingRange(jnp.float32(high)), update=True)
        >>> found.high, mean.counter[...]
        (Array(2., dtype=float32), Array(2., dtype=float32))
    """

    sum_of_max, sum_of_min = Part(), Part()
    settled: bool = False

    def __init__(self, restart: bool = False, momentum: float | None = None) -> None:
        weight = check.momentum(momentum, "SimpleMovingAverage", "momentum")
        self.remember(Policy("mean", weight, restart=restart), {"sum_of_max": 0.0, "sum_of_min": 0.0})

    def __call__(self, batch: ClippingRange, update: bool) -> ClippingRange:
        """The mean range.

        Args:
            batch: the range of the present batch, one number for each end.
            update: whether it enters.

        Returns:
            The range, shaped as `batch`; differentiable in `batch` where it entered.
        """
        high, low = self.after((batch.high, batch.lowest), update)
        return ClippingRange(high, None if batch.low is None else low)

    def has_range(self) -> bool | None:
        """None: the quantizer answers, which knows whether its range is fixed."""
        return None

    def mean(self, like: ClippingRange) -> ClippingRange:
        """The mean range, shaped as another one, which may be abstract; zeros if no batch has entered."""
        high, low = (mean.reshape(like.high.shape) for mean in self.means())
        return ClippingRange(high, None if like.low is None else low)


def range_along(
    method: Callable[..., ClippingRange], x: jax.Array, axes: tuple[int, ...] | Cut | None, names: Names
) -> ClippingRange:
    """The range along axes and mapped axes; custom range methods need not accept `names`."""
    return method(x, axes, names) if names else method(x, axes)


def range_of_batch(
    method: RangeMethod, x: jax.Array, batch_axes: tuple[int, ...], names: Names
) -> ClippingRange:
    """The range of a batch, without axes: of the whole tensor, or the mean over `batch_axes`.

    Args:
        method: finds the range.
        x: float32.
        batch_axes: axes with a range for each index.
        names: mapped axes that the batch is spread over.
    """
    if not batch_axes:
        axes = None if type(method) in OF_NO_AXES else tuple(range(x.ndim))
        return jax.tree.map(lambda end: shaped(end, ()), range_along(method, x, axes, names))
    # An example with its own range lies on one device.
    found = range_along(method, x, others(x.ndim, batch_axes), ())

    def mean(ends: jax.Array) -> jax.Array:
        return sum_over(jnp.sum(ends), names) / (ends.size * places_over(names))

    return jax.tree.map(mean, found)


def abstract_range(method: RangeMethod, ndim: int) -> ClippingRange:
    """The range, without axes, that a method finds in a tensor of `ndim` axes: abstract."""
    return (_cached if isinstance(method, Hashable) else _abstract)(method, ndim)


def _abstract(method: RangeMethod, ndim: int) -> ClippingRange:
    one = jax.ShapeDtypeStruct((1,) * ndim, jnp.float32)
    found = jax.eval_shape(lambda x: method(x, tuple(range(ndim))), one)
    return jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), found)


_cached = lru_cache(maxsize=256)(_abstract)

LEAST_SCALE = float(np.sqrt(np.finfo(np.float32).tiny))


def scale_and_zero_point(
    found: ClippingRange, bit_width: int, range_steps: float | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Float per integer step of a range, and the integer that stands for 0.

    A symmetric range has `scale = high / (2^(b-1) - 1/2)` and no zero point. With two ends,
    `scale = (high - low) / (2^b - 1)` and `zero_point = round(-2^(b-1) - low / scale)`. A scale below 1.1e-19 (of
    zeros, say) becomes 1.

    Args:
        found: the range, float32.
        bit_width: of signed integers.
        range_steps: steps from 0 to the end of a symmetric range; None for `2^(b-1) - 1/2`.

    Returns:
        Scale and zero point (None if the range is symmetric), float32, shaped as the range.

    Source: Qwix.

    Example:
        >>> scale_and_zero_point(ClippingRange(jnp.float32(3.0), jnp.float32(-1.0)), 2)
        (Array(1.3333334, dtype=float32), Array(-1., dtype=float32))
    """
    lowest = -(2 ** (bit_width - 1))
    if found.low is None:
        return not_tiny(by_reciprocal(found.high, range_steps or -lowest - 0.5)), None
    return _of_two_ends(bit_width, found.high, found.low)[:2]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_two_ends(bit_width: int, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scale, zero point, and whether the scale was too small."""
    lowest = -(2.0 ** (bit_width - 1))
    scale = quotient(high - low, jnp.float32(2**bit_width - 1))
    tiny = scale < LEAST_SCALE
    scale = choose(tiny, 1.0, scale)
    # A quotient of two arrays of one shape, not nested: XLA has nothing to rewrite.
    return scale, jax.lax.clamp(lowest, nearest(lowest - low / scale), -lowest - 1), tiny


@_of_two_ends.defjvp
def _(bit_width: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found = _of_two_ends(bit_width, *primals)
    _, zero_point, tiny = found
    change = choose(tiny, 0.0, (tangents[0] - tangents[1]) / jnp.float32(2**bit_width - 1))
    return found, (change, jnp.zeros_like(zero_point), np.zeros(tiny.shape, jax.dtypes.float0))


def not_tiny(scale: jax.Array) -> jax.Array:
    """A scale, with values below 1.1e-19 replaced by 1."""
    return choose(scale < LEAST_SCALE, 1.0, scale)
