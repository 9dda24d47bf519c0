"""The generic wrapper that gives a quantized tensor of any format a scale for each group along one axis."""

from collections.abc import Iterable
from typing import Any, Self

import jax

from jqinject.ops.cut import Cut
from jqinject.quant_tensor import shaping
from jqinject.quant_tensor.attribute import attribute
from jqinject.quant_tensor.base import QuantTensor, as_array
from jqinject.quant_tensor.groupwise.groups import Groups, groups_of, key_of_whole_groups, with_two_axes


def register(cls: "type[GroupwiseQuantTensor]") -> None:
    """Make a class of tensors a pytree whose child is the tensor in groups."""

    def unflatten(aux: tuple[Groups, int, Any], children: Iterable[Any]) -> GroupwiseQuantTensor:
        (grouped,) = children
        return cls._of(grouped, *aux)

    jax.tree_util.register_pytree_with_keys(cls, _flatten, unflatten)


class GroupwiseQuantTensor(QuantTensor):
    """A quantized tensor of any number format, cut into groups along one axis, with the shape of one without groups.

    It wraps `grouped`, a tensor whose shape has two axes (groups, elements of a group) instead of one, as a quantizer
    makes it. `value`, `scale` and `zero_point` are expanded on every access; with an underscore (`value_`, `scale_`,
    `zero_point_`, Brevitas's names) they are those of `grouped`. The format is asked of `grouped`. Arithmetic and
    `reshape` decay to the plain array; `transpose`, and indexing of other axes, keep the groups.

    It is immutable, and a pytree whose child is `grouped`. `in_groups` makes one of the class of its format:
    `GroupwiseIntQuantTensor`, `GroupwiseFloatQuantTensor`, `GroupwiseCodebookQuantTensor`, or this one for a format of
    a user's own.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor, in_groups
        >>> value, scale = jnp.array([[0.5, 1.0], [6.0, 0.0]]), jnp.array([[0.5], [2.0]])
        >>> grouped = IntQuantTensor(value, scale, 0.0, 8, signed=True, training=False)
        >>> x = in_groups(grouped, group_size=2, group_dim=0, length=3)
        >>> x.value, x.scale, x.int()
        (Array([0.5, 1. , 6. ], dtype=float32), Array([0.5, 0.5, 2. ], dtype=float32), Array([1, 2, 3], dtype=int8))
    """

    __slots__ = ("_group_dim", "_grouped", "_groups", "_piece")

    _grouped: Any
    _groups: Groups
    _group_dim: int
    _piece: int | None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register(cls)

    def _hold(self, grouped: Any, groups: Groups, group_dim: int, piece: int | None = None) -> None:
        fields = {"_grouped": grouped, "_groups": groups, "_group_dim": group_dim, "_piece": piece}
        for name, field in fields.items():
            object.__setattr__(self, name, field)

    @property
    def _cuts(self) -> Cut | None:
        """How the groups lie in a tensor that does not have them as two axes; None of one that has."""
        if self._piece is None:
            return None
        return Cut(self._groups.dim % self._grouped.ndim, self._groups.size, self._piece)

    def _joined(self, x: jax.Array) -> jax.Array:
        return x if self._piece is not None else self._groups.join(x)

    def _cut(self, grouped: Any, group_size: int, group_dim: int, shape: tuple[int, ...] | None) -> None:
        """Store what a constructor is given; None as the shape without groups means that they are full."""
        length = None if shape is None else shape[group_dim]
        groups = groups_of(grouped.shape, group_size, group_dim, length, type(self).__name__)
        self._hold(grouped, groups, group_dim)

    @property
    def grouped(self) -> Any:
        """The same numbers as a quantized tensor with the two axes."""
        if self._piece is None:
            return self._grouped
        value, scale, zero_point = self._groups.split(self.value), self.scale_, self.zero_point_
        zeros = {"zero_point": zero_point} if zero_point.ndim else {}
        return self._grouped.set(value=value, scale=scale, **zeros)

    @property
    def as_it_lies(self) -> Any:
        """The same numbers as a quantized tensor without groups, each with its scale; None unless they are kept so."""
        return None if self._piece is None else self._grouped

    piece: int | None = attribute(
        "_piece", "Elements of a piece of a tensor without the two axes, see `Cut`; else None."
    )

    groups: Groups = attribute("_groups", "The division of the axis into groups.")

    # --- Brevitas's names: with an underscore in groups, without one expanded

    @property
    def value_(self) -> jax.Array:
        """The dequantized numbers in groups."""
        value = self._grouped.value
        return value if self._piece is None else self._groups.split(value)

    @property
    def scale_(self) -> jax.Array:
        """The scale of each group, with 1 along the elements of a group."""
        return self._of_each(self._grouped.scale)

    @property
    def zero_point_(self) -> jax.Array:
        """The zero point of each group, or one for all."""
        return self._of_each(self._grouped.zero_point)

    def _of_each(self, x: jax.Array) -> jax.Array:
        cut = self._cuts
        return x if cut is None or x.ndim == 0 else cut.in_two(x)

    group_size: int = attribute("_groups.size", "Elements of a group.")

    group_dim: int = attribute("_group_dim", "The axis that is divided into groups, as given.")

    dequant_shape: tuple[int, ...] = attribute("shape", "The shape without groups.")

    @property
    def value(self) -> jax.Array:
        """The dequantized float array."""
        return self._joined(self._grouped.value)

    @property
    def scale(self) -> jax.Array:
        """The scale of each element."""
        return self._of_elements(self._grouped.scale)

    @property
    def zero_point(self) -> jax.Array:
        """The zero point of each element, or one for all."""
        return self._of_elements(self._grouped.zero_point)

    def _of_elements(self, x: jax.Array) -> jax.Array:
        return self._groups.broadcast(x) if self._piece is None else x

    @property
    def is_valid(self) -> bool | jax.Array:
        """Whether the numbers lie on the grids of their groups."""
        return self._grouped.is_valid

    training: bool = attribute("_grouped.training", "Whether it was made in training mode.")
    bit_width: Any = attribute(
        "_grouped.bit_width", "Bits of one number: a Python int, or an array if learned."
    )
    signed: bool = attribute("_grouped.signed", "Whether there are numbers below 0.")

    _shaped: Any = attribute("_abstract_value", "Something of the shape of `value`.")
    _dtype: Any = attribute("_grouped.dtype", "The float dtype of `value`.")

    @property
    def _abstract_value(self) -> jax.ShapeDtypeStruct:
        shape = self._grouped.shape
        return jax.ShapeDtypeStruct(
            self._groups.shape_of(shape) if self._piece is None else shape, self._dtype
        )

    def number_range(self, narrow_range: bool = False) -> tuple[Any, Any]:
        """The smallest and the largest number of the format, before scale and zero point."""
        return self._grouped.number_range(narrow_range)

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
            value = as_array(changes["value"])
            if self._piece is not None and not inner:
                return self._like(self._grouped.set(value=value))
            inner["value"] = self._groups.split(value)
        return self._of(self.grouped.set(**inner), self._groups, self._group_dim)

    def astype(self, dtype: Any) -> Self:
        """The same numbers with `value` in another float dtype; scales stay float32."""
        return self._like(self._grouped.set(value=self._grouped.value.astype(self._float_dtype(dtype))))

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
        wide = with_two_axes(order, cut)
        return self._moved(lambda x: x.transpose(wide), order.index(cut) - ndim)

    def swapaxes(self, axis1: int, axis2: int) -> Self:
        """Two axes exchanged."""
        order = list(range(self.ndim))
        order[axis1], order[axis2] = order[axis2], order[axis1]
        return self.transpose(order)

    def __getitem__(self, key: Any) -> Any:
        ndim = self.ndim
        cut = self._groups.dim % ndim
        wide = key_of_whole_groups(key, ndim, cut)
        if wide is None:
            return self.value[key]
        after = sum(isinstance(k, slice) for k in wide[cut + 2 :])
        return self._moved(lambda x: x[shaping.basic_key(wide, x.shape)], -1 - after)

    def _moved(self, move: Any, dim: int) -> Self:
        """Apply `move` to value, scale and zero point; the groups then lie along `dim`."""
        inner = self.grouped
        moved = {
            "value": move(inner.value),
            "scale": inner.scale if inner.scale.ndim == 0 else move(inner.scale),
        }
        if inner.zero_point.ndim:
            moved["zero_point"] = move(inner.zero_point)
        groups = Groups(self.group_size, dim, self._groups.length)
        return self._of(inner.set(**moved), groups, dim)

    def moved(self, grouped: Any, groups: Groups) -> Self:
        """The tensor in the same groups elsewhere.

        Args:
            grouped: what takes the place of `grouped`; of `as_it_lies`, if there is one.
            groups: where they lie now.
        """
        return self._of(grouped, groups, groups.dim, self._piece)

    def _like(self, grouped: Any) -> Self:
        return self._of(grouped, self._groups, self._group_dim, self._piece)

    @classmethod
    def of(
        cls,
        grouped: Any,
        group_size: int,
        group_dim: int,
        length: int | None = None,
        piece: int | None = None,
    ) -> Self:
        """A groupwise tensor from a tensor in groups.

        Args:
            grouped: a tensor with the two axes.
            group_size: elements of a group.
            group_dim: the axis, counted without groups.
            length: elements along it; None if the last group is full.
            piece: as of `in_groups`.

        Raises:
            ValueError: it has no such groups.
        """
        if piece is None:
            groups = groups_of(grouped.shape, group_size, group_dim, length, cls.__name__)
        else:
            dim = group_dim % grouped.ndim - grouped.ndim
            groups = Groups(group_size, dim, grouped.shape[dim])
        return cls._of(grouped, groups, group_dim, piece)

    @classmethod
    def _of(cls, grouped: Any, groups: Groups, group_dim: int, piece: int | None = None) -> Self:
        """A tensor of these fields, unchecked."""
        tensor = object.__new__(cls)
        tensor._hold(grouped, groups, group_dim, piece)
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._of, (self._grouped, self._groups, self._group_dim, self._piece)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group_size={self.group_size}, group_dim={self.group_dim}, {self._grouped!r})"

    def int(self, float_datatype: bool = False) -> jax.Array:
        """The integers, codes or indices of the numbers, without groups. See `int` of the class of `grouped`."""
        return self._joined(self._grouped.int(float_datatype))


def _flatten(tensor: GroupwiseQuantTensor) -> tuple[list[tuple[Any, Any]], tuple[Groups, int, int | None]]:
    static = (tensor._groups, tensor._group_dim, tensor._piece)
    return [(jax.tree_util.GetAttrKey("grouped"), tensor._grouped)], static


register(GroupwiseQuantTensor)
