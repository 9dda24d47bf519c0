"""Everyday functions of arrays that leave no more operations in a program than they need."""

from typing import cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from jqinject.ops.sharding import sharded_as, varying_with

#: A bit width: an int if it is constant, an array if it is learned.
Bits = int | jax.Array


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
    array = x if isinstance(x, jax.Array) else y
    dtype = array.dtype if isinstance(array, jax.Array) else jnp.float32
    shape, like = which.shape, which
    for operand in (x, y):
        if isinstance(operand, jax.Array) and operand.shape != shape:
            shape = jnp.broadcast_shapes(shape, operand.shape)
            like = operand if operand.shape == shape else like
    return jax.lax.select(
        which if which.shape in (shape, ()) else _filled(which, shape, bool, like),
        x if isinstance(x, jax.Array) and x.shape == shape else _filled(x, shape, dtype, like),
        y if isinstance(y, jax.Array) and y.shape == shape else _filled(y, shape, dtype, like),
    )


def _filled(x: ArrayLike, shape: tuple[int, ...], dtype: DTypeLike, like: jax.Array) -> jax.Array:
    if not isinstance(x, jax.Array) and isinstance(like, jax.core.Tracer):
        # One number, repeated by stride 0: part of the program, where it stays one number.
        return sharded_as(cast(jax.Array, np.broadcast_to(np.asarray(x, dtype), shape)), like)
    return sharded_as(jnp.broadcast_to(jnp.asarray(x, dtype), shape), like)


def unshared(*numbers: ArrayLike) -> list[jax.Array]:
    """The same numbers or arrays, whose broadcasts no other operation shares.

    XLA on a CPU sums elementwise operations in one pass over memory, but what other operations use too, as a number
    that was broadcast, it writes to memory first, as a whole array.

    Example:
        >>> unshared(jnp.float32(2))
        [Array(2., dtype=float32)]
    """
    return jax.lax.optimization_barrier([jnp.asarray(number, jnp.float32) for number in numbers])


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


def known_zeros(like: jax.Array, dtype: DTypeLike | None = None, number: float = 0.0) -> jax.Array:
    """Zeros that are part of a program, instead of being made by it; laid out over devices as another array.

    Args:
        like: an array.
        dtype: None for its own.
        number: another number.

    Example:
        >>> known_zeros(jnp.ones(2))
        Array([0., 0.], dtype=float32)
    """
    with jax.ensure_compile_time_eval():
        zeros = jnp.full(like.shape, number, dtype or like.dtype)
    return varying_with(sharded_as(zeros, like), like)


def known_zero() -> jax.Array:
    """A float32 0 that is known to be 0 while a program is traced too: no corrections have to be made for it.

    Example:
        >>> jax.jit(lambda x: x + float(known_zero()))(1.0)
        Array(1., dtype=float32, weak_type=True)
    """
    with jax.ensure_compile_time_eval():
        return jnp.zeros((), jnp.float32)
