"""Views: how a tensor is laid out before a statistic reduces it.

A view brings the tensor to the form in which a statistic's `stats_reduce_dim` selects what shares a scale:
the whole tensor, or channels first and everything else flattened behind. `permute_dims` is a permutation of
the axes applied before; an NNX kernel has its output channel last, so `permute_dims=(1, 0)` brings it first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def _permuted(x: jax.Array, permute_dims: tuple[int, ...] | None, where: str) -> jax.Array:
    if permute_dims is None:
        return x
    if sorted(permute_dims) != list(range(x.ndim)):
        raise ValueError(
            f"{where}: permute_dims={permute_dims} does not permute the {x.ndim} axes of an array of "
            f"shape {x.shape}. "
            f"Write a permutation of {tuple(range(x.ndim))}, the axis of the channels first."
        )
    return jnp.transpose(x, permute_dims)


def _flat_after(x: jax.Array, leading: int, where: str) -> jax.Array:
    if x.ndim < leading:
        raise ValueError(f"{where} needs an array of {leading} or more axes, got shape {x.shape}.")
    return x.reshape((*x.shape[:leading], math.prod(x.shape[leading:])))


def _frozen(permute_dims: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if permute_dims is None else tuple(int(axis) for axis in permute_dims)


@dataclass(frozen=True)
class OverTensorView:
    """Everything in one axis: `(n,)`.

    Example:
        >>> OverTensorView()(jnp.zeros((16, 6, 5, 5))).shape
        (2400,)
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        return x.reshape((x.size,))


@dataclass(frozen=True)
class OverOutputChannelView:
    """Channels first, the rest flat: `(channels, n)`; to be reduced over axis 1.

    Args:
        permute_dims: permutation that brings the output channel first, or None when it is first.
        channel_axes: how many axes channels are counted along; several become one.

    Example:
        >>> OverOutputChannelView(permute_dims=(1, 0))(jnp.zeros((64, 10))).shape
        (10, 64)
        >>> OverOutputChannelView(permute_dims=(0, 2, 1), channel_axes=2)(jnp.zeros((3, 4, 5))).shape
        (15, 4)
    """

    permute_dims: tuple[int, ...] | None = None
    channel_axes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "permute_dims", _frozen(self.permute_dims))

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        name = type(self).__name__
        viewed = _flat_after(_permuted(x, self.permute_dims, name), self.channel_axes, name)
        return viewed.reshape((math.prod(viewed.shape[:-1]), viewed.shape[-1]))


@dataclass(frozen=True)
class OverBatchOverTensorView:
    """Examples first, the rest flat: `(batch, n)`.

    Args:
        permute_dims: permutation that brings the batch first, or None when it is first.

    Example:
        >>> OverBatchOverTensorView()(jnp.zeros((8, 10, 5, 5))).shape
        (8, 250)
    """

    permute_dims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "permute_dims", _frozen(self.permute_dims))

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        return _flat_after(_permuted(x, self.permute_dims, type(self).__name__), 1, type(self).__name__)


@dataclass(frozen=True)
class OverBatchOverOutputChannelView:
    """Examples, channels, the rest flat: `(batch, channels, n)`.

    Args:
        permute_dims: permutation that brings batch and channels first, or None when they are.

    Example:
        >>> OverBatchOverOutputChannelView()(jnp.zeros((8, 10, 5, 5))).shape
        (8, 10, 25)
    """

    permute_dims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "permute_dims", _frozen(self.permute_dims))

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        return _flat_after(_permuted(x, self.permute_dims, type(self).__name__), 2, type(self).__name__)


@dataclass(frozen=True)
class OverOutputFeaturesView:
    """The last axis kept, everything before it flat: `(n, features)`.

    Args:
        permute_dims: permutation that brings the features last, or None when they are.

    Example:
        >>> OverOutputFeaturesView()(jnp.zeros((8, 10, 25))).shape
        (80, 25)
    """

    permute_dims: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "permute_dims", _frozen(self.permute_dims))

    def __call__(self, x: jax.Array) -> jax.Array:
        """View `x`."""
        y = _permuted(x, self.permute_dims, type(self).__name__)
        if y.ndim < 1:
            raise ValueError(f"{type(self).__name__} needs an array of one or more axes, got a scalar.")
        rest = 1
        for size in y.shape[:-1]:
            rest *= size
        return y.reshape((rest, y.shape[-1]))
