"""The public classes of quantized tensors with a scale for each group: constructors, names, and smaller groups; and
which numbers a value is on."""

from dataclasses import replace
from typing import Any, Self, TypeGuard, final

import jax
from jax.typing import ArrayLike

from jqinject.ops import float_grid, grid, lean
from jqinject.ops.cut import Cut, cut_in_place
from jqinject.quant_tensor.array_methods import attribute, kind_of
from jqinject.quant_tensor.group_layout import Groups, Layout
from jqinject.quant_tensor.public_tensors import (
    CodebookNames,
    CodebookQuantTensor,
    FloatNames,
    FloatQuantTensor,
    IntQuantTensor,
)
from jqinject.quant_tensor.quantized import QuantTensor


class GroupwiseQuantTensor(QuantTensor):
    """Abstract: a quantized tensor of any number format, with a scale (and zero point) for each group along one axis.

    It has the shape of a tensor without groups. `value`, `scale` and `zero_point` are expanded on every access; with an
    underscore (`value_`, `scale_`, `zero_point_`, Brevitas's names) they are as a quantizer makes them, with two axes
    (groups, elements of a group) instead of one. Arithmetic and `reshape` decay to the plain array; `transpose`, and
    indexing of other axes, keep the groups.

    It is immutable, and a pytree whose child is the tensor without groups, `grouped`. `in_groups` makes one of the
    class of its format.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor, in_groups
        >>> value, scale = jnp.array([[0.5, 1.0], [6.0, 0.0]]), jnp.array([[0.5], [2.0]])
        >>> grouped = IntQuantTensor(value, scale, 0.0, 8, signed=True, training=False)
        >>> x = in_groups(grouped, group_size=2, group_dim=0, length=3)
        >>> x.value, x.scale, x.int()
        (Array([0.5, 1. , 6. ], dtype=float32), Array([0.5, 0.5, 2. ], dtype=float32), Array([1, 2, 3], dtype=int8))
    """

    __slots__ = ()
    is_grouped = True

    def _divide(self, grouped: QuantTensor, *groups: Any) -> None:
        """Store the arguments of a constructor; the last three are those of `Layout.of`."""
        self._take(grouped, Layout.of(type(self).__name__, grouped.shape, *groups))

    grouped: Any = attribute("_grouped", "The same numbers as a quantized tensor with the two axes.")
    value_: jax.Array = attribute("grouped.value", "The dequantized numbers in groups.")
    groups: Groups = attribute("_layout.groups", "The division of the axis into groups.")
    group_size: int = attribute("_layout.groups.size", "Elements of a group.")
    group_dim: int = attribute("_layout.group_dim", "The axis that is divided into groups, as given.")
    piece: int | None = attribute("_layout.piece", "Elements of a piece, see `Cut`, or None.")
    dequant_shape: tuple[int, ...] = attribute("shape", "The shape without groups.")

    @property
    def as_it_lies(self) -> Any:
        """The same numbers as a quantized tensor without groups, each with its scale; None unless stored like that."""
        return None if self._layout.piece is None else self._bare

    @property
    def kept_payload(self) -> Any:  # type: ignore[override]
        """The low-bit numbers that it was rounded to, if it keeps them in groups."""
        return self._payload if self._layout.piece is None else None

    @property
    def scale_(self) -> jax.Array:
        """The scale of each group, with 1 along the elements of a group."""
        return self._layout.of_groups(self._scale, self._array.ndim)

    @property
    def zero_point_(self) -> jax.Array:
        """The zero point of each group, or one for all."""
        return self._layout.of_groups(self._bare.zero_point, self._array.ndim)

    @property
    def scale(self) -> jax.Array:  # type: ignore[override]
        """The scale of each element."""
        return self._layout.of_elements(self._scale)

    @property
    def zero_point(self) -> jax.Array:
        """The zero point of each element, or one for all."""
        return self._layout.of_elements(self._bare.zero_point)

    def moved(self, grouped: Any, groups: Groups) -> Self:
        """Return the tensor in the same groups elsewhere.

        Args:
            grouped: what takes the place of `grouped`; of `as_it_lies`, if any.
            groups: where they lie now.
        """
        return grouped._like(type(self), Layout(groups, groups.dim, self._layout.piece))


@final
class GroupwiseIntQuantTensor(GroupwiseQuantTensor):
    """Integers with a scale (and zero point) for each group along one axis.

    Args:
        value: the dequantized numbers in groups, `value_`: two axes (groups, elements of a group) instead of the axis
            `group_dim`.
        scale: float32, `scale_`: the same shape with 1 along the elements of a group.
        zero_point: float32, `zero_point_`: likewise, or a scalar; None for no zero point.
        group_size: elements of a group.
        group_dim: the axis, counted without groups.
        bit_width, signed, training: as of `IntQuantTensor`.
        dequant_shape: the shape without groups; None means that groups are full.

    Raises:
        TypeError: `value` is not a float array.
        ValueError: it has no such groups; scale or zero point do not broadcast against it.

    Example:
        >>> import jax.numpy as jnp
        >>> x = GroupwiseIntQuantTensor(
        ...     jnp.array([[0.5, 1.0], [6.0, 0.0]]), jnp.array([[0.5], [2.0]]), 0.0, 2, 0, 8, True, False, (3,))
        >>> x.value, x.scale, x.int()
        (Array([0.5, 1. , 6. ], dtype=float32), Array([0.5, 0.5, 2. ], dtype=float32), Array([1, 2, 3], dtype=int8))
    """

    __slots__ = ()
    partner = IntQuantTensor

    def __init__(
        self,
        value: ArrayLike,
        scale: jax.Array,
        zero_point: jax.Array | None,
        group_size: int,
        group_dim: int,
        bit_width: lean.Bits,
        signed: bool,
        training: bool,
        dequant_shape: tuple[int, ...] | None = None,
    ) -> None:
        grouped = IntQuantTensor(value, scale, zero_point, bit_width, signed, training)
        self._divide(grouped, group_size, group_dim, dequant_shape)


@final
class GroupwiseFloatQuantTensor(FloatNames, GroupwiseQuantTensor):
    """Minifloats with a scale for each group along one axis.

    Args:
        value, scale, group_size, group_dim, dequant_shape: as of `GroupwiseIntQuantTensor`.
        format, training: as of `FloatQuantTensor`.

    Raises:
        TypeError: `value` is not a float array, or `format` is neither a format nor a narrow float dtype.
        ValueError: it has no such groups; the scale does not broadcast against it.

    Example:
        >>> import jax.numpy as jnp
        >>> x = GroupwiseFloatQuantTensor(
        ...     jnp.array([[0.5, 3.0], [6.0, 0.0]]), jnp.array([[0.5], [2.0]]), 2, 0, jnp.float4_e2m1fn,
        ...     dequant_shape=(3,))
        >>> x.value, x.minifloat()
        (Array([0.5, 3. , 6. ], dtype=float32), Array([1., 6., 3.], dtype=float32))
    """

    __slots__ = ()
    partner = FloatQuantTensor

    def __init__(
        self,
        value: ArrayLike,
        scale: jax.Array,
        group_size: int,
        group_dim: int,
        format: float_grid.FloatGrid,
        training: bool = False,
        dequant_shape: tuple[int, ...] | None = None,
    ) -> None:
        grouped = FloatQuantTensor(value, scale, format, training)
        self._divide(grouped, group_size, group_dim, dequant_shape)


@final
class GroupwiseCodebookQuantTensor(CodebookNames, GroupwiseQuantTensor):
    """Indices into a table, with a scale for each group along one axis.

    Args:
        value, scale, group_size, group_dim, dequant_shape: as of `GroupwiseIntQuantTensor`.
        codebook, training: as of `CodebookQuantTensor`.

    Raises:
        TypeError: `value` is not a float array, or `codebook` is not a `Codebook`.
        ValueError: it has no such groups; the scale does not broadcast against it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.ops import TableGrid
        >>> table = TableGrid((-1.0, 0.0, 0.25, 1.0))
        >>> x = GroupwiseCodebookQuantTensor(
        ...     jnp.array([[0.5, -2.0], [0.25, 0.0]]), jnp.array([[2.0], [1.0]]), 2, 0, table, dequant_shape=(3,))
        >>> x.value, x.codes()
        (Array([ 0.5 , -2.  ,  0.25], dtype=float32), Array([2, 0, 2], dtype=uint8))
    """

    __slots__ = ()
    partner = CodebookQuantTensor

    def __init__(
        self,
        value: ArrayLike,
        scale: jax.Array,
        group_size: int,
        group_dim: int,
        codebook: grid.Codebook,
        training: bool = False,
        dequant_shape: tuple[int, ...] | None = None,
    ) -> None:
        grouped = CodebookQuantTensor(value, scale, codebook, training)
        self._divide(grouped, group_size, group_dim, dequant_shape)


for _cls in (GroupwiseIntQuantTensor, GroupwiseFloatQuantTensor, GroupwiseCodebookQuantTensor):
    _cls.partner.partner, _cls.kind = _cls, f"grouped {_cls.partner.kind}"


def in_groups(
    grouped: QuantTensor, group_size: int, group_dim: int, length: int | None = None, piece: int | None = None
) -> GroupwiseQuantTensor:
    """Return a groupwise tensor of the same number format, from a quantized tensor with two axes for the groups.

    Args:
        grouped: a QuantTensor of any format, with the two axes.
        group_size: elements of a group.
        group_dim: the axis, counted without groups.
        length: elements along it; None if the last group is full.
        piece: elements of a piece, see `Cut`, of a tensor without the two axes, each of whose elements has the scale
            of its group; None for one with two axes.

    Raises:
        ValueError: it has no such groups.
    """
    cls, shape = grouped.partner, grouped.shape
    if piece is None:
        return grouped._like(cls, Layout.of(cls.__name__, shape, group_size, group_dim, length))
    dim = group_dim % len(shape) - len(shape)
    return grouped._like(cls, Layout(Groups(group_size, dim, shape[dim]), group_dim, piece))


def in_pieces(x: GroupwiseIntQuantTensor) -> GroupwiseIntQuantTensor:
    """Return a tensor whose groups may cross shards in pieces of groups that no shard divides; any other unchanged.

    Args:
        x: the tensor.
    """
    cut = cut_in_place(x.value, x.group_size, x.groups.dim % x.ndim)
    return x if cut is None else smaller_groups(x, cut.piece)


def smaller_groups(x: GroupwiseIntQuantTensor, size: int) -> GroupwiseIntQuantTensor:
    """Return the same numbers in groups of `size`, each with the scale and zero point of the group it is part of.

    Args:
        x: the tensor, whose group size is a multiple of `size`.
        size: elements of a smaller group.

    Example:
        >>> import jax.numpy as jnp
        >>> x = GroupwiseIntQuantTensor(jnp.ones((1, 4)), jnp.ones((1, 1)), 0.0, 4, 0, 8, True, False, (3,))
        >>> smaller_groups(x, 2).value_
        Array([[1., 1.],
               [1., 0.]], dtype=float32)
    """
    groups, layout = replace(x.groups, size=size), x._layout

    def of_pieces(metadata: jax.Array) -> jax.Array:
        """Scales or zero points of the groups, or of the elements, once for each smaller group."""
        if metadata.ndim == 0:
            return metadata
        if layout.piece is None:
            cut = Cut(groups.dim % metadata.ndim - 1, x.group_size, size)
            return cut.of_pieces(metadata, groups.length)
        return jax.lax.slice_in_dim(groups.split(metadata), 0, 1, axis=groups.dim)

    scale, zero = jax.tree.map(of_pieces, (x._scale, x._zero_point))
    payload = None if x._payload is None else groups.split(layout.join(x._payload))
    pieces = IntQuantTensor(groups.split(x.value), scale, zero, x.bit_width, x.signed, x.training, payload)
    return pieces._like(GroupwiseIntQuantTensor, Layout(groups, x.group_dim))


# Questions about a value that may be a quantized tensor: each class is of one kind, its grid's, without or in groups.


def is_quantized(x: object) -> TypeGuard[QuantTensor]:
    """Whether it is a quantized tensor of any format; the functions below answer False for anything else.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, None, 4, signed=True, training=False)
        >>> is_quantized(x), on_integers(x), on_minifloats(x), is_grouped(x), is_quantized(x.value)
        (True, True, False, False, False)
    """
    return isinstance(x, QuantTensor)


def is_grouped(x: object) -> TypeGuard[GroupwiseQuantTensor]:
    """Whether it has a scale for each group along an axis."""
    return is_quantized(x) and x.is_grouped


def on_integers(x: Any) -> TypeGuard[IntQuantTensor]:
    """Whether its grid is integers, without groups."""
    return kind_of(x) == "integers"


def on_minifloats(x: Any) -> TypeGuard[FloatQuantTensor]:
    """Whether its grid is minifloats, without groups."""
    return kind_of(x) == "minifloats"


def on_table(x: Any) -> TypeGuard[CodebookQuantTensor]:
    """Whether its grid is a table, without groups."""
    return kind_of(x) == "table"


def grouped_integers(x: Any) -> TypeGuard[GroupwiseIntQuantTensor]:
    """Whether its grid is integers, in groups."""
    return kind_of(x) == "grouped integers"


def grouped_minifloats(x: Any) -> TypeGuard[GroupwiseFloatQuantTensor]:
    """Whether its grid is minifloats, in groups."""
    return kind_of(x) == "grouped minifloats"
