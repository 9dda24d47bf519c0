"""A recipe is data, and stops where a floor is broken."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quant, recipes
from jqinject.recipes import GPTQ, QEP, RTN, AllocateBits, MagR, Qronos, Recipe, SmoothQuant, Solve
from jqinject.recipes.recipe import kinds_by_name

RECIPE = Recipe(
    SmoothQuant(alpha=0.7),
    AllocateBits(bits=(3, 4), max_seconds=3.5, seconds={"kernel": (1.0, 2.0)}),
    Solve(QEP(MagR(GPTQ(act_order=True), steps=5), factor=1.0), quantize_inputs=False),
)
X = jax.random.normal(jax.random.key(0), (32, 8))
RULE = Rule(weight_quant=quant.Int8WeightPerChannelFloat.let(bit_width=2))


@pytest.mark.heavy
def test_a_recipe_survives_a_file(tmp_path: Path) -> None:
    RECIPE.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == RECIPE != Recipe(Solve(Qronos()))


def test_a_file_may_name_every_pass_and_solver() -> None:
    exported = {name: getattr(recipes, name) for name in dir(recipes) if name[0].isupper()}
    callable_parts = {name for name, each in exported.items() if "__call__" in vars(each)}
    assert callable_parts - {"Solver"} == set(kinds_by_name())


@pytest.mark.parametrize(
    "each",
    [
        recipes.AWQ(weights="always", error="weights", clip=True),
        recipes.LowRank(rank=8, iterations=2),
        Solve(recipes.Clip(recipes.HQO(lp_norm=0.6), smallest=0.7)),
        Solve(GPTQ(accumulator_bits=16, tile_size=64)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_choices_survive_a_file(each: Any, tmp_path: Path) -> None:
    Recipe(each).save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == Recipe(each)


def test_a_recipe_is_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        'version = 1\n[[passes]]\nis = "SmoothQuant"\nalpha = 0.7\n[[passes]]\nis = "Solve"\n'
        'solver = { is = "GPTQ", act_order = true }\n'
    )
    assert Recipe.load(file) == Recipe(SmoothQuant(alpha=0.7), Solve(GPTQ(act_order=True)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"is": "Solv"}, r"passes\[0\]: there is no pass or solver 'Solv'; .*Solve"),
        ({"is": "GPTQ", "blocksize": 4}, r"passes\[0\]: GPTQ has no choice 'blocksize'; .*block_size"),
        ({"is": "GPTQ", "block_size": 0}, r"passes\[0\]: GPTQ: block_size must be at least 1"),
    ],
)
def test_what_a_file_says_wrongly_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps({"version": 1, "passes": [change]}))
    with pytest.raises(ValueError, match=said):
        Recipe.load(file)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2, "passes": []}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(ValueError, match=r"recipe\.json"):
        Recipe.load(tmp_path / "recipe.json")


@pytest.mark.heavy
def test_a_pass_below_the_floor_is_undone() -> None:
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    wanted = model(X)

    def nearness(candidate: Any) -> float:
        return -float(np.abs(candidate(X) - wanted).max())

    recipe = Recipe(Solve(RTN()))
    plain = recipe.apply(model, RULE, [X], evaluate=nearness, progress=False)
    (step,) = plain.report.steps
    assert step.score == nearness(plain.model) < 0 and not step.undone
    stopped = Recipe(Solve(RTN()), Solve(GPTQ())).apply(
        model, RULE, [X], evaluate=nearness, floor=step.score + 1e-3, progress=False
    )
    (undone,) = stopped.report.steps
    assert undone.undone and "below the floor" in str(undone)
    assert not stopped.model.weight_quant.committed  # pyright: ignore
    with pytest.raises(TypeError, match="a floor needs evaluate"):
        recipe.apply(model, RULE, [X], floor=0.0, progress=False)
