"""Quantized tensors with a scale for each group along one axis, which present the shape without groups."""

from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from jqinject.ops.groups import checked_group_size, elements_axis, join_groups, split_groups, spread_groups
from jqinject.quant_tensor import shaping
from jqinject.quant_tensor.base import QuantTensor, as_array


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


class GroupwiseQuantTensor(QuantTensor):
    """Abstract: a quantized tensor in groups, with the shape of one without groups.

    `grouped` is the underlying tensor, of any number format, whose shape has two axes (groups, elements of a group)
    instead of one. `value`, `scale` and `zero_point` are expanded on every access.

    It is immutable, and a pytree whose child is `grouped`.
    """

    __slots__ = ("_group_dim", "_grouped", "_groups")

    _grouped: Any
    _groups: Groups
    _group_dim: int

    def _hold(
        self, grouped: Any, group_size: int, group_dim: int, dequant_shape: tuple[int, ...] | None
    ) -> None:
        """Store a constructor's arguments; `dequant_shape` None means that groups are full."""
        length = None if dequant_shape is None else dequant_shape[group_dim]
        groups = groups_of(grouped.shape, group_size, group_dim, length, type(self).__name__)
        for name, field in (("_grouped", grouped), ("_groups", groups), ("_group_dim", group_dim)):
            object.__setattr__(self, name, field)

    @property
    def grouped(self) -> Any:
        """The same numbers as a quantized tensor with the two axes."""
        return self._grouped

    @property
    def groups(self) -> Groups:
        """The division of the axis into groups."""
        return self._groups

    # --- Brevitas's names: with an underscore in groups, without one expanded

    @property
    def value_(self) -> jax.Array:
        """The dequantized numbers in groups."""
        return self._grouped.value

    @property
    def scale_(self) -> jax.Array:
        """The scale of each group, with 1 along the elements of a group."""
        return self._grouped.scale

    @property
    def zero_point_(self) -> jax.Array:
        """The zero point of each group, or one for all."""
        return self._grouped.zero_point

    @property
    def group_size(self) -> int:
        """Elements of a group."""
        return self._groups.size

    @property
    def group_dim(self) -> int:
        """The axis that is divided into groups, as given."""
        return self._group_dim

    @property
    def dequant_shape(self) -> tuple[int, ...]:
        """The shape without groups."""
        return self.shape

    @property
    def value(self) -> jax.Array:
        """The dequantized float array."""
        return self._groups.join(self.value_)

    @property
    def scale(self) -> jax.Array:
        """The scale of each element."""
        return self._groups.broadcast(self.scale_)

    @property
    def zero_point(self) -> jax.Array:
        """The zero point of each element, or one for all."""
        return self._groups.broadcast(self.zero_point_)

    @property
    def is_valid(self) -> bool | jax.Array:
        """Whether the numbers lie on the grids of their groups."""
        return self._grouped.is_valid

    @property
    def training(self) -> bool:
        """Whether it was made in training mode."""
        return self._grouped.training

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `value`."""
        return self._groups.shape_of(self.value_.shape)

    @property
    def ndim(self) -> int:
        """Number of axes of `value`."""
        return self.value_.ndim - 1

    @property
    def size(self) -> int:
        """Number of elements of `value`."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype:
        """The float dtype of `value`."""
        return self.value_.dtype

    def set(self, **changes: Any) -> Self:
        """A copy with some fields replaced.

        Args:
            **changes: fields of the tensor in groups, `value_`, `scale_` and `zero_point_` with or without their
                underscore; but `value` is the array without groups.

        Raises:
            TypeError: a name is not a field.
        """
        inner = {name.removesuffix("_"): field for name, field in changes.items() if name != "value"}
        if "value" in changes:
            inner["value"] = self._groups.split(as_array(changes["value"]))
        return self._like(self._grouped.set(**inner))

    def astype(self, dtype: Any) -> Self:
        """The same numbers with `value` in another float dtype; scales stay float32."""
        return self._like(self._grouped.set(value=self.value_.astype(self._float_dtype(dtype))))

    def axes(self, **fields: Any) -> Self:
        """A pytree prefix with this tensor's structure, for `in_axes`, `out_axes` or shardings.

        Args:
            **fields: an entry for each child of the tensor in groups (value, scale, for integers also zero_point and
                bit_width); omitted ones are None.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(self._grouped)
        names = [path[0].name for path, _ in leaves]
        if unknown := sorted(fields.keys() - set(names)):
            raise TypeError(
                f"{type(self).__name__}.axes: {', '.join(unknown)}; its children are {', '.join(names)}"
            )
        return self._like(treedef.unflatten([fields.get(name) for name in names]))

    # --- axes: operations that leave the groups whole keep them, others return a plain array

    def transpose(self, *axes: Any) -> Self:
        """Axes permuted, groups and all; reversed without arguments."""
        given = tuple(axes[0] or ()) if len(axes) == 1 and not isinstance(axes[0], int) else axes
        ndim = self.ndim
        order = [axis % ndim for axis in given] or list(reversed(range(ndim)))
        cut = self._groups.dim % ndim
        wide = [a for axis in order for a in ((axis, axis + 1) if axis == cut else (axis + (axis > cut),))]
        return self._moved(lambda x: x.transpose(wide), order.index(cut) - ndim)

    def swapaxes(self, axis1: int, axis2: int) -> Self:
        """Two axes exchanged."""
        order = list(range(self.ndim))
        order[axis1], order[axis2] = order[axis2], order[axis1]
        return self.transpose(order)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        basic = all(k is Ellipsis or (isinstance(k, slice | int) and not isinstance(k, bool)) for k in keys)
        if not basic or len(keys) > self.ndim + (Ellipsis in keys):
            return self.value[key]
        whole: list[Any] = []
        for k in keys:
            whole += [slice(None)] * (self.ndim - len(keys) + 1) if k is Ellipsis else [k]
        whole += [slice(None)] * (self.ndim - len(whole))
        cut = self._groups.dim % self.ndim
        if whole[cut] != slice(None):
            return self.value[key]
        wide = (*whole[:cut], slice(None), *whole[cut:])
        after = sum(isinstance(k, slice) for k in whole[cut + 1 :])
        return self._moved(lambda x: x[shaping.basic_key(wide, x.shape)], -1 - after)

    def _moved(self, move: Any, dim: int) -> Self:
        """Apply `move` to value, scale and zero point; the groups then lie along `dim`."""
        inner = self._grouped
        moved = {
            "value": move(inner.value),
            "scale": inner.scale if inner.scale.ndim == 0 else move(inner.scale),
        }
        if inner.zero_point.ndim:
            moved["zero_point"] = move(inner.zero_point)
        groups = Groups(self.group_size, dim, self._groups.length)
        return self._of(inner.set(**moved), groups, dim)

    def _like(self, grouped: Any) -> Self:
        return self._of(grouped, self._groups, self._group_dim)

    @classmethod
    def of(cls, grouped: Any, group_size: int, group_dim: int, length: int | None = None) -> Self:
        """A groupwise tensor from a tensor in groups.

        Args:
            grouped: a tensor with the two axes.
            group_size: elements of a group.
            group_dim: the axis, counted without groups.
            length: elements along it; None if the last group is full.

        Raises:
            ValueError: it has no such groups.
        """
        groups = groups_of(grouped.shape, group_size, group_dim, length, cls.__name__)
        return cls._of(grouped, groups, group_dim)

    @classmethod
    def _of(cls, grouped: Any, groups: Groups, group_dim: int) -> Self:
        """A tensor of these fields, unchecked."""
        tensor = object.__new__(cls)
        for name, field in (("_grouped", grouped), ("_groups", groups), ("_group_dim", group_dim)):
            object.__setattr__(tensor, name, field)
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._of, (self._grouped, self._groups, self._group_dim)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group_size={self.group_size}, group_dim={self.group_dim}, {self._grouped!r})"


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


def flatten_groups(tensor: GroupwiseQuantTensor) -> tuple[list[tuple[Any, Any]], tuple[Groups, int]]:
    """The child and the static fields, for the pytree."""
    return [(jax.tree_util.GetAttrKey("grouped"), tensor.grouped)], (tensor.groups, tensor.group_dim)
