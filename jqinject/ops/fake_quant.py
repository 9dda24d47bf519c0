"""Quantize and dequantize in one step, with its derivative written out.

Autodiff of the composition `(clamp(round(x / s + z)) - z) * s` is right, but it saves and reads several arrays of the
size of `x`. Written out, the backward pass reads the incoming gradient and `x` itself, and nothing more is kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jqinject.ops.broadcast import spread
from jqinject.ops.power import divide

LARGEST = float(jnp.finfo(jnp.float32).max)
ToInteger = Callable[[jax.Array], jax.Array]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fake_quantize(to_integer: ToInteger, x: jax.Array, scale: jax.Array, zero_point: jax.Array) -> jax.Array:
    return (to_integer(divide(x, scale) + zero_point) - zero_point) * scale


def _fake_quantize_jvp(to_integer: ToInteger, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # Under `checkpoint` the backward pass keeps the arguments, which are there anyway, and no array made from them.
    given = [None if isinstance(tangent, SymbolicZero) else tangent for tangent in tangents]
    change = jax.checkpoint(partial(_change, to_integer))(primals, given)
    return _fake_quantize(to_integer, *primals), change


def _change(to_integer: ToInteger, primals: Any, tangents: Any) -> jax.Array:
    x, scale, zero_point = primals
    steps = jnp.clip(divide(x, scale), -LARGEST, LARGEST)  # times a slope of 0 it must be 0
    position = steps + zero_point
    # The derivative of an elementwise function at every element: its directional derivative along ones.
    integers, slope = jax.jvp(to_integer, (position,), (jnp.ones_like(position),))
    centered = integers - zero_point
    change = jnp.zeros_like(position)
    along_x, along_scale, along_zero_point = tangents
    if along_x is not None:
        change = change + slope * jax.lax.optimization_barrier(along_x)
    if along_scale is not None:
        change = change + (centered - slope * steps) * spread(along_scale, change.shape)
    if along_zero_point is not None:
        change = change + (slope - 1) * scale * along_zero_point
    return change


_fake_quantize.defjvp(_fake_quantize_jvp, symbolic_zeros=True)


def fake_quantize(x: jax.Array, scale: jax.Array, zero_point: jax.Array, to_integer: ToInteger) -> jax.Array:
    """Quantize and dequantize: `y = (q - zero_point) * scale`, `q = to_integer(x / scale + zero_point)`.

    With `m` the derivative of `to_integer` (1 where a rounding passes straight through, 0 where a clamp masks):

        dy/dx = m        dy/dscale = (q - zero_point) - m * x / scale        dy/dzero_point = (m - 1) * scale

    It equals autodiff of the composition, with less memory traffic.

    Args:
        x: a float32 array of any shape.
        scale: float per integer step; broadcasts to the shape of `x`.
        zero_point: the integer that stands for 0; broadcasts to the shape of `x`.
        to_integer: an elementwise function without state, hashable: rounding, then clamping.

    Returns:
        An array of the shape and dtype of `x`.

    Example:
        >>> from jqinject.ops import round_ste
        >>> x, scale, zero_point = jnp.array([0.26, -0.8]), jnp.float32(0.5), jnp.float32(0)
        >>> fake_quantize(x, scale, zero_point, round_ste)
        Array([ 0.5, -1. ], dtype=float32)
        >>> jax.grad(lambda s: fake_quantize(x, s, zero_point, round_ste).sum())(scale)
        Array(0.08000004, dtype=float32)
    """
    return _fake_quantize(to_integer, x, scale, zero_point)
