"""Drives what Qwix's ODML providers refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jqinject import Rule
from jqinject.odml import Int8Act, Int8Weight, OdmlConversion, OdmlQat
from tests.golden._config import reading
from tests.golden.adapters.qwix_models import Mlp

SHAPES = {"fc1/kernel": (6, 10), "fc2/kernel": (10, 4)}
X = jnp.ones((4, 6))


class ConstantOnTheLeft(nnx.Module):
    """Multiplies a constant, which is neither weight nor activation, with its input."""

    def __call__(self, x: Any) -> Any:
        return jnp.dot(jnp.ones((3, 4)), x)


def _constant_on_the_left(strict: bool) -> None:
    OdmlQat(strict=strict).quantize(ConstantOnTheLeft(), X)


def _no_statistics() -> None:
    OdmlConversion().quantize(Mlp(SHAPES), X)


def _empty_statistics() -> None:
    OdmlConversion().quantize(OdmlQat().quantize(Mlp(SHAPES), X), X)


def _nan_weight() -> None:
    model = OdmlQat().quantize(Mlp(SHAPES), X)
    model(X)
    model.fc1.kernel[...] = jnp.full((6, 10), jnp.nan)
    OdmlConversion().quantize(model, X)


def _float8_weight() -> None:
    rule = Rule(weight_quant=Int8Weight.let(q_dtype=jnp.float8_e4m3fn), output_quant=Int8Act)
    model = OdmlQat(rule).quantize(Mlp(SHAPES), X)
    model(X)
    OdmlConversion().quantize(model, X)


CASES: dict[str, Callable[[], None]] = {
    "quant_stats missing": _no_statistics,
    "quant_stats count == 0": _empty_statistics,
    "nan weight -> invalid scale": _nan_weight,
    "weight_qtype float8_e4m3fn": _float8_weight,
}


def attempt_of(config: Mapping[str, Any]) -> Callable[[], None]:
    """What a case says is to be tried."""
    with reading(config, "what ODML refuses") as given:
        if "case" in given:
            return given.choose("case", CASES)
        attempt = given.choose("model", {"const-lhs": _constant_on_the_left})
        return partial(attempt, given.take("strict"))


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Do what the reference was made with; nothing is returned."""
    attempt_of(case["config"])()
    return {}
