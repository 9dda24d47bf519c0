"""Several contractions of a model's own read one input: its quantizer is found for each of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jqinject import Rule
from jqinject.quant import Int8DynamicActPerRowFloat, Int8WeightPerChannelFloat
from jqinject.recipes import RTN, Recipe, SmoothQuant, Solve


class Bare(nnx.Module):
    """A gain, and two parameters that contract what it makes."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self.gain = nnx.Param(jnp.ones(8))
        self.q, self.k = (nnx.Param(jax.random.normal(key, (8, 6))) for key in keys[:2])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.encode(x)

    def encode(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(x) * self.gain[...]
        return jnp.einsum("bd,df->bf", x, self.q[...]) * jnp.einsum("bd,df->bf", x, self.k[...])


X = jax.random.normal(jax.random.key(1), (12, 8))
INT8 = Int8DynamicActPerRowFloat


@pytest.mark.parametrize("method", ["__call__", "encode"])
def test_every_site_sees_the_quantizer_of_the_shared_input(method: str) -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=INT8)
    (step,) = Recipe(Solve(RTN())).explain(Bare(), rule, X, method=method).steps
    assert ["inputs of 8 bits" in str(site) for site in step.sites] == [True, True]


def test_a_site_without_a_rule_keeps_its_float_input() -> None:
    rule = Rule("q", weight_quant=Int8WeightPerChannelFloat, input_quant=INT8)
    other = Rule("k", weight_quant=Int8WeightPerChannelFloat)
    (step,) = Recipe(Solve(RTN())).explain(Bare(), [rule, other], X).steps
    assert ["inputs of 8 bits" in str(site) for site in step.sites] == [True, False]


def test_factors_that_sites_without_a_rule_take_too_are_told() -> None:
    rule: Any = Rule("q", weight_quant=Int8WeightPerChannelFloat)
    step, _ = Recipe(SmoothQuant(), Solve(RTN())).explain(Bare(), rule, X).steps
    (one,) = (each for each in step.sites if each.facts)
    assert one.name == "einsum0, einsum1"
    assert str(one).endswith("in gain; no rule quantizes einsum1")
