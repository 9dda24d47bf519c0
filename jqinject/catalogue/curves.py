"""The transfer curve of a quantizer: its output over its input."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jqinject.catalogue.examples import CHANNELS, OUT_FEATURES, Example
from jqinject.catalogue.pages import HEIGHT, MARGIN, WIDTH, line_svg
from jqinject.quant_tensor import IntQuantTensor, as_array

POINTS = 512
BEYOND = 1.25  # curves of activations extend past the collected range


def transfer_curve(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of a quantizer for evenly spaced numbers.

    A weight is a column of a `QuantLinear` from -1 to 1. An activation's range is collected from numbers between -1 and
    1, and its curve drawn between -1.25 and 1.25. A truncating quantizer gets 11-bit integers.

    Args:
        example: a layer with the quantizer.

    Returns:
        The inputs, ascending, and the outputs.

    Raises:
        ValueError: a quantizer of gradients, which changes only the backward pass.
    """
    if example.slot == "weight_quant":
        return _of_weight(example.layer)
    if example.slot == "act_quant":
        return _of_activation(example)
    if example.slot == "trunc_quant":
        return _of_accumulator(example.layer)
    if example.slot == "bias_quant":
        return _of_bias(example.layer)
    raise ValueError("a quantizer of gradients leaves the forward pass as it is")


def curve_points(x: np.ndarray, y: np.ndarray) -> str:
    """The curve as the points of a line in a picture of `WIDTH` by `HEIGHT`.

    Args:
        x: the inputs, ascending.
        y: the outputs.
    """
    low = float(min(x.min(), y.min()))
    high = float(max(x.max(), y.max()))
    across, up = (WIDTH - 2 * MARGIN) / (high - low or 1.0), (HEIGHT - 2 * MARGIN) / (high - low or 1.0)
    return " ".join(
        f"{MARGIN + (float(x[i]) - low) * across:.1f},{HEIGHT - MARGIN - (float(y[i]) - low) * up:.1f}"
        for i in _corners(x, y)
    )


def curve_svg(x: np.ndarray, y: np.ndarray, title: str) -> str:
    """The curve as a small picture, with the identity line behind it.

    Args:
        x: the inputs, ascending.
        y: the outputs.
        title: alternative text.
    """
    return line_svg(curve_points(x, y), title)


def _corners(x: np.ndarray, y: np.ndarray) -> list[int]:
    """The points at which a line through all of them changes direction."""
    slope = np.diff(y) / np.diff(x)
    turns = 1 + np.flatnonzero(np.abs(np.diff(slope)) > 1e-6 * max(np.abs(slope).max(initial=0.0), 1.0))
    return [0, *turns.tolist(), len(x) - 1]


def _of_weight(layer: Any) -> tuple[np.ndarray, np.ndarray]:
    x = layer.weight[...][:, 0]
    return _numpy(x), _numpy(as_array(layer.quant_weight())[:, 0])


def _of_bias(layer: Any) -> tuple[np.ndarray, np.ndarray]:
    layer.bias[...] = jnp.linspace(-1.0, 1.0, OUT_FEATURES)
    x = layer.bias[...]
    given = jnp.ones((1, layer.weight_shape[0]))
    quant_input = None if layer.input_quant is None else layer.input_quant(given)
    return _numpy(x), _numpy(as_array(layer.quant_bias(quant_input)))


def _of_activation(example: Example) -> tuple[np.ndarray, np.ndarray]:
    permutation = example.overrides.get("scaling_stats_permute_dims", (1, 0))
    around = (1,) * (len(permutation) - 2)

    def spread(most: float) -> Any:
        rising = jnp.linspace(-most, most, POINTS)
        return jnp.broadcast_to(rising.reshape(POINTS, *around, 1), (POINTS, *around, CHANNELS))

    example.layer(spread(1.0))
    example.layer.eval()
    x = spread(BEYOND)
    y = as_array(example.layer(x))
    return _numpy(x).reshape(POINTS, CHANNELS)[:, 0], _numpy(y).reshape(POINTS, CHANNELS)[:, 0]


def _of_accumulator(layer: Any) -> tuple[np.ndarray, np.ndarray]:
    integers = jnp.arange(-1024, 1024).reshape(1, -1, 1)
    sums = IntQuantTensor.from_int(integers, 2.0**-10, 0.0, 11, signed=True)
    layer(sums)
    layer.eval()
    return _numpy(sums.value).ravel(), _numpy(as_array(layer(sums))).ravel()


def _numpy(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)
