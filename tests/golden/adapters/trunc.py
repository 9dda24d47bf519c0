"""Drives quantizers of accumulators: the quantizer itself on a quantized tensor, or in a pooling layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.nn import TruncAvgPool, TruncAvgPool2d
from jqinject.quant_tensor import IntQuantTensor
from tests.golden.adapters.layouts import (
    back,
    channels_last,
    compiled,
    facts_of,
    fields_of,
    moved,
    once,
    plain,
    quantizer,
    shaped,
)

Case = dict[str, Any]


def layer_of(case: Case) -> Any:
    """The layer of the case; for the quantizer alone one that pools nothing."""
    given = {"trunc_quant": quantizer(case["quantizer"]), **plain(case["overrides"])}
    if case["layer"]["kind"] == "proxy":
        return TruncAvgPool((), **given)
    size = case["layer"]["kernel_size"]
    return TruncAvgPool2d(size, strides=case["layer"].get("stride", size), **given)


def axes_of(case: Case) -> tuple[int, ...]:
    """The axes of the reference's tensors in our order."""
    return () if case["layer"]["kind"] == "proxy" else channels_last(4)


def steps_of(case: Case, inputs: dict[str, np.ndarray]) -> list[tuple[str, Any]]:
    """Mode and input of every step."""
    if not case.get("schedule"):
        return [("train", inputs["x"])]
    return list(zip(case["schedule"], inputs["x"], strict=True))


@once
def _sequence(case: Case, inputs: dict[str, np.ndarray]) -> list[tuple[Any, Any]]:
    """The result of every step, and the gradient of its input where there is a cotangent."""
    layer, stated, axes = layer_of(case), case["config"]["input"], axes_of(case)
    found = []
    for mode, x in steps_of(case, inputs):
        layer.train() if mode == "train" else layer.eval()
        given = IntQuantTensor(
            jnp.asarray(moved(x, axes)),
            stated["scale"],
            stated["zero_point"],
            stated["bit_width"],
            signed=stated["signed"],
            training=mode == "train",
        )
        if "cotangent" not in inputs:
            found.append((layer(given), None))
            continue
        cotangent = jnp.asarray(moved(inputs["cotangent"], axes))
        gradient, tensor = compiled(_gradient)(layer, given.value, given, cotangent)
        found.append((tensor, back(gradient, axes)))
    return found


def _gradient(layer: Any, x: Any, given: Any, cotangent: Any) -> Any:
    def loss(layer: Any, x: Any) -> tuple[Any, Any]:
        tensor = layer(given.set(value=x))
        return jnp.sum(tensor.value * cotangent), tensor

    return nnx.grad(loss, argnums=1, has_aux=True)(layer, x)


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names."""
    rows = []
    for tensor, gradient in _sequence(case, inputs):
        row = {name: back(array, axes_of(case)) for name, array in fields_of(tensor).items()}
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
    steps = [facts_of(tensor) for tensor, _ in _sequence(case, inputs)]
    return {"steps": steps} if case.get("schedule") else steps[0]
