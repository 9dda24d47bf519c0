"""Builds a groupwise tensor from a quantized tensor with two axes for the groups."""

from typing import Any

from jqinject.quant_tensor.codebook_quant_tensor import CodebookQuantTensor
from jqinject.quant_tensor.float_quant_tensor import FloatQuantTensor
from jqinject.quant_tensor.groupwise.groupwise_codebook_quant_tensor import GroupwiseCodebookQuantTensor
from jqinject.quant_tensor.groupwise.groupwise_float_quant_tensor import GroupwiseFloatQuantTensor
from jqinject.quant_tensor.groupwise.groupwise_int_quant_tensor import GroupwiseIntQuantTensor
from jqinject.quant_tensor.groupwise.groupwise_quant_tensor import GroupwiseQuantTensor
from jqinject.quant_tensor.int_quant_tensor import IntQuantTensor

KINDS: dict[type, type[GroupwiseQuantTensor]] = {
    IntQuantTensor: GroupwiseIntQuantTensor,
    FloatQuantTensor: GroupwiseFloatQuantTensor,
    CodebookQuantTensor: GroupwiseCodebookQuantTensor,
}


def in_groups(
    grouped: Any, group_size: int, group_dim: int, length: int | None = None
) -> GroupwiseQuantTensor:
    """A groupwise tensor of the same number format, from a quantized tensor with two axes for the groups.

    Args:
        grouped: an `IntQuantTensor`, `FloatQuantTensor` or `CodebookQuantTensor`.
        group_size: elements of a group.
        group_dim: the axis, counted without groups.
        length: elements along it; None if the last group is full.
    """
    return KINDS[type(grouped)].of(grouped, group_size, group_dim, length)
