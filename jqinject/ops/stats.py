"""Statistics of a tensor in two parts: a reduction without gradient, then its gradient attached elementwise.

A statistic that is needed during calibration only is computed under `jax.lax.cond`. Differentiating *through*
the
`cond` would write a gradient as large as the tensor in every later step, all zeros. So the reduction
(`kth_smallest`,
`jnp.max`, ...) runs on a tensor without gradient and returns a few numbers, and `attach_gradient` gives the
result its derivative: elementwise weights that the compiler fuses with its neighbours.

What is reduced is an `Over`: axes of the tensor, and names of axes of `shard_map`, `pmap` or `vmap` that it is spread
over. A tensor is never laid out anew for it: a reshape would gather one that is sharded, and so would joining several
that share a statistic, which come as a tuple.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jqinject.ops.devices.explicit_axes import sharded_as
from jqinject.ops.devices.mapped import Names, max_over, sum_over
from jqinject.ops.devices.over import Over, Tensors, each, parts_of
from jqinject.ops.one_program import one_program


class Selected(NamedTuple):
    """An element picked from a tensor: its value and its position (axis kept with size 1; flat if None)."""

    value: jax.Array
    position: jax.Array


class Extreme(NamedTuple):
    """The largest element of a whole tensor and how many elements share it (they share the gradient)."""

    value: jax.Array
    ties: jax.Array


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attach(names: Names, x: Tensors, value: jax.Array, weights: Any) -> jax.Array:
    del names, x, weights
    return value


@_attach.defjvp
def _(names, primals, tangents):
    _, value, weights = primals
    slopes = [
        _slope(value, *each_part) for each_part in zip(parts_of(weights), parts_of(tangents[0]), strict=True)
    ]
    return _attach(names, *primals), sum_over(reduce(jnp.add, slopes), names).reshape(value.shape)


def _slope(value: jax.Array, weights: jax.Array, tangent: jax.Array) -> jax.Array:
    same = value.ndim == tangent.ndim
    axes = tuple(i for i in range(tangent.ndim) if not same or value.shape[i] != tangent.shape[i])
    # An element without weight gets no gradient, not even 0 times nan.
    weighed = weights * tangent
    has_weight = sharded_as(jnp.broadcast_to(weights != 0, weighed.shape), weighed)
    weighed = jnp.where(has_weight, weighed, jnp.zeros_like(weighed))
    return jnp.sum(weighed, axis=axes, keepdims=same)


def attach_gradient(x: Tensors, value: jax.Array, weights: Any, names: Names = ()) -> jax.Array:
    """The number `value` with the derivative `weights` with respect to `x`.

    `d value = sum(weights * dx)` over the axes in which `value` has size 1, or over all axes when `value` is
    a scalar.

    Args:
        x: the tensor that receives the gradient, or several.
        value: a scalar, or an array of the rank of `x` with 1 in every reduced axis; gets no gradient.
        weights: array that broadcasts with `x`, of several tensors one for all or one for each; gets no gradient.
        names: of mapped axes that `x` is spread over: the sum is over them too.

    Returns:
        `value`.

    Example:
        >>> x = jnp.array([1.0, -3.0])
        >>> jax.grad(lambda x: attach_gradient(x, jnp.float32(3), jnp.array([0.0, -1.0])))(x)
        Array([ 0., -1.], dtype=float32)
    """
    if isinstance(x, tuple) and not isinstance(weights, tuple):
        weights = (weights,) * len(x)
    return _attach(names, x, value, weights)


@jax.custom_jvp
def magnitude(x: jax.Array) -> jax.Array:
    """`|x|`, whose derivative at 0 is 0: a weight of exactly 0 moves no statistic of magnitudes.

    `jnp.abs` has the slope 1 there, which pushes pruned weights (and what a ReLU returns) to one side.

    Args:
        x: a float array.

    Returns:
        The magnitudes.

    Example:
        >>> jax.grad(lambda x: magnitude(x).sum())(jnp.array([-2.0, 0.0, 2.0]))
        Array([-1.,  0.,  1.], dtype=float32)
    """
    return jnp.abs(x)


@magnitude.defjvp
def _(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return magnitude(x), jnp.where(x > 0, tangent, jnp.where(x < 0, -tangent, jnp.zeros_like(tangent)))


@one_program("over")
def locate(x: Tensors, value: jax.Array, over: Over) -> Selected:
    """Where `value` first occurs in `x`; a nan is found at the first nan.

    Args:
        x: the tensor, or several.
        value: an element of it; a scalar over the whole tensor, else with size 1 in the axes.
        over: what is searched.

    Returns:
        `Selected(value, position)`.

    Example:
        >>> locate(jnp.array([1.0, 5.0, 5.0]), jnp.float32(5), Over()).position
        Array(1, dtype=int32)
    """

    def found(x: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.where((x == value) | (x != x), positions, jnp.iinfo(jnp.int32).max)

    return Selected(value, over.min(each(found, x, over.positions(x))))


def select(x: Tensors, selected: Selected, over: Over) -> jax.Array:
    """The selected element, as a function of `x`: the whole gradient goes to that element.

    Args:
        x: the tensor from which `selected` was taken.
        selected: what `locate` returned.
        over: what was searched.

    Returns:
        `selected.value`, differentiable.
    """
    weights = each(lambda x, place: (place == selected.position).astype(x.dtype), x, over.positions(x))
    return attach_gradient(x, selected.value, weights, over.names)


def extreme(x: Tensors, value: jax.Array, names: Names = ()) -> Extreme:
    """`value`, the largest (or smallest) element of `x`, and how many elements equal it."""
    return Extreme(value, Over(None, names).sum(each(lambda x: (x == value).astype(jnp.float32), x)))


def share(x: Tensors, measured: Extreme, names: Names = ()) -> jax.Array:
    """The extreme element as a function of `x`: elements that tie share the gradient equally."""
    weights = each(lambda x: (x == measured.value).astype(x.dtype) / jnp.maximum(measured.ties, 1), x)
    return attach_gradient(x, measured.value, weights, names)


def largest(x: jax.Array, axes: Sequence[int], names: Names = ()) -> jax.Array:
    """`max(x, 0)` over some axes, kept with size 1; elements that tie share the gradient equally.

    A compiler may compute `x` once for the maximum and once more, rounded otherwise, for the gradient. The derivative
    of `jnp.max` divides by the number of elements that equal the maximum, which is 0 then; here no element gets any.

    Args:
        x: the tensor; of the rest of an empty one 0 is the largest.
        axes: to reduce.
        names: of mapped axes that the tensor is spread over.

    Example:
        >>> x = jnp.array([1.0, 3.0, 3.0])
        >>> jax.value_and_grad(lambda x: largest(x, (0,))[0])(x)
        (Array(3., dtype=float32), Array([0. , 0.5, 0.5], dtype=float32))
    """
    fixed = jax.lax.stop_gradient(x)
    value = max_over(jnp.max(fixed, tuple(axes), keepdims=True, initial=-jnp.inf), names)
    equal = (fixed == value).astype(x.dtype)
    ties = sum_over(jnp.sum(equal, tuple(axes), keepdims=True), names)
    return jnp.maximum(attach_gradient(x, value, equal / jnp.maximum(ties, 1), names), 0.0)


def measure(x: Tensors, value: jax.Array, over: Over) -> Selected | Extreme:
    """What `attach` needs to know of the extreme `value` of `x`: along axes the first of equal elements is selected,
    over the whole tensor they share.
    """
    return locate(x, value, over) if over.keeps else extreme(x, value, over.names)


def attach(x: Tensors, measured: Selected | Extreme, over: Over) -> jax.Array:
    """The measured element as a differentiable function of `x`."""
    if isinstance(measured, Extreme):
        return share(x, measured, over.names)
    return select(x, measured, over)


def rank_high(percentile: float, size: int) -> int:
    """1-based rank of a high percentile among `size` numbers: `floor(q/100 * n + 1/2)`, kept in 1 .. n.

    Example:
        >>> rank_high(99.999, 100), rank_high(50.0, 25)
        (100, 13)
    """
    return min(max(math.floor(0.01 * percentile * size + 0.5), 1), max(size, 1))


def rank_low(percentile: float, size: int) -> int:
    """1-based rank of a low percentile among `size` numbers: `ceil(q/100 * n)`, kept in 1 .. n.

    Example:
        >>> rank_low(0.001, 100), rank_low(5.0, 100)
        (1, 5)
    """
    return min(max(math.ceil(0.01 * percentile * size), 1), max(size, 1))


def kth_smallest(x: Tensors, k: int | jax.Array, over: Over) -> jax.Array:
    """The k-th smallest element (1-based), without interpolation.

    A maximum or minimum at the ends; else by bisection on the bits, 32 passes over the tensor whatever the rank (a sort
    of a million elements takes tens of times as long). Of a tensor that is spread over devices only counts travel.

    Args:
        x: float32 tensor, or several.
        k: rank, 1 to n, n the number of elements; or an array of them, of the shape of the result.
        over: what is reduced.

    Returns:
        A scalar over the whole tensor, else the tensor with size 1 in the axes.

    Example:
        >>> kth_smallest(jnp.array([4.0, 1.0, 3.0, 2.0]), 3, Over())
        Array(3., dtype=float32)
    """
    if isinstance(k, int) and k == over.count(x):
        return over.max(x)
    if isinstance(k, int) and k == 1:
        return over.min(x)
    return _bisect(x, k, over)


def _bisect(x: Tensors, k: int | jax.Array, over: Over) -> jax.Array:
    """The k-th smallest, bit by bit: unsigned integers in the order of the floats, nan last."""
    top = jnp.uint32(1 << 31)

    def key_of(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.float32(jnp.nan), x), jnp.uint32)
        return jnp.where(bits >= top, ~bits, bits | top)

    keys = each(key_of, x)

    def next_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (top >> i.astype(jnp.uint32))
        below = over.sum(each(lambda keys: (keys < candidate).astype(jnp.int32), keys))
        return jnp.where(below < k, candidate, found)

    key = jax.lax.fori_loop(0, 32, next_bit, jnp.zeros_like(over.min(keys)))
    return jax.lax.bitcast_convert_type(jnp.where(key >= top, key & ~top, ~key), jnp.float32)


@one_program("momentum")
def running_mean(buffer: jax.Array, update: jax.Array, count: jax.Array, momentum: float | None) -> jax.Array:
    """One step of a running statistic.

    `buffer' = (1 - momentum) * buffer + momentum * update`, the cumulative mean `(count * buffer + update) /
    (count + 1)` when `momentum` is None; the first update (`count == 0`) replaces the buffer.

    Args:
        buffer: the running statistic.
        update: the statistic of this batch, same shape.
        count: int32 scalar, the number of updates so far.
        momentum: weight of the new one, or None.

    Returns:
        The new buffer.

    Example:
        >>> running_mean(jnp.float32(1), jnp.float32(3), jnp.int32(5), 0.1)
        Array(1.2, dtype=float32)
    """
    if momentum is None:
        total = (count + 1).astype(jnp.float32)
        later = buffer * (count.astype(jnp.float32) / total) + update / total
    else:
        later = buffer * (1.0 - momentum) + update * momentum
    return jnp.where(count == 0, update, later)
