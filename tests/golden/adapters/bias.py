"""Drives bias quantizers: the bias of a layer whose input is quantized already."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import IntQuantTensor
from tests.golden.adapters.layouts import (
    LAYOUTS,
    back,
    facts_of,
    fields_of,
    in_the_words_of,
    is_quantized,
    moved,
    plain,
    quantizer,
)

Case = dict[str, Any]


def layer_of(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    """The layer whose bias is the case's, in our layout."""
    layout = LAYOUTS[case["layer"]["kind"]]
    weight = moved(inputs["weight"], layout.weight(inputs["weight"].ndim))
    layer = layout.make(
        weight.shape,
        weight_quant=quantizer(case["config"]["weight_quant"]),
        bias_quant=quantizer(case["quantizer"]),
        **plain(case["overrides"], "bias_"),
        **({"padding": "VALID"} if weight.ndim > 2 else {}),
    )
    layer.weight = nnx.Param(jnp.asarray(weight))
    layer.bias = nnx.Param(jnp.asarray(inputs["bias"]))
    return layer


def input_of(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    """The quantized input that the case describes."""
    x = jnp.asarray(moved(inputs["x"], LAYOUTS[case["layer"]["kind"]].data(inputs["x"].ndim)))
    given = case["config"]["input"]
    if given is None:
        return x
    return IntQuantTensor(x, given["scale"], 0.0, given["bit_width"], signed=given["signed"], training=False)


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names."""
    layer, x = layer_of(case, inputs), input_of(case, inputs)
    cotangent = jnp.asarray(inputs["cotangent"])

    def loss(layer: Any) -> tuple[Any, Any]:
        tensor = layer.quant_bias(x)
        value = tensor.value if is_quantized(tensor) else tensor
        return jnp.sum(value * cotangent), tensor

    gradients, tensor = nnx.grad(loss, has_aux=True)(layer)
    layout = LAYOUTS[case["layer"]["kind"]]
    axes = layout.weight(inputs["weight"].ndim)
    output = np.asarray(layer(x))
    outputs = {
        **fields_of(tensor),
        "grad.bias": np.asarray(gradients["bias"].get_value()),
        "grad.weight": back(gradients["kernel"].get_value(), axes),
        "layer_output": back(output, layout.data(output.ndim)),
    }
    return in_the_words_of(case, outputs)


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the quantized bias and of its proxy."""
    layer = layer_of(case, inputs)
    found = facts_of(layer.quant_bias(input_of(case, inputs)))
    return found | {"requires_input_scale": layer.bias_quant.requires_input_scale}
