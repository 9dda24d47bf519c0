"""Drives activation quantizers: a sequence of batches through one layer that lives through all of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import QuantParam
from jqinject.nn import QuantHardSwish, QuantHardTanh, QuantIdentity, QuantReLU, QuantSigmoid, QuantTanh
from jqinject.quant_tensor import FloatQuantTensor, GroupwiseFloatQuantTensor, as_array
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.layouts import (
    compiled,
    dotted,
    facts_of,
    fields_of,
    kept_by,
    once,
    our_path,
    quantizer,
    shaped,
)

Case = dict[str, Any]

LAYERS = (QuantHardSwish, QuantHardTanh, QuantIdentity, QuantReLU, QuantSigmoid, QuantTanh)
KINDS = {kind.__name__: kind for kind in LAYERS}


def build(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    """The activation layer, which returns quantized tensors if it has a quantizer."""
    with reading(case["layer"], "an activation") as stated:
        kind, shape = stated.choose("kind", KINDS), stated.take("x_shape")
    with reading(case["config"], "an activation"):
        pass
    with reading(inputs, "the arrays of an activation") as arrays:
        for name in ("x", "cotangent"):
            if name in arrays:
                arrays.take(name)
            else:
                for step in range(len(case["schedule"])):
                    arrays.take(f"step{step}.{name}")
    if "x" in inputs and list(inputs["x"].shape[1:]) != shape:
        raise CannotDrive(f"batches of shape {shape}: got {inputs['x'].shape}")
    return kind(act_quant=quantizer(case["quantizer"], case["overrides"]), return_quant_tensor=True)


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names, stacked over its steps."""
    steps = [outputs for outputs, _ in _sequence(case, inputs)]
    found: dict[str, np.ndarray] = {}
    for name, spec in case["outputs"].items():
        step, _, inner = name.partition(".")
        if step.startswith("step"):
            found[name] = _output(steps[int(step.removeprefix("step"))], inner, spec["shape"])
        else:
            found[name] = np.stack([_output(steps[step], name, spec["shape"][1:]) for step in spec["steps"]])
    return found


def _output(outputs: dict[str, Any], name: str, shape: list[int]) -> np.ndarray:
    kind, _, path = name.partition(".")
    if name not in outputs and kind in ("grad", "state"):
        name = f"{kind}.{dotted(our_path(path))}"
    return shaped(outputs[name], shape)


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of every step, and the counters after it."""
    found = [(facts_of(outputs["tensor"]), counters) for outputs, counters in _sequence(case, inputs)]
    counters = [counters for _, counters in found] if case["facts"].get("counters") else []
    return {"steps": [facts for facts, _ in found], "counters": counters}


@once
def _sequence(case: Case, inputs: dict[str, np.ndarray]) -> list[tuple[dict[str, Any], dict[str, int]]]:
    layer = build(case, inputs)
    found = []
    for step, mode in enumerate(case["schedule"]):
        x, cotangent = (_batch(inputs, name, step) for name in ("x", "cotangent"))
        layer.train() if mode == "train" else layer.eval()
        outputs = _step(layer, x, cotangent, mode == "train")
        found.append((outputs, _counters(layer.act_quant)))
    return found


def _batch(inputs: dict[str, np.ndarray], name: str, step: int) -> Any:
    return jnp.asarray(inputs[name][step] if name in inputs else inputs[f"step{step}.{name}"])


def _gradients(layer: Any, x: Any, cotangent: Any) -> Any:
    def loss(layer: Any, x: Any) -> tuple[Any, Any]:
        tensor = layer(x)
        return jnp.sum(as_array(tensor) * cotangent), tensor

    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


def _step(layer: Any, x: Any, cotangent: Any, training: bool) -> dict[str, Any]:
    (gradients, along_x), tensor = compiled(_gradients)(layer, x, cotangent)
    outputs: dict[str, Any] = {"tensor": tensor, **fields_of(tensor), "grad.x": np.asarray(along_x)}
    if isinstance(
        tensor, FloatQuantTensor | GroupwiseFloatQuantTensor
    ):  # the reference keeps the 0 as a buffer
        outputs["state.tensor_quant.zero_point_impl.value"] = np.asarray(tensor.zero_point)
    for path, gradient in nnx.to_flat_state(gradients):
        if isinstance(gradient, QuantParam) and training:
            outputs[f"grad.{dotted(path[1:])}"] = np.asarray(gradient.get_value())
    for path, variable in kept_by(layer):
        outputs[f"state.{dotted(path[1:])}"] = np.asarray(variable.get_value())
    return outputs


def _counters(proxy: Any) -> dict[str, int]:
    found = {}
    for path, variable in kept_by(proxy):
        if path[-1] in ("counter", "countdown"):
            found[dotted(path[1:-1])] = int(variable.get_value())
    return found
