"""`GroupwiseIntQuantTensor`: integers with a scale for each group."""

from collections.abc import Iterable
from typing import Any, final

import jax

from jqinject.quant_tensor.base import as_array
from jqinject.quant_tensor.bit_widths import BitWidth
from jqinject.quant_tensor.groupwise.groupwise_quant_tensor import (
    Groups,
    GroupwiseQuantTensor,
    flatten_groups,
)
from jqinject.quant_tensor.int_quant_tensor import IntQuantTensor


@final
class GroupwiseIntQuantTensor(GroupwiseQuantTensor):
    """A dequantized array of integers, with a scale (and zero point) for each group along one axis.

    Arithmetic and `reshape` decay to the plain array; `transpose`, and indexing of other axes, keep the groups.

    Args:
        value: the dequantized numbers in groups, `value_`: two axes (groups, elements of a group) instead of the axis
            `group_dim`.
        scale: float32, `scale_`: the same shape with 1 along the elements of a group.
        zero_point: float32, `zero_point_`: likewise, or a scalar.
        group_size: elements of a group.
        group_dim: the axis, counted without groups.
        bit_width: Python int, or float32 scalar array if learned.
        signed: whether the integers are signed.
        training: whether it was made in training mode.
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
        self._hold(grouped, group_size, group_dim, dequant_shape)

    @property
    def bit_width(self) -> BitWidth:
        """Bits of one integer: a Python int, or an array if learned."""
        return self._grouped.bit_width

    @property
    def signed(self) -> bool:
        """Whether the integers are signed."""
        return self._grouped.signed

    def int(self, float_datatype: bool = False) -> jax.Array:
        """The integers, without groups. See `IntQuantTensor.int`."""
        return self._groups.join(self._grouped.int(float_datatype))


def _unflatten(aux: tuple[Groups, int], children: Iterable[Any]) -> GroupwiseIntQuantTensor:
    (grouped,) = children
    return GroupwiseIntQuantTensor._of(grouped, *aux)


jax.tree_util.register_pytree_with_keys(GroupwiseIntQuantTensor, flatten_groups, _unflatten)
