"""Everyday functions of arrays that leave no more operations in a program than they need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jqinject.ops.devices.explicit_axes import sharded_as
from jqinject.ops.devices.mapped import varying_with


def choose(which: jax.Array, x: ArrayLike, y: ArrayLike) -> jax.Array:
    """`jnp.where(which, x, y)` of the dtype of its array, without the call that `jnp.where` leaves in a program.

    Args:
        which: booleans; all shapes broadcast together.
        x: taken where `which` is true: an array, or a number.
        y: taken elsewhere, of the dtype of `x` if both are arrays.

    Returns:
        An array of the broadcast shape.

    Example:
        >>> choose(jnp.array([True, False]), 0.0, jnp.array([1.0, 2.0]))
        Array([0., 2.], dtype=float32)
    """
    known = x if isinstance(x, jax.Array) else y
    dtype = known.dtype if isinstance(known, jax.Array) else jnp.float32
    shape, like = which.shape, which
    for given in (x, y):
        if isinstance(given, jax.Array) and given.shape != shape:
            shape = jnp.broadcast_shapes(shape, given.shape)
            like = given if given.shape == shape else like
    return jax.lax.select(
        which if which.shape == shape else _filled(which, shape, bool, like),
        x if isinstance(x, jax.Array) and x.shape == shape else _filled(x, shape, dtype, like),
        y if isinstance(y, jax.Array) and y.shape == shape else _filled(y, shape, dtype, like),
    )


def _filled(x: ArrayLike, shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    return sharded_as(jnp.broadcast_to(jnp.asarray(x, dtype), shape), like)


def shaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x.reshape(shape)`; `x` itself where it has that shape.

    Example:
        >>> shaped(jnp.float32(2), (1, 1))
        Array([[2.]], dtype=float32)
    """
    return x if x.shape == shape else x.reshape(shape)


def all_finite(x: jax.Array) -> jax.Array:
    """Whether every number is finite: a bool scalar."""
    finite = jnp.isfinite(x)
    return jnp.all(finite) if x.ndim else finite


def no_change(x: jax.Array) -> SymbolicZero:
    """The tangent of state, which carries no gradient from call to call."""
    return SymbolicZero(jax.typeof(x).to_tangent_aval())


def known_zeros(like: jax.Array, dtype: Any = None) -> jax.Array:
    """Zeros that are part of a program, instead of being made by it; laid out over devices as another array.

    Args:
        like: an array.
        dtype: None for its own.

    Example:
        >>> known_zeros(jnp.ones(2))
        Array([0., 0.], dtype=float32)
    """
    with jax.ensure_compile_time_eval():
        zeros = jnp.zeros(like.shape, dtype or like.dtype)
    return varying_with(sharded_as(zeros, like), like)
