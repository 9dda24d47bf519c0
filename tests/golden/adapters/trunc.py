"""Drives quantizers of accumulators: the quantizer itself on a quantized tensor, or in a pooling layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.nn import TruncAvgPool, TruncAvgPool2d
from jqinject.quant_tensor import IntQuantTensor
from tests.golden._config import reading
from tests.golden.adapters.layouts import (
    back,
    channels_last,
    compiled,
    facts_of,
    fields_of,
    moved,
    once,
    quantizer,
    shaped,
)

Case = dict[str, Any]


def build(case: Case, inputs: dict[str, np.ndarray]) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    """The layer of the case (for the quantizer alone one that pools nothing), the order of axes, its input's format."""
    given = {"trunc_quant": quantizer(case["quantizer"], case["overrides"])}
    with reading(inputs, "the arrays of an accumulator") as arrays:
        # The integers are those of `x`.
        for name in ("x", "x_int", "cotangent"):
            arrays.take(name, None)
    with reading(case["layer"], "an accumulator") as stated:
        if stated.choose("kind", {"proxy": True, "TruncAvgPool2d": False}):
            stated.choose("call", {"proxy(IntQuantTensor)": None})
            return TruncAvgPool((), **given), (), format_of(case)
        size = stated.take("kernel_size")
        pooling = TruncAvgPool2d(size, strides=stated.take("stride", size), **given)
        return pooling, channels_last(4), format_of(case)


def format_of(case: Case) -> dict[str, Any]:
    """Scale, zero point, bit width and sign of the quantized input."""
    with reading(case["config"], "an accumulator") as config:
        stated = config.nested("input")
    with reading(stated, "an accumulator's format") as given:
        return {name: given.take(name) for name in ("scale", "zero_point", "bit_width", "signed")}


def steps_of(case: Case, inputs: dict[str, np.ndarray]) -> list[tuple[str, Any]]:
    """Mode and input of every step."""
    if not case.get("schedule"):
        return [("train", inputs["x"])]
    return list(zip(case["schedule"], inputs["x"], strict=True))


@once
def _sequence(case: Case, inputs: dict[str, np.ndarray]) -> tuple[tuple[int, ...], list[tuple[Any, Any]]]:
    """The order of axes; the result of every step, and the gradient of its input if there is a cotangent."""
    layer, axes, stated = build(case, inputs)
    found = []
    for mode, x in steps_of(case, inputs):
        layer.train() if mode == "train" else layer.eval()
        given = IntQuantTensor(jnp.asarray(moved(x, axes)), **stated, training=mode == "train")
        if "cotangent" not in inputs:
            found.append((layer(given), None))
            continue
        cotangent = jnp.asarray(moved(inputs["cotangent"], axes))
        gradient, tensor = compiled(_gradient)(layer, given.value, given, cotangent)
        found.append((tensor, back(gradient, axes)))
    return axes, found


def _gradient(layer: Any, x: Any, given: Any, cotangent: Any) -> Any:
    def loss(layer: Any, x: Any) -> tuple[Any, Any]:
        tensor = layer(given.set(value=x))
        return jnp.sum(tensor.value * cotangent), tensor

    return nnx.grad(loss, argnums=1, has_aux=True)(layer, x)


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names."""
    rows = []
    axes, steps = _sequence(case, inputs)
    for tensor, gradient in steps:
        row = {name: back(array, axes) for name, array in fields_of(tensor).items()}
        rows.append(row | {"grad.x": gradient})
    found = {}
    for name, spec in case["outputs"].items():
        if "steps" in spec:
            found[name] = np.stack([shaped(rows[step][name], spec["shape"][1:]) for step in spec["steps"]])
        else:
            found[name] = shaped(rows[0][name], spec["shape"])
    return found


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the result, and of that of every step."""
    steps = [facts_of(tensor) for tensor, _ in _sequence(case, inputs)[1]]
    return {"steps": steps} if case.get("schedule") else steps[0]
