"""How a tensor is laid out: which axes hold channels, which one is cut into groups, and what statistics reduce.

Views put the channels first and everything else in axis 1.
"""

from flax import nnx

from jqinject.core.clamp import Identity
from jqinject.core.views import (
    DynamicOverSubChannelBlockView,
    OverOutputChannelView,
    OverSubChannelBlockView,
    OverTensorView,
)
from jqinject.inject import choices, this, value
from jqinject.ops.groups import block_of, check_divides, elements_axis, fitting_size, grouped_shape
from jqinject.quant.enums import ScalingPerOutputType, StatsOp, chooses
from jqinject.quant.solver.layers import (
    agreed,
    as_tuple,
    channels_of,
    check_groups_of_scales,
    group_dim_of,
    shape_of_bias,
    weight_shape_of,
)

CHANNEL_REDUCE_DIM = 1


@value
def stats_reduce_dim(scaling_stats_op, scaling_per_output):
    """The axis that statistics reduce; None for all of them."""
    if chooses(scaling_per_output, ScalingPerOutputType.GROUP):
        return this.group_elements_axis
    return CHANNEL_REDUCE_DIM if _has_channels(scaling_stats_op, scaling_per_output) else None


def _has_channels(scaling_stats_op, scaling_per_output):
    """Whether a statistic is taken of each channel."""
    return chooses(scaling_per_output, ScalingPerOutputType.CHANNEL) or chooses(
        scaling_stats_op, StatsOp.MAX_AVE
    )


@value
def keepdim(scaling_per_output):
    """Whether statistics keep the axis that they reduce."""
    return chooses(scaling_per_output, ScalingPerOutputType.GROUP)


@choices(OverOutputChannelView, OverTensorView)
def scaling_stats_input_view_shape_impl(scaling_stats_op, scaling_per_output):
    """How a tensor is laid out for statistics."""
    if chooses(scaling_per_output, ScalingPerOutputType.GROUP):
        return this.input_view_impl
    return OverOutputChannelView if _has_channels(scaling_stats_op, scaling_per_output) else OverTensorView


@value
def declared_permute_dims(scaling_stats_permute_dims=None):
    """`permute_dims`: what the view permutes, as declared."""
    return scaling_stats_permute_dims


# Weights: facts of the layer.


@value
def weight_ndims(module):
    """How many axes the weight has."""
    return agreed(module, lambda layer: len(layer.weight_shape), "number of weight axes")


@value
def output_channel_dim(module):
    """The weight's axis, or axes, of output channels."""
    return agreed(module, lambda layer: layer.output_channel_dim, "output_channel_dim")


@value
def output_channel_axes(module):
    """The weight's axes of output channels, as a tuple."""
    return as_tuple(agreed(module, lambda layer: layer.output_channel_dim, "output_channel_dim"))


@value
def out_channels(module, output_channel_dim):
    """How many output channels the weight has, along each axis that counts them."""
    return agreed(module, lambda layer: channels_of(layer, output_channel_dim), "out_channels")


@value
def weight_channel_axes(output_channel_dim):
    """How many axes count output channels."""
    return len(as_tuple(output_channel_dim))


@value
def weight_permute_dims(module, output_channel_dim):
    """The permutation that puts the channels of a weight first; None if they are first already."""
    ndim = agreed(module, lambda layer: len(layer.weight_shape), "number of weight axes")
    axes = list(range(ndim))
    channels = sorted(axes[axis] for axis in as_tuple(output_channel_dim))
    if channels == axes[: len(channels)]:
        return None
    if len(channels) > 1:
        return (*channels, *(axis for axis in axes if axis not in channels))
    axes[0], axes[channels[0]] = channels[0], 0
    return tuple(axes)


@value
def weight_channel_shape(scaling_per_output):
    """The channels of quantized group scales, which have one more axis than the weight: those of the scale's shape."""
    return this.scaling_shape if chooses(scaling_per_output, ScalingPerOutputType.CHANNEL) else None


@value
def weight_per_output_channel_shape(weight_ndims, output_channel_dim, out_channels):
    """The shape of a per-channel scale of weights: 1 but along the axes that channels are counted by."""
    shape = [1] * weight_ndims
    for axis, size in zip(as_tuple(output_channel_dim), as_tuple(out_channels), strict=True):
        shape[axis] = size
    return tuple(shape)


@value
def weight_concat_dim(scaling_per_output):
    """The axis along which statistics join the weights of layers that share a quantizer."""
    if chooses(scaling_per_output, ScalingPerOutputType.GROUP):
        return this.group_elements_axis
    return 1 if chooses(scaling_per_output, ScalingPerOutputType.CHANNEL) else 0


# Groups.


@choices(Identity, OverSubChannelBlockView)
def weight_input_view_impl(scaling_per_output):
    """`input_view_impl` of weights: per group, the axis of the inputs is cut into groups."""
    return OverSubChannelBlockView if chooses(scaling_per_output, ScalingPerOutputType.GROUP) else Identity


@choices(Identity, DynamicOverSubChannelBlockView)
def act_input_view_impl(scaling_per_output):
    """`input_view_impl` of activations: per group, the features are cut into groups."""
    return (
        DynamicOverSubChannelBlockView
        if chooses(scaling_per_output, ScalingPerOutputType.GROUP)
        else Identity
    )


@value
def weight_group_dim(module):
    """The axis of a weight that is cut into groups."""
    return agreed(module, group_dim_of, "group_dim")


@value
def block_width(group_size=None):
    """How many groups beside each other share a scale: the second length of a block, or 1."""
    return 1 if group_size is None else block_of(group_size, "a quantizer in groups")[1]


@value
def weight_block_dim(module):
    """The axis of a weight along which the groups of a block are neighbours: its last one of output channels."""
    return agreed(module, lambda layer: as_tuple(layer.output_channel_dim)[-1], "output_channel_dim")


@value
def no_group_dim():
    """`group_dim` of biases, which have none."""
    raise ValueError(
        "a bias has no groups.\n  cure: scaling_per_output_type = 'tensor' or 'channel' for a bias quantizer"
    )


@value
def group_elements_axis(group_dim):
    """The axis along the elements of a group, after the cut."""
    return elements_axis(group_dim)


@value
def upstream_shape(upstream_scaling=None):
    """The shape of the scales that a nested injector quantizes, which says so by declaring either name; else None."""
    return None if upstream_scaling is None else (this << 1).scaling_shape


@value
def quantized_shape(module, tracked_parameter_list=(), upstream_shape=None):
    """The shape of what is quantized: the weight's, or of a nested injector that of the scales it is given.

    Scales are not Variables; an array in `tracked_parameter_list` stands for them.
    """
    if upstream_shape is not None:
        return tuple(upstream_shape)
    for tracked in tracked_parameter_list:
        if not isinstance(tracked, nnx.Variable):
            return tuple(tracked.shape)
    return weight_shape_of(module)


@value
def expanded_groupwise_shape(
    module,
    quantized_shape,
    group_dim,
    block_dim=None,
    scaling_per_output=None,
    group_size=None,
    group_padding=True,
    upstream_shape=None,
):
    """The shape of a weight, or of its scales, cut into groups: the axis of the inputs becomes (groups, elements)."""
    if group_size is None:
        return this.group_size if chooses(scaling_per_output, ScalingPerOutputType.GROUP) else None
    size, width = block_of(group_size, "a group-wise weight quantizer")
    if upstream_shape is not None or quantized_shape != weight_shape_of(module):
        check_groups_of_scales(quantized_shape, size, group_dim)
    elif not group_padding:
        check_divides(quantized_shape[group_dim], size, "a group-wise weight quantizer")
        if width > 1:
            where = "a weight quantizer in blocks, along their second axis,"
            check_divides(quantized_shape[block_dim], width, where)
    return grouped_shape(quantized_shape, fitting_size(size, quantized_shape[group_dim]), group_dim)


@value
def reshaped_groupwise_shape(expanded_groupwise_shape, group_elements_axis):
    """The shape of a weight whose groups are joined again, padding included."""
    shape = list(expanded_groupwise_shape)
    size = shape.pop(group_elements_axis)
    shape[group_elements_axis - (group_elements_axis >= 0)] *= size
    return tuple(shape)


@value
def scaling_per_group_shape(expanded_groupwise_shape, group_elements_axis):
    """The shape of the scales of a weight's groups: 1 along the elements of each."""
    shape = list(expanded_groupwise_shape)
    shape[group_elements_axis] = 1
    return tuple(shape)


# Activations: a layer that knows how many channels flow through a slot declares them; otherwise the user does.


@value
def per_channel_broadcastable_shape(activation_channel_shape=None):
    """The shape of a per-channel scale of activations."""
    if activation_channel_shape is None:
        raise ValueError(
            "a scale for each channel needs to know the channels, and this layer does not know how many flow "
            "here.\n  cure: per_channel_broadcastable_shape = (4,) for 4 channels along the last axis, (4, 1, 1) "
            "along the third from the end"
        )
    return activation_channel_shape


@value
def act_channel_shape(scaling_per_output, scaling_stats_permute_dims=None):
    """The shape by which a view finds the channels of activations, unless it is told by a permutation."""
    per_channel = chooses(scaling_per_output, ScalingPerOutputType.CHANNEL)
    if per_channel and scaling_stats_permute_dims is None:
        return this.per_channel_broadcastable_shape
    return None


@value
def act_per_output_channel_shape():
    """`scaling_per_output_channel_shape` of activations: another name for `per_channel_broadcastable_shape`."""
    return this.per_channel_broadcastable_shape


# All axes of a bias are channels, so it needs no view.


@value
def bias_per_output_channel_shape(module):
    """The shape of a per-channel scale of biases: one for each element."""
    return agreed(module, shape_of_bias, "out_channels")


@value
def bias_channel_axes(module):
    """How many axes a bias has."""
    return len(agreed(module, shape_of_bias, "out_channels"))
