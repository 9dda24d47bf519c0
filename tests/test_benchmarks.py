"""The benchmark scripts run (on sizes too small to mean anything), and their arithmetic is right."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "assembly.py": ["--in", "8", "--out", "8", "--rounds", "2"],
    "checkpoint_memory.py": ["--width", "16", "--depth", "2", "--batch", "8"],
    "orderings.py": [
        "--seeds",
        "1",
        "--bits",
        "4",
        "--epochs",
        "1",
        "--float-epochs",
        "1",
        "--rounding-steps",
        "2",
    ],
    "matmul.py": ["--sizes", "16", "--rounds", "2"],
    "quantize_model.py": ["--width", "16", "--depth", "2", "--rounds", "2"],
    "real_models.py": ["--model", "u-net", "--rounds", "2"],
    "recipes.py": [
        "--quick",
        "--tracks",
        "natural",
        "--formats",
        "W3A16",
        "--methods",
        "RTN",
        "GPTQ",
        "--windows",
        "16",
        "--calibration",
        "8",
    ],
    "recipes_gptq.py": ["--sites", "2", "--width", "16", "--rows", "32", "--batches", "2"],
    "decode.py": ["--depth", "1", "--quick"],
    "serve.py": ["--models", "static", "int4", "--batches", "1", "--quick"],
    "trained_models.py": ["--model", "crepe", "--rows", "W8A8 dynamic", "--rounds", "0"],
    "train_step.py": ["--width", "16", "--depth", "2", "--batch", "8", "--rounds", "2"],
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def timing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_timing", ROOT / "benchmarks" / "_timing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_timing"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALL)
def test_script_runs(script: str) -> None:
    done = run(script, *SMALL[script])
    assert done.returncode == 0, done.stderr
    assert "jqinject" in done.stdout or "QuantCheckpoint" in done.stdout


@pytest.mark.slow
def test_payloads_are_a_quarter_and_an_eighth() -> None:
    done = run("checkpoint_memory.py", "--width", "128", "--depth", "4", "--batch", "64")
    shares = {row.split()[2]: row for row in done.stdout.splitlines() if "QuantCheckpoint," in row}
    assert "0.250" in shares["fp8"] or "0.251" in shares["fp8"], done.stdout
    assert "0.125" in shares["int4"] or "0.126" in shares["int4"], done.stdout


@pytest.mark.slow
def test_transformers_are_quantized() -> None:
    done = run("quantize_model.py", "--blocks", *SMALL["quantize_model.py"])
    assert done.returncode == 0, done.stderr
    assert "Quantizing 2 transformer blocks of 16" in done.stdout


@pytest.mark.slow
def test_frozen_layers_take_a_quarter() -> None:
    done = run("quantize_model.py", "--only", "quantize and freeze", "--width", "64", "--depth", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["float"] == 3 * 4 * (64 * 64 + 64)
    # integers; then a scale, a sum for zero points and a bias, 4 bytes each, for every channel
    assert found["quantized"] == 3 * (64 * 64 + 3 * 4 * 64)


@pytest.mark.slow
def test_convolutions_are_served() -> None:
    done = run("serve.py", "--conv", "--channels", "4", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert "4 x 16" in done.stdout


@pytest.mark.slow
def test_integer_steps_run() -> None:
    done = run("train_step.py", "--int8", *SMALL["train_step.py"])
    assert done.returncode == 0, done.stderr
    for row in ("jqinject, forward", "jqinject, all three, jax.uniform"):
        assert row in done.stdout


@pytest.mark.slow
def test_8_bit_float_steps_run() -> None:
    done = run("train_step.py", "--fp8", *SMALL["train_step.py"])
    assert done.returncode == 0, done.stderr
    for row in ("fp8, delayed, payloads", "fp8, current, floats"):
        assert row in done.stdout


@pytest.mark.slow
def test_steps_by_schemes_run() -> None:
    done = run(
        "train_step.py", "--schemes", "--width", "16", "--depth", "1", "--batch", "16", "--rounds", "2"
    )
    assert done.returncode == 0, done.stderr
    for row in ("Fp8CurrentTraining", "NVFP4Training, not rotated"):
        assert row in done.stdout


@pytest.mark.parametrize("script", SMALL)
def test_script_explains_itself(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert SMALL[script][0] in done.stdout


def test_differences_and_ratios_are_taken_round_by_round(timing: ModuleType) -> None:
    slow, fast = timing.Timing((3.0, 5.0, 9.0)), timing.Timing((1.0, 4.0, 3.0))
    assert slow.minus(fast).seconds == (2.0, 1.0, 6.0)
    assert slow.over(fast).seconds == (3.0, 1.25, 3.0)
    assert slow.median == 5.0
    assert slow.quartiles == (4.0, 7.0)
    assert slow.show(factor=1, digits=1) == "5.0 [4.0, 7.0]"


@pytest.mark.lengthy
def test_every_callable_is_timed_once_a_round_in_warm_caches(timing: ModuleType) -> None:
    calls: list[str] = []
    found = timing.interleaved({n: lambda n=n: calls.append(n) for n in "abc"}, rounds=5, warmup=2)
    assert {name: len(t.seconds) for name, t in found.items()} == {"a": 5, "b": 5, "c": 5}
    warmup, rounds = calls[:6], [calls[i : i + 4] for i in range(6, len(calls), 4)]
    assert warmup == ["a", "b", "c"] * 2 and len(rounds) == 5
    assert all(one[0] == one[-1] and sorted(one[1:]) == ["a", "b", "c"] for one in rounds), (
        "one untimed, then each once"
    )
    assert len({tuple(one) for one in rounds}) > 1, "the order within a round is shuffled"


@pytest.mark.parametrize("with_rich", [True, False])
def test_table_keeps_brackets(
    timing: ModuleType, with_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not with_rich:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    timing.print_table("title", ["ms [quartiles]", "b"], [["one", "1.0 [0.5, 1.5]"]])
    printed = capsys.readouterr().out
    for text in ("title", "ms [quartiles]", "1.0 [0.5, 1.5]"):
        assert text in printed
