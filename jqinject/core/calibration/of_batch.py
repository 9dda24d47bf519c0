"""The clipping range of a batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache

import jax
import jax.numpy as jnp

from jqinject.core.calibration.axes import others
from jqinject.core.calibration.ranges import OF_NO_AXES, ClippingRange, RangeMethod
from jqinject.ops.choose import shaped
from jqinject.ops.devices.cut import Cut
from jqinject.ops.devices.mapped import Names, places_over, sum_over


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
