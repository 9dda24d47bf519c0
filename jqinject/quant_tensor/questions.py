"""Questions about a value that may be a quantized tensor: which numbers it is on, and in which layout.

Each class of quantized tensors is of one kind: its grid's, without or in groups.
"""

from typing import Any, TypeGuard

from jqinject.quant_tensor import array_methods, groupwise_tensors, public_tensors, quantized


def is_quantized(x: object) -> TypeGuard[quantized.QuantTensor]:
    """Whether it is a quantized tensor of any format; the functions below answer False for anything else.

    Example:
        >>> import jax.numpy as jnp
        >>> from jqinject.quant_tensor import IntQuantTensor
        >>> x = IntQuantTensor(jnp.array([0.5, 1.0]), 0.5, None, 4, signed=True, training=False)
        >>> is_quantized(x), on_integers(x), on_minifloats(x), is_grouped(x), is_quantized(x.value)
        (True, True, False, False, False)
    """
    return isinstance(x, quantized.QuantTensor)


def is_grouped(x: object) -> TypeGuard[groupwise_tensors.GroupwiseQuantTensor]:
    """Whether it has a scale for each group along an axis."""
    return is_quantized(x) and x.is_grouped


def on_integers(x: Any) -> TypeGuard[public_tensors.IntQuantTensor]:
    """Whether its grid is integers, without groups."""
    return array_methods.kind_of(x) == "integers"


def on_minifloats(x: Any) -> TypeGuard[public_tensors.FloatQuantTensor]:
    """Whether its grid is minifloats, without groups."""
    return array_methods.kind_of(x) == "minifloats"


def on_table(x: Any) -> TypeGuard[public_tensors.CodebookQuantTensor]:
    """Whether its grid is a table, without groups."""
    return array_methods.kind_of(x) == "table"


def grouped_integers(x: Any) -> TypeGuard[groupwise_tensors.GroupwiseIntQuantTensor]:
    """Whether its grid is integers, in groups."""
    return array_methods.kind_of(x) == "grouped integers"


def grouped_minifloats(x: Any) -> TypeGuard[groupwise_tensors.GroupwiseFloatQuantTensor]:
    """Whether its grid is minifloats, in groups."""
    return array_methods.kind_of(x) == "grouped minifloats"
