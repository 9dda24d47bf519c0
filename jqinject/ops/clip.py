"""The gradient of clipping to a range, for a value that was quantized in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jqinject.ops.choose import choose
from jqinject.ops.fake_quant import change_beside

Compute = Callable[..., Any]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _within(compute: Compute, to_range: bool, x: jax.Array, ends: Any, others: Any) -> Any:
    return compute(x, *others)


def _within_jvp(compute: Compute, to_range: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, ends, _ = primals
    value = _within(compute, to_range, *primals)
    dx, dends = (jax.tree.map(_given, t, is_leaf=_is_zero) for t in tangents[:2])
    change = jax.checkpoint(partial(_change, to_range))(
        x, ends, dx, dends if to_range else (None,) * len(dends)
    )
    return value, change_beside(change, value)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _given(tangent: Any) -> Any:
    return None if _is_zero(tangent) else tangent


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
    if dlow is not None:
        parts.append((below - inside) * dlow)
    if dhigh is not None:
        parts.append((1.0 - below) * dhigh)
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
