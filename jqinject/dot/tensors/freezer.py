"""`Freezer`: keeps one operand of a contraction for serving."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Frozen
from jqinject.dot.schemes.operand import QuantizedOperand
from jqinject.ops.packing import container_bits, pack, unpack


class QuantMode(enum.Enum):
    """What happens to one operand of a quantized contraction."""

    TRAIN = "train"
    """It is quantized at every call."""
    CONVERT = "convert"
    """It is quantized at every call, and the `Freezer` stores it."""
    SERVE = "serve"
    """What the `Freezer` has stored takes its place; the operand is ignored."""


class Freezer(nnx.Module):
    """Holds the payload and scale of one operand: `set` stores them, `get` returns them.

    State: `value`, the payload, with the axes that are summed over last, as backends like it (4-bit and narrower
    integers packed into bytes along the last axis), and `scale`, float32; both `Frozen` variables. Made with shapes,
    they are there from the start, zeros, with what `metadata` says of their sharding, also under `nnx.eval_shape`;
    without, they come with the first `set`.

    Args:
        shape: of the operand; None to learn it from the first `set`.
        dtype: of the payload.
        scale_shape: of the scale.
        summed: the axes of the operand that are summed over.
        metadata: of the variables, such as `{"out_sharding": ("model", None)}`; for `scale`, axes of size 1 are left
            unsharded.

    Example:
        >>> freezer = Freezer()
        >>> freezer.set(QuantizedOperand(jnp.array([[1, -2]], jnp.int8), jnp.array([[0.5]])))
        >>> freezer.get().dequantize()
        Array([[ 0.5, -1. ]], dtype=float32)
    """

    value: Frozen | None
    scale: Frozen | None

    def __init__(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: Any = jnp.int8,
        scale_shape: tuple[int, ...] = (),
        summed: tuple[int, ...] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.metadata = dict(metadata or {})
        self.value = nnx.data(None)
        self.scale = nnx.data(None)
        if shape is not None:
            self._hold(jnp.zeros(shape, dtype), jnp.ones(scale_shape, jnp.float32), tuple(summed))

    def set(self, operand: QuantizedOperand, summed: tuple[int, ...] = ()) -> None:
        """Store an operand.

        Args:
            operand: its payload and scale.
            summed: its axes that are summed over.

        Raises:
            ValueError: it is not quantized, or has another shape or dtype than what is held.
        """
        if operand.scale is None:
            raise ValueError(
                "Freezer: there is nothing to freeze, as the operand is not quantized (its bits are None).\n"
                "  cure: QuantMode.TRAIN for this side, or a configuration that quantizes it"
            )
        payload, scale = operand.payload, operand.scale
        if self.value is None or self.scale is None:
            # The payload has its sharding from the operand, with or without a mesh.
            self.metadata = {**self.metadata, "eager_sharding": False}
            self._hold(payload, scale, tuple(summed))
            return
        known = (self.shape, self.dtype, self.scale_shape, self.summed)
        given = (tuple(payload.shape), np.dtype(payload.dtype), tuple(scale.shape), tuple(summed))
        if known != given:
            raise ValueError(
                f"Freezer holds {_described(*known)} and was given {_described(*given)}.\n  cure: a module of its own "
                "for every layer; one that several layers share can only be used in QuantMode.TRAIN"
            )
        self.value.set_value(self._stored(payload))
        self.scale.set_value(scale)

    def get(self) -> QuantizedOperand:
        """What is stored.

        Raises:
            ValueError: nothing was stored and no shapes were given.
        """
        if self.value is None or self.scale is None:
            raise nothing_stored()
        stored = self.value[...]
        if self._packs:
            signed = jnp.issubdtype(self.dtype, jnp.signedinteger)
            stored = unpack(stored, self._bits, self._stored_shape, signed).astype(self.dtype)
        back = _orders(len(self.shape), self.summed)[1]
        return QuantizedOperand(jax.lax.transpose(stored, back), self.scale[...])

    def placeholder(self, dtype: Any) -> jax.Array:
        """Zeros of the shape of what is stored.

        Raises:
            ValueError: nothing is stored.
        """
        if self.value is None:
            raise nothing_stored()
        return jnp.zeros(self.shape, dtype)

    @property
    def _packs(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.integer) and jnp.iinfo(self.dtype).bits < 8

    @property
    def _bits(self) -> int:
        return container_bits(jnp.iinfo(self.dtype).bits)

    @property
    def _order(self) -> tuple[int, ...]:
        """Axes as they are stored: those that are summed over last."""
        return _orders(len(self.shape), self.summed)[0]

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self._order)

    def _stored(self, payload: jax.Array) -> jax.Array:
        moved = payload.transpose(self._order)
        return pack(moved.astype(jnp.int8), self._bits) if self._packs else moved

    def _hold(self, payload: jax.Array, scale: jax.Array, summed: tuple[int, ...]) -> None:
        self.shape = tuple(payload.shape)
        self.dtype = np.dtype(payload.dtype)
        self.scale_shape = tuple(scale.shape)
        self.summed = tuple(axis % payload.ndim for axis in summed)
        metadata = _per_axis(
            self.metadata, payload.ndim, lambda names: tuple(names[axis] for axis in self._order)
        )
        of_scale = _per_axis(
            self.metadata, payload.ndim, lambda names: _unsharded_ones(names, self.scale_shape)
        )
        self.value = Frozen(self._stored(payload), **metadata)
        self.scale = Frozen(scale, **of_scale)


@lru_cache(maxsize=1024)
def _orders(ndim: int, summed: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes as they are stored, those that are summed over last; and the permutation back."""
    order = (*(axis for axis in range(ndim) if axis not in summed), *summed)
    return order, tuple(order.index(axis) for axis in range(ndim))


def nothing_stored() -> ValueError:
    """The error for serving what was not stored."""
    return ValueError(
        "QuantMode.SERVE before CONVERT: there is nothing stored to serve.\n  cure: call it once in QuantMode.CONVERT, "
        "load a frozen checkpoint into a module made with its shapes, or jqinject.freeze(model)"
    )


def _per_axis(
    metadata: Mapping[str, Any], ndim: int, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> dict[str, Any]:
    """The metadata with what is said of each of the last `ndim` axes changed; stacks of layers have more in front."""
    names = ("out_sharding", "sharding_names", "sharding")

    def changed(found: tuple[Any, ...]) -> tuple[Any, ...]:
        front = len(found) - ndim
        return (*found[:front], *change(found[front:]))

    return {
        name: changed(tuple(found)) if name in names and isinstance(found, tuple) else found
        for name, found in metadata.items()
    }


def _unsharded_ones(names: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    if len(names) != len(shape):
        return (None,) * len(shape)
    return tuple(name if size > 1 else None for name, size in zip(names, shape, strict=True))


def _described(
    shape: tuple[int, ...], dtype: np.dtype, scale_shape: tuple[int, ...], summed: tuple[int, ...]
) -> str:
    over = f", summed over axes {summed}" if summed else ""
    return f"{dtype.name} numbers of shape {shape} with scales of shape {scale_shape}{over}"
