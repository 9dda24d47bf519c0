"""Drives weight quantizers: the weight of a layer, twice."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import QuantParam
from tests.golden.adapters.layouts import (
    LAYOUTS,
    back,
    compiled,
    dotted,
    facts_of,
    fields_of,
    in_the_words_of,
    moved,
    plain,
    quantizer,
)

Case = dict[str, Any]


def layer_of(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    """The layer whose weight is the case's, in our layout."""
    layout = LAYOUTS[case["layer"]["kind"]]
    weight = moved(inputs["weight"], layout.weight(inputs["weight"].ndim))
    layer = layout.make(
        weight.shape, weight_quant=quantizer(case["quantizer"]), **plain(case["overrides"], "weight_")
    )
    layer.weight = nnx.Param(jnp.asarray(weight))
    if "learned_round_value" in inputs:
        learned = moved(inputs["learned_round_value"], layout.weight(inputs["weight"].ndim))
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
    outputs = {name: back(v, axes, cut) for name, v in _call(layer, cotangent).items()}
    again = {name: back(v, axes, cut) for name, v in _call(layer, cotangent).items()}
    outputs |= {f"call2.{name}": v for name, v in again.items()}
    for path, variable in nnx.to_flat_state(nnx.state(layer.weight_quant)):
        outputs[f"param.{dotted(path)}"] = back(np.asarray(variable.get_value()), axes, cut)
    return in_the_words_of(case, outputs)


def _gradients(layer: Any, cotangent: Any) -> Any:
    def loss(layer: Any) -> tuple[Any, Any]:
        tensor = layer.quant_weight()
        value = tensor.value if layer.weight_quant.is_quant_enabled else tensor
        return jnp.sum(value * cotangent), tensor

    return nnx.grad(loss, has_aux=True)(layer)


def _call(layer: Any, cotangent: Any) -> dict[str, np.ndarray]:
    gradients, tensor = compiled(_gradients)(layer, cotangent)
    outputs = {**fields_of(tensor), "grad.weight": np.asarray(gradients["kernel"].get_value())}
    for path, gradient in nnx.to_flat_state(gradients):
        if isinstance(gradient, QuantParam):
            outputs[f"grad.{dotted(path[1:])}"] = np.asarray(gradient.get_value())
    return outputs


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the quantized weight."""
    return facts_of(layer_of(case, inputs).quant_weight())
