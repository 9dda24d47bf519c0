"""Drives SmoothQuant and log equalization of llm-compressor, and SmoothQuant of Qwix."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule
from jqinject.quant import Int8WeightPerChannelFloat
from jqinject.recipes import Recipe, SmoothQuant
from jqinject.recipes.passes.smoothing import smooth_scales
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
    return kept_by(model, each, batches).model


def kept_by(model: nnx.Module, each: Any, batches: list[Any]) -> Any:
    """The float model as a pass leaves it, and what it keeps online."""
    kept: list[Any] = []

    def keep(work: Any) -> list[Any]:
        kept.append(SimpleNamespace(model=work.model, online=dict(work.online)))
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
