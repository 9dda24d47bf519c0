"""A weight plus its low-rank update, of the same bits however the program around it is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOW_BITS = np.uint32(0xFFF)
SIGN_AND_EXPONENT = np.uint32(0xFF800000)
UNROLLED = 8


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def low_rank_sum(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """`weight + scale * sum(a * b, -1)`, rounded to the weight's dtype.

    A compiler may contract a product and a sum into one operation that rounds once, or sum in another order, and a
    number on the border of two integers of the quantizer then flips. So the factors are cut into halves of 12 bits,
    whose products are exact, and these are summed one after the other: the same bits in eager, jit, vjp and remat. Of
    each product the part below 2**-22 of it is left out.

    Args:
        weight: of any floating-point dtype.
        a, b: in the weight's axes, of size 1 where a factor does not vary, and the rank as the last axis.
        scale: of the update.

    Returns:
        The sum, in the weight's shape and dtype.

    Example:
        >>> w, a, b = jnp.ones((2, 2)), jnp.array([[[0.5]], [[1.0]]]), jnp.array([[[2.0], [4.0]]])
        >>> low_rank_sum(w, a, b, 0.5)
        Array([[1.5, 2. ],
               [2. , 3. ]], dtype=float32)
    """
    (a_high, a_low), (b_high, b_low) = (
        _halves(x) for x in (a.astype(jnp.float32) * scale, b.astype(jnp.float32))
    )

    def add(total: jax.Array, factors: Any) -> tuple[jax.Array, None]:
        one_high, one_low, other_high, other_low = factors
        total = total + one_high * other_high
        return total + one_high * other_low + one_low * other_high, None

    ranks = [jnp.moveaxis(x, -1, 0) for x in (a_high, a_low, b_high, b_low)]
    shape = jnp.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    update, _ = jax.lax.scan(add, jnp.zeros(shape, jnp.float32), ranks, unroll=UNROLLED)
    total = weight.astype(jnp.float32) + update
    form = jnp.finfo(weight.dtype)
    # A conversion alone may be left out between two that widen again.
    rounded = total if form.bits >= 32 else jax.lax.reduce_precision(total, form.nexp, form.nmant)
    return rounded.astype(weight.dtype)


@low_rank_sum.defjvp
def _tangent(scale: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (weight, a, b), (d_weight, d_a, d_b) = primals, tangents
    update = _product(d_a, b) + _product(a, d_b)
    return low_rank_sum(weight, a, b, scale), d_weight + (scale * update).astype(weight.dtype)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`sum(a * b, -1)` in float32, as one contraction."""
    axes = range(a.ndim)
    of_a, of_b = ([axis for axis in axes if axis == a.ndim - 1 or x.shape[axis] > 1] for x in (a, b))
    shape = jnp.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    out = [axis for axis in axes[:-1] if shape[axis] > 1]
    narrow = [
        x.astype(jnp.float32).reshape([x.shape[axis] for axis in own]) for x, own in ((a, of_a), (b, of_b))
    ]
    found = jnp.einsum(narrow[0], of_a, narrow[1], of_b, out, precision="highest")
    return found.reshape(shape)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 numbers as the sum of two with 12 bits each, by integer operations, which no compiler contracts."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)

    def as_float(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    # The low half: a number of the same exponent with the low bits alone, less that exponent's power of two.
    power = bits & SIGN_AND_EXPONENT
    return as_float(bits & ~LOW_BITS), as_float(power | (bits & LOW_BITS)) - as_float(power)
