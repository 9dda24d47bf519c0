"""R3: queries and keys are rotated before they are quantized, and before a cache that rounds keys."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.core.transforms import Hadamard
from jqinject.quant import Int8DynamicActPerRowFloat, Int8WeightPerChannelFloat, NoneActQuant
from jqinject.recipes import FoldNorms, Recipe, Rotate
from tests.model._generating_models import FEATURES, Decoder, ScatterAttention, init_cache
from tests.recipes.test_rotate import Decoder as Turning
from tests.recipes.test_rotate import _tokens, _with_noise

PRODUCTS = ("dot_general", "einsum")


class Attend(nnx.Module):
    """One head; gains make a channel of the queries and one of the keys far larger than the others."""

    def __init__(self, channels: int = 32) -> None:
        self.q = nnx.Param(jnp.ones(channels).at[9].set(12.0))
        self.k = nnx.Param(jnp.ones(channels).at[5].set(12.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = jnp.einsum("qd,kd->qk", x * self.q[...], x[::-1] * self.k[...])
        return jnp.dot(jax.nn.softmax(scores / 64), x)


def _error(found: jax.Array, wanted: jax.Array) -> float:
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


@pytest.mark.heavy
def test_outliers_of_queries_and_keys_are_spread_over_a_head() -> None:
    model, x = Attend(), jax.random.normal(jax.random.key(0), (24, 32))
    wanted = model(x)
    for bits in (4, 8):
        rule = Rule("einsum0", op="einsum", input_quant=Int8DynamicActPerRowFloat, input_bit_width=bits)
        found = [Recipe(*p).apply(model, rule, [x], progress=False) for p in ((), (Rotate("R3"),))]
        plain, rotated = (_error(one.model(x), wanted) for one in found)
        assert rotated < 0.7 * plain, (bits, plain, rotated)
    result = found[1]
    said = "R3 of einsum0: blocks of 32 channels, online, on both operands"
    assert str(result.report.steps[0].sites[0]) == said
    assert said in str(Recipe(Rotate("R3")).explain(model, rule, x))
    held: Any = result.model.op_quant.held  # pyright: ignore
    turns = {name: proxy.pre_transform for name, proxy in held.items()}
    assert turns == {"einsum0_lhs": Hadamard(32), "einsum0_rhs": Hadamard(32)}
    (row, _) = jqinject.coverage(result.model, x).activations
    assert row.note == f"the input goes through {Hadamard(32)!r}"


@pytest.mark.heavy
def test_a_head_without_a_hadamard_matrix_is_left_with_its_cause() -> None:
    rule = Rule("einsum0", op="einsum", input_quant=Int8DynamicActPerRowFloat)
    x = jax.random.normal(jax.random.key(0), (4, 21))
    report = Recipe(Rotate("R3")).apply(Attend(21), rule, [x], progress=False).report
    assert str(report.steps[0].sites[0]) == "einsum0: R3: a head of this size has no Hadamard matrix"


@pytest.mark.lengthy
def test_all_rotations_leave_the_float_function_alone() -> None:
    model, tokens = _with_noise(Turning(1)), _tokens()
    model.eval()
    wanted = model(tokens)
    result = Recipe(FoldNorms(), Rotate()).apply(
        model, Rule(op=PRODUCTS, input_quant=NoneActQuant), [tokens], progress=False
    )
    done = {str(site).partition(" of ")[0] for site in result.report.steps[1].sites}
    assert {"R1", "R2", "R3"} <= done
    allowed = 2e-5 * float(jnp.abs(wanted).max())  # two passes, each to 1e-5
    np.testing.assert_allclose(result.model(tokens), wanted, rtol=0, atol=allowed)


def _steps(model: Any, ids: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """All positions but one at once, then the last."""
    first, cache = model(ids[:, :-1], cache)
    last, cache = model(ids[:, -1:], cache)
    return jnp.concatenate([first, last], 1), cache


@pytest.mark.lengthy
def test_a_cache_keeps_rotated_keys() -> None:
    model = Decoder(nnx.Rngs(0), ScatterAttention)
    for layer in model.layers:
        layer.k.w[...] = layer.k.w[...].at[:, :, 2].multiply(40.0)
    model.eval()
    ids = jax.random.randint(jax.random.key(1), (1, 5), 0, 32)
    wanted, floats = _steps(model, ids, init_cache(1, 8))

    rules = [
        Rule(r"cache\..*", cache_quant=Int8DynamicActPerRowFloat),
        Rule("up.*", weight_quant=Int8WeightPerChannelFloat),
    ]
    result = Recipe(Rotate("R3")).apply(model, rules, [(ids, init_cache(1, 8))], progress=False)
    assert str(result.report.steps[0].sites[0]) == (
        "R3 of layers.0.einsum0: blocks of 8 channels, online, before the cache cache.layer_0.k and on what meets it"
    )
    rotated = result.model
    found, held = _steps(rotated, ids, init_cache(1, 8))
    assert _error(found, wanted) < 0.02
    keys = held["layer_0"]["k"][:, :5]
    np.testing.assert_allclose(Hadamard(FEATURES).inverse(keys), floats["layer_0"]["k"][:, :5], atol=0.3)
    np.testing.assert_allclose(held["layer_0"]["v"], floats["layer_0"]["v"], atol=0.02)
    # In low bits, from empty or after a float prefill; and without a cache, where the keys come as they are.
    frozen = jqinject.freeze(nnx.clone(rotated))
    said = f"the input goes through {Hadamard(8)!r}"
    assert str(jqinject.report(frozen, ids[:, :1], init_cache(1, 8))).count(said) == 2  # one in each layer
    low, _ = _steps(frozen, ids, jqinject.quantized_cache(frozen, init_cache(1, 8)))
    np.testing.assert_allclose(low, found, atol=1e-4)
    _, after = model(ids[:, :4], init_cache(1, 8))
    last, _ = rotated(ids[:, 4:], jqinject.quantized_cache(rotated, after))
    assert _error(last, wanted[:, 4:]) < 0.02
    assert _error(rotated(ids)[0], wanted) < 0.02


@pytest.mark.heavy
def test_products_that_no_rule_quantizes_are_left_and_rotated_keys_need_rotated_queries() -> None:
    model = Decoder(nnx.Rngs(0))
    model.eval()
    ids = jnp.zeros((1, 2), jnp.int32)
    rule = Rule(r"cache\..*\.v", cache_quant=Int8DynamicActPerRowFloat)
    report = Recipe(Rotate("R3")).apply(model, rule, [(ids, init_cache(1, 4))], progress=False).report
    assert str(report.steps[0].sites[0]).startswith("layers.0.einsum0: R3: no rule quantizes queries, keys")
    alone = Rule(r"cache\..*\.k", cache_quant=Int8DynamicActPerRowFloat.let(pre_transform=Hadamard(8)))
    with pytest.raises(
        ValueError, match=re.escape("layers.0.einsum0: its operand comes from the cache cache.layer_0.k")
    ):
        jqinject.quantize(model, alone, inputs=(ids, init_cache(1, 4)))


@pytest.mark.heavy
def test_a_rule_may_name_one_operation_of_a_module() -> None:
    model, tokens = Turning(1), _tokens()
    rule = Rule("blocks.0.einsum1", op="einsum", input_quant=Int8DynamicActPerRowFloat)
    found: Any = jqinject.quantize(model, rule, inputs=(tokens,))
    assert [*found.op_quant] == ["blocks.0.einsum1_lhs", "blocks.0.einsum1_rhs"]
    products = {
        row.name: (row.input, row.weight) for row in jqinject.report(found, tokens).coverage.activations
    }
    assert products == {"blocks.0.einsum0": ("", ""), "blocks.0.einsum1": ("int8 per row", "int8 per row")}
