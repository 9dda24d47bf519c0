"""Quantize and dequantize in one step, with the gradients that quantizers need; from a statistic to a scale.

Quantizing and dequantizing in one step has its derivative written out. Autodiff of the composition
`(clamp(round(x / s + z)) - z) * s` is right, but it saves and reads several arrays of the size of `x`, and leaves a
rule of its own for each of its steps in the program. Written out, the backward pass reads the incoming gradient, `x`
itself and maybe the result, which are there anyway, and nothing more is kept for it.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from jqinject.ops import lean, processes
from jqinject.ops.processes import one_operation
from jqinject.ops.ste import Primals, Tangents, custom_jvp, nearest, with_gradient_of

Offset = jax.Array | None


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


def change_beside(change: jax.Array, result: object) -> Any:
    """The tangent of a value, or of a value and its integers, which have none.

    Args:
        change: of the value.
        result: the value, or both.
    """
    return (
        (change, jax.custom_derivatives.zero_from_primal(result[1])) if isinstance(result, tuple) else change
    )


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


@custom_jvp(0, 1, 2)
def to_scale(floor: float, of_magnitude: bool, steps: float | None, x: jax.Array, divisor: Any) -> jax.Array:
    """`max(x, floor) / steps`, correctly rounded in every program (see `divide`); the gradient passes the maximum.

    Args:
        floor: the minimum, above 0.
        of_magnitude: take `|x|`, with the gradient +1 at 0.
        steps: how many steps of the scale span it, above 0; None for those of an array.
        x: float32: a statistic that is at least 0, or with `of_magnitude` any number.
        divisor: the steps as an array.

    Returns:
        The scale, float32. nan stays nan.

    Example:
        >>> to_scale(1e-3, False, 127.0, jnp.float32(254.0), jnp.float32(1))
        Array(2., dtype=float32)
        >>> jax.grad(to_scale, argnums=3)(1e-3, False, 4.0, jnp.float32(0.0), jnp.float32(1))
        Array(0.25, dtype=float32)
    """
    value = jnp.maximum(jnp.abs(x) if of_magnitude else x, floor)
    if steps is None:
        return quotient(value, divisor)
    if steps == 1:
        return value
    # For a power of two, multiplying by the reciprocal gives the same number.
    return value / steps if math.frexp(steps)[0] == 0.5 else quotient(value, jnp.float32(steps))


def _to_scale_jvp(
    floor: float, of_magnitude: bool, steps: float | None, primals: Primals, tangents: Tangents
) -> tuple[jax.Array, Any]:
    (x, divisor), (dx, ddivisor) = primals, tangents
    # JAX differentiates it likewise, but for a second derivative below the minimum, which is 0.
    scale = to_scale.fun(floor, of_magnitude, steps, x, divisor)
    changes = []
    if not isinstance(dx, SymbolicZero):
        changes.append(dx * lean.choose(x >= 0, jnp.ones_like(x), -1.0) if of_magnitude else dx)
    if not isinstance(ddivisor, SymbolicZero):
        changes.append(-scale * ddivisor)
    if not changes:
        return scale, jnp.zeros_like(scale)
    change = sum(changes[1:], changes[0])
    if steps != 1:
        change = change / (divisor if steps is None else jnp.float32(steps))
    return scale, jnp.broadcast_to(change, scale.shape)


to_scale.defjvp(_to_scale_jvp, symbolic_zeros=True)


def in_range_of(value: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
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
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, divided: Callable[..., jax.Array] = quotient
    ) -> tuple[jax.Array, jax.Array]:
        """`x / scale`, by that division, and the whole number that it is rounded to with the zero point added."""
        one_for_many = self.by_reciprocal and (self.repeated or scale.size != x.size)
        steps = x * divided(jnp.float32(1.0), scale) if one_for_many else divided(x, scale)
        return steps, self.rounding(steps if zero_point is None else steps + zero_point)

    def quantized(
        self, x: jax.Array, scale: jax.Array, zero_point: Offset, low: jax.Array, high: jax.Array
    ) -> Any:
        """What the integers of `x` stand for, and with `payload` the integers beside it."""
        _, rounded = self.rounded(x, scale, zero_point)
        integers = bounded(rounded, low, high)
        floats = (integers if zero_point is None else integers - zero_point) * scale
        return floats if self.payload is None else (floats, integers.astype(self.payload))


#: `quantize_in_steps(how, x, scale, zero_point, low, high)`: `fake_quantize` with float32 bounds.
quantize_in_steps = jax.custom_jvp(Steps.quantized, nondiff_argnums=(0,))


def _jvp(how: Steps, primals: Any, tangents: Any) -> tuple[Any, Any]:
    # Under `checkpoint` the backward pass keeps arguments and result, which are there anyway, and no array of them.
    changes = tuple([None if isinstance(tangent, SymbolicZero) else tangent for tangent in tangents])
    result = quantize_in_steps(how, *primals)
    if how.straight:
        change = _straight_change(primals, changes, result[0] if isinstance(result, tuple) else result)
    else:
        change = jax.checkpoint(partial(_change, how))(primals, changes)
    return result, change_beside(change, result)


def _straight_change(primals: Primals, tangents: Tangents, y: jax.Array) -> jax.Array:
    """Return the change without a mask: `dx + (q - zero_point - x / scale) dscale = dx + (y - x) dscale / scale`."""
    (x, scale, *_), (along_x, along_scale, *_) = primals, tangents
    if along_scale is None:
        return jnp.zeros_like(y) if along_x is None else along_x
    change = jax.checkpoint(_error_times)(y, x, along_scale / scale)
    return change if along_x is None else along_x + change


def _error_times(y: jax.Array, x: jax.Array, relative_change: jax.Array) -> jax.Array:
    return (y - x) * relative_change


def _bounds_compared(
    how: Steps,
    by: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    scale: jax.Array,
    low: jax.Array,
    high: jax.Array,
    zero_point: Offset = None,
) -> jax.Array:
    """1 where `by(clamped, q)` holds for the integer `q` of a number and the same within its bounds, else 0.

    With `clamps_first` `q` is not rounded.
    """
    place, integers = how.rounded(x, scale, zero_point)
    if not how.clamps_first:
        place = integers
    elif zero_point is not None:
        place = place + zero_point
    return by(bounded(place, low, high), place).astype(jnp.float32)


def _summable(
    how: Steps, x: jax.Array, scale: jax.Array, low: jax.Array, high: jax.Array, zero_point: Offset
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x / scale`, the integers, and 1 where a number lies beyond the bounds, else 0.

    Written without a comparison, a choice or `lax.clamp`, and with a division of its own: so XLA sums products of them
    with the incoming gradient in one pass on a CPU, and writes none of their steps to memory.
    """

    def clamped(x: jax.Array, number: jax.Array) -> jax.Array:
        _, least, most = lean.unshared(number, low, high)
        return jnp.minimum(jnp.maximum(x, least), most)

    scale, again = lean.unshared(scale, scale)
    steps, rounded = how.rounded(
        x, scale, zero_point, lambda x, scale: x / jnp.minimum(jnp.maximum(x, scale), again)
    )
    integers = clamped(rounded, scale)
    beyond = rounded - integers
    if how.clamps_first:
        place = steps if zero_point is None else steps + zero_point
        beyond = place - clamped(place, again)
    return steps, integers, jax.lax.sign(jax.lax.abs(beyond))


def _error(
    how: Steps, x: jax.Array, scale: jax.Array, low: jax.Array, high: jax.Array, zero_point: Offset = None
) -> jax.Array:
    """`q - zero_point - x / scale` where a number lies within the bounds, beyond them `q - zero_point`."""
    steps, integers, outside = _summable(how, x, scale, low, high, zero_point)
    largest = float(jnp.finfo(jnp.float32).max)
    _, unit, least, most = lean.unshared(scale, 1.0, -largest, largest)
    centered = integers if zero_point is None else integers - zero_point
    return centered - jnp.minimum(jnp.maximum(steps, least), most) * (unit - outside)


def _outside(how: Steps, *numbers: jax.Array) -> jax.Array:
    """1 where a number lies beyond the bounds, else 0."""
    return _summable(how, *numbers)[2]


def _change(how: Steps, primals: Primals, tangents: Tangents) -> jax.Array:
    x, scale, zero_point, low, high = primals
    along_x, along_scale, along_zero_point, along_low, along_high = tangents
    numbers = (x, scale, low, high) if zero_point is None else (x, scale, low, high, zero_point)

    def compared(by: Callable[..., jax.Array]) -> jax.Array:
        return one_operation(processes.Bound(_bounds_compared, (how, by)), *numbers)

    parts = []
    if along_x is not None:
        parts.append(jax.lax.optimization_barrier(along_x) * compared(operator.eq))
    if along_scale is not None:
        parts.append(one_operation(processes.Bound(_error, (how,)), *numbers) * along_scale)
    # Beyond a bound y = (bound - zero_point) * scale.
    if along_zero_point is not None:
        outside = one_operation(processes.Bound(_outside, (how,)), *numbers)
        parts.append(outside * (-scale * along_zero_point))
    if along_low is not None:
        parts.append(compared(operator.gt) * (scale * along_low))
    if along_high is not None:
        parts.append(compared(operator.lt) * (scale * along_high))
    return sum(parts[1:], parts[0]) if parts else jnp.zeros_like(x)


quantize_in_steps.defjvp(_jvp, symbolic_zeros=True)


def fake_quantize(
    x: jax.Array,
    scale: jax.Array,
    zero_point: Offset,
    low: ArrayLike,
    high: ArrayLike,
    how: Steps = Steps(),
) -> jax.Array | tuple[jax.Array, jax.Array]:
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
