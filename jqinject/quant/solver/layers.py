"""Facts about the layer, or about the layers that share a quantizer, as read from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def layers_of(module: Any) -> tuple[Any, ...]:
    """The layers a proxy hands in as `module`: one layer, or a tuple of those that share it."""
    return module if isinstance(module, tuple) else (module,)


def as_tuple(fact: int | tuple[int, ...]) -> tuple[int, ...]:
    """A fact about the channel axis, or about several (which they are, how many channels each has)."""
    return fact if isinstance(fact, tuple) else (fact,)


def channels_of(layer: Any, output_channel_dim: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """How many channels a layer's weight has along its channel axis, or along each of several."""
    found = tuple(layer.weight_shape[axis] for axis in as_tuple(output_channel_dim))
    return found[0] if len(found) == 1 else found


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


def weight_shape_of(module: Any) -> tuple[int, ...]:
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


def agreed(module: Any, fact: Callable[[Any], Any], name: str) -> Any:
    """A fact about a layer; layers that share a quantizer have to agree on it.

    Args:
        module: a layer, or a tuple of layers.
        fact: reads the fact from one layer.
        name: the fact's name, for the error text.

    Raises:
        ValueError: the layers disagree.
    """
    found = [fact(layer) for layer in layers_of(module)]
    if any(other != found[0] for other in found[1:]):
        shown = ", ".join(f"{type(m).__name__}: {f}" for m, f in zip(layers_of(module), found, strict=True))
        raise ValueError(
            f"layers that share a per-channel quantizer need the same {name}, got {shown}. "
            "Give each layer a quantizer of its own, or share one with scaling_per_output_type = 'tensor'."
        )
    return found[0]
