"""The division of an axis into groups, and how a tensor with a scale for each group is laid out."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import jax

from jqinject.ops.cut import Cut
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


@dataclass(frozen=True)
class Layout:
    """How the arrays of a tensor in groups are laid out.

    Attributes:
        groups: the division of the axis.
        group_dim: the axis, as the constructor was called with it.
        piece: None if the arrays have two axes for the groups (groups, elements of a group); else elements of a piece,
            see `Cut`: the arrays have the tensor's shape, and each element has the scale of its group.
    """

    groups: Groups
    group_dim: int
    piece: int | None = None

    @classmethod
    def of(cls, where: str, shape: tuple[int, ...], group_size: int, group_dim: int, like: Any) -> "Layout":
        """Return the layout of an array with two axes for the groups.

        Args:
            where: the class that is built, for the error text.
            shape: of the array.
            group_size: elements of a group.
            group_dim: the axis without groups, from the front or (negative) from the end.
            like: the shape without groups, or the elements along the axis; None if the last group is full.

        Raises:
            ValueError: the array has no such groups.
        """
        size = checked_group_size(group_size, where)
        ndim = len(shape) - 1
        if not -ndim <= group_dim < ndim or shape[elements_axis(group_dim) % len(shape)] != size:
            raise ValueError(
                f"{where}: an array of shape {shape} has no groups of {size} along axis {group_dim}: the groups lie "
                "along that axis, and the elements of a group along the one behind it.\n"
                "  cure: jqinject.ops.split_groups(x, group_size, group_dim)"
            )
        dim = group_dim - ndim if group_dim >= 0 else group_dim
        count = shape[elements_axis(dim) - 1]
        length = count * size if like is None else like if isinstance(like, int) else like[group_dim]
        if -(-length // size) != count:
            raise ValueError(f"{where}: {count} groups of {size} do not hold {length} elements")
        return cls(Groups(size, dim, length), group_dim)

    def at(self, dim: int) -> "Layout":
        """Return the layout with two axes for the groups, which lie along another axis."""
        return Layout(replace(self.groups, dim=dim), dim)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape, from that of its arrays."""
        return shape if self.piece is not None else self.groups.shape_of(shape)

    def join(self, x: jax.Array) -> jax.Array:
        """Return an array of the tensor's shape."""
        return x if self.piece is not None else self.groups.join(x)

    def of_elements(self, x: jax.Array) -> jax.Array:
        """Return scales or zero points as each element has them."""
        return x if self.piece is not None else self.groups.broadcast(x)

    def of_groups(self, x: jax.Array, ndim: int) -> jax.Array:
        """Return scales or zero points as each group has them, with 1 along the elements of a group.

        Args:
            x: as the tensor keeps them.
            ndim: axes of the tensor's arrays.
        """
        if self.piece is None or x.ndim == 0:
            return x
        return Cut(self.groups.dim % ndim, self.groups.size, self.piece).in_two(x)


def with_two_axes(axes: Iterable[int], cut: int) -> tuple[int, ...]:
    """Axes, counted from the front, where one of them, `cut`, has become two.

    Example:
        >>> with_two_axes((2, 1, 0), cut=1)
        (3, 1, 2, 0)
    """
    return tuple(
        wide for axis in axes for wide in ((axis, axis + 1) if axis == cut else (axis + (axis > cut),))
    )


def whole_key(key: object, ndim: int) -> tuple[Any, ...] | None:
    """An index with one entry for each axis, beside those for new ones.

    Args:
        key: as in `x[key]`.
        ndim: axes of the array.

    Returns:
        None for indices other than slices, ints, None and one Ellipsis, or too many of them.

    Example:
        >>> whole_key((..., None, 0), ndim=2)
        (slice(None, None, None), None, 0)
    """
    keys = key if isinstance(key, tuple) else (key,)
    kinds = slice | int | EllipsisType | None
    basic = [k for k in keys if isinstance(k, kinds) and not isinstance(k, bool)]
    missing = ndim - sum(k is not None and k is not Ellipsis for k in basic)
    if len(basic) < len(keys) or missing < 0:
        return None
    place = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    return (*keys[:place], *[slice(None)] * missing, *keys[place + 1 :])
