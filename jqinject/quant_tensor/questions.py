"""Questions about a value that may be a quantized tensor: which numbers it is on, and in which layout.

Each class of quantized tensors is of one kind: its grid's, without or in groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from jqinject.quant_tensor.groupwise_tensors import (
        GroupwiseFloatQuantTensor,
        GroupwiseIntQuantTensor,
        GroupwiseQuantTensor,
    )
    from jqinject.quant_tensor.public_tensors import CodebookQuantTensor, FloatQuantTensor, IntQuantTensor
    from jqinject.quant_tensor.quantized import QuantTensor


def as_array(x: Any) -> Any:
    """The plain array of `x`: `x.value` if it is a `QuantTensor`, else `x` itself.

    Args:
        x: a `QuantTensor`, an array, or anything else.

    Returns:
        The dequantized array of a `QuantTensor`; any other object unchanged.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor, as_array
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, 0.0, 4, signed=True, training=False)
        >>> as_array(x)
        Array([0.5, 1. ], dtype=float32)
        >>> as_array(3)
        3
    """
    return x.value if hasattr(type(x), "kind") else x


def is_quantized(x: Any) -> TypeGuard[QuantTensor]:
    """Whether it is a quantized tensor of any format; the functions below answer False for anything else.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, None, 4, signed=True, training=False)
        >>> is_quantized(x), on_integers(x), on_minifloats(x), is_grouped(x), is_quantized(x.value)
        (True, True, False, False, False)
    """
    return hasattr(type(x), "kind")


def is_grouped(x: Any) -> TypeGuard[GroupwiseQuantTensor]:
    """Whether it has a scale for each group along an axis."""
    return is_quantized(x) and x.is_grouped


def on_integers(x: Any) -> TypeGuard[IntQuantTensor]:
    """Whether its grid is integers, without groups."""
    return getattr(type(x), "kind", "") == "integers"


def on_minifloats(x: Any) -> TypeGuard[FloatQuantTensor]:
    """Whether its grid is minifloats, without groups."""
    return getattr(type(x), "kind", "") == "minifloats"


def on_table(x: Any) -> TypeGuard[CodebookQuantTensor]:
    """Whether its grid is a table, without groups."""
    return getattr(type(x), "kind", "") == "table"


def grouped_integers(x: Any) -> TypeGuard[GroupwiseIntQuantTensor]:
    """Whether its grid is integers, in groups."""
    return getattr(type(x), "kind", "") == "grouped integers"


def grouped_minifloats(x: Any) -> TypeGuard[GroupwiseFloatQuantTensor]:
    """Whether its grid is minifloats, in groups."""
    return getattr(type(x), "kind", "") == "grouped minifloats"
