"""Drives weight quantizers: the weight of a layer, twice."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import QuantParam
from jqinject.quant_tensor import IntQuantTensor
from tests.golden.adapters.layouts import (
    LAYOUTS,
    back,
    compiled,
    declaring,
    dotted,
    facts_of,
    fields_of,
    in_the_words_of,
    moved,
    quantizer,
)

Case = dict[str, Any]


def input_of(case: Case) -> Any:
    """The quantized input that the case states, of which only the format counts; None where it states none."""
    stated = case["config"].get("input")
    if stated is None:
        return None
    zeros, bits, signed = jnp.zeros(1), stated["bit_width"], stated["signed"]
    return IntQuantTensor(zeros, stated["scale"], 0.0, bits, signed=signed, training=True)


def layer_of(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    """The layer whose weight is the case's, in our layout."""
    layout = LAYOUTS[case["layer"]["kind"]]
    axes = layout.weight(inputs["weight"].ndim)
    weight = moved(inputs["weight"], axes)
    overrides = dict(case["overrides"])
    if "group_dim" in overrides:  # an axis of the reference's weight
        overrides["group_dim"] = axes.index(overrides["group_dim"] % weight.ndim)
    layer = layout.make(weight.shape, weight_quant=declaring(quantizer(case["quantizer"]), overrides))
    layer.weight = nnx.Param(jnp.asarray(weight))
    if "learned_round_value" in inputs:
        learned = moved(inputs["learned_round_value"], axes)
        layer.weight_quant.tensor_quant.int_quant.float_to_int_impl.value[...] = jnp.asarray(learned)
    if case["layer"].get("mode") == "eval":
        layer.eval()
    return layer


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names."""
    layer = layer_of(case, inputs)
    axes = LAYOUTS[case["layer"]["kind"]].weight(inputs["weight"].ndim)
    cotangent = jnp.asarray(moved(inputs["cotangent"], axes))
    cut = layer.weight_quant.facts.group_dim
    given = input_of(case)
    outputs = {name: back(v, axes, cut) for name, v in _call(layer, cotangent, given).items()}
    again = {name: back(v, axes, cut) for name, v in _call(layer, cotangent, given).items()}
    for name in ("pre_scale", "pre_zero_point"):
        if name in case["outputs"]:
            outputs[name] = back(getattr(layer.weight_quant, name)(), axes)
    outputs |= {f"call2.{name}": v for name, v in again.items()}
    for path, variable in nnx.to_flat_state(nnx.state(layer.weight_quant)):
        outputs[f"param.{dotted(path)}"] = back(np.asarray(variable.get_value()), axes, cut)
    return in_the_words_of(case, outputs)


def _gradients(layer: Any, cotangent: Any, given: Any) -> Any:
    def loss(layer: Any) -> tuple[Any, Any]:
        tensor = layer.quant_weight(given)
        value = tensor.value if layer.weight_quant.is_quant_enabled else tensor
        return jnp.sum(value * cotangent), tensor

    return nnx.grad(loss, has_aux=True)(layer)


def _call(layer: Any, cotangent: Any, given: Any) -> dict[str, np.ndarray]:
    gradients, tensor = compiled(_gradients)(layer, cotangent, given)
    outputs = {**fields_of(tensor), "grad.weight": np.asarray(gradients["kernel"].get_value())}
    for path, gradient in nnx.to_flat_state(gradients):
        if isinstance(gradient, QuantParam):
            outputs[f"grad.{dotted(path[1:])}"] = np.asarray(gradient.get_value())
    return outputs


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the quantized weight."""
    return facts_of(layer_of(case, inputs).quant_weight(input_of(case)))
