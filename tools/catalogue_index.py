"""Writes `jqinject/catalogue/index.jsonl`: an entry a line for every ready-made quantizer, with its transfer curve.

    python tools/catalogue_index.py

A test compares the file with what this makes of the ready-made quantizers.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from catalogue_pages import HEIGHT, MARGIN, WIDTH
from jqinject.catalogue import index
from jqinject.catalogue.entries import entry_from_wiring, ready_made
from jqinject.catalogue.examples import BEYOND, CHANNELS, OUT_FEATURES, Example, example_of
from jqinject.quant_tensor import IntQuantTensor, as_array

Curve: TypeAlias = tuple[ArrayLike, ArrayLike]
POINTS = 512


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
    if example.slot not in CURVES_OF:
        raise ValueError("a quantizer of gradients leaves the forward pass as it is")
    x, y = CURVES_OF[example.slot](example)
    return np.asarray(x, np.float64), np.asarray(as_array(y), np.float64)


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


def _corners(x: np.ndarray, y: np.ndarray) -> list[int]:
    """The points at which a line through all of them changes direction."""
    slope = np.diff(y) / np.diff(x)
    turns = 1 + np.flatnonzero(np.abs(np.diff(slope)) > 1e-6 * max(np.abs(slope).max(initial=0.0), 1.0))
    return [0, *turns.tolist(), len(x) - 1]


def _of_weight(example: Example) -> Curve:
    layer = example.layer
    return layer.weight[...][:, 0], as_array(layer.quant_weight())[:, 0]


def _of_bias(example: Example) -> Curve:
    layer = example.layer
    layer.bias[...] = jnp.linspace(-1.0, 1.0, OUT_FEATURES)
    inputs = jnp.ones((1, layer.weight_shape[0]))
    return layer.bias[...], layer.quant_bias(None if layer.input_quant is None else layer.input_quant(inputs))


def _of_activation(example: Example) -> Curve:
    permutation: Any = example.overrides.get("scaling_stats_permute_dims", (1, 0))
    around = (1,) * (len(permutation) - 2)

    def spread(most: float) -> jax.Array:
        rising = jnp.linspace(-most, most, POINTS)
        return jnp.broadcast_to(rising.reshape(POINTS, *around, 1), (POINTS, *around, CHANNELS))

    x = spread(BEYOND)
    y = example.after(spread(1.0), x)
    return x.reshape(POINTS, CHANNELS)[:, 0], y.reshape(POINTS, CHANNELS)[:, 0]


def _of_accumulator(example: Example) -> Curve:
    integers = jnp.arange(-1024, 1024).reshape(1, -1, 1)
    sums = IntQuantTensor.from_int(integers, 2.0**-10, 0.0, 11, signed=True)
    return sums.value.ravel(), example.after(sums, sums).ravel()


CURVES_OF: Mapping[str, Callable[[Example], Curve]] = {
    "weight_quant": _of_weight,
    "act_quant": _of_activation,
    "trunc_quant": _of_accumulator,
    "bias_quant": _of_bias,
}


def with_curve(entry: index.Entry, example: Example) -> index.Entry:
    """The entry with its transfer curve; gradients have none."""
    if entry.kind == "grad":
        return entry
    return dataclasses.replace(entry, points=curve_points(*transfer_curve(example)))


def main() -> None:
    """Write the index."""
    lines = []
    for name, quantizer in ready_made().items():
        entry = with_curve(entry_from_wiring(name, quantizer, {}), example_of(quantizer, {}))
        lines.append(json.dumps(dataclasses.asdict(entry), ensure_ascii=False) + "\n")
    index.INDEX.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
