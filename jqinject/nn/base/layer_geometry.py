"""Where the weight and the input of a layer have which axes, and the check of an input against them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jqinject.quant_tensor.array_methods import attribute


@dataclass(frozen=True, eq=False)
class LayerGeometry:
    """Declares the axes of a layer's weight and input.

    Axes of the weight are counted in one layer: those of a stack come before them. Instances are compared by identity,
    so a layer returns the same one for the same arguments (`functools.cache`).

    Attributes:
        ndim: number of axes of the weight.
        summed: axes of the weight that the contraction sums over, stored last once frozen; empty where it is not a
            single `dot_general`.
        channels: axes of the weight with the output channels; by default those that are not summed.
        sums: axes along which a contraction of integers needs sums of the weight; by default `summed`.
        input_axes: axes of the input that are contracted, in the order of `summed`.
        batch_axes: axes of the input that meet the first axes of the weight and stay in the output.
        features: sizes of `input_axes`, in the order in which these lie; empty if they are not checked.
        channels_last: whether the input has axes in space before its channels.
        input_channels, output_channels: shapes of a scale for each channel of input and output; None if unknown.
    """

    ndim: int
    summed: tuple[int, ...] = ()
    channels: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    input_axes: tuple[int, ...] = (-1,)
    batch_axes: tuple[int, ...] = ()
    features: tuple[int, ...] = ()
    channels_last: bool = False
    input_channels: tuple[int, ...] | None = None
    output_channels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        unsummed = tuple(axis for axis in range(self.ndim) if axis not in self.summed)
        object.__setattr__(self, "channels", self.channels or unsummed)
        object.__setattr__(self, "sums", self.sums or self.summed)

    @cached_property
    def channel_dim(self) -> int | tuple[int, ...]:
        """The axis of `channels`; a tuple if there are several."""
        return self.channels[0] if len(self.channels) == 1 else self.channels

    @cached_property
    def channel_shapes(self) -> dict[str, tuple[int, ...]]:
        """Map slots of activations to the shape of a scale for each channel there, as far as it is known."""
        shapes = {"input_quant": self.input_channels, "output_quant": self.output_channels}
        return {slot: shape for slot, shape in shapes.items() if shape is not None}

    def expected_features(self, ndim: int) -> dict[int, int]:
        """Map contracted axes of an input of `ndim` axes to their sizes."""
        axes = self.input_axes
        if all(-ndim <= axis < ndim for axis in axes):  # else an axis is missing, and reported
            axes = tuple(sorted(axes, key=lambda axis: axis % ndim))
        return dict(zip(axes, self.features, strict=True)) if self.features else {}


class DeclaresGeometry:
    """Mixin: the questions that quantizers ask of a weight's axes, answered by its `geometry`."""

    __slots__ = ()  # an instance of a Flax layer can only take a class of the same layout

    @property
    def geometry(self) -> LayerGeometry:
        """The axes of the weight and the input."""
        raise TypeError(
            f"{type(self).__name__} does not declare which axes its weight and input have.\n"
            "  cure: a property `geometry` that returns a jqinject.nn.base.LayerGeometry"
        )

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight, with the axes of a stack."""
        raise TypeError(
            f"{type(self).__name__} does not say which shape its weight has.\n  cure: a property `weight_shape`"
        )

    weight_ndim: int = attribute("geometry.ndim", "Axes of one weight; more than that are a stack of layers.")
    output_channel_dim: int | tuple[int, ...] = attribute("geometry.channel_dim", "Of output channels.")
    summed_axes: tuple[int, ...] = attribute(
        "geometry.summed", "Of the weight: what a contraction sums over, stored last; none for a convolution."
    )
    input_axes: tuple[int, ...] = attribute("geometry.input_axes", "Of the input: what is contracted.")

    @property
    def out_channels(self) -> int:
        """The number of output channels."""
        geometry = self.geometry
        return math.prod(self.weight_shape[axis - geometry.ndim] for axis in geometry.channels)

    def axes_of_sums(self) -> tuple[int, ...] | None:
        """The axes along which a contraction of integers needs sums of the weight; None if it needs none."""
        return self.geometry.sums or None


CONTRACTED = ("in_features", "kernel_shape")  # arguments whose axes are summed over


class WrongFeaturesError(ValueError, TypeError):
    """An input has other features than the layer; a TypeError too, as XLA's contractions raise."""


def check_features(
    layer: object,
    inputs: Any,
    expected: Mapping[int, int],
    *,
    channels_last: bool = False,
    argument: str = "in_features",
    what: str = "an input",
) -> None:
    """Refuse an input of wrong features, before any quantizer has seen it.

    Args:
        layer: the layer that is called, for the error text.
        inputs: an array or a QuantTensor.
        expected: the size of each axis that is contracted; axes count from the front or (negative) from the end.
        channels_last: whether the input has axes in space, so that the channels may stand in the wrong place.
        argument: the argument of the layer that decides the features, for the text.
        what: what came, for the text.

    Raises:
        WrongFeaturesError: an axis has another size, or is missing.
    """
    shape = tuple(np.shape(inputs) if isinstance(inputs, list | tuple | int | float) else inputs.shape)
    kind = type(layer).__name__
    for axis, size in expected.items():
        if not -len(shape) <= axis < len(shape):
            raise WrongFeaturesError(
                f"{kind} got {what} of shape {shape}, which has no axis {axis}; expected {size} features there"
            )
        if shape[axis] != size:
            where = "last axis" if axis in (-1, len(shape) - 1) else f"axis {axis}"
            sizes = tuple(shape[place] for place in expected if -len(shape) <= place < len(shape))
            contracted = f"{sizes} and {tuple(expected.values())}"
            by = f"the layer's {argument}" + (
                f" (contracted: {contracted})" if argument in CONTRACTED else ""
            )
            argument_cure = (
                f"{argument}={shape[axis]}" if argument != "kernel_shape" else "another kernel_shape"
            )
            cure = _moved(shape, axis, size, channels_last)
            cure = cure or f"{what} with {size} features, or {kind} with {argument_cure}"
            raise WrongFeaturesError(
                f"{kind} got {what} of shape {shape}, whose {where} is {shape[axis]}; expected {size}, {by}.\n"
                f"  cure: {cure}"
            )


def _moved(shape: tuple[int, ...], axis: int, size: int, channels_last: bool) -> str:
    """How the features come to their place, if another axis has as many."""
    if size not in shape:
        return ""
    there = shape.index(size)
    order = "channels come last here: " if channels_last else ""
    return f"axis {there} has {size}; {order}jnp.moveaxis(x, {there}, {axis})"
