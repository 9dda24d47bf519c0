"""Low-bit integers packed into bytes."""

import jax
import jax.numpy as jnp


def container_bits(bit_width: int) -> int:
    """Bits that one number takes when packed: 2, 4 or 8.

    Example:
        >>> [container_bits(bits) for bits in (1, 2, 3, 4, 5, 8)]
        [2, 2, 4, 4, 8, 8]
    """
    return next(bits for bits in (2, 4, 8) if bit_width <= bits)


def pack(payload: jax.Array, bits: int) -> jax.Array:
    """Integers of at most `bits` bits in two's complement, `8 / bits` of them in a uint8, along the last axis.

    Args:
        payload: int8 or uint8, any shape; the last axis is padded to whole bytes.
        bits: 2, 4 or 8.

    Returns:
        uint8, the last axis `ceil(n * bits / 8)` long; a scalar gets an axis.

    Example:
        >>> pack(jnp.array([1, -1, 7], jnp.int8), 4)
        Array([241,   7], dtype=uint8)
    """
    raw = payload.astype(jnp.uint8).reshape(payload.shape or (1,))
    share = 8 // bits
    if share == 1:
        return raw
    raw = raw & jnp.uint8(2**bits - 1)
    length = -(-raw.shape[-1] // share) * share
    raw = jnp.pad(raw, [(0, 0)] * (raw.ndim - 1) + [(0, length - raw.shape[-1])])
    groups = raw.reshape(*raw.shape[:-1], length // share, share)
    packed = groups[..., 0]
    for place in range(1, share):
        packed = packed | (groups[..., place] << jnp.uint8(bits * place))
    return packed


def unpack(packed: jax.Array, bits: int, shape: tuple[int, ...], signed: bool) -> jax.Array:
    """The integers that `pack` has packed, as int8, or as uint8 if they are unsigned.

    Args:
        packed: uint8.
        bits: as given to `pack`.
        shape: shape of the payload.
        signed: whether its highest bit is a sign.

    Example:
        >>> unpack(pack(jnp.array([1, -1, 7], jnp.int8), 4), 4, (3,), True)
        Array([ 1, -1,  7], dtype=int8)
    """
    share = 8 // bits
    if share > 1:
        shifts = jnp.arange(share, dtype=jnp.uint8) * jnp.uint8(bits)
        groups = (packed[..., None] >> shifts) & jnp.uint8(2**bits - 1)
        packed = groups.reshape(*packed.shape[:-1], packed.shape[-1] * share)
    if signed:
        half = jnp.uint8(2 ** (bits - 1))
        packed = jax.lax.bitcast_convert_type((packed ^ half) - half, jnp.int8)
    return packed[..., : shape[-1]] if shape else packed[0]
