"""Clamp and choose, with the gradients that quantizers need.

Everyday functions of arrays that leave no more operations in a program than they need.

Clamping, by how the gradient passes: masked, or straight through.

The gradient of clipping to a range, for a value that was quantized in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jqinject.ops.processes import one_program
from jqinject.ops.sharding import sharded_as, varying_with
from jqinject.ops.ste import with_gradient_of


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
        which if which.shape in (shape, ()) else _filled(which, shape, bool, like),
        x if isinstance(x, jax.Array) and x.shape == shape else _filled(x, shape, dtype, like),
        y if isinstance(y, jax.Array) and y.shape == shape else _filled(y, shape, dtype, like),
    )


def _filled(x: ArrayLike, shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    if not isinstance(x, jax.Array) and isinstance(like, jax.core.Tracer):
        # One number, repeated by stride 0: part of the program, where it stays one number.
        return sharded_as(cast(jax.Array, np.broadcast_to(np.asarray(x, dtype), shape)), like)
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


def known_zeros(like: jax.Array, dtype: Any = None, number: float = 0.0) -> jax.Array:
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


def scalar_clamp_min_ste(x: ArrayLike, min_val: float) -> jax.Array:
    """`max(x, min_val)`; gradient 1.

    Example:
        >>> scalar_clamp_min_ste(jnp.array([1.5, 0.2]), 0.3)
        Array([1.5, 0.3], dtype=float32)
    """
    x = jnp.asarray(x)
    return with_gradient_of(x, jnp.maximum(x, _bound(min_val, x)))


@one_program()
def _signed_clamp_min(x: jax.Array, min_val: jax.Array) -> jax.Array:
    magnitude = jnp.maximum(jnp.abs(x), min_val)
    return jax.lax.select(x < 0, -magnitude, magnitude)


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
    return with_gradient_of(x, _signed_clamp_min(x, _bound(min_val, x)))


Compute = Callable[..., Any]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _within(compute: Compute, to_range: bool, x: jax.Array, ends: Any, others: Any) -> Any:
    return compute(x, *others)


def _within_jvp(compute: Compute, to_range: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, ends, _ = primals
    value = _within(compute, to_range, *primals)
    dx, *dends = (None if isinstance(t, SymbolicZero) else t for t in (tangents[0], *tangents[1]))
    change = jax.checkpoint(partial(_change, to_range))(
        x, ends, dx, dends if to_range else [None] * len(dends)
    )
    return value, change_beside(change, value)


def _change(to_range: bool, x: jax.Array, ends: Any, dx: Any, dends: Any) -> jax.Array:
    high, low = ends if len(ends) == 2 else (ends[0], -ends[0])
    if not to_range:
        inside = (low <= x) & (x <= high)
        return jnp.zeros_like(x) if dx is None else choose(inside, dx, 0.0)
    # As the derivatives of `jnp.maximum` and `jnp.minimum`: one half each where `x` equals an end.
    above = 0.5 + 0.5 * jax.lax.sign(x - low)
    below = 0.5 + 0.5 * jax.lax.sign(high - x)
    inside = above * below
    parts: list[jax.Array] = [] if dx is None else [inside * dx]
    dhigh, dlow = dends if len(ends) == 2 else (dends[0], None if dends[0] is None else -dends[0])
    # Clamped, which changes nothing: else a compiler that sums the products of stored factors stores more of them.
    if dlow is not None:
        parts.append(jax.lax.clamp(0.0, below - inside, 1.0) * dlow)
    if dhigh is not None:
        parts.append(jax.lax.clamp(0.0, 1.0 - below, 1.0) * dhigh)
    return sum(parts[1:], parts[0]) if parts else jnp.zeros_like(x)


_within.defjvp(_within_jvp, symbolic_zeros=True)


def within_range(
    compute: Compute,
    x: jax.Array,
    high: jax.Array,
    low: jax.Array | None,
    *others: jax.Array,
    to_range: bool = True,
) -> Any:
    """The number `compute(x, *others)` with the gradient of `jnp.clip(x, low, high)`.

    It passes straight through to `x` inside the range, and where `x` lies beyond an end it goes to that end. At an end
    either gets half of it.

    Args:
        compute: quantizes `x`, to a value or to a value and integers beside it; `others` get no gradient.
        x: float32.
        high: the upper end of the range, broadcasts with `x`.
        low: the lower end; None for `-high`.
        others: further arrays that `compute` takes.
        to_range: whether the ends get a gradient; if not, `x` at an end counts as inside.

    Returns:
        What `compute` returns.

    Example:
        >>> x = jnp.array([0.4, 3.0])
        >>> jax.grad(lambda x: within_range(jnp.round, x, jnp.float32(2), None).sum())(x)
        Array([1., 0.], dtype=float32)
    """
    ends = (high,) if low is None else (high, low)
    return _within(compute, to_range, x, ends, others)


def bounded(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """The number that `tensor_clamp` returns, without its derivative: for derivative rules that have their own.

    Args:
        x: a float array.
        low: lower bound, of the dtype of `x`; broadcasts with it.
        high: upper bound, likewise.

    Example:
        >>> bounded(jnp.array([1.7, -0.5]), jnp.float32(0), jnp.float32(1))
        Array([1., 0.], dtype=float32)
    """
    if low.ndim == 0 and high.ndim == 0:
        return jax.lax.clamp(low, x, high)
    return jnp.maximum(jnp.minimum(x, high), low)


def change_beside(change: jax.Array, made: Any) -> Any:
    """The tangent of a value, or of a value and its integers, which have none.

    Args:
        change: of the value.
        made: the value, or both.
    """
    return (change, jax.custom_derivatives.zero_from_primal(made[1])) if isinstance(made, tuple) else change


def quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """The number that `divide` returns, without its derivative: for derivative rules that have their own.

    Args:
        x: a float32 array.
        divisor: a float32 number or array that broadcasts with `x`, not 0.

    Example:
        >>> quotient(jnp.float32(254.0), jnp.float32(127))
        Array(2., dtype=float32)
    """
    return x / bounded(x, divisor, divisor)  # the divisor for every number, nan for nan
