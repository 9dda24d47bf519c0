"""Clamping, by how the gradient passes: masked, or straight through."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jqinject.ops.choose import choose
from jqinject.ops.fake_quant import bounded
from jqinject.ops.one_program import one_program


def _bound(bound: ArrayLike, x: jax.Array) -> jax.Array:
    """A bound in `x`'s dtype; differentiable if it was an array."""
    return jnp.asarray(bound, dtype=x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _clamp(straight: bool, x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return bounded(x, low, high)


def _clamp_jvp(straight: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, low, high), (dx, dlow, dhigh) = primals, tangents
    y = _clamp(straight, *primals)
    if isinstance(dx, SymbolicZero):
        dx = jnp.zeros_like(x)
    if not straight:
        dx = choose(x > high, 0.0 if isinstance(dhigh, SymbolicZero) else dhigh, dx)
        dx = choose(x < low, 0.0 if isinstance(dlow, SymbolicZero) else dlow, dx)
    return y, jnp.broadcast_to(dx, y.shape)


_clamp.defjvp(_clamp_jvp, symbolic_zeros=True)


def tensor_clamp(x: ArrayLike, min_val: ArrayLike, max_val: ArrayLike) -> jax.Array:
    """Clamp between two (arrays of) bounds; where it clamps, the gradient goes to the bound instead of `x`.

    `y = max_val` where `x > max_val`, else `min_val` where `x < min_val`, else `x`. At `x == bound` the
    gradient goes to `x` (`jnp.clip` halves it there).

    Args:
        x: a float array.
        min_val: lower bound, a number or an array that broadcasts with `x`, nowhere above `max_val`.
        max_val: upper bound, likewise.

    Returns:
        The clamped array in the dtype of `x`; nan stays nan.

    Example:
        >>> tensor_clamp(jnp.array([1.7, -0.5, 0.1]), 0.0, 1.0)
        Array([1. , 0. , 0.1], dtype=float32)
    """
    x = jnp.asarray(x)
    return _clamp(False, x, _bound(min_val, x), _bound(max_val, x))


def tensor_clamp_ste(x: ArrayLike, min_val: ArrayLike, max_val: ArrayLike) -> jax.Array:
    """Clamp as `tensor_clamp`; the whole gradient passes straight through to `x`, none to the bounds.

    Example:
        >>> jax.grad(lambda x: tensor_clamp_ste(x, -1.0, 1.0))(jnp.float32(5.0))
        Array(1., dtype=float32)
    """
    x = jnp.asarray(x)
    return _clamp(True, x, _bound(min_val, x), _bound(max_val, x))


def scalar_clamp_ste(x: ArrayLike, min_val: float, max_val: float) -> jax.Array:
    """Clamp between two numbers; gradient 1.

    Example:
        >>> scalar_clamp_ste(jnp.array([1.5, 0.4, -1.5]), -1.0, 1.0)
        Array([ 1. ,  0.4, -1. ], dtype=float32)
    """
    return tensor_clamp_ste(x, min_val, max_val)


@jax.custom_jvp
def _clamp_min_ste(x: jax.Array, min_val: jax.Array) -> jax.Array:
    return jnp.maximum(x, min_val)


@_clamp_min_ste.defjvp
def _(primals, tangents):
    y = _clamp_min_ste(*primals)
    return y, jnp.broadcast_to(tangents[0], y.shape)


def scalar_clamp_min_ste(x: ArrayLike, min_val: float) -> jax.Array:
    """`max(x, min_val)`; gradient 1.

    Example:
        >>> scalar_clamp_min_ste(jnp.array([1.5, 0.2]), 0.3)
        Array([1.5, 0.3], dtype=float32)
    """
    x = jnp.asarray(x)
    return _clamp_min_ste(x, _bound(min_val, x))


@jax.custom_jvp
@one_program()
def _signed_clamp_min_ste(x: jax.Array, min_val: jax.Array) -> jax.Array:
    magnitude = jnp.maximum(jnp.abs(x), min_val)
    return jax.lax.select(x < 0, -magnitude, magnitude)


@_signed_clamp_min_ste.defjvp
def _(primals, tangents):
    y = _signed_clamp_min_ste(*primals)
    return y, jnp.broadcast_to(tangents[0], y.shape)


def signed_clamp_min_ste(x: ArrayLike, min_val: float) -> jax.Array:
    """Keep a number at least `min_val` away from zero, on its own side (zero becomes positive);
    gradient 1.

    `y = sign(x) * max(|x|, min_val)`, `sign(0) = +1`; nan stays nan.

    Args:
        x: a float array.
        min_val: the least magnitude, `>= 0`.

    Returns:
        The clamped array, same shape and dtype.

    Example:
        >>> signed_clamp_min_ste(jnp.array([0.0, -0.1, 2.0]), 0.5)
        Array([ 0.5, -0.5,  2. ], dtype=float32)
    """
    x = jnp.asarray(x)
    return _signed_clamp_min_ste(x, _bound(min_val, x))
