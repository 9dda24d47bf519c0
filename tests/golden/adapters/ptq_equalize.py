"""Drives Brevitas's equalization: cross-layer, by activations, and the splitting of channels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.recipes import Equalize, FoldNorms, SmoothQuant, SplitChannels
from tests.golden._config import CannotDrive, Settings, meaning, reading
from tests.golden.adapters.ptq_corrections import Arrays, Chain, Drive, normed, put, put_norm
from tests.golden.adapters.ptq_layerwise import images, weight_of
from tests.golden.adapters.ptq_smooth import applied, kept_by

SHRINKAGE = "vaiq"


def equalization_of(config: dict[str, Any]) -> Drive:
    """Read a config."""
    readers = {
        "EqualizeGraph": cross_layer_of,
        "activation_equalization_mode": activations_of,
        "GraphChannelSplitting": splitting_of,
        "MergeLnAffine": merging_of,
        "LayerNormToRMS": centring_of,
    }
    with_norm = config.get("model") == NORMED
    read = meaning(readers, config["algorithm"], "algorithm")
    return normed_of(config) if with_norm else read(config)


NORMED = "conv1 - bn1 - relu - conv2"


def merging(given: Settings) -> Any:
    """What biases are divided by, as the pass takes it."""
    merge = given.choose("merge_bias", {True: True, False: False})
    shrinkage = given.take("bias_shrinkage")
    if shrinkage != SHRINKAGE and not isinstance(shrinkage, float):
        raise CannotDrive(f"bias_shrinkage: {shrinkage!r} has no meaning")
    return shrinkage if merge else None


def cross_layer_of(config: dict[str, Any]) -> Drive:
    """Read an equalization of consecutive layers, with ReLU between them."""
    with reading(config, "cross-layer equalization") as given:
        given.choose("peer", {"brevitas": None})
        given.take("algorithm")
        given.take("seed")
        windows = given.choose("conv3x3", {False: False, True: True})
        sizes, regions = given.take("layer_sizes"), given.take("regions")
        equalize = Equalize(
            given.take("iterations"),
            given.take("threshold"),
            given.choose("scale_computation_type", {"maxabs": "maxabs", "range": "range"}),
            merging(given),
        )
    names = [str(2 * place) for place in range(len(sizes) - 1)]
    if any(region not in [[[one], [other]] for one, other in pairwise(names)] for region in regions):
        raise CannotDrive(f"regions: {regions} are not of layers that follow each other")

    def drive(inputs: Arrays) -> dict[str, Any]:
        made = equalized(chain(names, sizes, windows), inputs, equalize, images(data(sizes, windows)))
        return outputs(made, names)

    return drive


def splitting_of(config: dict[str, Any]) -> Drive:
    """Read a splitting of channels between layers, with ReLU between them."""
    with reading(config, "channel splitting") as given:
        given.choose("peer", {"brevitas": None})
        given.take("algorithm")
        given.take("seed")
        given.choose("criterion", {"maxabs": None})
        sizes = given.take("layer_sizes")
        halves = given.choose("split_input", {True: True, False: False})
        split = SplitChannels(given.take("split_ratio"), halves)
    names = [str(2 * place) for place in range(len(sizes) - 1)]

    def drive(inputs: Arrays) -> dict[str, Any]:
        return outputs(equalized(chain(names, sizes, False), inputs, split, data(sizes, False)), names)

    return drive


def normed_of(config: dict[str, Any]) -> Drive:
    """Read an equalization through a batch normalization, which is the source."""
    with reading(config, "cross-layer equalization") as given:
        given.choose("peer", {"brevitas": None})
        given.choose("algorithm", {"EqualizeGraph": None})
        given.choose("model", {NORMED: None})
        given.take("seed")
        if given.take("regions") != [[["bn1"], ["conv2"]]]:
            raise CannotDrive(f"regions: {config['regions']} have another source than the norm")
        equalize = Equalize(given.take("iterations"), biases=merging(given))

    def drive(inputs: Arrays) -> dict[str, Any]:
        shapes = [inputs[f"{name}.weight"].shape for name in ("conv1", "conv2")]
        channels = [shapes[0][1], shapes[0][0], shapes[1][0]]
        x = images(inputs["x"])
        made = equalized(normed(channels, shapes[0][-1], 0), inputs, equalize, x)
        found = outputs(made, ("conv1", "conv2")) | {"bn1.weight": made.bn1.scale, "bn1.bias": made.bn1.bias}
        found |= {"bn1.running_mean": made.bn1.mean, "bn1.running_var": made.bn1.var}
        return found | {"y": np.moveaxis(np.asarray(made(x)), -1, 1)}

    return drive


def chain(names: list[str], sizes: list[int], windows: bool) -> Any:
    """Layers with ReLU between them."""
    rngs = nnx.Rngs(0)
    made = [
        nnx.Conv(a, b, (3, 3), rngs=rngs) if windows else nnx.Linear(a, b, rngs=rngs)
        for a, b in pairwise(sizes)
    ]
    return Chain({f"layer{name}": layer for name, layer in zip(names, made, strict=True)})


def data(sizes: list[int], windows: bool) -> np.ndarray:
    """Any inputs: ranges of weights are all that is read."""
    shape = (2, sizes[0], 5, 5) if windows else (4, sizes[0])
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def equalized(model: Any, inputs: Arrays, each: Any, x: Any) -> Any:
    """A model with the parameters of a case, as a pass leaves it."""
    for name in model.names:
        if name.startswith("bn"):
            put_norm(model.bn1, inputs, name)
        else:
            put(getattr(model, name), inputs, name.removeprefix("layer"), "")
    return applied(model, each, [x])


def outputs(model: Any, names: Any) -> dict[str, Any]:
    """Weights and biases in the reference's layout."""
    found = {}
    for name in names:
        layer = getattr(model, name if hasattr(model, name) else f"layer{name}")
        found |= {f"{name}.weight": weight_of(layer.kernel), f"{name}.bias": layer.bias}
    return found


class NormAndMlp(nnx.Module):
    """`ln - fc1 - activation - fc2`."""

    def __init__(self, inputs: Arrays, activation: Callable[[Any], Any]) -> None:
        self.ln = nnx.LayerNorm(inputs["ln.weight"].size, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.ln.scale.set_value(jnp.asarray(inputs["ln.weight"]))  # pyright: ignore
        self.ln.bias.set_value(jnp.asarray(inputs["ln.bias"]))  # pyright: ignore
        for name in ("fc1", "fc2"):
            rows, columns = inputs[f"{name}.weight"].shape
            setattr(self, name, nnx.Linear(columns, rows, rngs=nnx.Rngs(0)))
            put(getattr(self, name), inputs, name, "")
        self.activation = activation

    def __call__(self, x: Any) -> Any:
        return self.fc2(self.activation(self.fc1(self.ln(x))))  # pyright: ignore


def exact_gelu(x: Any) -> Any:
    """torch's GELU."""
    return nnx.gelu(x, approximate=False)


ACTIVATIONS = {"ReLU": nnx.relu, "GELU": exact_gelu, "SiLU": nnx.silu}


def through(model: NormAndMlp, online: dict[str, Any], x: Any) -> Any:
    """The outputs of a model, with factors before the inputs of its layers."""
    hidden = model.ln(x) * online.get("fc1.kernel", 1)  # pyright: ignore
    return model.fc2(model.activation(model.fc1(hidden)) * online.get("fc2.kernel", 1))  # pyright: ignore


def activations_of(config: dict[str, Any]) -> Drive:
    """Read an equalization by activations."""
    with reading(config, "activation equalization") as given:
        given.choose("peer", {"brevitas": None})
        given.take("algorithm")
        given.take("seed")
        given.choose("model", {"ln - fc1 - act - fc2": None})
        given.take("sizes")
        activation = given.choose("activation", ACTIVATIONS)
        inserted = given.choose("add_mul_node", {True: True, False: False})
        layerwise = given.choose("layerwise", {True: True, False: False})
        batches = given.take("batches")
        smooth = SmoothQuant(
            given.take("alpha"),
            with_sources=given.choose("co_optimize_act_weights", {True: True, False: False}),
            online="all" if layerwise else "rest" if inserted else "never",
        )

    def drive(inputs: Arrays) -> dict[str, Any]:
        kept = kept_by(NormAndMlp(inputs, activation), smooth, np.split(inputs["x"], batches))
        made, online = kept.model, {path: one.transform.factors[...] for path, one in kept.online.items()}
        found = outputs(made, ("fc1", "fc2")) | {"ln.weight": made.ln.scale, "ln.bias": made.ln.bias}
        first, second = (online.get(f"{name}.kernel") for name in ("fc1", "fc2"))
        found["scale0"] = found["ln.weight"] / inputs["ln.weight"] if first is None else first
        found["scale1"] = found["fc1.bias"] / inputs["fc1.bias"] if second is None else second
        found |= {"actact_eq_mul.weight": second, "fc1.scale.weight": first, "fc2.scale.weight": second}
        for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
            found[name.replace(".", ".layer.")] = found[name]
        return found | {"y_first4": through(made, online, inputs["x"][:4])}

    return drive


class EmbeddingAndNorm(nnx.Module):
    """`emb - ln - fc`."""

    def __init__(self, inputs: Arrays, epsilon: float) -> None:
        self.ln = nnx.LayerNorm(inputs["ln.weight"].size, epsilon=epsilon, rngs=nnx.Rngs(0))
        self.ln.scale.set_value(jnp.asarray(inputs["ln.weight"]))  # pyright: ignore
        self.ln.bias.set_value(jnp.asarray(inputs["ln.bias"]))  # pyright: ignore
        for name in ("emb", "fc"):
            rows, columns = inputs[f"{name}.weight"].shape
            setattr(self, name, nnx.Linear(columns, rows, rngs=nnx.Rngs(0)))
            put(getattr(self, name), inputs, name, "")

    def __call__(self, x: Any) -> Any:
        return self.fc(self.ln(self.emb(x)))  # pyright: ignore


def merging_of(config: dict[str, Any]) -> Drive:
    """Read the folding of a LayerNorm's gain and bias."""
    with reading(config, "a norm to fold") as given:
        given.choose("peer", {"brevitas": None})
        given.choose("algorithm", {"MergeLnAffine": None})
        given.choose("model", {"emb - ln - fc": None})
        given.take("seed")
        given.take("sizes")
    return folding(FoldNorms(), 1e-5)


def centring_of(config: dict[str, Any]) -> Drive:
    """Read the centring of what a LayerNorm takes."""
    with reading(config, "a norm to centre") as given:
        given.choose("peer", {"brevitas": None})
        given.choose("algorithm", {"LayerNormToRMS": None})
        given.choose("model", {"emb - rms - fc": None})
        given.take("seed")
        given.take("sizes")
        epsilon = given.take("eps")
    return folding(FoldNorms(center=True), epsilon)


def folding(each: FoldNorms, epsilon: float) -> Drive:
    """A model after a pass, and what it computes."""

    def drive(inputs: Arrays) -> dict[str, Any]:
        made = applied(EmbeddingAndNorm(inputs, epsilon), each, [inputs["x"]])
        found = outputs(made, ("emb", "fc")) | {"ln.weight": made.ln.scale, "ln.bias": made.ln.bias}
        return found | {"y": made(inputs["x"])}

    return drive
