"""Moments of AQT's stochastic rounding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jqinject.dot as d
from jqinject.dot.noise import NOISES

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]


def driver(case: Case) -> Callable[[Case, Arrays], dict[str, Any]]:
    if case.get("expect_error"):
        return without_key
    name = case["id"].split("/")[1]
    return noise if name.startswith("noise") else rounding if "rounding" in name else gradients


def keys(case: Case) -> Any:
    return jax.random.split(jax.random.key(7), case["config"]["n_keys"])


def noise(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    draw = NOISES[given["implementation"]]()
    drawn = np.asarray(jax.vmap(lambda key: draw(tuple(given["shape"]), key))(keys(case)))
    moments = {"mean": drawn.mean(), "var": drawn.var(), "min": drawn.min(), "max": drawn.max()}
    assert -0.5 <= moments["min"] < moments["max"] <= 0.5
    return moments | case["json_outputs"]


def rounding(case: Case, inputs: Arrays) -> dict[str, Any]:
    numerics, draw = d.IntNumerics(case["config"]["bits"]), d.JaxUniform()
    x = jnp.asarray(inputs["x"])
    rounded = np.asarray(jax.vmap(lambda key: numerics.encode(x, draw(x.shape, key)))(keys(case)), np.float64)
    return {"mean": rounded.mean(0), "var": rounded.var(0)}


def gradients(case: Case, inputs: Arrays) -> dict[str, Any]:
    given = case["config"]
    lhs, rhs, g = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs", "g"))
    numbers = (((1,), (0,)), ((), ()))

    def pulled(key: Any, rng_type: str | None) -> Any:
        config = d.config_v4(drhs_bits=given["drhs_bits"], rng_type=rng_type)
        general = config.dot_general
        return jax.vjp(lambda a, b: general(a, b, numbers, key=key), lhs, rhs)[1](g)

    found = {}
    for name, drawn in zip(
        ("dlhs", "drhs"), jax.vmap(lambda key: pulled(key, given["rng_type"]))(keys(case)), strict=True
    ):
        drawn = np.asarray(drawn, np.float64)
        found |= {f"{name}_mean": drawn.mean(0), f"{name}_std": drawn.std(0)}
    for name, exact, still in zip(("dlhs", "drhs"), (g @ rhs.T, lhs.T @ g), pulled(None, None), strict=True):
        found |= {f"{name}_exact": exact, f"{name}_nosr": still}
    return found


def without_key(case: Case, inputs: Arrays) -> dict[str, Any]:
    general = d.config_v4().dot_general
    x = jnp.ones((2, 2))
    return {"gradient": jax.grad(lambda a: general(a, x, (((1,), (0,)), ((), ()))).sum())(x)}
