"""Quantize and dequantize in one step, with its derivative written out.

Autodiff of the composition `(clamp(round(x / s + z)) - z) * s` is right, but it saves and reads several arrays of the
size of `x`, and leaves a rule of its own for each of its steps in the program. Written out, the backward pass reads the
incoming gradient and `x` itself, and nothing more is kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jqinject.ops.clamp import bounded, change_beside, choose, quotient
from jqinject.ops.grid import Grid, Rounding
from jqinject.ops.minifloat import float_steps, from_float_steps
from jqinject.ops.ste import nearest, with_gradient_of

LARGEST = float(jnp.finfo(jnp.float32).max)
Offset = jax.Array | None


def known_zero() -> jax.Array:
    """A float32 0 that is known to be 0 while a program is traced too: no corrections have to be made for it.

    Example:
        >>> jax.jit(lambda x: x + float(known_zero()))(1.0)
        Array(1., dtype=float32, weak_type=True)
    """
    with jax.ensure_compile_time_eval():
        return jnp.zeros((), jnp.float32)


def in_range_of(value: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """What integers stand for, float32, in a dtype: beyond its range, its largest number; the gradient is 1.

    The lowest of 8 bits times the scale of a tensor that holds float16's largest number is not one of float16.

    Args:
        value: float32.
        scale: of the integers; where it is not finite, nothing is hidden.
        dtype: of the result.

    Example:
        >>> float(in_range_of(jnp.float32(-65760.0), jnp.float32(513.75), jnp.float16))
        -65504.0
    """
    largest = float(jnp.finfo(dtype).max)
    if largest < 1e38:
        inside = jnp.where(jnp.isfinite(scale), jnp.clip(value, -largest, largest), value)
        value = with_gradient_of(value, inside)
    return value.astype(dtype)


@dataclass(frozen=True)
class Steps:
    """How numbers become integers: static, equal by value.

    Attributes:
        rounding: an elementwise function without state; its gradient counts as 1.
        straight: whether the gradient passes the clamp too, instead of going to the bound where it clamps.
        by_reciprocal: whether numbers are multiplied by the reciprocal of the scale; see `jqinject.ops.by_reciprocal`.
        repeated: whether the scale has the shape of the numbers, and is one for many of them nevertheless.
        payload: the dtype in which the integers are returned beside the value; None to return the value alone.
        clamps_first: whether the gradient counts numbers as clamped that lie beyond a bound before they are rounded
            (7.3 of at most 7); else only if they still do afterwards.
    """

    rounding: Callable[[jax.Array], jax.Array] = nearest
    straight: bool = False
    by_reciprocal: bool = False
    repeated: bool = False
    payload: Any = None
    clamps_first: bool = False

    def rounded(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, finite: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """`x / scale`, perhaps kept finite, and the whole number that it is rounded to with the zero point added."""
        one_for_many = self.by_reciprocal and (self.repeated or scale.size != x.size)
        steps = x * quotient(jnp.float32(1.0), scale) if one_for_many else quotient(x, scale)
        if finite:
            # It is used twice, and a compiler that stores a quotient for that fuses this clamp, and the quotient in it.
            steps = jax.lax.clamp(-LARGEST, steps, LARGEST)
        return steps, self.rounding(steps if zero_point is None else steps + zero_point)

    def quantized(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, low: jax.Array, high: jax.Array
    ) -> Any:
        """What the integers of `x` stand for, and with `payload` the integers beside it."""
        _, rounded = self.rounded(x, scale, zero_point)
        integers = bounded(rounded, low, high)
        floats = (integers if zero_point is None else integers - zero_point) * scale
        return floats if self.payload is None else (floats, integers.astype(self.payload))


quantize_in_steps = jax.custom_jvp(Steps.quantized, nondiff_argnums=(0,))
"""`quantize_in_steps(how, x, scale, zero_point, low, high)`: `fake_quantize` with float32 bounds."""


def _jvp(how: Steps, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # Under `checkpoint` the backward pass keeps the arguments, which are there anyway, and no array made from them.
    given = [None if isinstance(tangent, SymbolicZero) else tangent for tangent in tangents]
    change = jax.checkpoint(partial(_change, how))(primals, given)
    made = quantize_in_steps(how, *primals)
    return made, change_beside(change, made)


def _change(how: Steps, primals: Any, tangents: Any) -> jax.Array:
    x, scale, zero_point, low, high = primals
    along_x, along_scale, along_zero_point, along_low, along_high = tangents
    steps, rounded = how.rounded(x, scale, zero_point, finite=how.straight)
    integers = bounded(rounded, low, high)
    centered = integers if zero_point is None else integers - zero_point
    place, clamped = rounded, integers
    if how.clamps_first:
        place = steps if zero_point is None else steps + zero_point
        clamped = bounded(place, low, high)
    inside = None if how.straight else clamped == place
    parts = []
    if along_x is not None:
        if inside is not None:
            along_x = jax.lax.optimization_barrier(along_x) * inside.astype(jnp.float32)
        parts.append(along_x)
    if along_scale is not None:
        if inside is None:
            slope = jax.lax.clamp(-LARGEST, centered - steps, LARGEST)
        else:
            slope = choose(inside, centered - steps, centered)
        parts.append(slope * along_scale)
    if inside is not None:  # beyond a bound y = (bound - zero_point) * scale
        if along_zero_point is not None:
            parts.append(choose(inside, 0.0, -scale * along_zero_point))
        if along_low is not None:
            parts.append(choose(place < low, scale * along_low, 0.0))
        if along_high is not None:
            parts.append(choose(place > high, scale * along_high, 0.0))
    return sum(parts[1:], parts[0]) if parts else jnp.zeros_like(centered)


quantize_in_steps.defjvp(_jvp, symbolic_zeros=True)


def fake_quantize(
    x: jax.Array,
    scale: jax.Array,
    zero_point: Offset,
    low: ArrayLike,
    high: ArrayLike,
    how: Steps = Steps(),
) -> Any:
    """Quantize and dequantize: `y = (q - zero_point) * scale`, `q = clamp(round(x / scale + zero_point), low, high)`.

    With `m` = 1 where nothing is clamped, else 0:

        dy/dx = m        dy/dscale = (q - zero_point) - m * x / scale        dy/dzero_point = (m - 1) * scale
        dy/dlow = scale where q was below        dy/dhigh = scale where it was above

    It equals autodiff of the composition, with less memory traffic. With `how.straight` m is 1 everywhere, and the
    bounds get no gradient.

    Args:
        x: a float32 array of any shape.
        scale: float per integer step; broadcasts to the shape of `x`.
        zero_point: the integer that represents 0; broadcasts to the shape of `x`; None without one.
        low: the least integer, a number or an array; nowhere above `high`.
        high: the largest.
        how: rounding, and where the gradient goes.

    Returns:
        An array of the shape and dtype of `x`; with `how.payload` that and the integers.

    Example:
        >>> x, scale = jnp.array([0.26, -0.8]), jnp.float32(0.5)
        >>> fake_quantize(x, scale, None, -7, 7)
        Array([ 0.5, -1. ], dtype=float32)
        >>> jax.grad(lambda s: fake_quantize(x, s, None, -7, 7).sum())(scale)
        Array(0.08000004, dtype=float32)
    """
    low, high = jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32)
    return quantize_in_steps(how, x, scale, zero_point, low, high)


def quantize_on_grid(
    x: jax.Array,
    grid: Grid,
    scale: jax.Array,
    zero_point: jax.Array | None = None,
    rounding: Rounding = nearest,
    dtype: Any = jnp.float32,
    *,
    by_reciprocal: bool = False,
) -> jax.Array:
    """Quantize and dequantize on any grid: `(grid.round(x / scale + zero_point) - zero_point) * scale`.

    It has no gradient of its own: how it passes `x` is up to the caller and the rounding.

    Args:
        x: a float32 array.
        grid: the numbers at scale 1.
        scale: float per step, not 0; broadcasts with `x`.
        zero_point: the number that stands for 0, likewise; None if there is none.
        rounding: to whole numbers; tables have one of their own.
        dtype: of the result, whose range it does not exceed.
        by_reciprocal: whether numbers that share a scale are multiplied by its reciprocal, as quantizers with a
            symmetric range do; see `jqinject.ops.by_reciprocal`.

    Example:
        >>> from jqinject.ops import FloatGrid, IntGrid
        >>> x = jnp.array([0.26, -0.9, 9.0])
        >>> quantize_on_grid(x, IntGrid(4), jnp.float32(0.5)), quantize_on_grid(x, FloatGrid(2, 1), jnp.float32(0.5))
        (Array([ 0.5, -1. ,  3.5], dtype=float32), Array([ 0.25, -1.  ,  3.  ], dtype=float32))
    """
    shared = by_reciprocal and scale.size != x.size
    steps = x * quotient(jnp.float32(1.0), scale) if shared else float_steps(x, scale)
    if zero_point is None:
        return from_float_steps(grid.round(steps, rounding), scale, dtype)
    return from_float_steps(grid.round(steps + zero_point, rounding) - zero_point, scale, dtype)
