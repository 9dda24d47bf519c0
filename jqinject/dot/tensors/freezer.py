"""How low-bit numbers are stored for serving, and `Freezer`, which stores one operand of a contraction."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import Frozen
from jqinject.core.component import InnerModule
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.grid import IntGrid
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor, QuantTensor


class QuantMode(enum.Enum):
    """What happens to one operand of a quantized contraction."""

    TRAIN = "train"
    """It is quantized at every call."""
    CONVERT = "convert"
    """It is quantized at every call, and the `Freezer` stores it."""
    SERVE = "serve"
    """The `Freezer`'s stored operand is used instead."""


class QuantizedOperand(NamedTuple):
    """Low-bit numbers and their scale: the operand is `payload * scale`.

    Attributes:
        payload: integers, 8-bit floats, or the unquantized operand.
        scale: float32, of the operand's rank, size 1 along axes that share a scale; None if unquantized.
    """

    payload: jax.Array
    scale: jax.Array | None

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """`payload * scale`, computed in float32.

        Example:
            >>> QuantizedOperand(jnp.array([3, -1], jnp.int8), jnp.array([0.5])).dequantize()
            Array([ 1.5, -0.5], dtype=float32)
        """
        if self.scale is None:
            return self.payload.astype(dtype)
        return (self.payload.astype(jnp.float32) * self.scale).astype(dtype)


@dataclass(frozen=True)
class StoredForm:
    """How a payload is stored: summed axes last, integers of fewer than 8 bits packed into bytes.

    Attributes:
        shape: of the payload.
        dtype: of the payload.
        summed: its summed axes, counted from the front.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    summed: tuple[int, ...]

    @classmethod
    def of(cls, payload: jax.Array, summed: tuple[int, ...]) -> StoredForm:
        """The form of a payload."""
        axes = tuple(axis % payload.ndim for axis in summed)
        return cls(tuple(payload.shape), np.dtype(payload.dtype), axes)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The axes in stored order."""
        return (*(axis for axis in range(len(self.shape)) if axis not in self.summed), *self.summed)

    @cached_property
    def back(self) -> tuple[int, ...]:
        """The permutation of stored axes to the order of the payload."""
        return tuple(self.order.index(axis) for axis in range(len(self.shape)))

    @cached_property
    def grid(self) -> IntGrid | None:
        """The integers that are packed into bytes; None for whole bytes."""
        if not jnp.issubdtype(self.dtype, jnp.integer) or jnp.iinfo(self.dtype).bits >= 8:
            return None
        return IntGrid(jnp.iinfo(self.dtype).bits, signed=bool(jnp.issubdtype(self.dtype, jnp.signedinteger)))

    @property
    def packed_bits(self) -> int | None:
        """Bits of an integer that is packed into a byte; None for whole bytes."""
        return None if self.grid is None else self.grid.packed_bits

    def stored(self, payload: jax.Array) -> jax.Array:
        """A payload in its stored form."""
        moved = payload.transpose(self.order)
        return moved if self.grid is None else self.grid.pack(moved.astype(jnp.int8))

    def payload(self, stored: jax.Array) -> jax.Array:
        """The payload from its stored form."""
        if self.grid is not None:
            shape = tuple(self.shape[axis] for axis in self.order)
            stored = self.grid.unpack(stored, shape).astype(self.dtype)
        return jax.lax.transpose(stored, self.back)

    def variables(
        self, payload: jax.Array, scale: jax.Array, metadata: Mapping[str, Any]
    ) -> tuple[Frozen, Frozen]:
        """The Variables of a payload and its scale.

        Args:
            payload: the payload.
            scale: its scale.
            metadata: of the operand's Variable; its sharding follows the axes, and size-1 axes of a scale stay
                unsharded.
        """
        moved, kept = self.metadata(metadata, tuple(scale.shape))
        return Frozen(self.stored(payload), **moved), Frozen(scale, **kept)

    def metadata(
        self, metadata: Mapping[str, Any], scale_shape: tuple[int, ...]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The metadata of an operand's Variable for its payload as stored, and for its scale.

        Args:
            metadata: as for `variables`.
            scale_shape: of the scale.
        """
        ndim = len(self.shape)
        moved = _per_axis(metadata, ndim, lambda names: tuple(names[axis] for axis in self.order))
        return moved, _per_axis(metadata, ndim, lambda names: _unsharded_ones(names, scale_shape))


class Freezer(InnerModule):
    """Holds the payload and scale of one operand: `set` stores them, `get` returns them.

    State: `value`, the payload, with summed axes last, as backends prefer (4-bit and narrower integers packed into
    bytes along the last axis), and `scale`, float32; both `Frozen` variables. Given shapes, they exist from the start
    as zeros, sharded by `metadata`, also under `nnx.eval_shape`; otherwise the first `set` makes them.

    Args:
        shape: of the operand; None takes it from the first `set`.
        dtype: of the payload.
        scale_shape: of the scale.
        summed: the summed axes of the operand.
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
    form: StoredForm | None = None

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
            summed: its summed axes.

        Raises:
            ValueError: it is not quantized, or differs in shape or dtype from what is held.
        """
        if operand.scale is None:
            raise ValueError(
                "Freezer: there is nothing to freeze, as the operand is not quantized (its bits are None).\n"
                "  cure: QuantMode.TRAIN for this side, or a configuration that quantizes it"
            )
        payload, scale = operand.payload, operand.scale
        if self.value is None or self.scale is None:
            # The payload gets its sharding from the operand, with or without a mesh.
            self.metadata = {**self.metadata, "eager_sharding": False}
            self._hold(payload, scale, tuple(summed))
            return
        form = StoredForm.of(payload, summed)
        known, given = (self.form, self.scale_shape), (form, tuple(scale.shape))
        if known != given:
            raise ValueError(
                f"Freezer holds {_described(*known)} and was given {_described(*given)}.\n  cure: a module of its own "
                "for every layer; one that several layers share can only be used in QuantMode.TRAIN"
            )
        self.value.set_value(form.stored(payload))
        self.scale.set_value(scale)

    def get(self) -> QuantizedOperand:
        """What is stored.

        Raises:
            ValueError: nothing was stored and no shapes were given.
        """
        if self.value is None or self.scale is None or self.form is None:
            raise nothing_stored()
        return QuantizedOperand(self.form.payload(self.value[...]), self.scale[...])

    def placeholder(self, dtype: Any) -> jax.Array:
        """Zeros of the stored shape.

        Raises:
            ValueError: nothing is stored.
        """
        if self.form is None:
            raise nothing_stored()
        return jnp.zeros(self.form.shape, dtype)

    def _hold(self, payload: jax.Array, scale: jax.Array, summed: tuple[int, ...]) -> None:
        self.form = StoredForm.of(payload, summed)
        self.scale_shape = tuple(scale.shape)
        self.value, self.scale = self.form.variables(payload, scale, self.metadata)


def nothing_stored() -> ValueError:
    """The error for serving before storing."""
    return ValueError(
        "QuantMode.SERVE before CONVERT: there is nothing stored to serve.\n  cure: call it once in QuantMode.CONVERT, "
        "load a frozen checkpoint into a module made with its shapes, or jqinject.freeze(model)"
    )


def _per_axis(
    metadata: Mapping[str, Any], ndim: int, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> dict[str, Any]:
    """The metadata with the entries of the last `ndim` axes changed; stacks of layers have more in front."""
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


def _described(form: StoredForm | None, scale_shape: tuple[int, ...]) -> str:
    assert form is not None, "something is stored"
    over = f", summed over axes {form.summed}" if form.summed else ""
    return f"{form.dtype.name} numbers of shape {form.shape} with scales of shape {scale_shape}{over}"


def served(stored: QuantizedOperand) -> QuantTensor:
    """A stored operand as a tensor to contract."""
    assert stored.scale is not None, "the Freezer stores nothing else"
    if jnp.issubdtype(stored.payload.dtype, jnp.integer):
        signed = jnp.issubdtype(stored.payload.dtype, jnp.signedinteger)
        bits = 8 * stored.payload.dtype.itemsize
        return IntQuantTensor.stored(
            stored.payload, stored.scale, None, IntGrid(bits, bool(signed)), jnp.float32
        )
    form = FloatGrid.of_dtype(stored.payload.dtype)
    return FloatQuantTensor.stored(stored.payload, stored.scale, None, form, jnp.float32)
