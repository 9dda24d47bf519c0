"""Wrong recipes, solvers and data are refused before anything runs."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jqinject import Rule, quant
from jqinject.recipes import GPTQ, Qronos, Recipe, Solve

X = jnp.ones((4, 8))
RULE = Rule(weight_quant=quant.Int8WeightPerChannelFloat)


def applied(batches: Any) -> Any:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    return Recipe(Solve(GPTQ())).apply(model, RULE, batches, progress=False)


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        (lambda: Recipe(GPTQ(block_size=4)), TypeError, "cure: Solve(GPTQ(block_size=4"),  # pyright: ignore
        (lambda: Recipe(Solve), TypeError, "cure: Solve()"),  # pyright: ignore
        (lambda: Solve(GPTQ), TypeError, "cure: Solve(GPTQ())"),  # pyright: ignore
        (lambda: Solve("gptq"), TypeError, "Solve takes a solver, got 'gptq'"),  # pyright: ignore
        (lambda: GPTQ(block_size=0), ValueError, "GPTQ: block_size must be at least 1, got 0"),
        (
            lambda: Qronos(damping=-1.0),
            ValueError,
            "Qronos: damping must be a number of at least 0, got -1.0",
        ),
        (lambda: applied(X), TypeError, "cure: [x] for a single batch"),
        (lambda: applied([]), ValueError, "Recipe.apply got no batch"),
        (lambda: applied([X.at[0, 0].set(jnp.nan)]), ValueError, "batch 0 has nan or inf"),
    ],
)
def test_wrong_input_is_refused_with_a_cure(wrong: Callable[[], Any], kind: type, said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        wrong()
