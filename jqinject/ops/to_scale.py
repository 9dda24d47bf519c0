"""From a statistic (or a learned number) to a scale, with one derivative rule."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jqinject.ops.choose import choose
from jqinject.ops.power import quotient


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _to_scale(
    floor: float, of_magnitude: bool, steps: float | None, x: jax.Array, divisor: jax.Array
) -> jax.Array:
    value = jnp.maximum(jnp.abs(x) if of_magnitude else x, floor)
    if steps is None:
        return quotient(value, divisor)
    if steps == 1:
        return value
    # By a power of two, a product with its reciprocal is the same number.
    return value / steps if math.frexp(steps)[0] == 0.5 else quotient(value, jnp.float32(steps))


def _to_scale_jvp(
    floor: float, of_magnitude: bool, steps: float | None, primals: Any, tangents: Any
) -> tuple[jax.Array, Any]:
    (x, divisor), (dx, ddivisor) = primals, tangents
    scale = _to_scale(floor, of_magnitude, steps, *primals)
    known = jnp.float32(steps) if steps is not None else divisor
    changes = []
    if not isinstance(dx, SymbolicZero):
        changes.append(dx * choose(x >= 0, jnp.ones_like(x), -1.0) if of_magnitude else dx)
    if not isinstance(ddivisor, SymbolicZero):
        changes.append(-scale * ddivisor)
    if not changes:
        return scale, jnp.zeros_like(scale)
    change = sum(changes[1:], changes[0])
    return scale, jnp.broadcast_to(change if steps == 1 else change / known, scale.shape)


_to_scale.defjvp(_to_scale_jvp, symbolic_zeros=True)


def to_scale(
    x: jax.Array, floor: float, steps: float | jax.Array | None, *, of_magnitude: bool = False
) -> jax.Array:
    """`max(x, floor) / steps`, correctly rounded in every program (see `divide`); the gradient passes the maximum.

    Args:
        x: float32: a statistic that is at least 0, or with `of_magnitude` any number.
        floor: the least value, above 0.
        steps: how many steps of the scale span it, above 0; None for 1.
        of_magnitude: take `|x|`, with the gradient +1 at 0.

    Returns:
        The scale, float32. nan stays nan.

    Example:
        >>> to_scale(jnp.float32(254.0), 1e-3, 127.0)
        Array(2., dtype=float32)
        >>> jax.grad(to_scale)(jnp.float32(0.0), 1e-3, 4.0)
        Array(0.25, dtype=float32)
    """
    if isinstance(steps, jax.Array):
        return _to_scale(floor, of_magnitude, None, x, steps)
    return _to_scale(floor, of_magnitude, float(steps or 1), x, jnp.float32(1))
