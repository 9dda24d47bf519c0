"""Moments of AQT's stochastic rounding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jqinject.dot as d
from jqinject.core import FixedRange
from jqinject.inject import Binding
from jqinject.ops import stochastic_round_ste
from jqinject.quant import aqt
from jqinject.quant.aqt import RANDOM_BITS
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


def noise_of(config: dict[str, Any]) -> tuple[int, tuple[int, ...], int]:
    """The random bits of a number, the shape that noise is drawn in, and how often."""
    with reading(config, "noise") as given:
        return given.choose("implementation", RANDOM_BITS), tuple(given.take("shape")), given.take("n_keys")


def drawn_noise(keys: Any, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Uniform noise in steps of 1/256, read off the numbers between 0 and 1 that it takes upwards."""
    steps = (jnp.arange(256, dtype=jnp.float32) + 0.5) / 256

    def drawn(key: Any) -> Any:
        up = jax.vmap(lambda step: stochastic_round_ste(jnp.full(shape, step), key, (), bits))(steps)
        return 0.5 - up.sum(0) / 256

    return np.asarray(jax.vmap(drawn)(keys))


def noise(case: Case, inputs: Arrays) -> dict[str, Any]:
    bits, shape, count = noise_of(case["config"])
    found = drawn_noise(keys(count), shape, bits)
    moments = {"mean": found.mean(), "var": found.var(), "min": found.min(), "max": found.max()}
    assert -0.5 <= moments["min"] < moments["max"] <= 0.5
    return moments | case["json_outputs"]


def rounding_of(config: dict[str, Any]) -> tuple[type, int]:
    with reading(config, "stochastic rounding") as given:
        return aqt.OperandInjector.let(bits=given.take("bits"), rng_type="jax.uniform"), given.take("n_keys")


def rounding(case: Case, inputs: Arrays) -> dict[str, Any]:
    """Numbers in steps of 1: the range becomes the bound."""
    injector, count = rounding_of(case["config"])
    bound = injector.range_steps
    binding = Binding(injector, {"calibration": FixedRange(-bound, bound), "shared_axes": (0,)})
    x = jnp.asarray(inputs["x"])

    def rounded(key: Any) -> Any:
        return binding.resolve("tensor_quant", rngs=nnx.Rngs(key))(x).value

    found = np.asarray(jax.vmap(rounded)(keys(count)), np.float64)
    return {"mean": found.mean(0), "var": found.var(0)}


def gradients_of(config: dict[str, Any]) -> tuple[type, int]:
    """The configuration, and how many keys."""
    with reading(config, "gradients under stochastic rounding") as given:
        config_ = aqt.config_v4(drhs_bits=given.take("drhs_bits"), rng_type=given.take("rng_type"))
        return config_, given.take("n_keys")


def gradients(case: Case, inputs: Arrays) -> dict[str, Any]:
    config, count = gradients_of(case["config"])
    lhs, rhs, g = (jnp.asarray(inputs[name]) for name in ("lhs", "rhs", "g"))
    numbers = (((1,), (0,)), ((), ()))

    def pulled(key: Any, injector: Any) -> Any:
        return jax.vjp(lambda a, b: d.dot_general(a, b, numbers, config=injector, key=key), lhs, rhs)[1](g)

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
        return given.choose("config", {"config_v4": aqt.config_v4()})


def without_key(case: Case, inputs: Arrays) -> dict[str, Any]:
    config, numbers = without_key_of(case["config"]), (((1,), (0,)), ((), ()))
    x = jnp.ones((2, 2))
    return {"gradient": jax.grad(lambda a: d.dot_general(a, x, numbers, config=config).sum())(x)}
