"""Groups: an axis cut into pieces of one size, each of which has numbers (a scale) of its own."""

import jax
import jax.numpy as jnp

from jqinject.ops.sharding import merge_axes, sharded_as, shards_along, whole


def fitting_size(group_size: int, length: int) -> int:
    """The elements of a group along an axis of `length` elements: a group that would be longer is the axis.

    The 3 input channels of an image are one group of 3, and not of 32 with zeros behind.

    Example:
        >>> fitting_size(32, 40), fitting_size(32, 3)
        (32, 3)
    """
    return max(min(group_size, length), 1)


def split_groups(x: jax.Array, group_size: int, group_dim: int) -> jax.Array:
    """An axis as two: the groups, and the elements of a group; zeros fill up the last group.

    Args:
        x: an array of any dtype.
        group_size: elements of a group.
        group_dim: the axis, from the front or (negative) from the end.

    Returns:
        An array of one axis more: `(..., ceil(n / group_size), group_size, ...)` in the place of `(..., n, ...)`.

    Example:
        >>> split_groups(jnp.arange(1, 6), 2, 0)
        Array([[1, 2],
               [3, 4],
               [5, 0]], dtype=int32)
    """
    axis = group_dim % x.ndim
    missing = -x.shape[axis] % group_size
    shards = shards_along(x, axis)
    if shards > 1 and (missing or x.shape[axis] // group_size % shards):
        x = whole(x, axis)  # its shards do not hold whole groups
    if missing:
        x = jnp.pad(x, [(0, missing if place == axis else 0) for place in range(x.ndim)])
    return x.reshape(grouped_shape(x.shape, group_size, axis))


def grouped_shape(shape: tuple[int, ...], group_size: int, group_dim: int) -> tuple[int, ...]:
    """The shape that `split_groups` gives an array of `shape`.

    Example:
        >>> grouped_shape((40, 3), 32, 0)
        (2, 32, 3)
    """
    axis = group_dim % len(shape)
    return (*shape[:axis], -(-shape[axis] // group_size), group_size, *shape[axis + 1 :])


def elements_axis(group_dim: int) -> int:
    """The axis of a grouped array along which the elements of a group lie; the groups lie along the one before.

    Args:
        group_dim: the axis that was cut, from the front or (negative) from the end.

    Example:
        >>> elements_axis(0), elements_axis(-1)
        (1, -1)
    """
    return group_dim + 1 if group_dim >= 0 else group_dim


def join_groups(x: jax.Array, group_dim: int, length: int) -> jax.Array:
    """The inverse of `split_groups`: what filled up the last group is cut off.

    Args:
        x: a grouped array.
        group_dim: the axis of the result, from the front or (negative) from the end.
        length: elements along it.

    Example:
        >>> join_groups(jnp.array([[1, 2], [3, 4], [5, 0]]), 0, 5)
        Array([1, 2, 3, 4, 5], dtype=int32)
    """
    axis = elements_axis(group_dim) % x.ndim - 1
    joined = merge_axes(x, axis, axis + 2)
    return jax.lax.slice_in_dim(joined, 0, length, axis=axis) if joined.shape[axis] != length else joined


def ungrouped(x: jax.Array, like: jax.Array) -> jax.Array:
    """What may have been cut into groups that are full, in the shape and sharding that it had before.

    Args:
        x: of that shape, or with one of its axes as (groups, elements).
        like: what was cut.

    Example:
        >>> ungrouped(jnp.zeros((2, 8, 1, 3)), jnp.zeros((16, 1, 3))).shape
        (16, 1, 3)
    """
    if x.ndim == like.ndim:
        return x
    differing = (place for place, length in enumerate(like.shape) if x.shape[place] != length)
    axis = next(differing, like.ndim - 1)
    return sharded_as(merge_axes(x, axis, axis + 2), like)


def spread_groups(x: jax.Array, group_size: int, group_dim: int, length: int) -> jax.Array:
    """What every group has one of (its scale), once for each element, without the groups.

    Args:
        x: of the grouped shape with 1 along the elements of a group; or a scalar, which stays one.
        group_size: elements of a group.
        group_dim: the axis of the result, from the front or (negative) from the end.
        length: elements along it.

    Example:
        >>> spread_groups(jnp.array([[0.5], [2.0]]), 2, 0, 3)
        Array([0.5, 0.5, 2. ], dtype=float32)
    """
    if x.ndim == 0:
        return x
    axis = elements_axis(group_dim) % x.ndim
    shape = (*x.shape[: axis - 1], -(-length // group_size), group_size, *x.shape[axis + 1 :])
    return join_groups(jnp.broadcast_to(x, shape), group_dim, length)


def checked_group_size(group_size: object, where: str, name: str = "group_size") -> int:
    """A group size as a Python int; `name` is for the error text.

    Raises:
        ValueError: it is not a whole number of at least 1.
    """
    if isinstance(group_size, tuple | list):
        raise ValueError(
            f"{where} cuts one axis into groups, got the block {name} = {tuple(group_size)!r}.\n"
            "  cure: group_size = 32, for instance; blocks go with quantizers whose scale has a "
            "scaling_stats_input_view_shape_impl, such as MXFloat8e4m3Weight"
        )
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(
            f"{where}: {name} must be a whole number of at least 1, got {group_size!r}.\n"
            f"  cure: {name} = 32, for instance"
        )
    return group_size


def block_of(group_size: int | tuple[int, int], where: str) -> tuple[int, int]:
    """A block's elements along the axis that is cut into groups, and along its other axis.

    Args:
        group_size: a group's elements, a block of one row; or both lengths of a block.
        where: for the error text.

    Raises:
        ValueError: they are not whole numbers of at least 1.

    Example:
        >>> block_of(32, "here"), block_of((16, 16), "here")
        ((32, 1), (16, 16))
    """
    if not isinstance(group_size, tuple | list):
        return checked_group_size(group_size, where), 1
    if len(group_size) != 2:
        raise ValueError(
            f"{where}: a block has two lengths, group_size has {len(group_size)}: {tuple(group_size)!r}.\n"
            "  cure: group_size = (128, 128), along the inputs and along the outputs; group_size = 32 for one axis"
        )
    size, width = (checked_group_size(length, where) for length in group_size)
    return size, width


def check_divides(length: int, group_size: int, where: str) -> None:
    """Refuse an axis that groups do not fill.

    Raises:
        ValueError: `group_size` does not divide `length`.
    """
    if length % group_size:
        raise ValueError(
            f"{where}: groups of {group_size} do not fill an axis of {length} elements, and group_padding is False.\n"
            f"  cure: a group_size that divides {length}, or group_padding = True, which fills up the last group "
            "with zeros"
        )
