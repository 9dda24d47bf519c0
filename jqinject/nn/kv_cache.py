"""The cache of keys and values in low bits: payload, scales and zero points of every position.

What is stored is what attention contracts: a key or value as its quantizer made it at its own step. A float quantity
(no quantizer, or one whose numbers have no payload of at most 8 bits) is stored unchanged.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.dot.frozen.frozen_form import FrozenForm
from jqinject.dot.frozen.frozen_numbers import ScaleForms, frozen_numbers, has_low_bits, quant_tensor_of
from jqinject.quant_tensor import Operand, as_array, is_grouped, is_quantized

OPERAND_AXES = 3  # positions, heads and features, behind the axes of the batch
FIELDS = ("payload", "scale", "zero_point")
Fields = dict[str, jax.Array]


def attribute(name: str, field: str) -> str:
    """What the layer calls a field of the cache: `cached_key`, `cached_key_scale`."""
    return name if field == "payload" else f"{name}_{field}"


def encoded(x: Operand, has_zero_point: bool) -> tuple[Fields, FrozenForm | None]:
    """The arrays that a cache stores of a key or value, and what is static in them.

    Args:
        x: (*batch, positions, heads, features), array or QuantTensor.
        has_zero_point: whether its zero point may be another than 0.

    Returns:
        `payload`, and where there are, `scale` and `zero_point`, each with all the axes of `x` and with its positions;
        with two axes for one where there are groups. A payload of at most 4 bits has several numbers in a byte, along
        the last axis. The form is None for floats.

    Raises:
        ValueError: groups of several positions, which are not known at one of them.
    """
    if is_grouped(x) and x.groups.dim <= -OPERAND_AXES:
        raise ValueError(
            "QuantMultiHeadAttention: a group of several positions cannot be quantized position by position.\n"
            "  cure: groups along the features (group_dim = -1) or the heads (group_dim = -2)"
        )
    if not has_low_bits(x):
        return {"payload": as_array(x)}, None
    numbers, form = frozen_numbers(x, (), has_zero_point, None, ScaleForms())
    at = x.ndim - OPERAND_AXES

    def by_position(metadata: jax.Array) -> jax.Array:
        return jnp.broadcast_to(metadata, (*metadata.shape[:at], x.shape[at], *metadata.shape[at + 1 :]))

    return {"payload": numbers.pop("value"), **jax.tree.map(by_position, numbers)}, form


def decoded(fields: Fields, form: FrozenForm | None) -> Any:
    """What `encoded` made the arrays of.

    Args:
        fields: arrays of any number of positions.
        form: what is static in them.
    """
    numbers = {"value" if name == "payload" else name: field for name, field in fields.items()}
    return fields["payload"] if form is None else quant_tensor_of(numbers, form)


def empty(position: Any, has_zero_point: bool, length: int) -> Fields:
    """The cache before the first position.

    Args:
        position: a quantized key or value of one position, abstract (from `nnx.eval_shape`).
        has_zero_point: as for `encoded`.
        length: how many positions it is to have.
    """
    at = position.ndim - OPERAND_AXES
    stored = jax.eval_shape(lambda x: encoded(x, has_zero_point)[0], position)

    # A scale of 1 lets what is not written yet be zeros; of a table, whose first number is none, a scale of 0.
    scale = 0 if is_quantized(position) and position.grid.is_table else 1

    def filled(name: str, field: Any) -> jax.Array:
        shape = (*field.shape[:at], length, *field.shape[at + 1 :])
        return jnp.full(shape, scale if name == "scale" else 0, field.dtype)

    return {name: filled(name, field) for name, field in stored.items()}


def check(name: str, stored: Mapping[str, nnx.Variable[jax.Array] | None], new: Fields, at: int) -> None:
    """Refuse a position that the cache was not made for.

    Args:
        name: of the cache.
        stored: its Variables by field, or None.
        new: the fields of the position.
        at: the axis of positions.

    Raises:
        ValueError: other fields, dtypes or shapes than the cache has, but for one position.
    """
    expected = {
        field: (v.dtype.name, (*v.shape[:at], 1, *v.shape[at + 1 :]))
        for field, v in stored.items()
        if v is not None
    }
    got = {field: (array.dtype.name, array.shape) for field, array in new.items()}
    if got != expected:
        raise ValueError(
            f"QuantMultiHeadAttention: {name} takes one position at a time, {expected}; got {got}.\n"
            "  cure: inputs of length 1 and of the batch that init_cache was given; init_cache again where quantizers "
            "or the dtype (init_cache(shape, dtype)) are others now"
        )


def put(stored: nnx.Variable[jax.Array], new: jax.Array, index: jax.Array, at: int) -> jax.Array:
    """A stored array with one position replaced.

    Args:
        stored: the cache's Variable, which is changed.
        new: of one position.
        index: int32 scalar, which position.
        at: the axis of positions.

    Returns:
        What is stored now.
    """
    stored[...] = jax.lax.dynamic_update_slice_in_dim(stored[...], new, index, at)
    return stored[...]
