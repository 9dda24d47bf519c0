"""Drives quantized layers, and one small network: sequences of batches through layers that live through all of them."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.quant_tensor import as_array
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters import attention, recurrent
from tests.golden.adapters.layer_classes import layer_of
from tests.golden.adapters.layouts import (
    LAYOUTS,
    back,
    compiled,
    dotted,
    facts_of,
    fields_of,
    moved,
    once,
    our_path,
    shaped,
)

Case = dict[str, Any]

WEIGHTS = ("kernel", "embedding", "scale")


def _axes(case: Case, name: str, ndim: int) -> tuple[int, ...]:
    """The order of axes of a named array: weights by their rank, data by that of the layer."""
    kind = case["layer"]["kind"]
    if kind == "QuantEmbedding":
        return LAYOUTS["embedding"].data(ndim)
    linear = ndim == 2 or kind == "QuantLinear"
    layout = LAYOUTS["linear" if linear else "conv2d"]
    # The parameters of a weight's quantizer have its rank.
    names = name.split(".")
    is_weight = names[-1] == "weight" or "weight_quant" in names
    return layout.weight(ndim) if is_weight else layout.data(ndim)


def _to_ours(case: Case, name: str, array: np.ndarray) -> Any:
    return jnp.asarray(moved(array, _axes(case, name, array.ndim)))


def _to_theirs(case: Case, name: str, array: Any) -> np.ndarray:
    array = np.asarray(array)
    return back(array, _axes(case, name, array.ndim)) if array.ndim > 1 else array


def build(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    """The layer of the case, with its parameters."""
    with reading(case["layer"], "a layer") as stated:
        kind = stated.take("kind")
    if kind == "QuantMultiheadAttention":
        return attention.build(case, inputs)
    if kind in recurrent.KINDS:
        return recurrent.build(case, inputs)
    with reading(case["config"], kind) as config:
        layer = layer_of(config, kind)
    with reading(inputs, f"the arrays of {kind}") as arrays:
        arrays.take("x")
        arrays.take("cotangent0")
        for name in inputs:
            if name.startswith("param."):
                _set(layer, name.split(".")[1:], _to_ours(case, name, arrays.take(name)))
    return layer


def _set(layer: Any, path: list[str], array: Any) -> None:
    *owners, last = path
    owner = functools.reduce(getattr, owners, layer)
    if getattr(owner, last).shape != array.shape:
        raise CannotDrive(f"{'.'.join(path)}: shape {getattr(owner, last).shape}, got {array.shape}")
    setattr(owner, last, nnx.Param(array))


@once
def _sequence(case: Case, inputs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    if case["layer"]["kind"] == "QuantMultiheadAttention":
        return attention.sequence(case, inputs)
    layer = build(case, inputs)
    found = []
    for step, mode in enumerate(case["schedule"]):
        layer.train() if mode == "train" else layer.eval()
        x = _to_ours(case, "x", inputs["x"][step])
        cotangent = _to_ours(case, "cotangent", inputs["cotangent0"])
        found.append(_step(case, layer, x, cotangent))
    return found


def _gradients(layer: Any, x: Any, cotangent: Any) -> Any:
    def loss(layer: Any, x: Any) -> tuple[Any, Any]:
        out = layer(x)
        return jnp.sum(as_array(out) * cotangent), out

    if jnp.issubdtype(x.dtype, jnp.integer):
        gradients, out = nnx.grad(loss, has_aux=True)(layer, x)
        return (gradients, jnp.zeros(x.shape)), out
    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


def _step(case: Case, layer: Any, x: Any, cotangent: Any) -> dict[str, Any]:
    (gradients, along_x), out = compiled(_gradients)(layer, x, cotangent)
    outputs = {"tensor": out, "grad.x": _to_theirs(case, "x", along_x)}
    outputs |= {f"out0.{name}": _to_theirs(case, "out", array) for name, array in fields_of(out).items()}
    for path, gradient in nnx.to_flat_state(gradients):
        name = dotted(tuple("weight" if step in WEIGHTS else step for step in path))
        outputs[f"grad.{name}"] = _to_theirs(case, name, gradient.get_value())
    return outputs


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names, stacked over its steps."""
    if case["layer"]["kind"] in recurrent.KINDS:
        return recurrent.run(case, inputs)
    steps = _sequence(case, inputs)
    found: dict[str, np.ndarray] = {}
    for name, spec in case["outputs"].items():
        step, _, inner = name.partition(".")
        if step.startswith("step"):
            found[name] = shaped(steps[int(step.removeprefix("step"))][_ours(inner)], spec["shape"])
        else:
            rows = [shaped(steps[step][_ours(name)], spec["shape"][1:]) for step in spec["steps"]]
            found[name] = np.stack(rows)
    return found


def _ours(name: str) -> str:
    """`grad.[owner.]act_quant.fused...tensor_quant.a` -> the same under our path."""
    head, found, _ = name.partition(".fused_activation_quant_proxy")
    if not found:
        head, found, _ = name.partition(".tensor_quant")
    return f"{head}.{dotted(our_path(name))}" if found else name


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the output after every step."""
    if case["layer"]["kind"] in recurrent.KINDS:
        return recurrent.facts(case, inputs)
    return {"steps": [facts_of(outputs["tensor"]) for outputs in _sequence(case, inputs)]}
