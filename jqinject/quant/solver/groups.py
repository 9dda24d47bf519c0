"""Fragments for a scale for each group: which axis is cut, and into what shape."""

from typing import Any

from jqinject.core.clamp import Identity
from jqinject.core.view import DynamicOverSubChannelBlockView, OverSubChannelBlockView
from jqinject.inject import ExtendedInjector, choices, this, value
from jqinject.inject.enum import QuantType, ScalingPerOutputType
from jqinject.ops.groups import check_divides, checked_group_size, fitting_size, grouped_shape
from jqinject.quant.solver.layers import agreed, group_dim_of


def check_groups_fit(quant_type: Any, scaling_per_output: Any) -> None:
    """Refuse groups of numbers that have none.

    Raises:
        ValueError: ternary or binary numbers with a scale for each group.
    """
    if scaling_per_output == ScalingPerOutputType.GROUP and quant_type in (
        QuantType.TERNARY,
        QuantType.BINARY,
    ):
        raise ValueError(
            f"quant_type = {str(quant_type)!r} has no scales for groups.\n"
            "  cure: quant_type = 'int' with bit_width = 2, or scaling_per_output_type = 'channel'"
        )


class SolveGroupwiseActInputViewImpl(ExtendedInjector):
    """`input_view_impl` of activations: per group, the features are cut into groups."""

    group_dim = -1

    @choices(Identity, DynamicOverSubChannelBlockView)
    def input_view_impl(scaling_per_output):
        return (
            DynamicOverSubChannelBlockView if scaling_per_output == ScalingPerOutputType.GROUP else Identity
        )


class SolveGroupwiseWeightInputViewImpl(ExtendedInjector):
    """`input_view_impl` of weights, and what it takes: per group, the axis of the inputs is cut into groups."""

    @value
    def group_dim(module):
        return agreed(module, group_dim_of, "group_dim")

    @value
    def expanded_groupwise_shape(
        module, group_dim, scaling_per_output=None, group_size=None, group_padding=True
    ):
        if group_size is None:
            return this.group_size if scaling_per_output == ScalingPerOutputType.GROUP else None
        shape = agreed(module, lambda layer: tuple(layer.weight_shape), "weight shape")
        size = checked_group_size(group_size, "a group-wise weight quantizer")
        if not group_padding:
            check_divides(shape[group_dim], size, "a group-wise weight quantizer")
        return grouped_shape(shape, fitting_size(size, shape[group_dim]), group_dim)

    @value
    def reshaped_groupwise_shape(expanded_groupwise_shape: Any, group_elements_axis: Any):
        shape = list(expanded_groupwise_shape)
        size = shape.pop(group_elements_axis)
        shape[group_elements_axis - (group_elements_axis >= 0)] *= size
        return tuple(shape)

    @value
    def scaling_per_group_shape(expanded_groupwise_shape: Any, group_elements_axis: Any):
        shape = list(expanded_groupwise_shape)
        shape[group_elements_axis] = 1
        return tuple(shape)

    @choices(Identity, OverSubChannelBlockView)
    def input_view_impl(scaling_per_output):
        return OverSubChannelBlockView if scaling_per_output == ScalingPerOutputType.GROUP else Identity
