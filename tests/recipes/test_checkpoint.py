"""A recipe that was stopped goes on from its folder, to the bit; a folder of another run is refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quant
from jqinject.recipes import GPTQ, RTN, Recipe, Solve

SCRIPT = Path(__file__).with_name("_killed.py")
ROOT = Path(__file__).parents[2]
X = jax.random.normal(jax.random.key(0), (16, 4))
RULE = Rule(weight_quant=quant.Int8WeightPerChannelFloat.let(bit_width=3))
NEAREST = (Solve(RTN()),)


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.lengthy
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    folder, results = tmp_path / "run", tmp_path / "results.npz"
    killed = run(folder, results, 2)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not results.exists() and len(list(folder.glob("*.npz"))) == 2
    finished = run(folder, results, 2)
    assert finished.returncode == 0, finished.stderr[-3000:]
    with np.load(results) as found:
        assert found["calls"] == 2  # of four sites, two were solved before
        names = [name.removeprefix("again/") for name in found.files if name.startswith("again/")]
        assert "report" in names and any("weight_quant/record/scale" in name for name in names)
        for name in names:
            np.testing.assert_array_equal(found[f"again/{name}"], found[f"whole/{name}"], err_msg=name)


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


def begun(folder: Path, passes: Any = NEAREST, model: Any = None, rule: Rule = RULE, x: Any = X) -> Any:
    model = linear() if model is None else model
    return Recipe(*passes).apply(model, rule, [x], progress=False, checkpoint=folder)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda folder: begun(folder, (Solve(GPTQ()),)), "another recipe.\n  cure: the same recipe"),
        (lambda folder: begun(folder, model=linear(1)), "another model.\n"),
        (
            lambda folder: begun(folder, rule=Rule(weight_quant=quant.Int8WeightPerTensorFloat)),
            "another rules.\n",
        ),
        (lambda folder: begun(folder, x=X + 1), "another batches.\n"),
        (lambda folder: begun(folder, x=X[:8], model=linear(2)), "another model and another batches.\n"),
        (
            lambda folder: (folder / "recipe.json").write_text("{") and begun(folder),
            "recipe.json in the checkpoint folder is damaged",
        ),
        (
            lambda folder: next(folder.glob("*.npz")).write_bytes(b"PK") and begun(folder),
            "pass_00_part_00000.npz in the checkpoint folder is damaged",
        ),
    ],
)
def test_a_folder_of_another_run_is_refused(other: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun(folder)
    begun(folder)
    with pytest.raises(ValueError) as refused:
        other(folder)
    assert said in str(refused.value)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds no run of a recipe, but notes\.txt"):
        begun(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]
