"""TRAIN, CONVERT and SERVE in models of AQT's users, here NNX models."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject.dot as d
from jqinject.dot import QuantMode
from jqinject.quant import aqt
from tests.golden._config import meaning, reading

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]
CONFIGS = {
    "v4": aqt.config_v4(),
    "fwd4": aqt.config_v4(fwd_bits=4, dlhs_bits=None),
    "fp8": aqt.config_fwd_fp8(),
    "fp8-e5m2": aqt.config_fwd_fp8("e5m2"),
    "v4-drhs8": aqt.config_v4(drhs_bits=8),
    "v4-static": aqt.config_v4(use_dummy_static_bound=True),
}
NETS = {"dense": ["d"], "mlp": ["d1", "d2"], "dense_general": ["dg"], "einsum": ["e"], "einsum_swap": ["e"]}


def driver(case: Case) -> Callable[[Case, Arrays], dict[str, Any]]:
    if "tile_count" in case["config"]:
        return tiled
    return refused if case.get("expect_error") else served


def _kernel(inputs: Arrays, name: str) -> Callable[..., Any]:
    return lambda *_: jnp.asarray(inputs[f"params/{name}kernel"])


class Net(nnx.Module):
    """One of the small models; `ops` are its quantized contractions by their layer's name."""

    def __init__(self, kind: str, config: Any, inputs: Arrays) -> None:
        self.kind = kind
        names = NETS[kind]
        op = d.QEinsum if kind.startswith("einsum") else d.QDotGeneral
        self.ops = nnx.Dict({name: op(config) for name in names})
        self.weights = nnx.Dict({name: self.layer(name, inputs) for name in names})

    def layer(self, name: str, inputs: Arrays) -> nnx.Module:
        rngs, op = nnx.Rngs(0), self.ops[name]
        if self.kind.startswith("einsum"):
            kernel = inputs["params/kernel"]
            return nnx.Dict({"kernel": nnx.Param(jnp.asarray(kernel))})
        kernel = inputs[f"params/{name}/kernel"]
        given = {
            "kernel_init": lambda *_: jnp.asarray(kernel),
            "bias_init": lambda *_: jnp.asarray(inputs[f"params/{name}/bias"]),
            "dot_general": op,
            "rngs": rngs,
        }
        if self.kind == "dense_general":
            return nnx.LinearGeneral(kernel.shape[0], kernel.shape[1:], **given)
        return nnx.Linear(*kernel.shape, **given)

    def __call__(self, x: Any) -> Any:
        if self.kind == "einsum":
            return self.ops.e("bd,df->bf", x, self.weights.e.kernel[...])
        if self.kind == "einsum_swap":
            return self.ops.e("df,bd->bf", self.weights.e.kernel[...], x)
        for number, layer in enumerate(self.weights.values()):
            x = layer(nnx.relu(x) if number else x)
        return x


def served_of(config: dict[str, Any]) -> tuple[str, type]:
    """The kind of the net, and the injector of its contractions."""
    with reading(config, "a served net") as given:
        given.take("use_legacy_freezer")  # AQT's two ways to store the same; here there is one
        injector = given.choose("config", CONFIGS)
        kind = given.take("kind")
    meaning(NETS, kind, "a served net: kind")
    return kind, injector


def served(case: Case, inputs: Arrays) -> dict[str, Any]:
    kind, injector = served_of(case["config"])
    net = Net(kind, injector, inputs)
    side = "lhs" if kind == "einsum_swap" else "rhs"
    x, x2 = jnp.asarray(inputs["x"]), jnp.asarray(inputs["x2"])
    found: dict[str, Any] = {"y_train": net(x), "y_train_x2": net(x2)}
    net.set_attributes(**{f"{side}_quant_mode": QuantMode.CONVERT})
    found["y_convert"] = net(x)
    net.set_attributes(**{f"{side}_quant_mode": QuantMode.SERVE})
    for layer in net.weights.values():
        layer.kernel[...] = jnp.zeros_like(layer.kernel[...])
    found["y_serve_x2"] = net(x2)
    for name, spec in case["outputs"].items():
        if name.startswith("aqt/"):
            layer_name = name.split("/")[1]
            frozen = getattr(net.ops[layer_name], f"{side}_freezer").get()
            is_value = name.endswith(("value", "qvalue"))
            numbers = frozen.numbers
            payload = frozen.form.stored.payload(numbers["value"])
            found[name] = payload if is_value else _scale(numbers["scale"], spec["shape"])
    return found | _facts(case, found)


def _scale(scale: Any, shape: list[int]) -> Any:
    """A scale in AQT's shape: of a constant bound there is one scale here, and one for each channel there."""
    return jnp.full(shape, scale.reshape(())) if scale.size == 1 else scale.reshape(shape)


def _facts(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    frozen = {
        name: {"dtype": str(found[name].dtype), "shape": list(found[name].shape)}
        for name in case["json_outputs"]["frozen"]
    }
    return {
        "frozen": frozen,
        "serve_equals_train": bool(jnp.array_equal(found["y_serve_x2"], found["y_train_x2"])),
        "train_equals_convert": bool(jnp.array_equal(found["y_convert"], found["y_train"])),
    }


def refused_of(config: dict[str, Any]) -> tuple[type, QuantMode]:
    """The injector and the mode of weights of a layer that has nothing to serve."""
    with reading(config, "a layer that cannot be served") as given:
        given.take("use_legacy_freezer", None)
        # Nothing is stored of an operand without bits.
        bits = given.choose("rhs_freeze_mode", {"NONE": None}, 8)
        modes = {mode.name: mode for mode in QuantMode}
        mode = given.choose("rhs_quant_mode", modes, QuantMode.SERVE)
        return aqt.config_v4(fwd_bits=bits, dlhs_bits=bits), mode


def refused(case: Case, inputs: Arrays) -> dict[str, Any]:
    """What can't be served: nothing was stored, or there is nothing to store."""
    config, mode = refused_of(case["config"])
    layer = nnx.Linear(3, 2, dot_general=d.QDotGeneral(config, rhs_quant_mode=mode), rngs=nnx.Rngs(0))
    return {"y": layer(jnp.ones((1, 3)))}


def tiled_of(config: dict[str, Any]) -> tuple[str, type, int]:
    """The equation, the injector, and the length of the summed axis."""
    with reading(config, "a contraction in tiles") as given:
        operands = {name: aqt.OperandInjector for name in ("fprop_lhs", "fprop_rhs")}
        injector = d.Scheme.let(tile_size=d.LocalAqt(given.take("tile_count")), **operands)
        return given.take("eqn"), injector, given.take("contraction")


def tiled(case: Case, inputs: Arrays) -> dict[str, Any]:
    eqn, injector, length = tiled_of(case["config"])
    x, kernel = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs"))
    assert kernel.shape[0] == length
    return {"out": d.einsum(eqn, x, kernel, config=injector)}
