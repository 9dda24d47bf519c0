"""Drives weight quantizers: the weight of a layer, twice."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.core import QuantParam
from jqinject.quant_tensor import IntQuantTensor
from tests.golden._config import CannotDrive, reading
from tests.golden.adapters.layouts import (
    LAYOUTS,
    back,
    compiled,
    dotted,
    facts_of,
    fields_of,
    in_the_words_of,
    kept_by,
    moved,
    once,
    quantizer,
)

Case = dict[str, Any]


def input_of(case: Case) -> Any:
    """The quantized input that the case states, of which only the format counts; None if it states none."""
    with reading(case["config"], "a weight") as config:
        stated = config.take("input")
    if stated is None:
        return None
    with reading(stated, "the input of a weight") as given:
        scale, bits, signed = (given.take(name) for name in ("scale", "bit_width", "signed"))
    return IntQuantTensor(jnp.zeros(1), scale, 0.0, bits, signed=signed, training=True)


def build(case: Case, inputs: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
    """The layer whose weight is the case's, in our layout; the order of its axes; and its quantized input."""
    with reading(case["layer"], "a weight") as stated:
        layout = stated.choose("kind", LAYOUTS)
        training = stated.choose("mode", {"train": True, "eval": False})
        channels, shape = stated.take("output_channel_dim"), stated.take("weight_shape")
    with reading(inputs, "the arrays of a weight") as arrays:
        given, _ = arrays.take("weight"), arrays.take("cotangent")
        learned = arrays.take("learned_round_value", None)
    axes = layout.weight(given.ndim)
    weight = moved(given, axes)
    overrides = dict(case["overrides"])
    if "group_dim" in overrides:  # an axis of the reference's weight
        overrides["group_dim"] = axes.index(overrides["group_dim"] % weight.ndim)
    layer = layout.make(weight.shape, weight_quant=quantizer(case["quantizer"], overrides))
    if list(given.shape) != shape or axes[layer.output_channel_dim] != channels:
        raise CannotDrive(
            f"a weight {shape} with its channels along {channels}: got {given.shape} and {axes}"
        )
    layer.weight = nnx.Param(jnp.asarray(weight))
    if learned is not None:
        value = layer.weight_quant.tensor_quant.int_quant.float_to_int_impl.value
        value[...] = jnp.asarray(moved(learned, axes))
    layer.train() if training else layer.eval()
    return layer, axes, input_of(case)


@once
def _driven(case: Case, inputs: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Any]:
    """The outputs by our names, and the quantized weight."""
    layer, axes, given = build(case, inputs)
    cotangent = jnp.asarray(moved(inputs["cotangent"], axes))
    cut = layer.weight_quant.quant_metadata.group_dim
    first, tensor = _call(layer, cotangent, given)
    again, _ = _call(layer, cotangent, given)
    outputs = {name: back(v, axes, cut) for name, v in first.items()}
    for name in ("pre_scale", "pre_zero_point"):
        if name in case["outputs"]:
            outputs[name] = back(getattr(layer.weight_quant, name)(), axes)
    outputs |= {f"call2.{name}": back(v, axes, cut) for name, v in again.items()}
    for path, variable in kept_by(layer.weight_quant):
        outputs[f"param.{dotted(path)}"] = back(np.asarray(variable.get_value()), axes, cut)
    return outputs, tensor


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names."""
    return in_the_words_of(case, _driven(case, inputs)[0])


def _gradients(layer: Any, cotangent: Any, given: Any) -> Any:
    def loss(layer: Any) -> tuple[Any, Any]:
        tensor = layer.quant_weight(given)
        value = tensor.value if layer.weight_quant.is_quant_enabled else tensor
        return jnp.sum(value * cotangent), tensor

    return nnx.grad(loss, has_aux=True)(layer)


def _call(layer: Any, cotangent: Any, given: Any) -> tuple[dict[str, np.ndarray], Any]:
    gradients, tensor = compiled(_gradients)(layer, cotangent, given)
    of_weight = gradients[layer.weight_name].get_value()
    outputs = {**fields_of(tensor), "grad.weight": np.asarray(of_weight)}
    for path, gradient in nnx.to_flat_state(gradients):
        if isinstance(gradient, QuantParam):
            outputs[f"grad.{dotted(path[1:])}"] = np.asarray(gradient.get_value())
    return outputs, tensor


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the quantized weight."""
    return facts_of(_driven(case, inputs)[1])
