"""AQT's modes of an operand, and its `Freezer`, which stores one operand of a contraction as a `FrozenParam`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jqinject.core import Frozen
from jqinject.core.component import InnerModule
from jqinject.dot.frozen.frozen_param import FrozenParam
from jqinject.ops import FloatGrid, IntGrid
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor


class QuantMode(enum.Enum):
    """What happens to one operand of a quantized contraction."""

    TRAIN = "train"
    """It is quantized at every call."""
    CONVERT = "convert"
    """It is quantized at every call, and the `Freezer` stores it."""
    SERVE = "serve"
    """The `Freezer`'s stored operand is used instead."""


class Freezer(InnerModule):
    """Hold one operand as a `FrozenParam`: `set` stores it, `get` returns it.

    Given shapes, the parameter exists from the start as zeros, sharded by `metadata`, also under `nnx.eval_shape`;
    otherwise the first `set` makes it.

    Attributes:
        value: the parameter; None if nothing is stored.

    Args:
        shape: of the operand; None takes it from the first `set`.
        dtype: of the payload.
        scale_shape: of the scale.
        summed: the summed axes of the operand; they are stored last, as backends prefer.
        metadata: of the parameter, such as `{"out_sharding": ("model", None)}`.

    Example:
        >>> weight = IntQuantTensor.from_int(jnp.array([[1, -2]], jnp.int8), jnp.array([[0.5]]))
        >>> freezer = Freezer()
        >>> freezer.set(FrozenParam.of(weight, has_zero_point=False))
        >>> freezer.get()[...]
        Array([[ 0.5, -1. ]], dtype=float32)
    """

    value: FrozenParam | None

    def __init__(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike = jnp.int8,
        scale_shape: tuple[int, ...] = (),
        summed: tuple[int, ...] = (),
        *,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self.metadata = tuple((metadata or {}).items())
        self.value = nnx.data(None)
        if shape is not None:
            zeros = _zeros(tuple(shape), jnp.dtype(dtype), tuple(scale_shape))
            self.set(_sharded(FrozenParam.of(zeros, tuple(summed), has_zero_point=False), self.metadata))

    def set(self, operand: FrozenParam) -> None:
        """Store an operand.

        Raises:
            ValueError: it differs in shape or dtype from what is held.
        """
        stored = self.value
        if stored is not None and _facts(stored) != _facts(operand):
            raise ValueError(
                f"Freezer holds {_described(stored)} and was given {_described(operand)}.\n  cure: a module of its own "
                "for every layer; one that several layers share can only be used in QuantMode.TRAIN"
            )
        if stored is not None and stored.form == operand.form:
            stored.set_value(operand.numbers)
        else:
            metadata = dict(self.metadata) if stored is None else stored.get_metadata()
            self.value = FrozenParam.holding(operand.numbers, operand.form, metadata)

    def get(self) -> FrozenParam:
        """Return what is stored.

        Raises:
            ValueError: nothing was stored and no shapes were given.
        """
        if self.value is None:
            raise ValueError(
                "QuantMode.SERVE before CONVERT: there is nothing stored to serve.\n  cure: call it once in "
                "QuantMode.CONVERT, load a frozen checkpoint into a module made with its shapes, or "
                "jqinject.freeze(model)"
            )
        return self.value


def _zeros(
    shape: tuple[int, ...], dtype: DTypeLike, scale_shape: tuple[int, ...]
) -> IntQuantTensor | FloatQuantTensor:
    """Zeros with scales of 1."""
    payload, scale = jnp.zeros(shape, dtype), jnp.ones(scale_shape, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.integer):
        return FloatQuantTensor.stored(payload, scale, None, FloatGrid.of_dtype(dtype), jnp.float32)
    grid = IntGrid(jnp.iinfo(dtype).bits, signed=bool(jnp.issubdtype(dtype, jnp.signedinteger)))
    return IntQuantTensor.stored(payload, scale, None, grid, jnp.float32)


def _sharded(operand: FrozenParam, metadata: tuple[tuple[str, object], ...]) -> FrozenParam:
    """The parameter with its numbers where NNX places Variables with this metadata, on a mesh."""
    numbers, form = operand.numbers, operand.form
    of_value, of_scale = form.metadata(dict(metadata), numbers["scale"].shape)
    placed = {"value": Frozen(numbers["value"], **of_value), "scale": Frozen(numbers["scale"], **of_scale)}
    return FrozenParam.holding({name: number.get_value() for name, number in placed.items()}, form)


def _facts(param: FrozenParam) -> tuple[Any, ...]:
    return param.form.stored, {name: number.shape for name, number in param.numbers.items()}


def _described(param: FrozenParam) -> str:
    stored, scale = param.form.stored, param.numbers["scale"]
    over = f", summed over axes {stored.summed}" if stored.summed else ""
    return f"{stored.dtype.name} numbers of shape {stored.shape} with scales of shape {scale.shape}{over}"
