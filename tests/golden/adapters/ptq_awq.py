"""Drives AWQ of llm-compressor, Qwix and ModelOpt, and ModelOpt's SmoothQuant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject import Rule
from jqinject.quant import (
    Int4WeightPerGroupAbsMax,
    Int8WeightPerChannelAbsMax,
    Int8WeightPerChannelFloat,
    IntWeightSymmetricGroupQuant,
)
from jqinject.recipes import AWQ, RTN, Recipe, Solve
from jqinject.recipes.passes.float_change import Rescaling
from jqinject.recipes.passes.smoothing import AwqSearch, smooth_scales
from tests.golden._config import reading
from tests.golden.adapters.ptq_smooth import Arrays, NormAndReaders, applied


class GainAndReader(nnx.Module):
    """A layer whose inputs have a gain, which carries the factors."""

    def __init__(self, weight: np.ndarray) -> None:
        self.gain = nnx.Param(jnp.ones(weight.shape[1]))
        self.reader = nnx.Linear(weight.shape[1], weight.shape[0], use_bias=False, rngs=nnx.Rngs(0))
        self.reader.kernel.set_value(jnp.asarray(weight.T))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.reader(x * self.gain.get_value())


def searched(inputs: Arrays, search: AWQ, rule: Rule) -> Any:
    """The model that a search leaves, rounded to nearest."""
    recipe = Recipe(search, Solve(RTN()))
    return recipe.apply(GainAndReader(inputs["weight"]), rule, [inputs["x"]], progress=False).model


def qwix_of(config: dict[str, Any]) -> tuple[AWQ, Rule]:
    """Qwix's search, by the error of the weights."""
    with reading(config, "awq") as given:
        given.choose("peer", {"qwix": None})
        given.choose("algorithm", {"awq": None})
        given.take("seed")
        search = AWQ(given.take("n_grid"), weights=False, error="weights")
        bits, size = given.take("bits"), given.take("group_size")
    if size is None:
        return search, Rule(weight_quant=Int8WeightPerChannelAbsMax, weight_bit_width=bits)
    return search, Rule(weight_quant=Int4WeightPerGroupAbsMax, weight_bit_width=bits, weight_group_size=size)


def qwix(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """Qwix's AWQ."""
    model = searched(inputs, *qwix_of(case["config"]))
    tensor = model.reader.quant_weight()
    columns = inputs["weight"].shape[1]
    scale = np.asarray(tensor.scale)
    groups = case["config"]["group_size"] or columns
    return {
        "act_scale": np.abs(inputs["x"]).mean(axis=0),
        "scales": 1 / np.asarray(model.gain)[None],
        "int": np.asarray(tensor.int()).T,
        "scale": np.broadcast_to(scale, (columns, scale.shape[-1]))[::groups].T,
    }


def optimum_of(config: dict[str, Any]) -> tuple[str, Any, int, int | None]:
    """ModelOpt's algorithm, with its exponent or search, bits and group size."""
    with reading(config, "modelopt") as given:
        given.choose("peer", {"nvidia-modelopt": None})
        algorithm = given.choose("algorithm", {name: name for name in ("smoothquant", "awq_lite")})
        given.choose("batches", {"2 of 32 rows": None})
        given.take("seed")
        alpha, step = given.take("alpha"), given.take("alpha_step")
        bits, size = given.take("bits"), given.take("block_size")
        if algorithm == "smoothquant":
            return algorithm, 0.5 if alpha is None else alpha, bits, size
        grid = round(1 / (0.1 if step is None else step)) + 1
        return algorithm, AWQ(grid, weights="always"), bits, size


def optimum(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """ModelOpt, whose scales multiply the inputs."""
    algorithm, how, bits, size = optimum_of(case["config"])
    if algorithm == "smoothquant":
        return _optimum_smooth(inputs, how, 2 ** (bits - 1) - 1)
    weights = {"weight_quant": Int8WeightPerChannelFloat, "weight_bit_width": bits}
    if size is not None:
        weights |= {"weight_quant": IntWeightSymmetricGroupQuant, "weight_group_size": size}
    model = searched(inputs, how, Rule(**weights))
    before = np.asarray(model.gain)
    return {
        "awq_scale": 1 / before,
        "pre_quant_scale": before,
        "weight": inputs["weight"] / before,
        "y_first4": model(inputs["x"][:4]),
    }


def _optimum_smooth(inputs: Arrays, alpha: float, steps: int) -> dict[str, Any]:
    scales = smooth_scales(np.abs(inputs["x"]).max(axis=0), np.abs(inputs["weight"]).max(axis=0), alpha)
    x, weight = inputs["x"] / scales, inputs["weight"] * scales

    def rounded(numbers: np.ndarray, largest: np.ndarray) -> np.ndarray:
        return np.round(numbers / (largest / steps)) * (largest / steps)

    outputs = rounded(x, np.abs(x).max())[:4] @ rounded(weight, np.abs(weight).max(axis=1, keepdims=True)).T
    return {"pre_quant_scale": 1 / scales, "weight": weight, "y_first4": outputs}


@dataclass
class Rounded:
    """Rounds a kernel `(inputs, outputs)` as compressed-tensors does, in the place of a model's quantizer."""

    bits: int
    group_size: int | None
    symmetric: bool

    def nearest(self, kernel: jax.Array) -> jax.Array:
        """The rounded kernel."""
        rows = kernel.T
        grouped = rows.reshape(rows.shape[0], -1, self.group_size or rows.shape[1])
        low = jnp.minimum(grouped.min(axis=-1, keepdims=True), 0)
        high = jnp.maximum(grouped.max(axis=-1, keepdims=True), 0)
        least, steps = -(2 ** (self.bits - 1)), 2**self.bits - 1
        # The negative extreme stands on a tie, which exact division gives to the least code: divided by a little less.
        scale = jnp.maximum(-low, high) / (steps / 2) * (1 - 1e-6) if self.symmetric else (high - low) / steps
        zero = 0 if self.symmetric else jnp.round(jnp.clip(least - low / scale, least, least + steps))
        codes = jnp.clip(jnp.round(grouped / scale + zero), least, least + steps)
        return ((codes - zero) * scale).reshape(rows.shape).T

    def largest_of_groups(self, kernel: jax.Array) -> jax.Array:
        """The largest magnitude of each number's group."""
        assert self.group_size is not None, "asked only with groups"
        largest = jnp.abs(kernel).reshape(-1, self.group_size, kernel.shape[1]).max(axis=1)
        return jnp.repeat(largest, self.group_size, axis=0)


def compressor_of(config: dict[str, Any]) -> tuple[AWQ, Rounded]:
    """llm-compressor's search and its rounding."""
    with reading(config, "awq") as given:
        given.choose("peer", {"llmcompressor": None})
        given.choose("algorithm", {"awq": None})
        given.choose("model", {"norm -> fc1 (balanced), fc2 not in the mapping": None})
        given.choose("batches", {"4 of 16 rows": None})
        given.choose("strategy", {"group": None, "channel": None})
        given.take("seed")
        search = AWQ(given.take("n_grid"), given.take("duo_scaling"))
        return search, Rounded(given.take("bits"), given.take("group_size"), given.take("symmetric"))


def compressor(case: dict[str, Any], inputs: Arrays) -> dict[str, Any]:
    """llm-compressor's AWQ, of the one layer that its mapping names."""
    search, quantizer = compressor_of(case["config"])

    def smooth(work: Any) -> list[Any]:
        rescaling = Rescaling(work, "AWQ", ("magnitude", "hessian"))
        (region,) = rescaling.regions
        parameters: Any = {"readers.0.kernel": quantizer}
        scales = AwqSearch(search, rescaling, parameters).best(region)
        return [rescaling.multiply(region, 1 / scales), *rescaling.finish()]

    made = applied(NormAndReaders(inputs, ["fc1"]), smooth, np.array_split(inputs["x"], 4))
    found = {"norm.weight": made.norm.scale, "norm.bias": made.norm.bias}
    found |= {"fc1.weight": np.asarray(made.readers[0].kernel).T, "fc1.bias": made.readers[0].bias}
    found["scales"] = found["fc1.weight"][0] / inputs["fc1.weight"][0]
    return found | {
        name: inputs[name] for name in ("fc2.weight", "fc2.bias")
    }  # not in the mapping: untouched
