"""Moments of AQT's stochastic rounding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jqinject.dot as d
from jqinject.dot.schemes.noise import NOISES
from tests.golden._config import reading

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]


def driver(case: Case) -> Callable[[Case, Arrays], dict[str, Any]]:
    given = case["config"]
    if "n_keys" not in given:
        return without_key
    return noise if "implementation" in given else gradients if "rng_type" in given else rounding


def keys(count: int) -> Any:
    return jax.random.split(jax.random.key(7), count)


def noise_of(config: dict[str, Any]) -> tuple[Any, tuple[int, ...], int]:
    """The noise, the shape that it is drawn in, and how often."""
    with reading(config, "noise") as given:
        return given.choose("implementation", NOISES)(), tuple(given.take("shape")), given.take("n_keys")


def noise(case: Case, inputs: Arrays) -> dict[str, Any]:
    draw, shape, count = noise_of(case["config"])
    drawn = np.asarray(jax.vmap(lambda key: draw(shape, key))(keys(count)))
    moments = {"mean": drawn.mean(), "var": drawn.var(), "min": drawn.min(), "max": drawn.max()}
    assert -0.5 <= moments["min"] < moments["max"] <= 0.5
    return moments | case["json_outputs"]


def rounding_of(config: dict[str, Any]) -> tuple[d.IntNumerics, int]:
    with reading(config, "stochastic rounding") as given:
        return d.IntNumerics(given.take("bits")), given.take("n_keys")


def rounding(case: Case, inputs: Arrays) -> dict[str, Any]:
    numerics, count = rounding_of(case["config"])
    draw = d.JaxUniform()
    x = jnp.asarray(inputs["x"])
    rounded = jax.vmap(lambda key: numerics.encode(x, draw(x.shape, key)))(keys(count))
    rounded = np.asarray(rounded, np.float64)
    return {"mean": rounded.mean(0), "var": rounded.var(0)}


def gradients_of(config: dict[str, Any]) -> tuple[type, int]:
    """The configuration, and how many keys."""
    with reading(config, "gradients under stochastic rounding") as given:
        config_ = d.config_v4(drhs_bits=given.take("drhs_bits"), rng_type=given.take("rng_type"))
        return config_, given.take("n_keys")


def gradients(case: Case, inputs: Arrays) -> dict[str, Any]:
    config, count = gradients_of(case["config"])
    lhs, rhs, g = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs", "g"))
    numbers = (((1,), (0,)), ((), ()))

    def pulled(key: Any, injector: Any) -> Any:
        general = injector.dot_general
        return jax.vjp(lambda a, b: general(a, b, numbers, key=key), lhs, rhs)[1](g)

    found = {}
    both = jax.vmap(lambda key: pulled(key, config))(keys(count))
    for name, drawn in zip(("dlhs", "drhs"), both, strict=True):
        drawn = np.asarray(drawn, np.float64)
        found |= {f"{name}_mean": drawn.mean(0), f"{name}_std": drawn.std(0)}
    still_both = pulled(None, config.let(rng_type=None))
    for name, exact, still in zip(("dlhs", "drhs"), (g @ rhs.T, lhs.T @ g), still_both, strict=True):
        found |= {f"{name}_exact": exact, f"{name}_nosr": still}
    return found


def without_key_of(config: dict[str, Any]) -> type:
    with reading(config, "a gradient without a key") as given:
        return given.choose("config", {"config_v4": d.config_v4()})


def without_key(case: Case, inputs: Arrays) -> dict[str, Any]:
    general = without_key_of(case["config"]).dot_general
    x = jnp.ones((2, 2))
    return {"gradient": jax.grad(lambda a: general(a, x, (((1,), (0,)), ((), ()))).sum())(x)}
