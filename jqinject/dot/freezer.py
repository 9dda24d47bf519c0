"""`Freezer`: keeps one operand of a contraction for serving."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Frozen
from jqinject.dot.operand import QuantizedOperand
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

    State: `value`, the payload (4-bit and narrower integers packed into bytes along the last axis), and `scale`,
    float32; both `Frozen` variables. Made with shapes, they are there from the start, zeros, with what `metadata` says
    of their sharding, also under `nnx.eval_shape`; without, they come with the first `set`.

    Args:
        shape: of the operand; None to learn it from the first `set`.
        dtype: of the payload.
        scale_shape: of the scale.
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
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.metadata = dict(metadata or {})
        self.value = nnx.data(None)
        self.scale = nnx.data(None)
        if shape is not None:
            self._allocate(shape, np.dtype(dtype), tuple(scale_shape))

    def set(self, operand: QuantizedOperand) -> None:
        """Store an operand.

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
            self._allocate(payload.shape, np.dtype(payload.dtype), scale.shape)
        known = (self.shape, self.dtype, self.scale_shape)
        given = (tuple(payload.shape), np.dtype(payload.dtype), tuple(scale.shape))
        if known != given:
            raise ValueError(
                f"Freezer holds {_described(*known)} and was given {_described(*given)}.\n  cure: a module of its own "
                "for every layer; one that several layers share can only be used in QuantMode.TRAIN"
            )
        assert self.value is not None and self.scale is not None, "allocated above"
        self.value.set_value(self._stored(payload))
        self.scale.set_value(scale)

    def get(self) -> QuantizedOperand:
        """What is stored.

        Raises:
            ValueError: nothing was stored and no shapes were given.
        """
        if self.value is None or self.scale is None:
            raise ValueError(
                "QuantMode.SERVE before CONVERT: there is nothing stored to serve.\n  cure: call it once in "
                "QuantMode.CONVERT, load a frozen checkpoint into a module made with its shapes, or "
                "jqinject.freeze(model)"
            )
        stored = self.value[...]
        if stored.dtype == jnp.uint8 and self.dtype != np.dtype(jnp.uint8):
            stored = unpack(stored, self._bits, self.shape, True).astype(self.dtype)
        return QuantizedOperand(stored, self.scale[...])

    @property
    def _bits(self) -> int:
        return container_bits(jnp.iinfo(self.dtype).bits)

    def _stored(self, payload: jax.Array) -> jax.Array:
        packs = jnp.issubdtype(payload.dtype, jnp.signedinteger) and jnp.iinfo(payload.dtype).bits < 8
        return pack(payload.astype(jnp.int8), self._bits) if packs else payload

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype, scale_shape: tuple[int, ...]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.scale_shape = tuple(scale_shape)
        self.value = Frozen(self._stored(jnp.zeros(shape, dtype)), **self.metadata)
        self.scale = Frozen(jnp.ones(scale_shape, jnp.float32), **_of_scale(self.metadata, scale_shape))


def _of_scale(metadata: Mapping[str, Any], scale_shape: tuple[int, ...]) -> dict[str, Any]:
    """The metadata of an array, for one that has size 1 on some of its axes."""
    found = dict(metadata)
    for name in ("out_sharding", "sharding_names", "sharding"):
        names = found.get(name)
        if isinstance(names, tuple) and len(names) == len(scale_shape):
            found[name] = tuple(n if size > 1 else None for n, size in zip(names, scale_shape, strict=True))
    return found


def _described(shape: tuple[int, ...], dtype: np.dtype, scale_shape: tuple[int, ...]) -> str:
    return f"{dtype.name} numbers of shape {shape} with scales of shape {scale_shape}"
