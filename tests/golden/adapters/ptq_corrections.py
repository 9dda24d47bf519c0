"""Drives Brevitas's corrections: biases, and the statistics of batch normalizations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat
from jqinject.recipes import CorrectBatchNorm, CorrectBiases, Recipe
from tests.golden._config import meaning, reading
from tests.golden.adapters.ptq_layerwise import images, kernel_of

Arrays = dict[str, np.ndarray]
Drive = Callable[[Arrays], dict[str, Any]]


def correction_of(config: dict[str, Any]) -> Drive:
    """Read a config."""
    return meaning(
        {"bias_correction": biases_of, "norm_correction": norms_of}, config["algorithm"], "algorithm"
    )(config)


def biases_of(config: dict[str, Any]) -> Drive:
    """Read a correction of biases."""
    with reading(config, "bias correction") as given:
        given.choose("peer", {"brevitas": None})
        given.take("algorithm")
        given.take("seed")
        quantizer = given.choose("quantizer", {"Int8WeightPerChannelFloat": Int8WeightPerChannelFloat})
        weight_quant = quantizer.let(bit_width=given.take("weight_bits"))
        static = given.choose("input_quant", {None: False, "int8 per tensor, static": True})
        batches, sizes = given.take("batches"), given.take("layer_sizes")

    def drive(inputs: Arrays) -> dict[str, Any]:
        names = [f"fc{place}" for place in range(1, len(sizes))]
        model = Chain(
            {
                name: nnx.Linear(*size, rngs=nnx.Rngs(0))
                for name, size in zip(names, pairwise(sizes), strict=True)
            }
        )
        rules = []
        for name in names:
            put(getattr(model, name), inputs, name)
            scale = inputs[f"{name}.input_scale"] if static else None
            rules.append(
                Rule(
                    name, weight_quant=weight_quant, input_quant=None if scale is None else static_int8(scale)
                )
            )
        made = corrected(model, rules, np.split(inputs["x"], batches), CorrectBiases())
        return {f"{name}.bias": getattr(made, name).bias.get_value() for name in names}

    return drive


def norms_of(config: dict[str, Any]) -> Drive:
    """Read a correction of batch normalizations."""
    with reading(config, "norm correction") as given:
        given.choose("peer", {"brevitas": None})
        given.take("algorithm")
        given.take("seed")
        given.choose("model", {"conv1 - bn1 - relu - conv2": None})
        bits = given.choose("quantizer", {"Int8WeightPerChannelFloat, 3 bits, on both convolutions": 3})
        batches, channels = given.take("batches"), given.take("channels")
        kernel, padding = given.take("kernel"), given.take("padding")

    def drive(inputs: Arrays) -> dict[str, Any]:
        model = normed(channels, kernel, padding)
        for name in ("conv1", "conv2"):
            put(getattr(model, name), inputs, name)
        put_norm(model.bn1, inputs, "param.bn1")
        rule = Rule("conv.*", weight_quant=Int8WeightPerChannelFloat.let(bit_width=bits))
        parts = np.split(inputs["x"], batches)
        made = corrected(model, [rule], parts, CorrectBatchNorm(variance="geometric"))
        # torch keeps the unbiased variance of each batch; under the root of the geometric mean.
        size = model.conv1(images(parts[0]))[..., 0].size
        made.bn1.var.set_value(made.bn1.var.get_value() * np.sqrt(size / (size - 1)))
        y = np.moveaxis(np.asarray(made(images(inputs["x"][:3]))), -1, 1)
        return {"bn1.running_mean": made.bn1.mean, "bn1.running_var": made.bn1.var, "y_first3": y}

    return drive


class Chain(nnx.Module):
    """Layers by name, one after the other, each but the last followed by ReLU unless a norm follows it."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self.names = tuple(layers)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def __call__(self, x: Any) -> Any:
        for place, name in enumerate(self.names):
            x = getattr(self, name)(x)
            following = self.names[place + 1 : place + 2]
            if following and not following[0].startswith("bn"):
                x = nnx.relu(x)
        return x


def normed(channels: list[int], kernel: int, padding: int) -> Any:
    """`conv1 - bn1 - relu - conv2`."""
    convolutions = [
        nnx.Conv(a, b, (kernel, kernel), padding=[(padding, padding)] * 2, rngs=nnx.Rngs(0))
        for a, b in pairwise(channels)
    ]
    norm = nnx.BatchNorm(channels[1], epsilon=1e-5, rngs=nnx.Rngs(0))
    return Chain({"conv1": convolutions[0], "bn1": norm, "conv2": convolutions[1]})


def put(layer: Any, inputs: Arrays, name: str, prefix: str = "param.") -> None:
    """The weight and the bias of a case, in a layer."""
    layer.kernel.set_value(jnp.asarray(kernel_of(inputs[f"{prefix}{name}.weight"])))
    layer.bias.set_value(jnp.asarray(inputs[f"{prefix}{name}.bias"]))


def put_norm(norm: Any, inputs: Arrays, name: str) -> None:
    """The parameters and statistics of a case, in a batch normalization."""
    pairs = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    for ours, theirs in pairs.items():
        getattr(norm, ours).set_value(jnp.asarray(inputs[f"{name}.{theirs}"]))


def static_int8(scale: Any) -> Any:
    """A quantizer of activations with a given scale."""
    return Int8ActPerTensorFloat.let(scaling_impl_type="const", scaling_init=float(scale) * 128)


def corrected(model: Any, rules: list[Rule], parts: list[Any], each: Any) -> Any:
    """The quantized model after a pass."""
    return Recipe(each).apply(model, rules, [images(x) for x in parts], progress=False).model
