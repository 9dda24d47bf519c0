"""Drives bias quantizers: the bias of a layer whose input is quantized already."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import IntQuantTensor
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.layouts import (
    LAYOUTS,
    Layout,
    back,
    facts_of,
    fields_of,
    in_the_words_of,
    is_quantized,
    moved,
    quantizer,
)

Case = dict[str, Any]


def build(case: Case, inputs: dict[str, np.ndarray]) -> tuple[Any, Any, Layout]:
    """The layer whose bias is the case's, in our layout; its quantized input; and the layout."""
    with reading(case["layer"], "a bias") as stated:
        layout, shape = stated.choose("kind", LAYOUTS), stated.take("weight_shape")
    with reading(inputs, "the arrays of a bias") as arrays:
        given, bias, x, _ = (arrays.take(name) for name in ("weight", "bias", "x", "cotangent"))
    if list(given.shape) != shape:
        raise CannotDrive(f"a weight {shape}: got {given.shape}")
    weight = moved(given, layout.weight(given.ndim))
    with reading(case["config"], "a bias") as config:
        layer = layout.make(
            weight.shape,
            weight_quant=quantizer(config.take("weight_quant")),
            bias_quant=quantizer(case["quantizer"], case["overrides"]),
            **({"padding": "VALID"} if weight.ndim > 2 else {}),
        )
        quantized = input_of(jnp.asarray(moved(x, layout.data(x.ndim))), config.take("input"))
    layer.weight = nnx.Param(jnp.asarray(weight))
    layer.bias = nnx.Param(jnp.asarray(bias))
    return layer, quantized, layout


def input_of(x: Any, stated: dict[str, Any] | None) -> Any:
    """The input, quantized as the case states."""
    if stated is None:
        return x
    with reading(stated, "the input of a bias") as given:
        scale, bits, signed = (given.take(name) for name in ("scale", "bit_width", "signed"))
    return IntQuantTensor(x, scale, 0.0, bits, signed=signed, training=False)


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names."""
    layer, x, layout = build(case, inputs)
    cotangent = jnp.asarray(inputs["cotangent"])

    def loss(layer: Any) -> tuple[Any, Any]:
        tensor = layer.quant_bias(x)
        value = tensor.value if is_quantized(tensor) else tensor
        return jnp.sum(value * cotangent), tensor

    gradients, tensor = nnx.grad(loss, has_aux=True)(layer)
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
    layer, x, _ = build(case, inputs)
    found = facts_of(layer.quant_bias(x))
    return found | {"requires_input_scale": layer.bias_quant.requires_input_scale}
