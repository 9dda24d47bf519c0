"""Drives what Qwix's ODML providers refuse."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jqinject import Rule
from jqinject.odml import Int8Act, Int8Weight, OdmlConversion, OdmlQat
from tests.golden.adapters.qwix_models import Mlp

SHAPES = {"fc1/kernel": (6, 10), "fc2/kernel": (10, 4)}
X = jnp.ones((4, 6))


class ConstantOnTheLeft(nnx.Module):
    """Multiplies a constant, which is neither weight nor activation, with its input."""

    def __call__(self, x: Any) -> Any:
        return jnp.dot(jnp.ones((3, 4)), x)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Do what the reference was made with; nothing is returned."""
    config = case["config"]
    what = config.get("case") or config["model"]
    if what == "const-lhs":
        OdmlQat(strict=config["strict"]).quantize(ConstantOnTheLeft(), X)
    elif "quant_stats" in what:
        OdmlConversion().quantize(OdmlQat().quantize(Mlp(SHAPES), X) if "count" in what else Mlp(SHAPES), X)
    elif "nan weight" in what:
        model = OdmlQat().quantize(Mlp(SHAPES), X)
        model(X)
        model.fc1.kernel[...] = jnp.full((6, 10), jnp.nan)
        OdmlConversion().quantize(model, X)
    else:
        rule = Rule(weight_quant=Int8Weight.let(q_dtype=jnp.float8_e4m3fn), output_quant=Int8Act)
        model = OdmlQat(rule).quantize(Mlp(SHAPES), X)
        model(X)
        OdmlConversion().quantize(model, X)
    return {}
