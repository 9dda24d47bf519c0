"""Drives multi-head attention: batches through one layer, with its weights and gradients in torch's packed layout."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
from jqinject.nn import QuantMultiHeadAttention, attention_from_torch
from jqinject.quant_tensor import as_array
from tests.brevitas_defaults import ATTENTION
from tests.golden._driver import CannotDrive
from tests.golden.adapters.layouts import compiled, dotted, fields_of, our_path, plain, quantizer

Case = dict[str, Any]
POSITIONAL = ("embed_dim", "num_heads")
WORDS = {"bias": "use_bias", "dropout": "dropout_rate"}
PARTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}


def sequence(case: Case, inputs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What every step gives: outputs and gradients by the reference's names."""
    given = dict(zip(POSITIONAL, case["config"]["args"], strict=False)) | plain(case["config"]["kwargs"])
    layer = _layer(given)
    weights = {n.removeprefix("param."): x for n, x in inputs.items() if n.startswith("param.")}
    jqinject.load_state(layer, attention_from_torch(weights, given["num_heads"]))
    found = []
    for step, mode in enumerate(case["schedule"]):
        layer.train() if mode == "train" else layer.eval()
        x = _batch_first(given, inputs["x"][step])
        cotangents = (_batch_first(given, inputs["cotangent0"]), jnp.asarray(inputs["cotangent1"]))
        (gradients, along_x), (out, weights) = compiled(_gradients)(layer, x, *cotangents)
        outputs = {"tensor": out, "grad.x": _to_theirs(given, along_x), "out1.value": np.asarray(weights)}
        outputs |= {f"out0.{n}": _to_theirs(given, a) for n, a in fields_of(out).items()}
        flat = {dotted(path): np.asarray(g.get_value()) for path, g in nnx.to_flat_state(gradients)}
        flat |= _of_projections(layer, flat)
        names = (name for name in case["outputs"] if name.startswith("grad.") and name != "grad.x")
        found.append(outputs | {_ours(name): _gradient(name.removeprefix("grad."), flat) for name in names})
    return found


def _layer(given: dict[str, Any]) -> QuantMultiHeadAttention:
    given = {"packed_in_proj": True} | given
    size = given.pop("embed_dim")
    for name in ("add_bias_kv", "add_zero_attn"):
        if given.pop(name, False):
            raise CannotDrive(f"Flax's attention has no {name}")
    sources = {given.pop("kdim", None) or size, given.pop("vdim", None) or size}
    if len(sources) > 1:
        raise CannotDrive("Flax's attention projects keys and values from inputs of one size")
    given.pop("batch_first", None)
    arguments = {WORDS.get(name, name): value for name, value in given.items()}
    for name, value in arguments.items():
        if name.endswith("_quant") and isinstance(value, str):
            arguments[name] = quantizer(value)
    heads = arguments.pop("num_heads")
    return QuantMultiHeadAttention(
        heads, size, in_kv_features=sources.pop(), decode=False, rngs=nnx.Rngs(0), **ATTENTION | arguments
    )


def _gradients(layer: Any, x: Any, *cotangents: Any) -> Any:
    def loss(layer: Any, x: Any) -> tuple[Any, Any]:
        out, sown = nnx.capture(layer, nnx.Intermediate)(x, sow_weights=True)
        weights = sown["attention_weights"].get_value()[0].mean(-3)
        terms = zip((as_array(out), weights), cotangents, strict=True)
        return sum(jnp.sum(a * cotangent) for a, cotangent in terms), (out, weights)

    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


def _of_projections(layer: Any, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradients of weights, which a shared quantizer may lead to before their layer does."""
    paths = {id(node): dotted(path) for path, node in nnx.iter_graph(layer, graph=True)}
    held = {
        f"{part}.{name}": getattr(getattr(layer, part), name)
        for part in PARTS.values()
        for name in ("kernel", "bias")
    }
    return {name: found[paths[id(variable)]] for name, variable in held.items() if variable is not None}


def _gradient(name: str, found: dict[str, np.ndarray]) -> np.ndarray:
    """A gradient under the reference's name, in its layout."""
    owner, _, rest = name.partition(".")
    if rest in ("weight", "bias"):
        parts = ("query", "key", "value") if owner == "in_proj" else (PARTS[owner],)
        return np.concatenate([_matrix(part, rest, found) for part in parts])
    path = dotted(our_path(rest))
    if owner.endswith("_quant"):
        return found[f"{owner}.{path}"]
    slot = rest.partition(".")[0]
    if owner == "in_proj" and slot == "input_quant":
        return found[f"in_proj_input_quant.{path}"]
    layers = ("query", "key", "value") if owner == "in_proj" else (PARTS[owner],)
    held = [found[f"{layer}.{slot}.{path}"] for layer in layers if f"{layer}.{slot}.{path}" in found]
    return held[0] if len(held) == 1 else np.concatenate([x.reshape(-1, 1) for x in held])


def _matrix(part: str, kind: str, found: dict[str, np.ndarray]) -> np.ndarray:
    if kind == "bias":
        return found[f"{part}.bias"].reshape(-1)
    kernel = found[f"{part}.kernel"]
    return (kernel.reshape(-1, kernel.shape[-1]) if part == "out" else kernel.reshape(len(kernel), -1)).T


def _batch_first(given: dict[str, Any], x: np.ndarray) -> Any:
    return jnp.asarray(x if given.get("batch_first") or x.ndim != 3 else np.swapaxes(x, 0, 1))


def _to_theirs(given: dict[str, Any], x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x if given.get("batch_first") or x.ndim != 3 else np.swapaxes(x, 0, 1)


def _ours(name: str) -> str:
    """As the adapter of layers looks it up."""
    head, found, _ = name.partition(".fused_activation_quant_proxy")
    if not found:
        head, found, _ = name.partition(".tensor_quant")
    return f"{head}.{dotted(our_path(name))}" if found else name
