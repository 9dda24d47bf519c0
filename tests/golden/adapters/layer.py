"""Drives quantized layers, and one small network: sequences of batches through layers that live through all of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqinject.nn import (
    QuantConv,
    QuantConvTranspose,
    QuantEmbed,
    QuantIdentity,
    QuantLinear,
    QuantReLU,
    QuantScaleBias,
)
from jqinject.quant_tensor import as_array, max_pool
from tests.golden._driver import CannotDrive
from tests.golden.adapters import attention, recurrent
from tests.golden.adapters.layouts import (
    LAYOUTS,
    back,
    compiled,
    dotted,
    facts_of,
    fields_of,
    moved,
    once,
    our_path,
    plain,
    quantizer,
    shaped,
)

Case = dict[str, Any]

LINEAR = ("QuantLinear", "QuantScaleBias", "QuantEmbedding")
CONVOLUTIONS = ("QuantConv1d", "QuantConv2d", "QuantConv3d")
TRANSPOSED = ("QuantConvTranspose1d", "QuantConvTranspose2d", "QuantConvTranspose3d")
POSITIONAL = {
    "QuantScaleBias": ("num_features", "use_bias"),
    "QuantEmbedding": ("num_embeddings", "features"),
    **dict.fromkeys(
        ("QuantLinear", *CONVOLUTIONS, *TRANSPOSED), ("in_features", "out_features", "kernel_size")
    ),
}
WEIGHTS = ("kernel", "embedding", "scale")
WORDS = {
    "in_channels": "in_features",
    "out_channels": "out_features",
    "stride": "strides",
    "dilation": "kernel_dilation",
    "groups": "feature_group_count",
    "bias": "use_bias",
}


class Net(nnx.Module):
    """The network that the case describes in words, for kernels of the given shapes."""

    def __init__(
        self, config: dict[str, Any], conv_kernel: tuple[int, ...], fc_kernel: tuple[int, ...]
    ) -> None:
        *window, inner, outer = conv_kernel
        steps = {"collect_stats_steps": config["collect_stats_steps"], "return_quant_tensor": True}
        rngs = nnx.Rngs(0)
        self.inp = QuantIdentity(quantizer("Int8ActPerTensorFloat"), **steps)
        self.c1 = QuantConv(
            inner,
            outer,
            tuple(window),
            padding="VALID",
            weight_quant=quantizer("Int8WeightPerChannelFloat"),
            weight_bit_width=config["weight_bit_width_c1"],
            bias_quant=quantizer("Int32Bias"),
            return_quant_tensor=True,
            rngs=rngs,
        )
        self.a1 = QuantReLU(quantizer("Uint8ActPerTensorFloat"), bit_width=config["bit_width_a1"], **steps)
        self.fc = QuantLinear(
            *fc_kernel,
            weight_quant=quantizer("Int8WeightPerTensorFloat"),
            bias_quant=quantizer("Int32Bias"),
            return_quant_tensor=True,
            rngs=rngs,
        )

    def __call__(self, x: Any) -> Any:
        y = max_pool(self.a1(self.c1(self.inp(x))), (2, 2), strides=(2, 2))
        return self.fc(y.transpose((0, 3, 1, 2)).reshape((y.shape[0], -1)))


def _layer(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    config, kind = case["config"], case["layer"]["kind"]
    if "class" not in config:
        names = ("param.c1.weight", "param.fc.weight")
        return Net(config, *(_to_ours(case, name, inputs[name]).shape for name in names))
    if kind not in POSITIONAL:
        raise CannotDrive(f"no layer for {kind}")
    given = dict(zip(POSITIONAL[kind], config["args"], strict=False)) | config["kwargs"]
    arguments: dict[str, Any] = {WORDS.get(k, k): v for k, v in plain(given).items()}
    for name, given in arguments.items():
        if name.endswith("_quant") and isinstance(given, str):
            arguments[name] = quantizer(given)
    if kind in LINEAR:
        return _linear(kind, arguments)
    rank = int(kind[-2])
    arguments["kernel_size"] = _each(arguments["kernel_size"], rank)
    if kind in TRANSPOSED:
        return _transposed(rank, arguments)
    arguments["padding"] = [(p, p) for p in _each(arguments.get("padding", 0), rank)]
    return QuantConv(rngs=nnx.Rngs(0), **arguments)


def _linear(kind: str, arguments: dict[str, Any]) -> Any:
    if kind == "QuantLinear":
        return QuantLinear(rngs=nnx.Rngs(0), **arguments)
    if kind == "QuantEmbedding":
        return QuantEmbed(rngs=nnx.Rngs(0), **arguments)
    arguments.pop("runtime_shape", None)  # channels are the last axis here, whatever the rank
    return QuantScaleBias(**arguments)


def _transposed(rank: int, arguments: dict[str, Any]) -> Any:
    """The reference pads what the strided window leaves: less of the border, and more at the end, as it is told."""
    padding = _each(arguments.pop("padding", 0), rank)
    more = _each(arguments.pop("output_padding", 0), rank)
    dilation = arguments["kernel_dilation"] = _each(arguments.get("kernel_dilation", 1), rank)
    arguments["strides"] = _each(arguments.get("strides", 1), rank)
    reach = [d * (k - 1) for d, k in zip(dilation, arguments["kernel_size"], strict=True)]
    pairs = [(r - p, r - p + m) for r, p, m in zip(reach, padding, more, strict=True)]
    return QuantConvTranspose(rngs=nnx.Rngs(0), padding=pairs, transpose_kernel=True, **arguments)


def _each(given: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    """One number for each axis of the window."""
    return given if isinstance(given, tuple) else (given,) * rank


def _axes(case: Case, name: str, ndim: int) -> tuple[int, ...]:
    """The order of axes of a named array: weights by their rank, data by that of the layer."""
    kind = case["layer"]["kind"]
    if kind == "QuantEmbedding":
        return LAYOUTS["embedding"].data(ndim)
    linear = ndim == 2 or kind == "QuantLinear"
    layout = LAYOUTS["linear" if linear else "conv2d"]
    # The parameters of a weight's quantizer have its rank.
    names = name.split(".")
    is_weight = names[-1] == "weight" or "weight_quant" in names
    return layout.weight(ndim) if is_weight else layout.data(ndim)


def _to_ours(case: Case, name: str, array: np.ndarray) -> Any:
    return jnp.asarray(moved(array, _axes(case, name, array.ndim)))


def _to_theirs(case: Case, name: str, array: Any) -> np.ndarray:
    array = np.asarray(array)
    return back(array, _axes(case, name, array.ndim)) if array.ndim > 1 else array


def _prepared(case: Case, inputs: dict[str, np.ndarray]) -> Any:
    layer = _layer(case, inputs)
    for name, array in inputs.items():
        if name.startswith("param."):
            *owners, last = name.split(".")[1:]
            owner = layer
            for step in owners:
                owner = getattr(owner, step)
            setattr(owner, last, nnx.Param(_to_ours(case, name, array)))
    return layer


@once
def _sequence(case: Case, inputs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    if case["layer"]["kind"] == "QuantMultiheadAttention":
        return attention.sequence(case, inputs)
    layer = _prepared(case, inputs)
    found = []
    for step, mode in enumerate(case["schedule"]):
        layer.train() if mode == "train" else layer.eval()
        x = _to_ours(case, "x", inputs["x"][step])
        cotangent = _to_ours(case, "cotangent", inputs["cotangent0"])
        found.append(_step(case, layer, x, cotangent))
    return found


def _gradients(layer: Any, x: Any, cotangent: Any) -> Any:
    def loss(layer: Any, x: Any) -> tuple[Any, Any]:
        out = layer(x)
        return jnp.sum(as_array(out) * cotangent), out

    if jnp.issubdtype(x.dtype, jnp.integer):
        gradients, out = nnx.grad(loss, has_aux=True)(layer, x)
        return (gradients, jnp.zeros(x.shape)), out
    return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)


def _step(case: Case, layer: Any, x: Any, cotangent: Any) -> dict[str, Any]:
    (gradients, along_x), out = compiled(_gradients)(layer, x, cotangent)
    outputs = {"tensor": out, "grad.x": _to_theirs(case, "x", along_x)}
    outputs |= {f"out0.{name}": _to_theirs(case, "out", array) for name, array in fields_of(out).items()}
    for path, gradient in nnx.to_flat_state(gradients):
        name = dotted(tuple("weight" if step in WEIGHTS else step for step in path))
        outputs[f"grad.{name}"] = _to_theirs(case, name, gradient.get_value())
    return outputs


def run(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output that the case names, stacked over its steps."""
    if case["layer"]["kind"] in recurrent.KINDS:
        return recurrent.run(case, inputs)
    steps = _sequence(case, inputs)
    found: dict[str, np.ndarray] = {}
    for name, spec in case["outputs"].items():
        step, _, inner = name.partition(".")
        if step.startswith("step"):
            found[name] = shaped(steps[int(step.removeprefix("step"))][_ours(inner)], spec["shape"])
        else:
            rows = [shaped(steps[step][_ours(name)], spec["shape"][1:]) for step in spec["steps"]]
            found[name] = np.stack(rows)
    return found


def _ours(name: str) -> str:
    """`grad.[owner.]act_quant.fused...tensor_quant.a` -> the same under our path."""
    head, found, _ = name.partition(".fused_activation_quant_proxy")
    if not found:
        head, found, _ = name.partition(".tensor_quant")
    return f"{head}.{dotted(our_path(name))}" if found else name


def facts(case: Case, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """The facts of the output after every step."""
    if case["layer"]["kind"] in recurrent.KINDS:
        return recurrent.facts(case, inputs)
    return {"steps": [facts_of(outputs["tensor"]) for outputs in _sequence(case, inputs)]}
