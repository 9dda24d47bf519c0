"""Facts of the layer, or of the layers that share a quantizer, and the shapes that follow from them.

Views put the channels first and everything else in axis 1. `by_output` and `of_statistic` make the rows that depend on
what shares a scale; the other functions read the layer. The tables at the end are parts of the solvers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from flax import nnx

from jqinject import core
from jqinject.inject import ExtendedInjector, choices, this, value
from jqinject.ops.groups import block_of, check_divides, elements_axis, fitting_size, grouped_shape
from jqinject.quant import enums

Dims = int | tuple[int, ...]

CHANNEL_REDUCE_DIM = 1


def by_output(tensor: object = None, channel: object = None, group: object = None) -> Any:
    """Return the `@value` function that chooses by what shares a scale (`scaling_per_output`).

    Args:
        tensor: the choice if the whole tensor shares one, or if nothing is declared; a value, a component or a link.
        channel: the choice for each channel.
        group: the choice for each group.

    Example:
        >>> from jqinject.inject import ExtendedInjector
        >>> class Q(ExtendedInjector):
        ...     scaling_per_output = "channel"
        ...     axis = by_output(tensor=None, channel=1)
        >>> Q.axis
        1
    """
    table: dict[str | None, object] = {"channel": channel, "group": group}

    def select(scaling_per_output: str | None) -> object:
        return table.get(scaling_per_output and scaling_per_output.lower(), tensor)

    return choosing(select, tensor, channel, group)


def of_statistic(tensor: object = None, channel: object = None, group: object = None) -> Any:
    """As `by_output`, for what is reduced: the mean of the channels' maxima (`max_ave`) is taken of channels too."""
    plain, averaged = by_output(tensor, channel, group), by_output(channel, channel, group)

    def select(scaling_stats_op: str | None, scaling_per_output: str | None) -> object:
        of_channels = enums.chooses(scaling_stats_op, enums.StatsOp.MAX_AVE)
        return (averaged if of_channels else plain).__function__(scaling_per_output)

    return choosing(select, tensor, channel, group)


def choosing(select: Callable[..., object], *options: object) -> Any:
    """Return the `@value` function of `select`, which returns one of some options."""
    return choices(*(option for option in options if isinstance(option, type)))(select)


def as_tuple(fact: int | tuple[int, ...]) -> tuple[int, ...]:
    """A fact about the channel axis, or about several (which they are, how many channels each has)."""
    return fact if isinstance(fact, tuple) else (fact,)


def channels_of(layer: Any, output_channel_dim: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """How many channels a layer's weight has along its channel axis, or along each of several."""
    sizes = tuple(map(layer.weight_shape.__getitem__, as_tuple(output_channel_dim)))
    return sizes[0] if len(sizes) == 1 else sizes


def group_dim_of(layer: Any) -> int:
    """The axis of a layer's weight that groups lie along: the last that holds no output channels (the inputs).

    Raises:
        ValueError: every axis holds output channels.
    """
    channels = as_tuple(layer.output_channel_dim)
    others = [axis for axis in range(len(layer.weight_shape)) if axis not in channels]
    if not others:
        raise ValueError(
            f"the weight of a {type(layer).__name__} has no axis for groups: all of its {len(layer.weight_shape)} hold "
            "output channels.\n  cure: a quantizer per tensor or per channel, or group_dim = ..."
        )
    return others[-1]


def weight_shape_of(module: object) -> tuple[int, ...]:
    """The shape of a layer's weight, on which layers that share a quantizer have to agree."""
    return agreed(module, lambda layer: tuple(layer.weight_shape), "weight shape")


def check_groups_of_scales(shape: tuple[int, ...], group_size: int, group_dim: int) -> None:
    """Reject groups that scales do not fill, as a group of scales is never padded.

    Args:
        shape: of the scales that a nested injector quantizes.
        group_size: how many scales share a scale of their own.
        group_dim: the axis of the scales that is cut into groups.

    Raises:
        ValueError: the scales have no such axis, or `group_size` does not divide it.
    """
    if not -len(shape) <= group_dim < len(shape):
        raise ValueError(
            f"scales of shape {shape}, quantized in groups by a nested injector, have no axis {group_dim} to cut into "
            "groups.\n  cure: group_dim = 0, or another axis of the scales, in the nested injector"
        )
    length = shape[group_dim]
    if length % group_size:
        sizes = ", ".join(str(size) for size in range(2, length + 1) if length % size == 0)
        divisors = f"group_size = {sizes} (what divides {length}), or " if sizes else ""
        raise ValueError(
            f"groups of {group_size} scales do not fill axis {group_dim} of scales of shape {shape}, which a nested "
            f"injector quantizes: it has {length}.\n  cure: in the nested injector {divisors}group_dim = "
            "another axis, or scaling_per_output_type = 'tensor'"
        )


def shape_of_bias(layer: Any) -> tuple[int, ...]:
    """The shape of a layer's bias; without one, that of its output channels."""
    if layer.bias is None:
        return as_tuple(channels_of(layer, layer.output_channel_dim))
    return tuple(layer.bias.shape)


def agreed(module: object, fact: Callable[[Any], Any], name: str) -> Any:
    """A fact about a layer; layers that share a quantizer have to agree on it.

    Args:
        module: a layer, or a tuple of layers.
        fact: reads the fact from one layer.
        name: the fact's name, for the error text.

    Raises:
        ValueError: the layers disagree.
    """
    if not isinstance(module, tuple):
        return fact(module)
    facts = [fact(layer) for layer in module]
    if facts.count(facts[0]) < len(facts):
        shown = ", ".join(f"{type(m).__name__}: {f}" for m, f in zip(module, facts, strict=True))
        raise ValueError(
            f"layers that share a per-channel quantizer need the same {name}, got {shown}. "
            "Give each layer a quantizer of its own, or share one with scaling_per_output_type = 'tensor'."
        )
    return facts[0]


@value
def output_channel_axes(module: object) -> tuple[int, ...]:
    """The weight's axes of output channels, as a tuple."""
    return as_tuple(_channel_dim(module))


def _channel_dim(module: object) -> int | tuple[int, ...]:
    return agreed(module, attrgetter("output_channel_dim"), "output_channel_dim")


@value
def weight_group_dim(module: object) -> int:
    """The axis of a weight that is cut into groups."""
    return agreed(module, group_dim_of, "group_dim")


def _number_of_axes(layer: Any) -> int:
    return len(layer.weight_shape)


@value
def block_width(group_size: int | tuple[int, int] | None = None) -> int:
    """How many groups beside each other share a scale: the second length of a block, or 1."""
    return 1 if group_size is None else block_of(group_size, "a quantizer in groups")[1]


class Shapes(ExtendedInjector):
    """What statistics reduce, and how they see the tensor, in every role that says nothing else."""

    scaling_shape = by_output((), this.scaling_per_output_channel_shape, this.scaling_per_group_shape)
    permute_dims = value(lambda scaling_stats_permute_dims=None: scaling_stats_permute_dims)
    input_view_impl = core.Identity

    scaling_stats_input_view_shape_impl = of_statistic(
        core.OverTensorView, core.OverOutputChannelView, this.input_view_impl
    )
    stats_reduce_dim = of_statistic(channel=CHANNEL_REDUCE_DIM, group=this.group_elements_axis)
    keepdim = by_output(tensor=False, channel=False, group=True)
    group_elements_axis = value(elements_axis)


class WeightShapes(ExtendedInjector):
    """Shapes of weights, from facts of the layer; groups cut the axis of the inputs."""

    scaling_stats_input_concat_dim = by_output(tensor=0, channel=1, group=this.group_elements_axis)
    # quantized group scales have one more axis than the weight: their channels are those of the scale's shape
    channel_shape = by_output(channel=this.scaling_shape)
    output_channel_dim = value(_channel_dim)
    channel_axes = value(lambda output_channel_dim: len(as_tuple(output_channel_dim)))
    input_view_impl = by_output(core.Identity, core.Identity, core.OverSubChannelBlockView)
    group_dim = weight_group_dim
    block_width = block_width
    block_dim = value(lambda module: as_tuple(_channel_dim(module))[-1])
    # the scales that a nested injector quantizes, which says so by declaring either name
    upstream_shape = value(
        lambda upstream_scaling=None: None if upstream_scaling is None else (this << 1).scaling_shape
    )

    @value
    def out_channels(module: object, output_channel_dim: Dims) -> Dims:
        """How many output channels the weight has, along each axis that counts them."""
        return agreed(module, partial(channels_of, output_channel_dim=output_channel_dim), "out_channels")

    @value
    def permute_dims(module: object, output_channel_dim: Dims) -> tuple[int, ...] | None:
        """The permutation that puts the channels of a weight first; None if they are first already."""
        axes = list(range(agreed(module, _number_of_axes, "number of weight axes")))
        channels = sorted(map(axes.__getitem__, as_tuple(output_channel_dim)))
        if channels == axes[: len(channels)]:
            return None
        if len(channels) > 1:
            return (*channels, *(axis for axis in axes if axis not in channels))
        axes[0], axes[channels[0]] = channels[0], 0
        return tuple(axes)

    @value
    def scaling_per_output_channel_shape(
        module: object, output_channel_dim: Dims, out_channels: Dims
    ) -> tuple[int, ...]:
        """The shape of a per-channel scale of weights: 1 but along the axes that channels are counted by."""
        shape = [1] * agreed(module, _number_of_axes, "number of weight axes")
        for axis, size in zip(as_tuple(output_channel_dim), as_tuple(out_channels), strict=True):
            shape[axis] = size
        return tuple(shape)

    @value
    def quantized_shape(
        module: object,
        tracked_parameter_list: Sequence[Any] = (),
        upstream_shape: Sequence[int] | None = None,
    ) -> tuple[int, ...]:
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
        module: object,
        quantized_shape: tuple[int, ...],
        group_dim: int,
        block_dim: Any = None,
        scaling_per_output: str | None = None,
        group_size: int | tuple[int, int] | None = None,
        group_padding: bool = True,
        upstream_shape: Sequence[int] | None = None,
    ) -> object:
        """The shape of a weight, or of its scales, cut into groups: the axis of the inputs becomes two."""
        if group_size is None:
            needs_size = enums.chooses(scaling_per_output, enums.ScalingPerOutputType.GROUP)
            return this.group_size if needs_size else None
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
    def scaling_per_group_shape(expanded_groupwise_shape: Any, group_elements_axis: int) -> tuple[int, ...]:
        """The shape of the scales of a weight's groups: 1 along the elements of each."""
        shape = list(expanded_groupwise_shape)
        shape[group_elements_axis] = 1
        return tuple(shape)


class ActShapes(ExtendedInjector):
    """Shapes of activations: a layer that knows its slots' channels declares them; otherwise the user does."""

    scaling_shape = by_output(tensor=(), channel=this.per_channel_broadcastable_shape, group=())
    scaling_per_output_channel_shape = this.per_channel_broadcastable_shape

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
    def channel_shape(
        scaling_per_output: Any, scaling_stats_permute_dims: Sequence[int] | None = None
    ) -> object:
        """The shape by which a view finds the channels of activations, unless a permutation says so."""
        per_channel = enums.chooses(scaling_per_output, enums.ScalingPerOutputType.CHANNEL)
        by_shape = per_channel and scaling_stats_permute_dims is None
        return this.per_channel_broadcastable_shape if by_shape else None


class BiasShapes(ExtendedInjector):
    """Shapes of biases, all of whose axes are channels, so that they need no view."""

    scaling_stats_input_concat_dim = output_channel_dim = 0
    channel_axes = value(lambda module: len(agreed(module, shape_of_bias, "out_channels")))
    scaling_per_output_channel_shape = value(lambda module: agreed(module, shape_of_bias, "out_channels"))

    @value
    def group_dim():
        """Biases have no groups."""
        raise ValueError(
            "a bias has no groups.\n  cure: scaling_per_output_type = 'tensor' or 'channel' for a bias quantizer"
        )
