"""What the tests of training steps share: a small FP8 layer, a step, and its statistics as arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject
from jqinject.core.state import flat_parts
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3WeightPerTensorDelayed,
    Fp8e5m2GradPerTensorDelayed,
)

WIDTH = 6


class Act(Fp8e4m3ActPerTensorDelayed):
    amax_history_length = 4


class Weight(Fp8e4m3WeightPerTensorDelayed):
    amax_history_length = 4


class Grad(Fp8e5m2GradPerTensorDelayed):
    amax_history_length = 4


FP8: dict[str, Any] = {"weight_quant": Weight, "input_quant": Act, "grad_quant": Grad}
X = jax.random.normal(jax.random.key(1), (8, WIDTH))


def linear(seed: int = 0, **given: Any) -> QuantLinear:
    return QuantLinear(WIDTH, WIDTH, **{**FP8, **given}, rngs=nnx.Rngs(seed))


def loss(model: Any, x: Any) -> Any:
    return jnp.sum(model(x) ** 2)


def step(model: Any, x: Any) -> Any:
    return jqinject.value_and_grad(loss)(model, x)


def statistics(model: Any) -> dict[str, np.ndarray]:
    found = flat_parts(nnx.state(model))
    return {
        ".".join(map(str, path)): np.asarray(v.get_value())
        for path, v in found
        if not isinstance(v, nnx.Param)
    }


def histories(layer: QuantLinear) -> dict[str, np.ndarray]:
    proxies = {"weight": layer.weight_quant, "input": layer.input_quant, "grad": layer.grad_quant}
    return {name: np.asarray(p.amax_history.amax_history.get_value()) for name, p in proxies.items()}


def run(model: Any, step: Any, x: Any = X, steps: int = 3) -> Any:
    """Three steps on inputs that grow, so that a step too many or too few shows."""
    for number in range(steps):
        step(model, x * (number + 1))
    return model


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 1e-6) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, err_msg=name)


def by_hand(x: Any = X, steps: int = 3) -> dict[str, list[float]]:
    """The amaxes of every step, newest first, from plain arrays: no quantizer of ours moves a statistic here."""
    layer = linear()
    kernel, bias = layer.kernel.get_value(), layer.bias.get_value()
    found: dict[str, list[float]] = {"weight": [], "input": [], "grad": []}
    scales = {"weight": 1.0, "input": 1.0}
    for number in range(steps):
        here = x * (number + 1)
        rounded = {
            "weight": (kernel / scales["weight"]).astype(jnp.float8_e4m3fn).astype(jnp.float32)
            * scales["weight"],
            "input": jnp.clip(here / scales["input"], -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.float32)
            * scales["input"],
        }
        y = rounded["input"] @ rounded["weight"] + bias
        amaxes = {"weight": jnp.abs(kernel).max(), "input": jnp.abs(here).max(), "grad": jnp.abs(2 * y).max()}
        for name, amax in amaxes.items():
            found[name].insert(0, float(amax))
        scales = {name: max(found[name]) / 448 for name in scales}
    return found
