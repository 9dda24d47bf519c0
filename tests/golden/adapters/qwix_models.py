"""The models of Qwix's reference set, as its README describes them: in Linen and in NNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from tests.golden._config import CannotDrive, meaning, reading

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky": jax.nn.leaky_relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "softmax": jax.nn.softmax,
    "tanh": jnp.tanh,
}


class LMlp(nn.Module):
    h: int
    o: int
    act: str = "relu"

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = ACTIVATIONS[self.act](nn.Dense(self.h, name="fc1")(x))
        return nn.Dense(self.o, name="fc2")(x)


class LCnn(nn.Module):
    c1: int
    c2: int
    o: int
    bn: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(self.c1, (3, 3), name="conv1")(x)
        if self.bn:
            x = nn.BatchNorm(use_running_average=True, name="bn")(x)
        x = nn.avg_pool(nn.relu(x), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(self.c2, (3, 3), name="conv2")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(self.o, name="fc")(x.reshape(x.shape[0], -1))


def _with_mean(a: Any, b: Any) -> Any:
    c = jnp.concatenate([a, b], axis=-1)
    return c + jnp.mean(c, axis=-1, keepdims=True)


# What NAMES.md says of the kinds of `res-<kind>`.
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "concat": lambda a, b: jnp.concatenate([a, b], axis=-1),
    "clip": lambda a, b: jnp.clip(a, -0.5, 0.5) + b,
    "mean": _with_mean,
    "layernorm": lambda a, b: a + b,  # and the norm, in the model
    "softmax": lambda a, b: jax.nn.softmax(a) + b,
    "sin": lambda a, b: jnp.sin(a) + b,
    "take": lambda a, b: jnp.take(a, jnp.array([0, 2, 4]), axis=-1),
    "pad": lambda a, b: jnp.pad(a, ((0, 0), (1, 1))),
    "reshape": lambda a, b: (a + b).reshape(-1, 2, 3).swapaxes(1, 2).reshape(a.shape),
    "sub_const": lambda a, b: (a - 0.25) * 2,
}


class LRes(nn.Module):
    kind: str
    norm: str = "ln"  # the name of the layer

    @nn.compact
    def __call__(self, x: Any) -> Any:
        a, b = nn.Dense(6, name="a")(x), nn.Dense(6, name="b")(x)
        y = COMBINE[self.kind](a, b)
        if self.kind == "layernorm":
            y = nn.LayerNorm(name=self.norm)(y)
        return nn.Dense(3, name="out")(y)


class LEinsum(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.normal(), (x.shape[-1], self.features))
        return nn.Dense(3, name="out")(jax.nn.relu(jnp.einsum("bd,df->bf", x, kernel)))


class LSharedIn(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4, name="q")(x), nn.Dense(4, name="k")(x)


class Linear(nnx.Module):
    def __init__(self, shapes: dict[str, Any]) -> None:
        d, o = shapes["fc/kernel"]
        self.fc = nnx.Linear(d, o, use_bias="fc/bias" in shapes, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.fc(x)


class Conv(nnx.Module):
    def __init__(self, shapes: dict[str, Any]) -> None:
        *window, i, o = shapes["conv/kernel"]
        self.conv = nnx.Conv(i, o, window, use_bias="conv/bias" in shapes, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.conv(x)


class Mlp(nnx.Module):
    def __init__(self, shapes: dict[str, Any]) -> None:
        (d, h), (_, o) = shapes["fc1/kernel"], shapes["fc2/kernel"]
        self.fc1, self.fc2 = nnx.Linear(d, h, rngs=nnx.Rngs(0)), nnx.Linear(h, o, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.fc2(nnx.relu(self.fc1(x)))


class Cnn(nnx.Module):
    def __init__(self, shapes: dict[str, Any]) -> None:
        *window, i, c = shapes["conv/kernel"]
        self.conv = nnx.Conv(i, c, window, rngs=nnx.Rngs(0))
        self.fc = nnx.Linear(c, shapes["fc/kernel"][-1], rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.fc(jnp.mean(nnx.relu(self.conv(x)), axis=(1, 2)))


class Einsum(nnx.Module):
    def __init__(self, shapes: dict[str, Any]) -> None:
        self.proj = nnx.Einsum("btd,dnh->btnh", shapes["proj/kernel"], rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.proj(x)


NNX_MODELS = {"linear": Linear, "conv": Conv, "mlp": Mlp, "cnn": Cnn, "einsum": Einsum}


def linen_model(name: str, fields: Mapping[str, Any], shapes: Mapping[str, Any]) -> nn.Module:
    """The Linen model of a case; sizes that its fields do not name are read from its parameters."""

    def size(path: str, default: int = 1) -> int:
        return shapes[path][-1] if path in shapes else default

    with reading(fields, f"the model {name}") as given:
        if name == "LMlp":
            act = given.take("act", "relu")
            meaning(ACTIVATIONS, act, "the activation of an LMlp")
            return LMlp(given.take("h", size("fc1/kernel")), given.take("o", size("fc2/kernel")), act)
        if name == "LCnn":
            sizes = size("conv1/kernel"), size("conv2/kernel"), size("fc/kernel")
            return LCnn(*sizes, bn=given.take("bn", True))
        if name == "LRes":
            kind = given.take("kind")
            meaning(COMBINE, kind, "the kind of an LRes")
            norms = [path.split("/")[0] for path in shapes if path.endswith("/scale")]
            return LRes(kind, *norms)
        if name == "LEinsum":
            return LEinsum(size("kernel"))
        if name == "LSharedIn":
            return LSharedIn()
        raise CannotDrive(f"no model is named {name!r}")


def model_of(name: str, fields: Mapping[str, Any], params: dict[str, Any], x: Any) -> Any:
    """The NNX model of a case with its parameters: a Linen one through the bridge.

    Args:
        name: of the model.
        fields: of the model.
        params: path -> array; paths of statistics of batch normalization begin with `batch_stats/`.
        x: an input.
    """
    shapes = {path: array.shape for path, array in params.items()}
    if name in NNX_MODELS:
        with reading(fields, f"the model {name}"):
            model = NNX_MODELS[name](shapes)
    else:
        model = nnx.bridge.ToNNX(linen_model(name, fields, shapes), rngs=nnx.Rngs(0)).lazy_init(x)
    for path, array in params.items():
        variable: Any = nnx.state(model)
        for key in path.split("/"):
            variable = variable[key]
        variable.set_value(jnp.asarray(array))
    return model
