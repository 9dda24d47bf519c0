"""Drives multi-head attention: batches through one layer, with its weights and gradients in torch's packed layout."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
from jqinject.formats import attention_from_torch
from jqinject.nn import QuantMultiHeadAttention
from jqinject.quant_tensor import as_array
from tests.brevitas_defaults import ATTENTION
from tests.golden._config import CannotDrive, Settings, reading
from tests.golden.adapters.layer_classes import arguments_of, quantizers_of
from tests.golden.adapters.layouts import compiled, dotted, fields_of, our_path

Case = dict[str, Any]
POSITIONAL = ("embed_dim", "num_heads", "dropout", "bias")
PARTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}


def build(case: Case, inputs: dict[str, np.ndarray]) -> tuple[QuantMultiHeadAttention, bool]:
    """The layer of the case with its weights, and whether batches come first."""
    with reading(case["config"], "attention") as config:
        arguments = arguments_of(config, "QuantMultiheadAttention", POSITIONAL)
    with reading(arguments, "attention") as given:
        layer = _layer(given)
        heads, batch_first = given.take("num_heads"), given.take("batch_first", False)
    with reading(inputs, "the arrays of attention") as arrays:
        for name in ("x", "cotangent0", "cotangent1"):
            arrays.take(name)
        weights = {n.removeprefix("param."): arrays.take(n) for n in inputs if n.startswith("param.")}
    jqinject.load_state(layer, attention_from_torch(weights, heads))
    return layer, batch_first


def sequence(case: Case, inputs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What every step gives: outputs and gradients by the reference's names."""
    layer, batch_first = build(case, inputs)
    found = []
    for step, mode in enumerate(case["schedule"]):
        layer.train() if mode == "train" else layer.eval()
        x = jnp.asarray(_swapped(batch_first, inputs["x"][step]))
        cotangents = (_swapped(batch_first, inputs["cotangent0"]), inputs["cotangent1"])
        (gradients, along_x), (out, weights) = compiled(_gradients)(layer, x, *map(jnp.asarray, cotangents))
        outputs = {"tensor": out, "grad.x": _swapped(batch_first, along_x), "out1.value": np.asarray(weights)}
        outputs |= {f"out0.{n}": _swapped(batch_first, a) for n, a in fields_of(out).items()}
        flat = {dotted(path): np.asarray(g.get_value()) for path, g in nnx.to_flat_state(gradients)}
        flat |= _of_projections(layer, flat)
        names = (name for name in case["outputs"] if name.startswith("grad.") and name != "grad.x")
        found.append(outputs | {_ours(name): _gradient(name.removeprefix("grad."), flat) for name in names})
    return found


def _layer(given: Settings) -> QuantMultiHeadAttention:
    size = given.take("embed_dim")
    for name in ("add_bias_kv", "add_zero_attn"):
        if given.take(name, False):
            raise CannotDrive(f"Flax's attention has no {name}")
    sources = {given.take("kdim", None) or size, given.take("vdim", None) or size}
    if len(sources) > 1:
        raise CannotDrive("Flax's attention projects keys and values from inputs of one size")
    defaults = {slot: quantizer.__name__ for slot, quantizer in ATTENTION.items()}
    return QuantMultiHeadAttention(
        given.take("num_heads"),
        size,
        in_kv_features=sources.pop(),
        decode=False,
        use_bias=given.take("bias", True),
        dropout_rate=given.take("dropout", 0.0),
        packed_in_proj=given.take("packed_in_proj", True),
        rngs=nnx.Rngs(0),
        return_quant_tensor=given.take("return_quant_tensor", False),
        **quantizers_of(given, defaults | {"softmax_input_quant": None, "out_proj_output_quant": None}),
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


def _swapped(batch_first: bool, x: Any) -> np.ndarray:
    """From the reference's order of batch and time to ours, or back."""
    x = np.asarray(x)
    return x if batch_first or x.ndim != 3 else np.swapaxes(x, 0, 1)


def _ours(name: str) -> str:
    """As the adapter of layers looks it up."""
    head, found, _ = name.partition(".fused_activation_quant_proxy")
    if not found:
        head, found, _ = name.partition(".tensor_quant")
    return f"{head}.{dotted(our_path(name))}" if found else name
