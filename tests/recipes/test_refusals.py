"""Wrong recipes, solvers and data are refused before anything runs."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quant
from jqinject.recipes import GPTQ, RTN, AllocateBits, Qronos, Recipe, SmoothQuant, Solve

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


class Logarithm(nnx.Module):
    """A weight, and another one after a logarithm."""

    def __init__(self) -> None:
        self.first = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
        self.unused = nnx.Linear(4, 4, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.log(self.first(x)))


def state_of(model: nnx.Module) -> tuple[Any, list[Any]]:
    return nnx.graphdef(model), [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def unchanged(model: nnx.Module, before: tuple[Any, list[Any]]) -> bool:
    graph, leaves = state_of(model)
    same = all(np.array_equal(*pair) for pair in zip(leaves, before[1], strict=True))
    return same and graph == before[0]


NORMAL = jax.random.normal(jax.random.key(0), (3, 8))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("passes", "model", "said"),
    [
        (
            (Solve(GPTQ(damping=0.0)),),
            lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
            "dot_general0 (kernel): the Hessian of its inputs is not positive definite with damping=0.",
        ),
        ((SmoothQuant(),), Logarithm, "second.dot_general0 (second.kernel): its inputs in the"),
        (
            (Solve(GPTQ()),),
            Logarithm,
            "second.dot_general0 (second.kernel): its inputs in the calibration data hold nan",
        ),
        ((AllocateBits(mean_bits=4.0),), Logarithm, "second.dot_general0 (second.kernel): its inputs in the"),
    ],
)
def test_data_that_no_solver_can_use_is_refused_by_site(passes: Any, model: Any, said: str) -> None:
    given = model()
    before = state_of(given)
    with pytest.raises(ValueError, match=re.escape(said)):
        Recipe(*passes).apply(given, RULE, [NORMAL], progress=False)
    assert unchanged(given, before)


@pytest.mark.heavy
def test_a_weight_that_no_data_reaches_is_named() -> None:
    class Partly(Logarithm):
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(self.first(x))

    with pytest.warns(UserWarning, match=r"unused\.kernel: .* no call of the calibration data contracts"):
        report = Recipe(Solve(RTN())).apply(Partly(), RULE, [NORMAL], progress=False).report
    assert report.steps[0].sites[-1].path == "unused.kernel"


def halved(work: Any) -> list[str]:
    """A pass that changes the float model."""
    work.model.kernel[...] = work.model.kernel[...] / 2
    return ["halved"]


def raises_in_the_middle(work: Any) -> Any:
    halved(work)
    work.quantized.kernel[...] = jnp.zeros_like(work.quantized.kernel[...])
    yield "half done"
    raise RuntimeError("in the middle")


def test_a_pass_that_raises_leaves_the_model_as_it_was() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    before = state_of(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        Recipe(halved, Solve(RTN()), raises_in_the_middle).apply(model, RULE, [NORMAL], progress=False)
    with pytest.raises(RuntimeError, match="in the middle"):
        Recipe(halved, raises_in_the_middle).explain(model, RULE, NORMAL)
    with pytest.raises(ZeroDivisionError):
        Recipe(halved).apply(model, RULE, [NORMAL], evaluate=lambda _: 1 / 0, progress=False)
    assert unchanged(model, before)


def test_a_recipe_stops_where_the_floor_is_broken_and_goes_back() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    wanted = model(NORMAL)

    def nearness(candidate: Any) -> float:
        return -float(jnp.abs(candidate(NORMAL) - wanted).max())

    result = Recipe(Solve(RTN()), halved_later, Solve(GPTQ())).apply(
        model, RULE, [NORMAL], evaluate=nearness, floor=-0.1, progress=False
    )
    assert [step.undone for step in result.report.steps] == [False, True]
    assert result.report.steps[1].score < -0.1 <= result.report.steps[0].score  # pyright: ignore
    assert nearness(result.model) == result.report.steps[0].score


def halved_later(work: Any) -> list[str]:
    """A pass that changes the quantized model."""
    work.quantized.kernel[...] = work.quantized.kernel[...] / 2
    return ["halved"]


@pytest.mark.heavy
def test_batches_may_come_once() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    recipe = Recipe(SmoothQuant(), Solve(Qronos()))
    listed = recipe.apply(model, RULE, [NORMAL + i for i in range(3)], progress=False).model
    once = recipe.apply(model, RULE, (NORMAL + i for i in range(3)), progress=False).model
    np.testing.assert_array_equal(listed.kernel[...], once.kernel[...])
    with pytest.raises(ValueError, match=re.escape("Recipe.apply got no batch")):
        recipe.apply(model, RULE, iter(()), progress=False)
