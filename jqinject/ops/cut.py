"""Groups whose elements lie on several devices: reduced and quantized without moving them; and warnings of tensors that
are gathered nevertheless.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.processes import is_traced, on_one_device
from jqinject.ops.sharding import by_compiler, is_split, sharded_as, shards_along
from jqinject.ops.ste import with_gradient_of


class GatheredWarning(UserWarning):
    """A program over several devices gathers a tensor if it is sharded, for a component of your own."""


def warn_if_gathered(x: jax.Array, axes: Sequence[int], message: str) -> jax.Array:
    """`x`; a `GatheredWarning` says that it is gathered if it is sharded along certain axes.

    Shards along explicit axes, and those of concrete arrays, are known. Those along automatic axes are not known while
    a program is traced; then the warning comes when the program is lowered for several devices.

    Args:
        x: the tensor.
        axes: along which it must not be sharded, from the front.
        message: what is gathered, why, and the cure.

    Example:
        >>> import jax.numpy as jnp
        >>> warn_if_gathered(jnp.ones(2), (0,), "not said: one device")
        Array([1., 1.], dtype=float32)
    """
    counts = [shards_along(x, axis) if is_split(x) else _shards_along(x, axis) for axis in axes]
    if None in counts and jax.device_count() > 1:
        warning = (message, GatheredWarning)
        return with_gradient_of(x, on_one_device(_same, _same, jax.lax.stop_gradient(x), warning=warning))
    if any(count is not None and count > 1 for count in counts):
        warnings.warn(message, GatheredWarning, stacklevel=1)  # of one place, so that each is shown once
    return x


def _same(x: jax.Array) -> jax.Array:
    return x


COMBINED = {jnp.max: jax.ops.segment_max, jnp.min: jax.ops.segment_min, jnp.sum: jax.ops.segment_sum}


@dataclass(frozen=True)
class Cut:
    """An axis that is cut into groups without becoming two axes.

    A reduction goes over pieces of groups first, which no shard divides, and only sends what it finds of these. Its
    result has the shape of the tensor: every element has that of its group. Zeros fill up the last group. Groups may
    share their numbers over further axes too, which are reduced with them and kept with size 1.

    Attributes:
        axis: the axis, from the front.
        size: elements of a group.
        piece: elements of a piece, a divisor of `size`.
        beside: the further axes, from the front.
        spreads: whether a statistic along it has the shape of the tensor too, instead of one number for each group.
    """

    axis: int
    size: int
    piece: int
    beside: tuple[int, ...] = ()
    spreads: bool = False

    @property
    def shared(self) -> tuple[int, ...]:
        """The axes that share a number, in order."""
        return tuple(sorted((self.axis, *self.beside)))

    def zeros(self, shape: tuple[int, ...]) -> int:
        """How many zeros the last group has, of a tensor of this shape.

        Example:
            >>> Cut(axis=0, size=2, piece=1, beside=(1,)).zeros((3, 5))
            5
        """
        return -shape[self.axis] % self.size * math.prod(shape[axis] for axis in self.beside)

    def reduced(self, reduction: Any, x: jax.Array) -> jax.Array:
        """`jnp.max`, `jnp.min` or `jnp.sum` of each group without the zeros that fill up the last, for each element.

        Example:
            >>> Cut(axis=0, size=2, piece=1).reduced(jnp.sum, jnp.array([1.0, 2.0, 3.0]))
            Array([3., 3., 3.], dtype=float32)
            >>> Cut(axis=0, size=2, piece=1, beside=(1,)).reduced(jnp.sum, jnp.ones((3, 5)))
            Array([[10.],
                   [10.],
                   [ 5.]], dtype=float32)
        """
        if self.beside:
            x = reduction(x, axis=self.beside, keepdims=True)
        return self._repeated(self._found(reduction, x), x)

    def filled(self, reduced: jax.Array, with_fill: jax.Array) -> jax.Array:
        """What was found of each group; of the last, which zeros fill up, `with_fill`."""
        last = reduced.shape[self.axis] // self.size * self.size
        places = jax.lax.broadcasted_iota(jnp.int32, reduced.shape, self.axis)
        return jnp.where(sharded_as(places >= last, reduced), with_fill, reduced)

    def one_each(self, x: jax.Array) -> jax.Array:
        """Of numbers that the elements of a group share, one for each group.

        Example:
            >>> Cut(axis=0, size=2, piece=1).one_each(jnp.array([3.0, 3.0, 1.0]))
            Array([3., 1.], dtype=float32)
        """
        # The first of each group, found without comparing: a comparison loses gradients where a compiler rounds anew.
        first = jax.lax.broadcasted_iota(jnp.int32, x.shape, self.axis) % self.size == 0
        return self._found(jnp.sum, jnp.where(sharded_as(first, x), x, jnp.zeros((), x.dtype)))

    def in_two(self, x: jax.Array) -> jax.Array:
        """Numbers that the elements of a group share, in the shape with two axes; `spread` brings them back.

        Example:
            >>> Cut(axis=0, size=2, piece=1).in_two(jnp.array([3.0, 3.0, 1.0]))
            Array([[3.],
                   [1.]], dtype=float32)
        """
        return jnp.expand_dims(x if x.shape[self.axis] == 1 else self.one_each(x), self.axis + 1)

    def spread(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Numbers that groups have one of, in the shape with two axes, as they broadcast against a tensor.

        Example:
            >>> Cut(axis=0, size=2, piece=1).spread(jnp.array([[0.5], [2.0]]), jnp.zeros(3))
            Array([0.5, 0.5, 2. ], dtype=float32)
        """
        if x.ndim <= like.ndim:
            return x
        squeezed = jnp.squeeze(x, self.axis + 1)
        return squeezed if squeezed.shape[self.axis] == 1 else self._repeated(squeezed, like)

    def of_pieces(self, x: jax.Array, length: int) -> jax.Array:
        """Numbers that groups have one of, in the shape with two axes, once for each piece.

        Example:
            >>> Cut(axis=0, size=4, piece=2).of_pieces(jnp.array([[0.5], [2.0]]), 6)
            Array([[0.5],
                   [0.5],
                   [2. ]], dtype=float32)
        """
        if x.ndim == 0 or x.shape[self.axis] == 1:
            return x
        group_of = np.arange(-(-length // self.piece)) // (self.size // self.piece)
        return jnp.take(x, group_of, axis=self.axis, mode="clip")

    def _found(self, reduction: Any, x: jax.Array) -> jax.Array:
        """What is found of each group, in place of the groups' elements."""
        axis, length = self.axis, x.shape[self.axis]
        group_of = np.arange(length // self.piece) // (self.size // self.piece)

        def combined(x: jax.Array) -> jax.Array:
            if self.piece > 1:
                shape = (*x.shape[:axis], length // self.piece, self.piece, *x.shape[axis + 1 :])
                x = reduction(x.reshape(shape), axis=axis + 1)
            first = jnp.moveaxis(x, axis, 0)
            return jnp.moveaxis(COMBINED[reduction](first, group_of, -(-length // self.size)), 0, axis)

        return by_compiler(combined, x, x, axis)

    def _repeated(self, groups: jax.Array, like: jax.Array) -> jax.Array:
        group_of = np.arange(like.shape[self.axis]) // self.size
        return by_compiler(
            lambda groups: jnp.take(groups, group_of, axis=self.axis, mode="clip"), like, groups
        )


def cut_in_place(x: jax.Array, size: int, axis: int) -> Cut | None:
    """How to cut an axis into groups that may cross the borders of its shards; None if groups cannot.

    The shards of concrete arrays are known. Those over automatic axes of a mesh show in no type while a program is
    traced: then any number of shards counts that the available devices allow. Explicit axes show; along these, groups
    are cut in place unless shards hold whole groups, since only then a type can name the sharding of the two axes.

    Args:
        x: the tensor.
        size: elements of a group.
        axis: from the front.

    Example:
        >>> cut_in_place(jnp.zeros((64, 3)), 16, 0)
    """
    length = x.shape[axis]
    if is_split(x):
        shards = shards_along(x, axis)
        crosses = shards > 1 and bool(length % size or length // size % shards)
        return Cut(axis, size, math.gcd(size, length // shards)) if crosses else None
    places = _shards_along(x, axis)
    if length == 0 or places == 1:
        return None
    most = math.gcd(length, jax.device_count()) if places is None else places
    counts = [n for n in range(2, most + 1) if places in (None, n) and most % n == 0]
    if not any(length // n % size and size % (length // n) for n in counts):
        return None
    return Cut(axis, size, math.gcd(size, length // most))


def _shards_along(x: jax.Array, axis: int) -> int | None:
    """The number of shards of a concrete array along an axis; None for a tracer."""
    if is_traced(x):
        return None
    return x.shape[axis] // max(x.sharding.shard_shape(x.shape)[axis], 1)
