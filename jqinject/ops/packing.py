"""Save numbers of few bits for the backward pass.

Rematerialisation keeps the arrays that its policy names and recomputes the rest. Here the name is on a payload packed
into unsigned integers: integers have no cotangent, so the payload is not differentiated, and later values are
recomputed from it. The float array that the value was made from receives its gradient straight through, so the
gradient itself is not quantized. This holds for first derivatives: a second derivative sees the value as a constant.

Under a rematerialisation policy that saves intermediate results, JAX rounds floats to the exponent and mantissa widths
of their dtype, by IEEE 754's rules. Formats that use codes which IEEE 754 reserves lose their largest numbers: 256 and
448 of `float8_e4m3fn` become nan, and so do 4 and 6 of `float4_e2m1fn`. Integers are left alone.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jqinject.ops import ste
from jqinject.ops.grid import Grid, IntGrid


def is_low_bit(dtype: DTypeLike) -> bool:
    """Whether it is a float dtype of fewer than 16 bits.

    Example:
        >>> is_low_bit(jnp.float8_e4m3fn), is_low_bit(jnp.float4_e2m1fn), is_low_bit(jnp.bfloat16), is_low_bit(jnp.int8)
        (True, True, False, False)
    """
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowBitTree:
    """A pytree whose low-bit leaves are unsigned integers: 8-bit floats bit-cast, narrower numbers packed into bytes.

    Attributes:
        tree: the pytree, with integers in place of low-bit leaves. Made by `as_bits`.
        leaves: the original shapes and dtypes of its leaves.
    """

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...] = field(metadata={"static": True})

    def floats(self) -> Any:
        """The original pytree."""
        leaves, structure = jax.tree.flatten(self.tree)
        return jax.tree.unflatten(
            structure, (_of_bits(x, *leaf) for x, leaf in zip(leaves, self.leaves, strict=True))
        )


def as_bits(tree: object) -> LowBitTree:
    """A pytree in a form that can be kept for a backward pass. No gradient.

    Args:
        tree: arrays; those that are neither low-bit floats nor narrower than a byte stay as they are.

    Returns:
        The pytree as `LowBitTree`; its `floats()` restores it.

    Example:
        >>> kept = as_bits((jnp.array([448.0], jnp.float8_e4m3fn), jnp.ones(2)))
        >>> kept.tree
        (Array([126], dtype=uint8), Array([1., 1.], dtype=float32))
        >>> kept.floats()[0]
        Array([448], dtype=float8_e4m3fn)
    """
    leaves = tuple((tuple(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
    return LowBitTree(jax.tree.map(_in_bits, tree), leaves)


def packed_grid(dtype: DTypeLike) -> IntGrid | None:
    """The integers whose `pack` puts several numbers of a dtype into a byte; None if each fills whole bytes.

    Example:
        >>> packed_grid(jnp.int4), packed_grid(jnp.int8)
        (IntGrid(bit_width=4, signed=True, narrow_range=False), None)
    """
    if is_low_bit(dtype):
        bits, signed = jnp.finfo(dtype).bits, False
    elif jnp.issubdtype(dtype, jnp.integer):
        bits, signed = jnp.iinfo(dtype).bits, bool(jnp.issubdtype(dtype, jnp.signedinteger))
    else:
        return None
    return IntGrid(bits, signed) if bits < 8 else None


def _in_bits(x: jax.Array) -> jax.Array:
    grid = packed_grid(x.dtype)
    if grid is not None:
        return grid.pack(x)
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if is_low_bit(x.dtype) else x


def _of_bits(x: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    grid = packed_grid(dtype)
    if grid is not None:
        x = grid.unpack(x, shape).astype(f"{'' if grid.signed else 'u'}int{grid.bit_width}")
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


PAYLOAD = "jqinject.payload"
SCALE = "jqinject.scale"
ZERO_POINT = "jqinject.zero_point"
SAVED_NAMES = (PAYLOAD, SCALE, ZERO_POINT)


@jax.custom_jvp
def _with_first_gradient_of(value: jax.Array, x: jax.Array) -> jax.Array:
    """`value` with the first derivative of `x`: values recomputed in a backward pass must not depend on `x`."""
    return value


@_with_first_gradient_of.defjvp
def _(primals: ste.Primals, tangents: ste.Tangents) -> tuple[jax.Array, Any]:
    return primals[0], tangents[1]


def saved(
    x: jax.Array, payload: jax.Array, scale: jax.Array, zero_point: jax.Array | None, grid: Grid
) -> jax.Array:
    """`(number - zero_point) * scale`, kept for the backward pass as packed payload, scale and zero point.

    Args:
        x: the float array that the payload was made from; it receives the gradient, everywhere.
        payload: of the shape of `x`, as `grid.pack` takes it.
        scale: float per step of the grid, broadcasts to `x`; no gradient.
        zero_point: the number that represents 0, broadcasts to `x`, no gradient; None for 0.
        grid: the number format, of at most 8 bits.

    Returns:
        An array of the shape and dtype of `x`.

    Example:
        >>> from jqinject.ops import FloatGrid
        >>> x, grid = jnp.array([1.1, 3.0]), FloatGrid.of_dtype(jnp.float8_e5m2)
        >>> saved(x, grid.encode(x), jnp.float32(1), None, grid)
        Array([1., 3.], dtype=float32)
    """
    packed = checkpoint_name(as_bits(grid.pack(jax.lax.stop_gradient(payload))), PAYLOAD).floats()
    scale = checkpoint_name(jax.lax.stop_gradient(scale), SCALE)
    numbers = grid.decode(grid.unpack(packed, payload.shape))
    if zero_point is not None:
        numbers = numbers - checkpoint_name(jax.lax.stop_gradient(zero_point), ZERO_POINT)
    return _with_first_gradient_of((numbers * scale).reshape(x.shape).astype(x.dtype), x)


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
