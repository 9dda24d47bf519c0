"""The compiled program of a frozen model moves no weights and copies no caches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jqinject import Rule, compiled, freeze, quantize, quantized_cache
from jqinject.dot import QDotGeneral
from jqinject.nn import QuantLinear
from jqinject.quant import Int8DynamicActPerRowFloat, Int8WeightPerChannelFloat
from jqinject.quant.aqt import config_v4
from tests.model._generating_models import OwnDecoder

IN, OUT = 48, 40
RULE = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowFloat)


def made_of(program: str, dtype: str, *shapes: tuple[int, ...]) -> list[str]:
    """The instructions of a compiled program that make an array of one of these shapes."""
    kinds = "|".join(rf"{dtype}\[{','.join(map(str, shape))}\]" for shape in shapes)
    found = re.findall(rf"= (?:{kinds})\S* ([\w\-]+)\(", program)
    return [name for name in found if name not in ("parameter", "bitcast", "get-tuple-element")]


def text_of(answer: Any, x: jax.Array) -> str:
    return answer._run.lower(*answer._arguments((x,), {})).compile().as_text()


def by_rules(rngs: nnx.Rngs) -> Any:
    return quantize(nnx.Linear(IN, OUT, rngs=rngs), RULE, inputs=jnp.ones((4, IN)))


def by_layer(rngs: nnx.Rngs) -> Any:
    quantizers = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8DynamicActPerRowFloat}
    return QuantLinear(IN, OUT, rngs=rngs, **quantizers)


def by_scheme(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(IN, OUT, dot_general=QDotGeneral(config_v4()), rngs=rngs)


@pytest.mark.parametrize("make", [by_rules, by_layer, by_scheme])
@pytest.mark.parametrize("rows", [1, 8])
def test_weights_are_contracted_as_they_lie(make: Callable[[nnx.Rngs], Any], rows: int) -> None:
    model = freeze(make(nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(0), (rows, IN))
    program = text_of(compiled(model, x), x)
    assert made_of(program, "s8", (IN, OUT), (OUT, IN)) == []
    assert made_of(program, "f32", (IN, OUT), (OUT, IN)) == []


@pytest.mark.lengthy
def test_caches_are_written_in_place() -> None:
    ids = jnp.zeros((2, 1), jnp.int32)
    caches = Rule(cache_quant=Int8DynamicActPerRowFloat)
    made = freeze(quantize(OwnDecoder(nnx.Rngs(0), 2, 6), [RULE, caches], inputs=ids))
    answer = compiled(quantized_cache(made), ids, changing=nnx.Any(nnx.Cache, nnx.PathContains("start")))
    program = text_of(answer, ids)
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", program)
    assert aliases and aliases[1].count("may-alias") == len(answer._changing) == 10
    assert "copy" not in made_of(program, "s8", (2, 6, 2, 8))
