"""The division of an axis into groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jqinject.ops.groups import checked_group_size, elements_axis, join_groups, split_groups, spread_groups


@dataclass(frozen=True)
class Groups:
    """The division of an axis into groups.

    Attributes:
        size: elements of a group.
        dim: the divided axis, counted from the end (-1 is the last), so that leading axes may be added.
        length: elements along it; the last group is padded if `size` does not divide it.

    Example:
        >>> import jax.numpy as jnp
        >>> groups = Groups(size=2, dim=-1, length=3)
        >>> groups.split(jnp.array([1, 2, 3])).tolist()
        [[1, 2], [3, 0]]
    """

    size: int
    dim: int
    length: int

    def split(self, x: jax.Array) -> jax.Array:
        """The axis as two: groups, and elements of a group."""
        return split_groups(x, self.size, self.dim)

    def join(self, x: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        return join_groups(x, self.dim, self.length)

    def broadcast(self, x: jax.Array) -> jax.Array:
        """A value of each group, repeated for each of its elements."""
        return spread_groups(x, self.size, self.dim, self.length)

    def shape_of(self, grouped: tuple[int, ...]) -> tuple[int, ...]:
        """The shape without groups, from a grouped shape."""
        axis = elements_axis(self.dim) % len(grouped) - 1
        return (*grouped[:axis], self.length, *grouped[axis + 2 :])


def groups_of(
    shape: tuple[int, ...], group_size: int, group_dim: int, length: int | None, where: str
) -> Groups:
    """The groups of an array that has them as two axes.

    Args:
        shape: of the array, with the two axes.
        group_size: elements of a group.
        group_dim: the axis without groups, from the front or (negative) from the end.
        length: elements along it; None if the last group is full.
        where: what is built, for the error text.

    Raises:
        ValueError: the array has no such groups.
    """
    size = checked_group_size(group_size, where)
    ndim = len(shape) - 1
    if not -ndim <= group_dim < ndim or shape[elements_axis(group_dim) % len(shape)] != size:
        raise ValueError(
            f"{where}: an array of shape {shape} has no groups of {size} along axis {group_dim}: the groups lie along "
            "that axis, and the elements of a group along the one behind it.\n"
            "  cure: jqinject.ops.split_groups(x, group_size, group_dim)"
        )
    dim = group_dim - ndim if group_dim >= 0 else group_dim
    count = shape[elements_axis(dim) - 1]
    length = count * size if length is None else length
    if -(-length // size) != count:
        raise ValueError(f"{where}: {count} groups of {size} do not hold {length} elements")
    return Groups(size, dim, length)


def with_two_axes(axes: Iterable[int], cut: int) -> tuple[int, ...]:
    """Axes, counted from the front, where another one, `cut`, has become two.

    Example:
        >>> with_two_axes((2, 1, 0), cut=1)
        (3, 1, 2, 0)
    """
    return tuple(
        wide for axis in axes for wide in ((axis, axis + 1) if axis == cut else (axis + (axis > cut),))
    )


def key_of_whole_groups(key: Any, ndim: int, cut: int) -> tuple[Any, ...] | None:
    """An index with one entry for each axis, where `cut` has become two; None if it changes that axis.

    Args:
        key: as in `x[key]`.
        ndim: axes of the array without groups.
        cut: the axis that is in groups, counted from the front.

    Returns:
        None also for indices other than slices, ints and one Ellipsis, or too many of them.

    Example:
        >>> key_of_whole_groups((..., 0), ndim=3, cut=1)
        (slice(None, None, None), slice(None, None, None), slice(None, None, None), 0)
    """
    keys = key if isinstance(key, tuple) else (key,)
    basic = all(k is Ellipsis or (isinstance(k, slice | int) and not isinstance(k, bool)) for k in keys)
    if not basic or len(keys) > ndim + (Ellipsis in keys):
        return None
    whole: list[Any] = []
    for k in keys:
        whole += [slice(None)] * (ndim - len(keys) + 1) if k is Ellipsis else [k]
    whole += [slice(None)] * (ndim - len(whole))
    return None if whole[cut] != slice(None) else (*whole[:cut], slice(None), *whole[cut:])
