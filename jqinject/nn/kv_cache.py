"""The cache of keys and values in low bits: payload, scales and zero points of every position.

What is stored is what attention contracts: a key or value as its quantizer made it at its own step. A float quantity
(no quantizer, or one whose numbers have no payload of at most 8 bits) is stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.dot import has_integers
from jqinject.quant_tensor import (
    CodebookQuantTensor,
    FloatQuantTensor,
    IntQuantTensor,
    as_array,
    in_groups,
    is_grouped,
    on_minifloats,
    on_table,
)

OPERAND_AXES = 3  # positions, heads and features, behind the axes of the batch
FIELDS = ("payload", "scale", "zero_point")
Fields = dict[str, jax.Array]


def attribute(name: str, field: str) -> str:
    """What the layer calls a field of the cache: `cached_key`, `cached_key_scale`."""
    return name if field == "payload" else f"{name}_{field}"


def encoded(x: Any, has_zero_point: bool) -> Fields:
    """The arrays that a cache stores of a key or value.

    Args:
        x: (*batch, positions, heads, features), array or QuantTensor.
        has_zero_point: whether its zero point may be another than 0.

    Returns:
        `payload`, and where there are, `scale` and `zero_point`, each with all the axes of `x` and with its positions;
        with two axes for one where there are groups. A payload of at most 4 bits has several numbers in a byte, along
        the last axis.

    Raises:
        ValueError: groups of several positions, which are not known at one of them.
    """
    tensor = _ungrouped(x)
    payload = _payload(tensor)
    if payload is None:
        return {"payload": as_array(x)}
    at = x.ndim - OPERAND_AXES
    fields = {"payload": payload, "scale": _by_position(tensor.scale, tensor, at)}
    return fields | ({"zero_point": _by_position(tensor.zero_point, tensor, at)} if has_zero_point else {})


def decoded(fields: Fields, like: object) -> Any:
    """What `encoded` made the arrays of.

    Args:
        fields: arrays of any number of positions.
        like: a key or value of the same quantizer, for format and dtype.
    """
    payload, scale = fields["payload"], fields.get("scale")
    if scale is None:
        return payload
    sample = _ungrouped(like)
    options = {"training": sample.training, "dtype": sample.dtype}
    shape = (*payload.shape[:-1], sample.shape[-1])
    if on_minifloats(sample):
        form = sample.known_format("a cache")
        tensor: Any = FloatQuantTensor.from_payload(
            form.unpack(payload, shape), scale, format=form, **options
        )
    elif on_table(sample):
        codes = sample.grid.unpack(payload, shape)
        tensor = CodebookQuantTensor.from_codes(codes, scale, sample.codebook, **options)
    else:
        integers, zero = sample.grid.unpack(payload, shape), fields.get("zero_point", 0.0)
        bits = int(sample.bit_width)
        tensor = IntQuantTensor.from_int(integers, scale, zero, bits, signed=sample.signed, **options)
    if not is_grouped(like):
        return tensor
    return in_groups(tensor, like.group_size, like.groups.dim, like.groups.length)


def empty(position: Any, has_zero_point: bool, length: int) -> Fields:
    """The cache before the first position.

    Args:
        position: a quantized key or value of one position, abstract (from `nnx.eval_shape`).
        has_zero_point: as for `encoded`.
        length: how many positions it is to have.
    """
    at = position.ndim - OPERAND_AXES
    stored = jax.eval_shape(lambda x: encoded(x, has_zero_point), position)

    def filled(name: str, field: Any) -> jax.Array:
        shape = (*field.shape[:at], length, *field.shape[at + 1 :])
        # A scale of 1 lets what is not written yet be zeros.
        return jnp.full(shape, 1 if name == "scale" else 0, field.dtype)

    return {name: filled(name, field) for name, field in stored.items()}


def check(name: str, stored: Mapping[str, nnx.Variable[Any] | None], new: Fields, at: int) -> None:
    """Refuse a position that the cache was not made for.

    Args:
        name: of the cache.
        stored: its Variables by field, or None.
        new: the fields of the position.
        at: the axis of positions.

    Raises:
        ValueError: other fields, dtypes or shapes than the cache has, but for one position.
    """
    variables = {field: variable for field, variable in stored.items() if variable is not None}
    shapes = {field: (*v.shape[:at], 1, *v.shape[at + 1 :]) for field, v in variables.items()}
    fits = variables.keys() == new.keys() and all(
        variables[field].dtype == array.dtype and shapes[field] == array.shape for field, array in new.items()
    )
    if not fits:
        expected = {field: (v.dtype.name, shapes[field]) for field, v in variables.items()}
        got = {field: (array.dtype.name, array.shape) for field, array in new.items()}
        raise ValueError(
            f"QuantMultiHeadAttention: {name} takes one position at a time, {expected}; got {got}.\n"
            "  cure: inputs of length 1 and of the batch that init_cache was given; init_cache again where quantizers "
            "or the dtype (init_cache(shape, dtype)) are others now"
        )


def put(stored: nnx.Variable[Any], new: jax.Array, index: jax.Array, at: int) -> jax.Array:
    """A stored array with one position replaced.

    Args:
        stored: the cache's Variable, which is changed.
        new: of one position.
        index: int32 scalar, which position.
        at: the axis of positions.

    Returns:
        What is stored now.
    """
    start = [jnp.zeros((), index.dtype)] * new.ndim
    start[at] = index
    stored[...] = jax.lax.dynamic_update_slice(stored[...], new, start)
    return stored[...]


def _ungrouped(x: object) -> Any:
    """The tensor with two axes for the one that is cut into groups."""
    if not is_grouped(x):
        return x
    if x.groups.dim <= -OPERAND_AXES:
        raise ValueError(
            "QuantMultiHeadAttention: a group of several positions cannot be quantized position by position.\n"
            "  cure: groups along the features (group_dim = -1) or the heads (group_dim = -2)"
        )
    return x.grouped


def _payload(x: Any) -> jax.Array | None:
    """The low-bit numbers, packed into bytes if they fit; None if there are none of at most 8 bits."""
    if has_integers(x):
        return x.grid.pack(x.int())
    if on_minifloats(x) and not x.format.is_learned and x.format.bit_width <= 8:
        is_float8 = x.format.bit_width == 8 and jnp.issubdtype(x.format.storage, jnp.floating)
        return x.payload() if is_float8 else x.format.pack(x.codes())
    return x.grid.pack(x.codes()) if on_table(x) else None


def _by_position(metadata: jax.Array, x: Any, at: int) -> jax.Array:
    """A scale or zero point with as many axes as `x`, and one entry for each of its positions."""
    full = metadata.reshape((1,) * (x.ndim - metadata.ndim) + metadata.shape)
    positions = [*full.shape]
    positions[at] = x.shape[at]
    return jnp.broadcast_to(full, positions)
