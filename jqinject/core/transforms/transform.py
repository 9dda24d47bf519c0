"""What a transform is: an invertible linear map of the features that one contraction sums over."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jqinject.core.construction.component import Component


class Transform(Component):
    """Abstract: an invertible linear map `T` of the last axis, in float32 inside and in the dtype of `x` outside.

    Before the quantizer of an input, `x T` is quantized; the weight that it meets is stored as `T^-1 w`, so that the
    function in float is that of `x w`. A subclass without Variables is a value, compared by its parts.
    """

    @abstractmethod
    def __call__(self, x: jax.Array) -> jax.Array:
        """`x T`.

        Args:
            x: `(..., channels)`, float.

        Raises:
            TypeError: the class does not define it.
        """
        return super().__call__(x)

    @abstractmethod
    def inverse(self, x: jax.Array) -> jax.Array:
        """`x T^-1`.

        Args:
            x: `(..., channels)`, float.

        Raises:
            TypeError: the class does not define it.
        """
        raise TypeError(f"{type(self).__name__} has no inverse.\n  cure: define inverse")

    def dual(self, w: jax.Array) -> jax.Array:
        """`w T^-T`: the rows of a weight `(..., channels)` that contracts `x T` as it contracted `x`.

        That of an orthogonal map is the map itself.

        Args:
            w: `(..., channels)`, its last axis the one that is contracted.
        """
        return self(w)


@dataclass(frozen=True)
class Sized:
    """A transform with numbers of its own, as a declaration: made where it is declared, filled by `put` or by loading.

    Compared by value, so that inputs with equal declarations are transformed and quantized once for all their readers.

    Attributes:
        kind: the class of the transform, which takes the number of channels.
        channels: how many channels it transforms.
        label: tells transforms apart that hold different numbers.

    Example:
        >>> from jqinject.core.transforms import ChannelScale
        >>> Sized(ChannelScale, 3).made().factors[...].tolist()
        [1.0, 1.0, 1.0]
    """

    kind: Callable[[int], Transform]
    channels: int
    label: str = ""

    def made(self) -> Transform:
        """The transform, which leaves its input as it is."""
        return self.kind(self.channels)


@dataclass(frozen=True)
class SizedChain:
    """Several transforms, one after the other, as a declaration: see `Sized`.

    Attributes:
        parts: transforms without numbers, and declarations of others; the first is applied first.

    Example:
        >>> from jqinject.core.transforms import ChannelScale, Hadamard
        >>> len(SizedChain((Sized(ChannelScale, 4), Hadamard(4))).made().parts)
        2
    """

    parts: tuple[Any, ...]

    def made(self) -> Transform:
        """The transform."""
        return Chain(
            tuple(part.made() if isinstance(part, Sized | SizedChain) else part for part in self.parts)
        )


class Chain(Transform):
    """Several transforms, one after the other.

    Args:
        parts: transforms; the first is applied first.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.core.transforms import Hadamard
        >>> chain = Chain((Hadamard(4, signs=(1, -1, 1, -1)), Hadamard(4)))
        >>> chain(jnp.array([3.0, 1.0, 2.0, 5.0]))
        Array([ 3., -1.,  2., -5.], dtype=float32)
    """

    parts: Any

    def __init__(self, parts: tuple[Any, ...]) -> None:
        stateful = any(isinstance(part, nnx.Module) for part in parts)
        self.parts = nnx.data(nnx.List(parts)) if stateful else tuple(parts)

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        for part in self.parts:
            x = part(x)
        return x

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        for part in reversed(tuple(self.parts)):
            x = part.inverse(x)
        return x

    def dual(self, w: jax.Array) -> jax.Array:
        """See `Transform`."""
        for part in self.parts:
            w = part.dual(w)
        return w


def along(apply: Callable[[jax.Array], jax.Array], x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """A map of the last axis, on other axes of an array.

    Args:
        apply: the map, from `(..., channels)` to the same shape.
        x: the array.
        axes: the axes that it maps, together: channels count along the last of them first.

    Example:
        >>> import jax.numpy as jnp
        >>> along(lambda x: 2 * x[..., ::-1], jnp.array([[1.0, 2.0], [3.0, 4.0]]), (0, 1)).tolist()
        [[8.0, 6.0], [4.0, 2.0]]
    """
    last = tuple(axis % x.ndim for axis in axes)
    if last == (x.ndim - 1,):
        return apply(x)
    order = (*(axis for axis in range(x.ndim) if axis not in last), *last)
    moved = x.transpose(order)
    front = moved.shape[: x.ndim - len(last)]
    made = apply(moved.reshape(*front, math.prod(moved.shape[len(front) :])))
    return made.reshape(moved.shape).transpose([order.index(axis) for axis in range(x.ndim)])
