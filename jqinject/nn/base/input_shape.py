"""The error for an input whose features are not those that a layer was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class WrongFeaturesError(ValueError, TypeError):
    """An input has other features than the layer; a TypeError too, as XLA's contractions raise."""


def check_features(
    layer: Any, inputs: Any, expected: Mapping[int, int], *, channels_last: bool = False
) -> None:
    """Refuse an input of wrong features, before any quantizer has seen it.

    Args:
        layer: the layer that is called, for the error text.
        inputs: an array or a QuantTensor.
        expected: the size of each axis that is contracted; axes count from the front or (negative) from the end.
        channels_last: whether the input has axes in space, so that the channels may stand in the wrong place.

    Raises:
        WrongFeaturesError: an axis has another size, or is missing.
    """
    shape = np.shape(inputs) if isinstance(inputs, list | tuple | int | float) else inputs.shape
    kind = type(layer).__name__
    for axis, size in expected.items():
        if not -len(shape) <= axis < len(shape):
            raise WrongFeaturesError(
                f"{kind} got an input of shape {shape}, which has no axis {axis}; expected {size} features there"
            )
        if shape[axis] != size:
            where = "last axis" if axis in (-1, len(shape) - 1) else f"axis {axis}"
            found = [shape[each] for each in expected if -len(shape) <= each < len(shape)]
            contracted = f"{tuple(found)} and {tuple(expected.values())}"
            raise WrongFeaturesError(
                f"{kind} got an input of shape {shape}, whose {where} is {shape[axis]}; expected {size}, the layer's "
                f"in_features (contracted: {contracted}).\n  cure: {_cure(shape, axis, size, kind, channels_last)}"
            )


def _cure(shape: tuple[int, ...], axis: int, size: int, kind: str, channels_last: bool) -> str:
    if size in shape:
        there = shape.index(size)
        order = "channels come last here: " if channels_last else ""
        return f"axis {there} has {size}; {order}jnp.moveaxis(x, {there}, {axis})"
    return f"an input with {size} features, or {kind} with in_features={shape[axis]}"
