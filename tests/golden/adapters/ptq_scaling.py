"""Drives passes that rescale channels: SmoothQuant, equalization, and Hadamard matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule
from jqinject.ops import hadamard
from jqinject.quant import Int8WeightPerChannelFloat
from jqinject.recipes import Equalize, Recipe, SmoothQuant
from jqinject.recipes.passes.smooth_quant import smooth_scales
from tests.golden._config import reading

Arrays = dict[str, np.ndarray]


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


def compressor_smooth(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """llm-compressor's SmoothQuant."""
    with reading(case["config"], "smoothquant") as given:
        given.choose("peer", {"llmcompressor": None})
        given.choose("algorithm", {"smoothquant": None})
        given.choose("model", {"norm -> fc1, fc2": None})
        given.take("seed")
        parts = given.take("batches")
        smooth = SmoothQuant(given.take("smoothing_strength"), ranges="minmax")
    made = applied(NormAndReaders(inputs, ["fc1", "fc2"]), smooth, np.array_split(inputs["x"], parts))
    found = {"norm.weight": made.norm.scale, "norm.bias": made.norm.bias}
    outputs = made(inputs["x"][:4])
    for place, reader in enumerate(made.readers, 1):
        found |= {f"fc{place}.weight": np.asarray(reader.kernel).T, f"fc{place}.bias": reader.bias}
        found[f"y{place}_first4"] = outputs[place - 1]
    found["scales"] = np.asarray(made.readers[0].kernel)[:, 0] / inputs["fc1.weight"][0]
    return found


def qwix_smooth(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Qwix's SmoothQuant: ranges are scales to 8 bits."""
    with reading(case["config"], "smooth_quant") as given:
        given.choose("peer", {"qwix": None})
        given.choose("algorithm", {"smooth_quant": None})
        given.choose("layout", {"weight (in, out), x (rows, in)": None})
        given.take("seed")
        alpha = given.take("alpha")
    ranges = np.abs(inputs["x"]).max(axis=0) / 127.5, np.abs(inputs["weight"]).max(axis=1) / 127.5
    return {"scales": smooth_scales(*ranges, alpha)}


def cross_layer(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Brevitas's cross-layer equalization of a chain of layers with ReLU, biases left out of the ranges."""
    with reading(case["config"], "cross layer") as given:
        given.choose("peer", {"brevitas": None})
        given.choose("algorithm", {"EqualizeGraph": None})
        given.choose("conv3x3", {False: None})
        given.choose("merge_bias", {False: None})
        for unused in ("seed", "regions", "layer_sizes", "bias_shrinkage"):
            given.take(unused)
        equalize = Equalize(
            given.take("iterations"), given.take("threshold"), given.take("scale_computation_type")
        )
    names = sorted({name.split(".")[0] for name in inputs})
    layers: list[Any] = [linear(inputs, names[0])]
    for name in names[1:]:
        layers += [nnx.relu, linear(inputs, name)]
    x = np.random.default_rng(0).normal(size=(4, inputs[f"{names[0]}.weight"].shape[1])).astype(np.float32)
    made = applied(nnx.Sequential(*layers), equalize, [x])
    found: dict[str, Any] = {}
    for name in names:
        layer = made.layers[int(name)]
        found |= {f"{name}.weight": np.asarray(layer.kernel).T, f"{name}.bias": layer.bias}
    return found


def matrices(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Hadamard tables and products."""
    with reading(case["config"], "hadamard") as given:
        given.choose("peer", {"brevitas": None})
        size = given.take("size")
        if case["feature"].endswith("hadamard_table"):
            return {"table": hadamard.table(size)}
        if case.get("expect_error"):
            return {"table": hadamard.table_size(size)}
        assert given.take("table") == hadamard.table_size(size)
    return {
        "matrix": hadamard.matrix(size),
        "random_matrix": hadamard.with_signs(jnp.asarray(inputs["signs"])),
        "y": hadamard.transform(jnp.asarray(inputs["x"])),
        "y_transposed": hadamard.transform(jnp.asarray(inputs["x"]), inverse=True),
    }
