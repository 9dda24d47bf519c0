"""The examples run, and micro-batches change nothing that their quantizers see."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = ("--steps=2", "--batch=4", "--context=8", "--width=32", "--depth=1", "--micro-batches=2")


def run(*arguments):
    command = [sys.executable, EXAMPLES / "fp8_transformer.py", *arguments]
    root = {"PYTHONPATH": str(EXAMPLES.parent), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=root, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_fp8_transformer():
    done = run(*TINY)
    assert done.returncode == 0, done.stderr
    *rows, last = done.stdout.splitlines()[1:]
    assert [re.split(r"\s{2,}", row)[0] for row in rows] == [
        name + cut for cut in ("", ", accumulated") for name in ("bfloat16", "fp8, delayed", "fp8, current")
    ]
    numbers = [[float(number) for number in re.findall(r"\d+\.\d+", row)] for row in rows]
    assert all(abs(loss_ratio - 1) < 0.05 for _, loss_ratio, *_ in numbers)
    assert [saturated for *_, saturated in numbers[::3] + numbers[2::3]] == [0.0] * 4
    assert float(last.split("off by ")[1].split()[0]) < 1e-6


def test_a_batch_that_cannot_be_cut():
    done = run("--batch=6", "--micro-batches=4")
    assert done.returncode == 2
    assert "--batch 6 cannot be cut into 4 micro-batches" in done.stderr


@pytest.mark.slow
def test_low_bit_training(tmp_path):
    command = [sys.executable, EXAMPLES / "low_bit_training.py", "--quick", "--plot", tmp_path / "it.png"]
    environment = {"PYTHONPATH": str(EXAMPLES.parent), "JAX_PLATFORMS": "cpu", "MPLCONFIGDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    heading, base, scheme = done.stdout.splitlines()[-3:]
    assert heading.split()[:4] == ["scheme", "loss", "+-", "%"] and base.split()[0] == "bfloat16"
    name, loss, _, percent, one, every = scheme.split()
    assert name == "Fp8CurrentTraining" and abs(float(percent)) < 2 and 4 < float(loss) < 7
    assert float(one) > float(every) > 10  # one operand quantized, all of them
    assert (tmp_path / "it.png").stat().st_size > 1_000
