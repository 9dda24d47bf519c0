"""Tensors in groups by the format of their numbers, each with the constructor and the names of that format."""

from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np

from jqinject.ops import FloatGrid, TableGrid
from jqinject.quant_tensor.attribute import attribute
from jqinject.quant_tensor.base import QuantTensor, as_array
from jqinject.quant_tensor.codebook_quant_tensor import CodebookQuantTensor
from jqinject.quant_tensor.float_quant_tensor import FloatQuantTensor
from jqinject.quant_tensor.groupwise.groupwise_quant_tensor import GroupwiseQuantTensor
from jqinject.quant_tensor.int_quant_tensor import IntQuantTensor


def _joined(name: str, doc: str) -> Callable[[Any], jax.Array]:
    """A method whose result is that of the tensor in groups, without groups."""

    def method(self: GroupwiseQuantTensor) -> jax.Array:
        return self._joined(getattr(self._grouped, name)())

    method.__name__, method.__doc__ = name, doc
    return method


@final
class GroupwiseIntQuantTensor(GroupwiseQuantTensor):
    """Integers with a scale (and zero point) for each group along one axis.

    Args:
        value: the dequantized numbers in groups, `value_`: two axes (groups, elements of a group) instead of the axis
            `group_dim`.
        scale: float32, `scale_`: the same shape with 1 along the elements of a group.
        zero_point: float32, `zero_point_`: likewise, or a scalar.
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
        self._cut(grouped, group_size, group_dim, dequant_shape)


@final
class GroupwiseFloatQuantTensor(GroupwiseQuantTensor):
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
        self._cut(grouped, group_size, group_dim, dequant_shape)

    format: FloatGrid = attribute("_grouped.format", "The format of its minifloats.")
    exponent_bit_width: Any = attribute("_grouped.exponent_bit_width", "Bits of the exponent.")
    mantissa_bit_width: Any = attribute(
        "_grouped.mantissa_bit_width", "Bits of the mantissa, without the implicit 1."
    )
    exponent_bias: Any = attribute(
        "_grouped.exponent_bias", "The bias that is subtracted from the exponent field."
    )
    saturating: bool = attribute(
        "_grouped.saturating", "Whether numbers that are too large saturate at the largest."
    )
    inf_values: tuple[str, ...] | None = attribute(
        "_grouped.inf_values", "Mantissas of inf; see `FloatGrid`."
    )
    nan_values: tuple[str, ...] | None = attribute(
        "_grouped.nan_values", "Mantissas of nan; see `FloatGrid`."
    )
    q_dtype: np.dtype = attribute("_grouped.q_dtype", "Dtype of the payload.")
    payload = _joined("payload", "The numbers in `q_dtype`, without groups. See `FloatQuantTensor.payload`.")
    codes = _joined("codes", "The codes of the minifloats, without groups.")
    minifloat = _joined(
        "minifloat", "The minifloats in float32, without groups. See `FloatQuantTensor.minifloat`."
    )


@final
class GroupwiseCodebookQuantTensor(GroupwiseQuantTensor):
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
        self._cut(grouped, group_size, group_dim, dequant_shape)

    codebook: TableGrid = attribute("_grouped.codebook", "The table.")
    codes = _joined("codes", "The indices, uint8, without groups; no gradient.")
    payload = _joined("payload", "As `codes`.")


_BY_FORMAT: dict[type[QuantTensor], type[GroupwiseQuantTensor]] = {
    IntQuantTensor: GroupwiseIntQuantTensor,
    FloatQuantTensor: GroupwiseFloatQuantTensor,
    CodebookQuantTensor: GroupwiseCodebookQuantTensor,
}


def in_groups(
    grouped: Any, group_size: int, group_dim: int, length: int | None = None, piece: int | None = None
) -> GroupwiseQuantTensor:
    """A groupwise tensor of the same number format, from a quantized tensor with two axes for the groups.

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
    return _BY_FORMAT.get(type(grouped), GroupwiseQuantTensor).of(
        grouped, group_size, group_dim, length, piece
    )
