"""`GroupwiseFloatQuantTensor`: minifloats with a scale for each group."""

from collections.abc import Iterable
from typing import Any, final

import jax
import numpy as np

from jqinject.quant_tensor.base import as_array
from jqinject.quant_tensor.float_quant_tensor import AnyFloatFormat, FloatQuantTensor
from jqinject.quant_tensor.groupwise.groupwise_quant_tensor import (
    Groups,
    GroupwiseQuantTensor,
    flatten_groups,
)


@final
class GroupwiseFloatQuantTensor(GroupwiseQuantTensor):
    """A dequantized array of minifloats, with a scale for each group along one axis.

    Arithmetic and `reshape` decay to the plain array; `transpose`, and indexing of other axes, keep the groups.

    Args:
        value: the dequantized numbers in groups, `value_`: two axes (groups, elements of a group) instead of the axis
            `group_dim`.
        scale: float32, `scale_`: the same shape with 1 along the elements of a group.
        group_size: elements of a group.
        group_dim: the axis, counted without groups.
        format: a `FloatFormat`, or the JAX dtype of that format.
        training: whether it was made in training mode.
        dequant_shape: the shape without groups; None means that groups are full.

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
        self._hold(grouped, group_size, group_dim, dequant_shape)

    @property
    def format(self) -> AnyFloatFormat:
        """The format of its minifloats."""
        return self._grouped.format

    @property
    def bit_width(self) -> Any:
        """Bits of one minifloat."""
        return self._grouped.bit_width

    @property
    def exponent_bit_width(self) -> Any:
        """Bits of the exponent."""
        return self._grouped.exponent_bit_width

    @property
    def mantissa_bit_width(self) -> Any:
        """Bits of the mantissa, without the implicit 1."""
        return self._grouped.mantissa_bit_width

    @property
    def exponent_bias(self) -> Any:
        """The bias that is subtracted from the exponent field."""
        return self._grouped.exponent_bias

    @property
    def saturating(self) -> bool:
        """Whether numbers that are too large saturate at the largest."""
        return self._grouped.saturating

    @property
    def inf_values(self) -> tuple[str, ...] | None:
        """Mantissas that mean inf together with the largest exponent."""
        return self._grouped.inf_values

    @property
    def nan_values(self) -> tuple[str, ...] | None:
        """Mantissas that mean nan together with the largest exponent."""
        return self._grouped.nan_values

    @property
    def signed(self) -> bool:
        """Whether there are numbers below 0."""
        return self._grouped.signed

    @property
    def q_dtype(self) -> np.dtype:
        """Dtype of the payload."""
        return self._grouped.q_dtype

    def payload(self) -> jax.Array:
        """The numbers in `q_dtype`, without groups. See `FloatQuantTensor.payload`."""
        return self._groups.join(self._grouped.payload())

    def codes(self) -> jax.Array:
        """The codes of the minifloats, without groups."""
        return self._groups.join(self._grouped.codes())

    def minifloat(self) -> jax.Array:
        """The minifloats in float32, without groups. See `FloatQuantTensor.minifloat`."""
        return self._groups.join(self._grouped.minifloat())

    def int(self, float_datatype: bool = False) -> jax.Array:
        """The codes of the minifloats, without groups. See `FloatQuantTensor.int`."""
        return self._groups.join(self._grouped.int(float_datatype))


def _unflatten(aux: tuple[Groups, int], children: Iterable[Any]) -> GroupwiseFloatQuantTensor:
    (grouped,) = children
    return GroupwiseFloatQuantTensor._of(grouped, *aux)


jax.tree_util.register_pytree_with_keys(GroupwiseFloatQuantTensor, flatten_groups, _unflatten)
