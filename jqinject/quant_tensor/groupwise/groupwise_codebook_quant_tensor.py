"""`GroupwiseCodebookQuantTensor`: indices into a table, with a scale for each group."""

from collections.abc import Iterable
from typing import Any, final

import jax

from jqinject.ops.minifloats.nearest_code import Codebook
from jqinject.quant_tensor.base import as_array
from jqinject.quant_tensor.codebook_quant_tensor import CodebookQuantTensor
from jqinject.quant_tensor.groupwise.groupwise_quant_tensor import (
    Groups,
    GroupwiseQuantTensor,
    flatten_groups,
)


@final
class GroupwiseCodebookQuantTensor(GroupwiseQuantTensor):
    """A dequantized array of indices into a table, with a scale for each group along one axis.

    Arithmetic and `reshape` decay to the plain array; `transpose`, and indexing of other axes, keep the groups.

    Args:
        value: the dequantized numbers in groups, `value_`: two axes (groups, elements of a group) instead of the axis
            `group_dim`.
        scale: float32, `scale_`: the same shape with 1 along the elements of a group.
        group_size: elements of a group.
        group_dim: the axis, counted without groups.
        codebook: the table.
        training: whether it was made in training mode.
        dequant_shape: the shape without groups; None means that groups are full.

    Raises:
        TypeError: `value` is not a float array, or `codebook` is not a `Codebook`.
        ValueError: it has no such groups; the scale does not broadcast against it.

    Example:
        >>> import jax.numpy as jnp
        >>> table = Codebook((-1.0, 0.0, 0.25, 1.0))
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
        codebook: Codebook,
        training: bool = False,
        dequant_shape: tuple[int, ...] | None = None,
    ) -> None:
        grouped = CodebookQuantTensor(as_array(value), scale, codebook, training)
        self._hold(grouped, group_size, group_dim, dequant_shape)

    @property
    def codebook(self) -> Codebook:
        """The table."""
        return self._grouped.codebook

    @property
    def bit_width(self) -> int:
        """Bits of one index."""
        return self._grouped.bit_width

    @property
    def signed(self) -> bool:
        """Whether the table has numbers below 0."""
        return self._grouped.signed

    def codes(self) -> jax.Array:
        """The indices, uint8, without groups; no gradient."""
        return self._groups.join(self._grouped.codes())

    def payload(self) -> jax.Array:
        """As `codes`."""
        return self.codes()

    def int(self, float_datatype: bool = False) -> jax.Array:
        """The indices of the numbers, without groups. See `CodebookQuantTensor.int`."""
        return self._groups.join(self._grouped.int(float_datatype))


def _unflatten(aux: tuple[Groups, int], children: Iterable[Any]) -> GroupwiseCodebookQuantTensor:
    (grouped,) = children
    return GroupwiseCodebookQuantTensor._of(grouped, *aux)


jax.tree_util.register_pytree_with_keys(GroupwiseCodebookQuantTensor, flatten_groups, _unflatten)
