"""The measures of a model that the tables and the picture show."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jqinject.demo.network import Classifier
from jqinject.demo.recipes import DemoRecipe
from jqinject.quant_tensor import as_array


def float_bytes(model: Classifier) -> int:
    """Bytes of weights and biases in float32."""
    return sum(4 * (layer.kernel.size + layer.bias.size) for layer in model.layers().values())


def quantized_bytes(model: Classifier, recipe: DemoRecipe) -> int:
    """Bytes of the integers: weights at their bit width with one float32 scale each, biases in 32 bits."""
    total = 0.0
    for name, layer in model.layers().items():
        bits = 8 if name in ("conv1", "dense2") else recipe.weight_bits
        total += layer.kernel.size * bits / 8 + 4 * layer.weight_quant.scale().size + 4 * layer.bias.size
    return round(total)


def frozen_bytes(model: Classifier) -> int:
    """Bytes of a frozen model's weights and biases: integers (two 4-bit ones to a byte), scales, sums, and biases."""
    parts = [part for layer in model.layers().values() for part in (layer.kernel, layer.bias)]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parts))


def weight_sqnr(model: Classifier) -> dict[str, float]:
    """Signal-to-quantization-noise ratio of every layer's weights: 10 log10(sum w^2 / sum (w - w_q)^2), in decibels."""
    return {name: _sqnr(layer) for name, layer in model.layers().items()}


def _sqnr(layer: Any) -> float:
    weight = layer.weight[...]
    noise = float(jnp.sum((weight - as_array(layer.quant_weight())) ** 2))
    return 10 * float(np.log10(float(jnp.sum(weight**2)) / max(noise, 1e-30)))
