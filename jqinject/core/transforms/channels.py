"""Transforms that take channels one by one: a factor for each, or another order."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jqinject.core.state.variables import QuantStat, float_array
from jqinject.core.transforms.transform import Transform


class ChannelScale(Transform):
    """`x diag(factors)`: a factor for each channel, as those of SmoothQuant, AWQ and activation equalization.

    Args:
        channels: how many there are.

    Attributes:
        factors: float32, `(channels,)`; 1 until `put`.

    Example:
        >>> scale = ChannelScale(2)
        >>> scale.put(jnp.array([2.0, 0.5]))
        >>> x = jnp.array([[1.0, 1.0]])
        >>> scale(x).tolist(), scale.inverse(x).tolist(), scale.dual(x).tolist()
        ([[2.0, 0.5]], [[0.5, 2.0]], [[0.5, 2.0]])
    """

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.factors = QuantStat(float_array(1.0, (channels,)))

    def put(self, factors: jax.Array) -> None:
        """Set the factors.

        Args:
            factors: finite and not 0, `(channels,)`.

        Raises:
            ValueError: another shape, 0, nan or inf.
        """
        factors = _of_shape(factors, self.factors, "ChannelScale")
        if not bool(jnp.isfinite(factors).all() and (factors != 0).all()):
            raise ValueError("ChannelScale: factors must be finite and not 0, or they have no inverse")
        self.factors.set_value(factors)

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return (x.astype(jnp.float32) * self.factors.get_value()).astype(x.dtype)

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return (x.astype(jnp.float32) / self.factors.get_value()).astype(x.dtype)

    def dual(self, w: jax.Array) -> jax.Array:
        """See `Transform`."""
        return self.inverse(w)


class Permutation(Transform):
    """`x[..., order]`: the channels in another order.

    Args:
        channels: how many there are.

    Attributes:
        order: int32, `(channels,)`; as they come until `put`.

    Example:
        >>> swap = Permutation(3)
        >>> swap.put(jnp.array([2, 0, 1]))
        >>> y = swap(jnp.array([10.0, 20.0, 30.0]))
        >>> y.tolist(), swap.inverse(y).tolist()
        ([30.0, 10.0, 20.0], [10.0, 20.0, 30.0])
    """

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.order = QuantStat(jnp.arange(channels, dtype=jnp.int32))

    def put(self, order: jax.Array) -> None:
        """Set the order.

        Args:
            order: each channel once, `(channels,)`.

        Raises:
            ValueError: it is no permutation.
        """
        held = self.order.get_value()
        order = jnp.asarray(order)
        if order.shape != held.shape or not bool((jnp.sort(order) == jnp.arange(held.size)).all()):
            raise ValueError(f"Permutation: expected each of {held.size} channels once, got {order}")
        self.order.set_value(order.astype(jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return jnp.take(x, self.order.get_value(), axis=-1)

    def inverse(self, x: jax.Array) -> jax.Array:
        """See `Transform`."""
        return jnp.take(x, jnp.argsort(self.order.get_value()), axis=-1)


def _of_shape(value: jax.Array, held: QuantStat, kind: str) -> jax.Array:
    """Numbers as float32; a ValueError if the shape differs from that of the numbers held."""
    shape = held.get_value().shape
    if jnp.shape(value) != shape:
        raise ValueError(f"{kind}: expected numbers of shape {shape}, got {jnp.shape(value)}")
    return jnp.asarray(value, jnp.float32)
