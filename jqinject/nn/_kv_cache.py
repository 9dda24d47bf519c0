"""The cache of keys and values in low bits: payload, scales and zero points of every position.

What is stored is what attention contracts: a key or value as its quantizer made it at its own step. A float quantity
(no quantizer, or one without a payload of at most 8 bits) is stored as it is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jqinject.dot import has_integers
from jqinject.ops.packing import container_bits, pack, unpack
from jqinject.quant_tensor import FloatQuantTensor, IntQuantTensor, as_array

LENGTH = -3  # the axis of positions, of payloads and of scales
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
        `payload`, and where there are, `scale` and `zero_point`, each with as many axes as `x` and its positions; the
        payload of integers of at most 4 bits has several of them in a byte, along the features.
    """
    if isinstance(x, IntQuantTensor) and has_integers(x):
        bits = container_bits(int(x.bit_width))
        made = {"payload": x.int() if bits == 8 else pack(x.int(), bits), "scale": _each(x.scale, x)}
        return made | ({"zero_point": _each(x.zero_point, x)} if has_zero_point else {})
    if isinstance(x, FloatQuantTensor):
        return {"payload": x.payload(), "scale": _each(x.scale, x)}
    return {"payload": as_array(x)}


def decoded(fields: Fields, like: Any) -> Any:
    """What `encoded` made the arrays of.

    Args:
        fields: arrays of any number of positions.
        like: a key or value of the same quantizer, for format and dtype.
    """
    payload, scale = fields["payload"], fields.get("scale")
    if scale is None:
        return payload
    if isinstance(like, FloatQuantTensor):
        return FloatQuantTensor.from_payload(payload, scale, training=like.training, dtype=like.dtype)
    bits = int(like.bit_width)
    if container_bits(bits) < 8:
        shape = (*payload.shape[:-1], like.shape[-1])
        payload = unpack(payload, container_bits(bits), shape, like.signed)
    return IntQuantTensor.from_int(
        payload,
        scale,
        fields.get("zero_point", 0.0),
        bits,
        signed=like.signed,
        training=like.training,
        dtype=like.dtype,
    )


def empty(one: Any, has_zero_point: bool, length: int) -> Fields:
    """The cache before the first position.

    Args:
        one: a quantized key or value of one position, abstract (from `nnx.eval_shape`).
        has_zero_point: as for `encoded`.
        length: how many positions it is to have.
    """
    stored = jax.eval_shape(lambda x: encoded(x, has_zero_point), one)

    def filled(name: str, field: Any) -> jax.Array:
        axis = field.ndim + LENGTH
        shape = (*field.shape[:axis], length, *field.shape[axis + 1 :])
        # A scale of 1 lets what is not written yet be zeros.
        return jnp.full(shape, 1 if name == "scale" else 0, field.dtype)

    return {name: filled(name, field) for name, field in stored.items()}


def check(name: str, stored: dict[str, nnx.Variable[Any] | None], new: Fields) -> None:
    """Refuse a position that the cache was not made for.

    Args:
        name: of the cache.
        stored: its Variables by field, None for none.
        new: the fields of the position.

    Raises:
        ValueError: other fields, dtypes or shapes than the cache has, but for one position.
    """
    held = {field: variable for field, variable in stored.items() if variable is not None}
    fits = held.keys() == new.keys() and all(
        held[f].dtype == array.dtype and _one_of(held[f].shape) == array.shape for f, array in new.items()
    )
    if not fits:
        made = {f: (v.dtype.name, _one_of(v.shape)) for f, v in held.items()}
        got = {f: (a.dtype.name, a.shape) for f, a in new.items()}
        raise ValueError(
            f"QuantMultiHeadAttention: {name} takes one position at a time, {made}; got {got}.\n"
            "  cure: inputs of length 1 and of the batch that init_cache was given; init_cache again where quantizers "
            "or the dtype (init_cache(shape, dtype)) are others now"
        )


def _one_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    axis = len(shape) + LENGTH
    return (*shape[:axis], 1, *shape[axis + 1 :])


def put(stored: nnx.Variable[Any], new: jax.Array, index: jax.Array) -> jax.Array:
    """A stored array with one position replaced.

    Args:
        stored: the cache's Variable, which is changed.
        new: of one position.
        index: int32 scalar, which position.

    Returns:
        What is stored now.
    """
    start = [jnp.zeros((), index.dtype)] * new.ndim
    start[LENGTH] = index
    stored[...] = jax.lax.dynamic_update_slice(stored[...], new, start)
    return stored[...]


def _each(metadata: jax.Array, x: Any) -> jax.Array:
    """A scale or zero point with as many axes as `x`, and one entry for each of its positions."""
    full = metadata.reshape((1,) * (x.ndim - metadata.ndim) + metadata.shape)
    positions = [*full.shape]
    positions[LENGTH] = x.shape[LENGTH]
    return jnp.broadcast_to(full, positions)
