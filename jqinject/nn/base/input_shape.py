"""The error for an input whose features are not those that a layer was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

CONTRACTED = ("in_features", "kernel_shape")  # arguments whose axes are summed over


class WrongFeaturesError(ValueError, TypeError):
    """An input has other features than the layer; a TypeError too, as XLA's contractions raise."""


def check_features(
    layer: Any,
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
            found = tuple(shape[each] for each in expected if -len(shape) <= each < len(shape))
            contracted = f"{found} and {tuple(expected.values())}"
            by = f"the layer's {argument}" + (
                f" (contracted: {contracted})" if argument in CONTRACTED else ""
            )
            other = f"{argument}={shape[axis]}" if argument != "kernel_shape" else "another kernel_shape"
            cure = _moved(shape, axis, size, channels_last)
            cure = cure or f"{what} with {size} features, or {kind} with {other}"
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
