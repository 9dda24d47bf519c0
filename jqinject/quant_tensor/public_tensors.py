"""The public classes of quantized tensors: constructors and names of each number format, with and without groups.

Behaviour is in `jqinject.quant_tensor.quantized`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.ops.cut import cut_in_place
from jqinject.ops.float8_cast import from_float8
from jqinject.ops.float_grid import FloatGrid
from jqinject.ops.grid import IntGrid, TableGrid
from jqinject.ops.groups import elements_axis
from jqinject.quant_tensor.array_methods import as_array, attribute
from jqinject.quant_tensor.group_layout import Groups, Layout
from jqinject.quant_tensor.quantized import CONTRACTED, QuantTensor
from jqinject.quant_tensor.tensor_fields import Levels
from jqinject.quant_tensor.validity import BitWidth, dequantized

_int_grid = lru_cache(maxsize=256)(IntGrid)


@final
class IntQuantTensor(QuantTensor):
    """A dequantized array with the scale, zero point, bit width and signedness of its integers.

    value = (integer - zero_point) * scale, where scale and zero point broadcast against the value by NumPy's
    rules: a scalar for a whole tensor, size 1 everywhere but on the channel axis for one scale per channel.

    It is immutable; `set` makes changed copies. It is a pytree: value, scale and zero point are children, and so is
    the bit width if it is an array (learned); as a Python int it is static, and so are `signed` and `training`. So
    it crosses `jit`, `grad`, `vmap`, `scan` and NNX modules. In `jax.numpy` and in Flax layers it decays to `value`;
    `+ - * / abs`, unary minus, the shape methods and the functions of this package keep the type. JAX sets two
    limits: `array + quant_tensor` with a `jax.Array` on the left is a plain array (JAX converts the right operand
    first), and functions that directly call `jax.lax`, like `jax.nn.sigmoid`, need `x.value`.

    A tensor whose value does not lie on its grid can be built; its `is_valid` is false. Operations that need the
    numbers (`int`, comparing scales) check them if they are concrete; under tracing they are unchecked.

    Attributes:
        value: float array of any shape, the dequantized numbers.
        scale: float32 array, the float per integer step; broadcasts against `value`.
        zero_point: float32 array, the integer that represents 0.0; broadcasts against `value`. The constructor takes
            None for no zero point: then it is 0, no arithmetic is done for it, and it is no leaf of the pytree.
        bit_width: Python int, or float32 scalar array if learned.
        signed: whether the integers are signed.
        training: whether it was made in training mode, where scales of two operands may differ.
        payload: the integers that a quantizer has just rounded to, for `int` and for contractions; else None. They are
            not a child of the pytree: after a transformation they are recomputed from the value.

    Raises:
        TypeError: `value` is not a float array (use `from_int` for integers).
        ValueError: scale or zero point do not broadcast against the value, or a bit width is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> x = IntQuantTensor(jnp.array([-0.5, 1.0]), 0.25, 0.0, 8, signed=True, training=False)
        >>> x.int()
        Array([-2,  4], dtype=int8)
        >>> (x + x).bit_width
        9
        >>> jnp.sum(x)
        Array(0.5, dtype=float32)
    """

    __slots__ = ()
    arrays = ("value", "scale", "zero_point")
    grid_fields = ("bit_width", "signed")

    def __init__(
        self,
        value: Any,
        scale: Any,
        zero_point: Any,
        bit_width: Any,
        signed: bool,
        training: bool,
        payload: jax.Array | None = None,
    ) -> None:
        if type(bit_width) is not int or bit_width < 1:
            is_prefix = value is None or isinstance(value, int)
            bit_width = bit_width if is_prefix else _checked_bit_width(bit_width)
        grid = _int_grid(bit_width, signed) if type(bit_width) is int else IntGrid(bit_width, signed)
        self._store(value, scale, zero_point, grid, training, payload)

    @classmethod
    def from_int(
        cls,
        integers: Any,
        scale: Any,
        zero_point: Any = 0.0,
        bit_width: Any = 8,
        *,
        signed: bool = True,
        training: bool = False,
        dtype: Any = jnp.float32,
    ) -> IntQuantTensor:
        """Return the tensor of these integers: value = (integers - zero_point) * scale, in `dtype`.

        Example:
            >>> IntQuantTensor.from_int(jnp.array([0, 3]), scale=0.5, zero_point=1.0, signed=False).value
            Array([-0.5,  1. ], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        zero_point = None if zero_point is None else jnp.asarray(zero_point, jnp.float32)
        value = dequantized(jnp.asarray(integers), scale, zero_point, dtype)
        return cls(value, scale, zero_point, bit_width, signed, training)

    @classmethod
    def stored(
        cls, payload: jax.Array, scale: jax.Array, zero_point: Any, bit_width: int, signed: bool, dtype: Any
    ) -> IntQuantTensor:
        """As `from_int`, for integers that are known to fit; they are dequantized only when the value is read.

        Args:
            payload: the integers, of any integer dtype.
            scale, zero_point: float32 arrays that broadcast against them; no zero point if None.
            bit_width: bits of an integer.
            signed: whether the integers are signed.
            dtype: of the value.
        """
        return cls._of_payload(payload, scale, zero_point, _int_grid(bit_width, signed), dtype)

    bit_width: BitWidth = attribute("_grid.bit_width", "Bits: a Python int, or an array if learned.")
    payload: jax.Array | None = attribute("_payload", "The integers of a tensor just quantized.")


class _FloatNames:
    """The names of a tensor of minifloats, with and without groups."""

    __slots__ = ()

    format: FloatGrid = attribute("_grid", "The format of its minifloats.")
    exponent_bit_width: Any = attribute("_grid.exponent_bit_width", "Bits of the exponent.")
    mantissa_bit_width: Any = attribute("_grid.mantissa_bit_width", "Bits of the mantissa.")
    exponent_bias: Any = attribute(
        "_grid.exponent_bias", "The bias that is subtracted from the exponent field."
    )
    saturating: bool = attribute("_grid.saturating", "Whether numbers that are too large become the largest.")
    inf_values: tuple[str, ...] | None = attribute("_grid.inf_values", "Mantissas of inf; see `FloatGrid`.")
    nan_values: tuple[str, ...] | None = attribute("_grid.nan_values", "Mantissas of nan; see `FloatGrid`.")
    payload = QuantTensor.low_bits
    codes = QuantTensor.code_numbers
    minifloat = QuantTensor.grid_numbers


@final
class FloatQuantTensor(_FloatNames, QuantTensor):
    """A dequantized array with the scale and the format of its minifloats: `value = minifloat * scale`.

    It is immutable and a pytree: value and scale are children, the format (a child if its widths are learned) and
    `training` are static. Used as an array, including in arithmetic, it decays to `value`; `-x` (if the format is
    signed) and `abs(x)` keep the type, and so do the shape methods of a tensor with one scale.

    Attributes:
        value: float array of any shape, the dequantized numbers; gradients pass straight through.
        scale: float32, broadcasts against `value`.
        format: a `FloatGrid`, or given as the JAX dtype that has it, such as `jnp.float8_e4m3fn`.
        training: whether it was made in training mode.
        levels: both levels of its scale and its minifloats, of a quantizer with a scale in two levels; else None.
        scale_dtype: a dtype of 8 bits that holds its scales; None if unknown.

    A tensor that a quantizer has just made also keeps its payload, for `payload` and for contractions. Payload, levels
    and scale dtype are not children of the pytree: after a transformation the payload is recomputed from value and
    scale, and the others are None.

    Raises:
        TypeError: `value` is not a float array, or `format` is neither a format nor a narrow float dtype.
        ValueError: the scale does not broadcast against the value.

    Example:
        >>> x = FloatQuantTensor(jnp.array([0.5, 4.0]), 0.5, jnp.float8_e4m3fn)
        >>> x.payload()
        Array([1, 8], dtype=float8_e4m3fn)
        >>> x + 1
        Array([1.5, 5. ], dtype=float32)
        >>> FloatQuantTensor(jnp.array([0.5, 4.0]), 0.5, FloatGrid(3, 2)).minifloat()
        Array([1., 8.], dtype=float32)
    """

    __slots__ = ()
    arrays = ("value", "scale")
    grid_fields = ("format",)

    def __init__(
        self,
        value: Any,
        scale: Any,
        format: Any,
        training: bool = False,
        payload: jax.Array | None = None,
        levels: Levels | None = None,
        scale_dtype: np.dtype | None = None,
    ) -> None:
        self._store(value, scale, None, _float_format(format, "FloatQuantTensor"), training, payload)
        self._levels, self._scale_dtype = levels, scale_dtype

    @classmethod
    def from_payload(
        cls,
        payload: jax.Array,
        scale: Any,
        *,
        format: Any = None,
        training: bool = False,
        dtype: Any = jnp.float32,
    ) -> FloatQuantTensor:
        """Return the tensor of these minifloats: `value = payload * scale`, in `dtype`.

        Args:
            payload: minifloats in the dtype of their format; or, with a `format`, their codes.
            scale: float per step of the minifloat.
            format: the format of the codes; None for the format of the payload's dtype.
            training: whether it was made in training mode.
            dtype: of `value`.

        Example:
            >>> FloatQuantTensor.from_payload(jnp.array([3.0], jnp.float8_e5m2), 0.25).value
            Array([0.75], dtype=float32)
            >>> FloatQuantTensor.from_payload(jnp.array([2, 15], jnp.uint8), 0.5, format=FloatGrid(2, 1)).value
            Array([ 0.5, -3. ], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        form = _float_format(payload.dtype if format is None else format, "FloatQuantTensor.from_payload")
        numbers = form.decode(payload)
        low_bits = payload if payload.dtype in CONTRACTED and format is None else None
        return cls(from_float8(numbers, scale, dtype), scale, form, training, low_bits)

    @classmethod
    def stored(
        cls, payload: jax.Array, scale: jax.Array, dtype: Any, scale_dtype: np.dtype | None = None
    ) -> FloatQuantTensor:
        """As `from_payload`, for 8-bit floats that are dequantized only when the value is read.

        Args:
            payload: in one of the 8-bit float dtypes.
            scale: float32, broadcasts against it.
            dtype: of the value.
            scale_dtype: as of the constructor.
        """
        form = _float_format(payload.dtype, "FloatQuantTensor.stored")
        tensor = cls._of_payload(payload, scale, None, form, dtype)
        tensor._scale_dtype = scale_dtype
        return tensor


class _CodebookNames:
    """The names of a tensor of indices, with and without groups."""

    __slots__ = ()

    codebook: TableGrid = attribute("_grid", "The table.")
    payload = codes = QuantTensor.code_numbers


@final
class CodebookQuantTensor(_CodebookNames, QuantTensor):
    """A dequantized array with its scale and the table of its numbers: `value = table[code] * scale`.

    It is immutable and a pytree: value and scale are children, codebook and `training` static. Used as an array,
    including in arithmetic, it decays to `value`; the shape methods of a tensor with one scale keep the type.

    Attributes:
        value: float array of any shape, the dequantized numbers; gradients pass straight through.
        scale: float32, broadcasts against `value`.
        codebook: the table.
        training: whether it was made in training mode.

    Raises:
        TypeError: `value` is not a float array, or `codebook` is not a `TableGrid`.
        ValueError: the scale does not broadcast against the value.

    Example:
        >>> x = CodebookQuantTensor(jnp.array([0.5, -2.0]), 2.0, TableGrid((-1.0, 0.0, 0.25, 1.0)))
        >>> x.codes()
        Array([2, 0], dtype=uint8)
        >>> x + 1
        Array([ 1.5, -1. ], dtype=float32)
    """

    __slots__ = ()
    arrays = ("value", "scale")
    grid_fields = ("codebook",)

    def __init__(self, value: Any, scale: Any, codebook: TableGrid, training: bool = False) -> None:
        if not isinstance(codebook, TableGrid):
            raise TypeError(f"CodebookQuantTensor: codebook must be a TableGrid, got {codebook!r}")
        self._store(value, scale, None, codebook, training)

    @classmethod
    def from_codes(
        cls,
        codes: jax.Array,
        scale: Any,
        codebook: TableGrid,
        *,
        training: bool = False,
        dtype: Any = jnp.float32,
    ) -> CodebookQuantTensor:
        """Return the tensor of these indices: `value = table[code] * scale`, in `dtype`.

        Example:
            >>> CodebookQuantTensor.from_codes(jnp.array([0, 3], jnp.uint8), 2.0, TableGrid((-1, 0, 0.25, 1))).value
            Array([-2.,  2.], dtype=float32)
        """
        scale = jnp.asarray(scale, jnp.float32)
        return cls((codebook.decode(codes) * scale).astype(dtype), scale, codebook, training)


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

    def _in_groups(self, grouped: Any, size: int, dim: int, shape: tuple[int, ...] | None) -> None:
        """Store the arguments of a constructor; None as the shape without groups means that they are full."""
        length = None if shape is None else shape[dim]
        self._take(grouped, Layout.of(grouped.shape, size, dim, length, type(self).__name__))

    grouped: Any = attribute("_grouped", "The same numbers as a quantized tensor with the two axes.")
    value_: jax.Array = attribute("grouped.value", "The dequantized numbers in groups.")
    groups: Groups = attribute("_layout.groups", "The division of the axis into groups.")
    group_size: int = attribute("_layout.groups.size", "Elements of a group.")  # type: ignore[assignment]
    group_dim: int = attribute("_layout.group_dim", "The axis that is divided into groups, as given.")
    piece: int | None = attribute("_layout.piece", "Elements of a piece, see `Cut`, or None.")
    dequant_shape: tuple[int, ...] = attribute("shape", "The shape without groups.")

    @property
    def as_it_lies(self) -> Any:
        """The same numbers as a quantized tensor without groups, each with its scale; None unless stored like that."""
        return None if self._layout.piece is None else self._bare

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
            grouped: what takes the place of `grouped`; of `as_it_lies`, if there is one.
            groups: where they lie now.
        """
        return grouped._like(type(self), Layout(groups, groups.dim, self._layout.piece))

    @classmethod
    def of(
        cls,
        grouped: Any,
        group_size: int,
        group_dim: int,
        length: int | None = None,
        piece: int | None = None,
    ) -> Self:
        """Return a groupwise tensor from a tensor in groups; see `in_groups`.

        Raises:
            ValueError: it has no such groups.
        """
        if piece is None:
            layout = Layout.of(grouped.shape, group_size, group_dim, length, cls.__name__)
        else:
            dim = group_dim % grouped.ndim - grouped.ndim
            layout = Layout(Groups(group_size, dim, grouped.shape[dim]), group_dim, piece)
        return grouped._like(cls, layout)


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
        value: Any,
        scale: Any,
        zero_point: Any,
        group_size: int,
        group_dim: int,
        bit_width: Any,
        signed: bool,
        training: bool,
        dequant_shape: tuple[int, ...] | None = None,
    ) -> None:
        grouped = IntQuantTensor(as_array(value), scale, zero_point, bit_width, signed, training)
        self._in_groups(grouped, group_size, group_dim, dequant_shape)


@final
class GroupwiseFloatQuantTensor(_FloatNames, GroupwiseQuantTensor):
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
        value: Any,
        scale: Any,
        group_size: int,
        group_dim: int,
        format: Any,
        training: bool = False,
        dequant_shape: tuple[int, ...] | None = None,
    ) -> None:
        grouped = FloatQuantTensor(as_array(value), scale, format, training)
        self._in_groups(grouped, group_size, group_dim, dequant_shape)


@final
class GroupwiseCodebookQuantTensor(_CodebookNames, GroupwiseQuantTensor):
    """Indices into a table, with a scale for each group along one axis.

    Args:
        value, scale, group_size, group_dim, dequant_shape: as of `GroupwiseIntQuantTensor`.
        codebook, training: as of `CodebookQuantTensor`.

    Raises:
        TypeError: `value` is not a float array, or `codebook` is not a `TableGrid`.
        ValueError: it has no such groups; the scale does not broadcast against it.

    Example:
        >>> import jax.numpy as jnp
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
        value: Any,
        scale: Any,
        group_size: int,
        group_dim: int,
        codebook: TableGrid,
        training: bool = False,
        dequant_shape: tuple[int, ...] | None = None,
    ) -> None:
        grouped = CodebookQuantTensor(as_array(value), scale, codebook, training)
        self._in_groups(grouped, group_size, group_dim, dequant_shape)


for _cls in (GroupwiseIntQuantTensor, GroupwiseFloatQuantTensor, GroupwiseCodebookQuantTensor):
    _cls.partner.partner = _cls


def in_groups(
    grouped: Any, group_size: int, group_dim: int, length: int | None = None, piece: int | None = None
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
    return grouped.partner.of(grouped, group_size, group_dim, length, piece)


def in_pieces(x: GroupwiseIntQuantTensor) -> GroupwiseIntQuantTensor:
    """Return a tensor whose groups may cross shards in pieces of groups that no shard divides; any other unchanged.

    Args:
        x: the tensor.
    """
    cut = cut_in_place(x.value if x.piece is None else x._bare.value, x.group_size, x.groups.dim % x.ndim)
    return x if cut is None else smaller_groups(x, cut.piece)


def smaller_groups(x: GroupwiseIntQuantTensor, size: int) -> GroupwiseIntQuantTensor:
    """Return the same numbers in groups of `size`, each with the scale and zero point of the group it is part of.

    Args:
        x: the tensor, whose group size is a multiple of `size`.
        size: elements of a smaller group.

    Example:
        >>> x = GroupwiseIntQuantTensor(jnp.ones((1, 4)), jnp.ones((1, 1)), 0.0, 4, 0, 8, True, False, (3,))
        >>> smaller_groups(x, 2).value_
        Array([[1., 1.],
               [1., 0.]], dtype=float32)
    """
    groups, layout = replace(x.groups, size=size), x._layout
    payload = None if x._payload is None else groups.split(layout.join(x._payload))
    scale = _of_pieces(x, x._scale, size)
    zero = None if x._zero_point is None else _of_pieces(x, x._zero_point, size)
    pieces = IntQuantTensor(groups.split(x.value), scale, zero, x.bit_width, x.signed, x.training, payload)
    return pieces._like(GroupwiseIntQuantTensor, Layout(groups, x.group_dim))


def _of_pieces(x: GroupwiseIntQuantTensor, metadata: jax.Array, size: int) -> jax.Array:
    """Scales or zero points of the groups, or of the elements, once for each smaller group."""
    groups = x.groups
    if metadata.ndim == 0:
        return metadata
    if x.piece is not None:
        axis = groups.dim % metadata.ndim
        if metadata.shape[axis] == 1:
            return jnp.expand_dims(metadata, axis + 1)
        pieces = replace(groups, size=size).split(metadata)
        return jax.lax.slice_in_dim(pieces, 0, 1, axis=axis + 1)
    axis = elements_axis(groups.dim) % metadata.ndim - 1
    if metadata.shape[axis] == 1:
        return metadata
    group_of = np.arange(math.ceil(groups.length / size)) // (groups.size // size)
    return jnp.take(metadata, group_of, axis=axis, mode="clip")


def _checked_bit_width(bit_width: Any) -> BitWidth:
    """A Python int for a whole Python or NumPy number, else a float32 array."""
    if isinstance(bit_width, int | float | np.number) and float(bit_width).is_integer():
        if bit_width < 1:
            raise ValueError(f"bit_width must be at least 1, got {bit_width}.")
        return int(bit_width)
    return jnp.asarray(bit_width, jnp.float32)


def _float_format(form: Any, where: str) -> FloatGrid:
    """Return a format, from itself or from a JAX dtype.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(form, FloatGrid):
        return form
    try:
        return FloatGrid.of_dtype(form)
    except TypeError as error:
        raise TypeError(
            f"{where}: expected a FloatGrid or a narrow float dtype, got {form!r}; {error}"
        ) from None
