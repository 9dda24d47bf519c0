"""Pack codes of few bits into bytes, and save them for the backward pass.

Rematerialisation keeps the arrays that its policy names and recomputes the rest. Here the name is on a payload packed
into unsigned integers: integers have no cotangent, so the payload is not differentiated, and later values are
recomputed from it. The float array that the value was made from receives its gradient straight through, so the
gradient itself is not quantized. This holds for first derivatives: a second derivative sees the value as a constant.

Under a rematerialisation policy that saves intermediate results, JAX rounds floats to the exponent and mantissa widths
of their dtype, by IEEE 754's rules. Formats that use codes which IEEE 754 reserves lose their largest numbers: 256 and
448 of `float8_e4m3fn` become nan, and so do 4 and 6 of `float4_e2m1fn`. Integers are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name


def is_low_bit(dtype: Any) -> bool:
    """Whether it is a float dtype of fewer than 16 bits.

    Example:
        >>> is_low_bit(jnp.float8_e4m3fn), is_low_bit(jnp.float4_e2m1fn), is_low_bit(jnp.bfloat16), is_low_bit(jnp.int8)
        (True, True, False, False)
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowBits:
    """A pytree whose low-bit floats are bit-cast to unsigned integers of the same width; made by `as_bits`.

    Attributes:
        tree: the pytree, with integers in place of low-bit floats.
        dtypes: the original dtypes of its leaves, None for unchanged ones.
    """

    tree: Any
    dtypes: tuple[np.dtype | None, ...] = field(metadata={"static": True})

    def floats(self) -> Any:
        """The original pytree."""
        leaves, structure = jax.tree.flatten(self.tree)
        back = [
            leaf if dtype is None else jax.lax.bitcast_convert_type(leaf, dtype)
            for leaf, dtype in zip(leaves, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(structure, back)


def as_bits(tree: Any) -> LowBits:
    """A pytree in a form that can be kept for a backward pass. No gradient.

    Args:
        tree: arrays; those that are not low-bit floats stay as they are.

    Returns:
        The pytree as `LowBits`; its `floats()` restores it.

    Example:
        >>> kept = as_bits((jnp.array([448.0], jnp.float8_e4m3fn), jnp.ones(2)))
        >>> kept.tree
        (Array([126], dtype=uint8), Array([1., 1.], dtype=float32))
        >>> kept.floats()[0]
        Array([448], dtype=float8_e4m3fn)
    """
    leaves, structure = jax.tree.flatten(tree)
    dtypes = tuple(np.dtype(leaf.dtype) if is_low_bit(leaf.dtype) else None for leaf in leaves)
    bits = [leaf if dtype is None else _bits(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return LowBits(jax.tree.unflatten(structure, bits), dtypes)


def _bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(dtype).bits}"))


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


def saved_codes(x: jax.Array, codes: jax.Array, scale: jax.Array, form: Any) -> jax.Array:
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
    value = form.decode(unpack(packed, bits, codes.shape, False)) * scale
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


def to_bfloat16_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """One of the two bfloat16 neighbours, the farther from 0 with a probability equal to the fraction of the way to it.

    Args:
        x: float32.
        key: of `jax.random`.

    Returns:
        bfloat16. nan and infinities stay; a finite number stays finite.

    Example:
        >>> x = jnp.full((10_000,), 1.0 + 2.0**-10)
        >>> y = to_bfloat16_stochastically(x, jax.random.key(0)).astype(jnp.float32)
        >>> sorted(set(y.tolist())), abs(float(y.mean()) - float(x[0])) < 2e-4
        ([1.0, 1.0078125], True)
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    low = jnp.uint32(0xFFFF)
    drawn = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    down, up = bits & ~low, (bits + drawn) & ~low
    within = (up & jnp.uint32(0x7F800000)) != jnp.uint32(0x7F800000)
    chosen = jax.lax.bitcast_convert_type(jnp.where(within, up, down), jnp.float32)
    return jnp.where(jnp.isfinite(x), chosen, x).astype(jnp.bfloat16)
