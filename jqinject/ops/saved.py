"""Arrays that are kept for the backward pass as low-bit payloads.

Rematerialisation keeps the arrays that its policy names and recomputes the rest. Here the name is on a payload packed
into unsigned integers: integers have no cotangent, so the payload is not differentiated, and later values are
recomputed from it. The float array that the value was made from receives its gradient straight through, so the
gradient itself is not quantized. This holds for first derivatives: a second derivative sees the value as a constant.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jqinject.ops.minifloats.float_format import FloatFormat
from jqinject.ops.minifloats.float_grid import from_float_codes
from jqinject.ops.minifloats.low_bits import as_bits
from jqinject.ops.packing import container_bits, pack, unpack

PAYLOAD = "jqinject.payload"
SCALE = "jqinject.scale"
ZERO_POINT = "jqinject.zero_point"
SAVED_NAMES = (PAYLOAD, SCALE, ZERO_POINT)


@jax.custom_jvp
def _with_first_gradient_of(value: jax.Array, x: jax.Array) -> jax.Array:
    """`value` with the first derivative of `x`: values recomputed in a backward pass must not depend on `x`."""
    return value


@_with_first_gradient_of.defjvp
def _with_first_gradient_of_jvp(primals: tuple[jax.Array, jax.Array], tangents: Any) -> Any:
    return primals[0], tangents[1]


def saved_integers(
    x: jax.Array, payload: jax.Array, scale: jax.Array, zero_point: jax.Array, bit_width: int, signed: bool
) -> jax.Array:
    """`(payload - zero_point) * scale`, kept for the backward pass as packed payload, scale and zero point.

    Args:
        x: the float array that the payload was made from; it receives the gradient, everywhere.
        payload: int8 or uint8 of the shape of `x`.
        scale: float per integer step, broadcasts to `x`; no gradient.
        zero_point: the integer that stands for 0, broadcasts to `x`; no gradient.
        bit_width: at most 8.
        signed: whether the integers have a sign.

    Returns:
        An array of the shape and dtype of `x`.
    """
    bits = container_bits(bit_width)
    packed = checkpoint_name(pack(payload, bits), PAYLOAD)
    scale = checkpoint_name(jax.lax.stop_gradient(scale), SCALE)
    zero_point = checkpoint_name(jax.lax.stop_gradient(zero_point), ZERO_POINT)
    value = (unpack(packed, bits, payload.shape, signed).astype(jnp.float32) - zero_point) * scale
    return _with_first_gradient_of(value.reshape(x.shape).astype(x.dtype), x)


def saved_codes(x: jax.Array, codes: jax.Array, scale: jax.Array, form: FloatFormat) -> jax.Array:
    """`minifloat * scale`, kept for the backward pass as the packed codes of the minifloats and the scale.

    Args:
        x: the float array that the codes were made from; it receives the gradient, everywhere.
        codes: unsigned integers of the shape of `x`, of a format of at most 8 bits.
        scale: float per step of the minifloat, broadcasts to `x`; no gradient.
        form: the format of the codes.

    Returns:
        An array of the shape and dtype of `x`.
    """
    bits = container_bits(form.bit_width)
    packed = checkpoint_name(pack(jax.lax.stop_gradient(codes), bits), PAYLOAD)
    scale = checkpoint_name(jax.lax.stop_gradient(scale), SCALE)
    value = from_float_codes(unpack(packed, bits, codes.shape, False), form) * scale
    return _with_first_gradient_of(value.reshape(x.shape).astype(x.dtype), x)


def saved_floats(x: jax.Array, payload: jax.Array, scale: jax.Array) -> jax.Array:
    """`payload * scale`, kept for the backward pass as the payload's bits and the scale.

    Args:
        x: the float array that the payload was made from; it receives the gradient, everywhere.
        payload: an 8-bit float array of the shape of `x`.
        scale: float per step, broadcasts to `x`; no gradient.

    Returns:
        An array of the shape and dtype of `x`.

    Example:
        >>> x = jnp.array([1.1, 3.0])
        >>> saved_floats(x, x.astype(jnp.float8_e5m2), jnp.float32(1))
        Array([1., 3.], dtype=float32)
    """
    again = checkpoint_name(as_bits(payload), PAYLOAD).floats()
    scale = checkpoint_name(jax.lax.stop_gradient(scale), SCALE)
    return _with_first_gradient_of((again.astype(jnp.float32) * scale).astype(x.dtype), x)
