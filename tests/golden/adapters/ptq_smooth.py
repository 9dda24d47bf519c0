"""Drives SmoothQuant, log equalization and AWQ of llm-compressor, and SmoothQuant of Qwix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule
from jqinject.quant import Int8WeightPerChannelFloat
from jqinject.recipes import AWQ, Recipe, SmoothQuant
from jqinject.recipes.passes.rescaling import Rescaling
from jqinject.recipes.passes.smooth_quant import smooth_scales
from tests.golden._config import reading

Arrays = dict[str, np.ndarray]
Drive = Callable[[Arrays], dict[str, Any]]


class NormAndReaders(nnx.Module):
    """A norm whose output several layers contract."""

    def __init__(self, inputs: Arrays, readers: list[str]) -> None:
        self.norm = nnx.LayerNorm(inputs["norm.weight"].size, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.norm.scale.set_value(jnp.asarray(inputs["norm.weight"]))  # pyright: ignore
        self.norm.bias.set_value(jnp.asarray(inputs["norm.bias"]))  # pyright: ignore
        self.readers = nnx.List([linear(inputs, name) for name in readers])

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        x = self.norm(x)
        return [reader(x) for reader in self.readers]


def linear(inputs: Arrays, name: str) -> nnx.Linear:
    """A layer with the weights of a case."""
    weight = inputs[f"{name}.weight"]
    layer = nnx.Linear(weight.shape[1], weight.shape[0], rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.asarray(weight.T))
    layer.bias.set_value(jnp.asarray(inputs[f"{name}.bias"]))  # pyright: ignore
    return layer


def applied(model: nnx.Module, each: Any, batches: list[Any]) -> Any:
    """The float model as a pass leaves it."""
    kept: list[Any] = []

    def keep(work: Any) -> list[Any]:
        kept.append(work.model)
        return []

    Recipe(each, keep).apply(model, Rule(weight_quant=Int8WeightPerChannelFloat), batches, progress=False)
    return kept[0]


def compressor_smooth_of(config: dict[str, Any]) -> Drive:
    """Read llm-compressor's SmoothQuant or log equalization."""
    with reading(config, "smoothquant") as given:
        given.choose("peer", {"llmcompressor": None})
        formula = given.choose("algorithm", {"smoothquant": "power", "log_equalization": "log"})
        given.choose("model", {"norm -> fc1, fc2": None})
        given.take("seed")
        parts = given.take("batches")
        smooth = SmoothQuant(given.take("smoothing_strength"), ranges="minmax", formula=formula)

    def drive(inputs: Arrays) -> dict[str, Any]:
        made = applied(NormAndReaders(inputs, ["fc1", "fc2"]), smooth, np.array_split(inputs["x"], parts))
        found = {"norm.weight": made.norm.scale, "norm.bias": made.norm.bias}
        ys = made(inputs["x"][:4])
        for place, reader in enumerate(made.readers, 1):
            found |= {f"fc{place}.weight": np.asarray(reader.kernel).T, f"fc{place}.bias": reader.bias}
            found[f"y{place}_first4"] = ys[place - 1]
        return found | {"scales": np.asarray(made.readers[0].kernel)[:, 0] / inputs["fc1.weight"][0]}

    return drive


def qwix_smooth_of(config: dict[str, Any]) -> Drive:
    """Read Qwix's SmoothQuant: ranges are scales to 8 bits."""
    with reading(config, "smooth_quant") as given:
        given.choose("peer", {"qwix": None})
        given.choose("algorithm", {"smooth_quant": None})
        given.choose("layout", {"weight (in, out), x (rows, in)": None})
        given.take("seed")
        alpha = SmoothQuant(given.take("alpha")).alpha

    def drive(inputs: Arrays) -> dict[str, Any]:
        ranges = np.abs(inputs["x"]).max(axis=0) / 127.5, np.abs(inputs["weight"]).max(axis=1) / 127.5
        return {"scales": smooth_scales(*ranges, alpha)}

    return drive


@dataclass
class Rounded:
    """Rounds a kernel `(inputs, outputs)` as compressed-tensors does, in the place of a model's quantizer."""

    bits: int
    group_size: int | None
    symmetric: bool

    def quantized(self, kernel: jax.Array) -> Any:
        """The rounded kernel, as the value of a quantized tensor."""
        rows = kernel.T
        grouped = rows.reshape(rows.shape[0], -1, self.group_size or rows.shape[1])
        low = jnp.minimum(grouped.min(axis=-1, keepdims=True), 0)
        high = jnp.maximum(grouped.max(axis=-1, keepdims=True), 0)
        least, steps = -(2 ** (self.bits - 1)), 2**self.bits - 1
        # The negative extreme stands on a tie, which exact division gives to the least code: divided by a little less.
        scale = jnp.maximum(-low, high) / (steps / 2) * (1 - 1e-6) if self.symmetric else (high - low) / steps
        zero = 0 if self.symmetric else jnp.round(jnp.clip(least - low / scale, least, least + steps))
        codes = jnp.clip(jnp.round(grouped / scale + zero), least, least + steps)
        value = ((codes - zero) * scale).reshape(rows.shape).T
        return type("Tensor", (), {"value": value})


def compressor_awq_of(config: dict[str, Any]) -> Drive:
    """Read llm-compressor's AWQ, of the one layer that its mapping names."""
    with reading(config, "awq") as given:
        given.choose("peer", {"llmcompressor": None})
        given.choose("algorithm", {"awq": None})
        given.choose("model", {"norm -> fc1 (balanced), fc2 not in the mapping": None})
        given.choose("batches", {"4 of 16 rows": None})
        given.choose("strategy", {"group": None, "channel": None})
        given.take("seed")
        search = AWQ(given.take("n_grid"), given.take("duo_scaling"))
        quantizer = Rounded(
            given.choose("bits", {3: 3, 4: 4, 8: 8}),
            given.choose("group_size", {None: None, 8: 8, 16: 16}),
            given.choose("symmetric", {True: True, False: False}),
        )

    def smooth(work: Any) -> list[Any]:
        rescaling = Rescaling(work, "AWQ", ("magnitude", "hessian"))
        (region,) = rescaling.regions
        scales = search.best(rescaling, region, {"readers.0.kernel": quantizer})  # pyright: ignore
        return [rescaling.multiply(region, 1 / scales), *rescaling.finish()]

    def drive(inputs: Arrays) -> dict[str, Any]:
        made = applied(NormAndReaders(inputs, ["fc1"]), smooth, np.array_split(inputs["x"], 4))
        found = {"norm.weight": made.norm.scale, "norm.bias": made.norm.bias}
        found |= {"fc1.weight": np.asarray(made.readers[0].kernel).T, "fc1.bias": made.readers[0].bias}
        found["scales"] = found["fc1.weight"][0] / inputs["fc1.weight"][0]
        untouched = ("fc2.weight", "fc2.bias")  # not in the mapping
        return found | {name: inputs[name] for name in untouched}

    return drive
