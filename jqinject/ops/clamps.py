"""Clamp, with the gradients that quantizers need: masked, straight through, or that of the ends of a range."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jqinject.ops import lean, processes, sharding
from jqinject.ops.fake_quant import bounded, change_beside
from jqinject.ops.processes import one_operation
from jqinject.ops.ste import Primals, Tangents, custom_jvp, with_gradient_of


def _bound(bound: ArrayLike, x: jax.Array) -> jax.Array:
    """A bound in `x`'s dtype; differentiable if it was an array."""
    return jnp.asarray(bound, dtype=x.dtype)


@custom_jvp(0)
def _clamp(straight: bool, x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    return bounded(x, low, high)


def _clamp_jvp(straight: bool, primals: Primals, tangents: Tangents) -> tuple[jax.Array, jax.Array]:
    (x, low, high), (dx, dlow, dhigh) = primals, tangents
    y = _clamp(straight, *primals)
    if isinstance(dx, SymbolicZero):
        dx = jnp.zeros_like(x)
    if not straight:
        dx = lean.choose(x > high, 0.0 if isinstance(dhigh, SymbolicZero) else dhigh, dx)
        dx = lean.choose(x < low, 0.0 if isinstance(dlow, SymbolicZero) else dlow, dx)
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


@processes.one_program()
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


@custom_jvp(0, 1)
def _within(compute: Compute, to_range: bool, x: jax.Array, ends: tuple[jax.Array, ...], others: Any) -> Any:
    return compute(x, *others)


def _within_jvp(compute: Compute, to_range: bool, primals: Primals, tangents: Tangents) -> tuple[Any, Any]:
    x, ends, _ = primals
    value = _within(compute, to_range, *primals)
    dx, *dends = (None if isinstance(t, SymbolicZero) else t for t in (tangents[0], *tangents[1]))
    dends = dends if to_range else [None] * len(dends)
    change = jax.checkpoint(partial(_change_within, to_range))(x, ends, dx, dends)
    return value, change_beside(change, value)


def _times(x: jax.Array, end: jax.Array) -> jax.Array:
    """Multiply an array by an end; by a scalar so that the backward pass multiplies and sums in one operation."""
    if end.ndim or sharding.is_split(x):
        return x * end
    return jax.lax.dot_general(end, x, (((), ()), ((), ())), precision=jax.lax.Precision.HIGHEST)


def _share(x: jax.Array, y: jax.Array) -> jax.Array:
    """1 where `x > y`, one half where they are equal, else 0: summed in one pass on a CPU."""
    x, y, unit, half = lean.unshared(x, y, 1.0, 0.5)
    return half * (unit + jax.lax.sign(x - y))


def _inside_ends(x: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    """What both ends leave for `x`; not of shares, so that the compiler sees another array."""
    return (0.5 + 0.5 * jax.lax.sign(x - low)) * (0.5 + 0.5 * jax.lax.sign(high - x))


def _beyond_low_end(x: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
    return _share(low, x) * _share(high, x)


def _change_within(to_range: bool, x: jax.Array, ends: Any, dx: Any, dends: Any) -> jax.Array:
    high, low = ends if len(ends) == 2 else (ends[0], -ends[0])
    if not to_range:
        inside = (low <= x) & (x <= high)
        return jnp.zeros_like(x) if dx is None else lean.choose(inside, dx, 0.0)
    # As the derivatives of `jnp.minimum(jnp.maximum(x, low), high)`, one half each where `x` equals an end: the upper
    # end leaves a share of the gradient, and of that the lower one leaves a share for `x`.
    parts: list[jax.Array] = [] if dx is None else [one_operation(_inside_ends, x, high, low) * dx]
    dhigh, dlow = dends if len(ends) == 2 else (dends[0], None if dends[0] is None else -dends[0])
    if dlow is not None:
        parts.append(_times(one_operation(_beyond_low_end, x, high, low), dlow))
    if dhigh is not None:
        parts.append(_times(one_operation(_share, x, high), dhigh))
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
