"""Low-bit integers packed into bytes."""

import jax
import jax.numpy as jnp
import numpy as np


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


_PLACES = np.array([0, 4], np.uint8)


def pack_halves(codes: jax.Array, axis: int) -> jax.Array:
    """Codes of at most 4 bits, two in a byte: those of an axis's first half low, those of its second half high.

    Unlike `pack`, which takes neighbours of the last axis, it leaves the other axes as they lie, which compiled loops
    like.

    Args:
        codes: unsigned integers below 16, with at least one axis.
        axis: which axis; an odd one is filled up with 0.

    Returns:
        uint8, the axis half as long.

    Example:
        >>> pack_halves(jnp.array([1, 2, 3], jnp.uint8), 0)
        Array([49,  2], dtype=uint8)
    """
    axis %= codes.ndim
    half = -(-codes.shape[axis] // 2)
    wide = codes.astype(jnp.uint8)
    if codes.shape[axis] % 2:
        wide = jnp.pad(wide, [(0, place == axis) for place in range(codes.ndim)])
    halves = wide.reshape(*codes.shape[:axis], 2, half, *codes.shape[axis + 1 :])
    # A reduction ends a fused loop: what reads a byte twice does not compute its codes twice.
    shifted = halves << _beside(halves, axis)
    return jax.lax.reduce(shifted, np.uint8(0), jax.lax.bitwise_or, (axis,))


def unpack_halves(packed: jax.Array, axis: int, length: int) -> jax.Array:
    """The codes that `pack_halves` has packed, uint8.

    Args:
        packed: uint8.
        axis: which axis.
        length: of the axis before.

    Example:
        >>> unpack_halves(pack_halves(jnp.array([1, 2, 3], jnp.uint8), 0), 0, 3)
        Array([1, 2, 3], dtype=uint8)
    """
    axis %= packed.ndim
    halves = jnp.expand_dims(packed, axis)
    codes = (halves >> _beside(halves, axis)) & jnp.uint8(15)
    whole = codes.reshape(*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])
    return jax.lax.slice_in_dim(whole, 0, length, axis=axis) if whole.shape[axis] != length else whole


def _beside(halves: jax.Array, axis: int) -> jax.Array:
    return jnp.asarray(_PLACES).reshape([2 if place == axis else 1 for place in range(halves.ndim)])
