"""Sums of tensors in a fixed order of additions, where a device has them whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jqinject.core._protocols import View
from jqinject.core.stats.in_place import reduced
from jqinject.core.stats.two_phase import finish
from jqinject.ops.devices.explicit_axes import whole
from jqinject.ops.devices.one_device import on_one_device
from jqinject.ops.devices.over import Over
from jqinject.ops.ordered_sum import ordered_sum


def divisible_sum(
    tensors: Sequence[jax.Array], view: View, reduce_dim: int | None, permute_dims: tuple[int, ...] | None
) -> jax.Array:
    """The sum over an axis of the views of some tensors: by `ordered_sum` on one device, by XLA on several.

    Args:
        tensors: with one sum, float32.
        view: how they are laid out.
        reduce_dim: the axis of the view to sum, None for all.
        permute_dims: brings the channels first; a kernel's are added first, then inputs.

    Returns:
        The sum, without the axis; no gradient.

    Example:
        >>> from jqinject.core.view import OverTensorView
        >>> float(divisible_sum([jnp.ones(3), jnp.ones(2)], OverTensorView(), None, None))
        5.0
    """
    return on_one_device(_InOrder(view, reduce_dim, permute_dims), _InPlace(view, reduce_dim), *tensors)


@dataclass(frozen=True)
class _InOrder:
    """In the fixed order."""

    view: View
    reduce_dim: int | None
    permute_dims: tuple[int, ...] | None

    def __call__(self, *tensors: jax.Array) -> jax.Array:
        if self.reduce_dim is None:
            return ordered_sum(jnp.concatenate([self._channels_first(whole(x)).reshape(-1) for x in tensors]))
        joined = jnp.concatenate([self.view(whole(x)) for x in tensors], self.reduce_dim)
        rows = jnp.moveaxis(joined, self.reduce_dim, -1)
        return jax.vmap(ordered_sum)(rows.reshape((-1, rows.shape[-1]))).reshape(rows.shape[:-1])

    def _channels_first(self, x: jax.Array) -> jax.Array:
        last = x.ndim - 1
        if self.permute_dims is None or last < 1 or self.permute_dims[0] != last:
            return x
        return jnp.transpose(x, (last, last - 1, *range(last - 1)))


@dataclass(frozen=True)
class _InPlace:
    """Where they lie."""

    view: View
    reduce_dim: int | None

    def __call__(self, *tensors: jax.Array) -> jax.Array:
        if self.reduce_dim is None:
            return Over().sum(tensors)
        axes, parts = reduced(self.view, self.reduce_dim, tensors)
        return finish(Over(axes).sum(parts), axes, False)
