"""Reduce a tensor over axes, groups, devices and mapped axes; the reduction and its derivative are apart.

A statistic that is needed only during calibration is computed under `jax.lax.cond`. Differentiating *through* the
`cond` would write a gradient as large as the tensor, all zeros, in every later step. So the reduction (`kth_smallest`,
`Over.max`, ...) returns a few numbers, `locate` finds the position of an element, which only a derivative needs, and
the derivative itself (`picked`) is elementwise: the compiler fuses it with its neighbours.

An `Over` says what is reduced: axes of the tensor, and names of axes of `shard_map`, `pmap` or `vmap` that it is
distributed over. A tensor is never reshaped for it, because that would gather a sharded tensor. Joining several tensors
that share a statistic would do the same, so these come as a tuple.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial, partialmethod, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops import lean, processes, ste
from jqinject.ops.cut import Cut
from jqinject.ops.processes import one_operation
from jqinject.ops.sharding import Names, extreme_over, is_split, place_over, places_over, sharded_as, sum_over

Axes = int | tuple[int, ...] | Cut | None
#: A tensor, or several that share a statistic: that of all their elements, the first tensor's first.
Tensors = jax.Array | tuple[jax.Array, ...]
#: What a statistic measures of a tensor: one small array, or several.
Measured = jax.Array | tuple[jax.Array, ...]


#: As many elements float32 counts one by one.
COUNTED = 2**24
#: A few units in the last place below 1: an element this close to an extreme counts as the extreme.
ALMOST = 1.0 - 2.0**-21

#: `map_tensors(function, x, *others)`: a function applied to each of some tensors.
map_tensors: Callable[..., Any] = jax.tree.map


def parts_of(x: Tensors) -> tuple[jax.Array, ...]:
    """Tensors that share a statistic, as a tuple even if there is only one."""
    return x if isinstance(x, tuple) else (x,)


class _Kind(NamedTuple):
    """A way to reduce: of an array along axes, of two arrays, and over mapped axes."""

    along: Callable[..., jax.Array]
    of_two: Callable[..., jax.Array]
    over_names: Callable[[jax.Array, Names], jax.Array]


class Over(NamedTuple):
    """What a statistic reduces: a tensor in place, or several without joining them.

    Attributes:
        axes: an axis, a tuple of axes in the order in which elements are counted, an axis in groups, or None for the
            whole tensor. Results broadcast against the tensor along axes; of a whole tensor they are scalars.
        names: of mapped axes that share one statistic.
    """

    axes: Axes = None
    names: Names = ()

    def count(self, x: Tensors) -> int:
        """The number of elements in one statistic."""
        if not (self.names or isinstance(x, tuple)):
            return _elements(self.axes, x.shape)
        return sum(_elements(self.axes, part.shape) for part in parts_of(x)) * places_over(self.names)

    def _reduced(self, kind: _Kind, x: Tensors, of_zero: Any = None) -> jax.Array:
        """The one place that reduces tensors, groups that cross shards included.

        Args:
            kind: the reduction.
            x: what is reduced: a function of the tensor, or of each of several.
            of_zero: this function of a zero that fills up a group; None if these zeros are left out.
        """
        axes = self.axes
        if not (self.names or isinstance(x, tuple) or isinstance(axes, Cut)):
            return kind.along(x, axis=axes, keepdims=axes is not None)
        parts = parts_of(x)
        if not isinstance(axes, Cut):
            result = reduce(kind.of_two, (kind.along(x, axis=axes, keepdims=axes is not None) for x in parts))
            return kind.over_names(result, self.names)
        result = reduce(kind.of_two, (axes.reduced(kind.along, part) for part in parts))
        zeros = sum(axes.zeros(part.shape) for part in parts)
        if zeros and of_zero is not None:
            result = axes.filled(result, kind.of_two(result, zeros * of_zero))
        return kind.over_names(result, self.names)

    max = partialmethod(_reduced, _Kind(jnp.max, jnp.maximum, partial(extreme_over, jax.lax.pmax)), of_zero=0)
    min = partialmethod(_reduced, _Kind(jnp.min, jnp.minimum, partial(extreme_over, jax.lax.pmin)), of_zero=0)
    sum = partialmethod(_reduced, _Kind(jnp.sum, jnp.add, sum_over))

    def positions(self, x: Tensors, in_floats: bool = False) -> tuple[jax.Array, ...] | jax.Array:
        """The number of each element, counted along the axes in their order; one array for each tensor.

        Args:
            x: the tensor, or several.
            in_floats: for `locate`: in float32 as far as it counts. Else in 16 bits if they suffice, else 32.
        """
        parts = parts_of(x)
        before = [0, *accumulate(_elements(self.axes, part.shape) for part in parts)]
        count = self.count(x)
        dtype = np.dtype(np.int16 if count < 2**15 else np.int32)
        dtype = np.dtype(np.float32) if in_floats and count < COUNTED else dtype
        numbered = [
            self._numbered(part, start, before[-1], dtype) for part, start in zip(parts, before, strict=False)
        ]
        return tuple(numbered) if isinstance(x, tuple) else numbered[0]

    def _numbered(self, x: jax.Array, start: int, count: int, dtype: np.dtype) -> jax.Array:
        cut = self.axes if isinstance(self.axes, Cut) else None
        positions = None
        for axis in _axes_of(self.axes, x.ndim):
            places, length = jax.lax.broadcasted_iota(dtype, x.shape, axis), x.shape[axis]
            if cut is not None and axis == cut.axis:
                places, length = places % cut.size, cut.size
            positions = places if positions is None else positions * length + places
        positions = jnp.zeros(x.shape, dtype) if positions is None else positions
        if start:
            positions = positions + start
        if self.names:
            positions = positions + (place_over(self.names) * count).astype(dtype)
        return sharded_as(positions, x)


def _axes_of(axes: Axes, ndim: int) -> tuple[int, ...]:
    """The axes of a tensor that are reduced, from the front, in the order in which elements are counted."""
    if isinstance(axes, Cut):
        return axes.shared
    every = range(ndim) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return tuple(axis % ndim for axis in every)


@lru_cache(maxsize=1024)
def _elements(axes: Axes, shape: tuple[int, ...]) -> int:
    """The number of elements that a tensor of this shape has in one statistic."""
    if isinstance(axes, Cut):
        return axes.size * math.prod(shape[axis] for axis in axes.beside)
    return math.prod(shape[axis] for axis in _axes_of(axes, len(shape)))


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
def _(primals: ste.Primals, tangents: ste.Tangents) -> tuple[jax.Array, Any]:
    (x,), (tangent,) = primals, tangents
    return magnitude(x), change_of_magnitude(x, tangent)


def change_of_magnitude(x: Tensors, dx: Tensors) -> Any:
    """The change of `magnitude(x)` when `x` changes by `dx`."""
    return map_tensors(lambda x, dx: jax.lax.sign(x) * dx, x, dx)


def missed(x: jax.Array, value: jax.Array) -> jax.Array:
    """0 where `x == value`, elsewhere 1; nan where `x` is, and where both are infinite.

    Its sum, or its minimum, is one pass over memory on a CPU, where XLA writes comparisons to memory to reduce them.

    Example:
        >>> missed(jnp.array([1.0, 5.0]), jnp.float32(5))
        Array([1., 0.], dtype=float32)
    """
    return jax.lax.sign(jax.lax.abs(x - value))


def hit(by: Any, near: bool, is_low: bool, x: jax.Array, end: jax.Array) -> jax.Array:
    """1 where an element is, or is near, an end, else 0: in floats, which are counted in one pass on a CPU.

    Args:
        by: what is compared, of `x`: a function, or None for `x`.
        near: whether elements count that are a few units in the last place from an end of their sign, and beyond it.
        is_low: whether the end is the lower one.
        x: an array.
        end: a number.

    Example:
        >>> hit(jnp.abs, False, False, jnp.array([-3.0, 2.0]), jnp.float32(3))
        Array([1., 0.], dtype=float32)
    """
    x = x if by is None else by(x)
    end, zero, unit = lean.unshared(end * ALMOST if near else end, 0.0, 1.0)
    if not near:
        return unit - missed(x, end)
    return unit - jax.lax.sign(jnp.maximum(x - end if is_low else end - x, zero))


@processes.one_program("over")
def locate(x: Tensors, value: jax.Array, positions: Tensors, over: Over) -> jax.Array:
    """The position at which the element `value` of `x` first occurs.

    Args:
        x: the tensor, or several.
        value: an element of it; a scalar over the whole tensor, else with size 1 in the axes.
        positions: of the elements: `over.positions(x, in_floats=True)`.
        over: the axes to search.

    Returns:
        The position, of the dtype of `positions` and the shape of `value`; counted along the axes. If nowhere, as a
        nan, a number that is no position; of an infinity too, in floats.

    Example:
        >>> x, over = jnp.array([1.0, 5.0, 5.0]), Over()
        >>> locate(x, jnp.float32(5), over.positions(x, in_floats=True), over)
        Array(1., dtype=float32)
    """
    in_floats = parts_of(positions)[0].dtype == jnp.float32
    first = over.min(map_tensors(partial(_matching, value, in_floats), x, positions), of_zero=None)
    # A nan would be some position in integers.
    return lean.choose(first < COUNTED, first, -1.0) if in_floats else first


def _matching(value: jax.Array, in_floats: bool, x: jax.Array, positions: jax.Array) -> jax.Array:
    if in_floats:
        return one_operation(_place_or_beyond, x, value, positions)
    return lean.choose(x == value, positions, jnp.iinfo(positions.dtype).max)


def _place_or_beyond(x: jax.Array, value: jax.Array, positions: jax.Array) -> jax.Array:
    value, positions, beyond = lean.unshared(value, positions, COUNTED)
    return positions + beyond * missed(x, value)


def picked(dx: Tensors, position: jax.Array, positions: Tensors, over: Over) -> jax.Array:
    """The change of the element at a position when the tensor changes by `dx`.

    Args:
        dx: of the shape of the tensor, or of each of several.
        position: the result of `locate`.
        positions: of all elements.
        over: the searched axes.
    """

    def change(dx: jax.Array, place: jax.Array) -> jax.Array:
        return lean.choose(place == position.astype(place.dtype), dx, 0.0)

    return over.sum(map_tensors(change, dx, positions))


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


def rank_between(percentile: float, size: int) -> tuple[int, int, np.float32]:
    """1-based ranks around the place `q/100 * (n - 1)`, from 0, among `size` numbers, and the weight of the upper one.

    Example:
        >>> low, high, weight = rank_between(50.0, 4)
        >>> low, high, float(weight)
        (2, 3, 0.5)
    """
    last = size - 1
    place = np.float32(percentile) / np.float32(100) * np.float32(last)
    low, high = (min(max(int(side(place)), 0), last) + 1 for side in (np.floor, np.ceil))
    return low, high, np.float32(place - np.floor(place))


def kth_smallest(x: Tensors, k: int | jax.Array, over: Over) -> jax.Array:
    """The k-th smallest element (1-based), without interpolation.

    Of a whole tensor, near either end, it is selected in two levels, in one pass: the m-th largest number is among the
    m blocks with the largest maxima. Other ranks take a bisection on the bits of integers in the order of the floats,
    32 passes over the tensor (a sort of a million elements takes tens of times as long); for a tensor distributed over
    devices, only counts are sent. A nan is last, and infinite where it is selected.

    Args:
        x: float32 tensor, or several.
        k: rank, 1 to n, n the number of elements; or an array of ranks, of the shape of the result.
        over: the axes to reduce.

    Returns:
        A scalar over the whole tensor, else the tensor with size 1 in the axes.

    Example:
        >>> kth_smallest(jnp.array([4.0, 1.0, 3.0, 2.0]), 3, Over())
        Array(3., dtype=float32)
    """
    if isinstance(k, int) and over == Over() and isinstance(x, jax.Array) and not is_split(x):
        from_below, rank = 2 * k <= x.size, min(k, x.size - k + 1)
        # Half of the length with which there are as many blocks as candidates: blocks are compared in one sweep.
        length = math.isqrt(x.size // rank) // 2
        if length >= LEAST_BLOCK:
            # A maximum may drop nan, and `top_k` sorts it anywhere.
            ordered = jnp.where(jnp.isnan(x), jnp.inf, x)
            selected = _largest_in_blocks(-ordered if from_below else ordered, rank, length)
            return -selected if from_below else selected
    top = jnp.uint32(1 << 31)

    def key_of(x: jax.Array) -> jax.Array:
        """An unsigned integer in the order of the floats, nan last."""
        bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.float32(jnp.nan), x), jnp.uint32)
        return jnp.where(bits >= top, ~bits, bits | top)

    keys = map_tensors(key_of, x)

    def next_bit(i: jax.Array, prefix: jax.Array) -> jax.Array:
        candidate = prefix | (top >> i.astype(jnp.uint32))
        below = map_tensors(lambda keys: (keys < candidate).astype(jnp.int32), keys)
        return jnp.where(over.sum(below, (top < candidate).astype(jnp.int32)) < k, candidate, prefix)

    key: jax.Array = jax.lax.fori_loop(0, 32, next_bit, jnp.zeros_like(over.min(keys)))
    return jax.lax.bitcast_convert_type(jnp.where(key >= top, key & ~top, ~key), jnp.float32)


LEAST_BLOCK = 8  # with shorter blocks there are so many candidates that a bisection is faster


def _largest_in_blocks(x: jax.Array, rank: int, length: int) -> jax.Array:
    """The element of a rank from the largest, among the elements of the blocks with the largest maxima.

    Args:
        x: without nan.
        rank: 1 for the largest.
        length: of a block, whose elements are as far apart as there are blocks.
    """
    numbers, count = x.reshape(-1), x.size // length * length
    blocks = numbers[:count].reshape(length, -1)
    _, places = jax.lax.top_k(blocks.max(axis=0), rank)
    return jax.lax.top_k(jnp.concatenate([blocks[:, places].reshape(-1), numbers[count:]]), rank)[0][-1]


@processes.one_program("momentum")
def running_mean(buffer: jax.Array, update: jax.Array, count: jax.Array, momentum: float | None) -> jax.Array:
    """One step of a running statistic.

    `buffer' = (1 - momentum) * buffer + momentum * update`, the cumulative mean `(count * buffer + update) /
    (count + 1)` when `momentum` is None; the first update (`count == 0`) replaces the buffer. The cumulative mean
    of 2^24 updates, which is as far as float32 counts, is final.

    Args:
        buffer: the running statistic.
        update: the statistic of this batch, same shape.
        count: float32 or int32 scalar, the number of updates so far.
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
        later = lean.choose(count < 2**24, later, buffer)
    else:
        later = buffer * (1.0 - momentum) + update * momentum
    return lean.choose(count == 0, update, later)
