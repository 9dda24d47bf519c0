"""The command line of the main job, and a small run of it."""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jqinject.demo import cli, display
from jqinject.demo.recipes import RECIPES, RULE_RECIPES


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seed", "x"], "argument --seed: a seed is a whole number, got 'x'"),
        (["--seed", "-3"], "a seed lies between 0 and 4294967294, got -3"),
        (["--out", "nowhere/picture.png"], "there is no folder 'nowhere'"),
        (["--out", "picture.txt"], "the picture's name ends in one of .png, .pdf, .svg, .jpg"),
        (["--sede", "1"], "unrecognized arguments: --sede 1"),
        (["--seed"], "expected one argument"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and text in error and error.count("\n") == 1


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    told = capsys.readouterr().out
    assert stopped.value.code == 0 and all(word in told for word in ("--seed", "--out", "--help"))


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main([]) == 1
    assert 'pip install "jqinject[demo]"' in capsys.readouterr().err


def test_it_is_a_module_to_run():
    done = subprocess.run([sys.executable, "-m", "jqinject", "--seed", "no"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("python -m jqinject: argument --seed")


def test_headers_are_whole_at_80_columns(tmp_path):
    console = Console(record=True, width=80, file=io.StringIO())
    sqnr = {"conv1": 30.0, "conv2": 25.0}
    display.print_table(
        console, [display.Row("int8, no training", 3.5, 8, 1.0, 1.0, 1.0, 123456, sqnr)], 234567
    )
    display.print_rule_table(
        console, [display.RuleRow("4-bit weights, QAT", 4, 10, 1.0, 0.9, 123456)], 234567
    )
    told = console.export_text()
    assert "…" not in told and told.count("┃\n") == 2 * 2 and max(map(len, told.splitlines())) <= 80
    words = set(told.replace("┃", " ").split())
    assert {"quantizer", "weight", "bits", "input", "float", "loaded", "trained", "bytes", "float32"} <= words
    assert {"model", "epochs", "accuracy", "points", "100.0%", "123,456"} <= words


@pytest.mark.heavy
def test_the_picture_joins_no_layers_and_begins_near_the_numbers(tmp_path: Path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)
    sqnr = {"conv1": 30.0, "conv2": 25.0}
    rows = [
        display.Row(name, 4, 8, 0.97, loaded, 0.96, 1, sqnr) for name, loaded in (("a", 0.95), ("b", 0.9))
    ]
    display.save_picture(tmp_path / "picture.png", rows)
    left, right = plt.gcf().axes
    monkeypatch.undo()
    plt.close("all")
    assert 80 < left.get_ylim()[0] < 90 and not left.patches
    assert [line.get_linestyle() for line in right.lines] == ["None", "None"]
    assert all(list(line.get_ydata()) == [30.0, 25.0] for line in right.lines)
    assert [text.get_text() for text in right.get_xticklabels()] == ["conv1", "conv2"]


@pytest.mark.slow
def test_a_small_run_draws_and_tells(tmp_path: Path):
    from jqinject.demo.job import run

    recipes = [replace(RECIPES[0]), replace(RECIPES[1], epochs=1)]
    rule_recipes = [RULE_RECIPES[0], replace(RULE_RECIPES[1], epochs=1)]
    console = Console(record=True, width=140, file=io.StringIO())
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam mixes weak types
        rows, by_rule = run(
            0,
            tmp_path / "picture.png",
            console,
            recipes=recipes,
            rule_recipes=rule_recipes,
            float_epochs=6,
        )
    told = console.export_text()
    assert "Digits: 450 test images" in told and "tensor_quant: RescalingIntQuant" in told
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert [row.trained_accuracy is None for row in rows] == [True, False]
    assert rows[0].float_accuracy > 0.8 and abs(rows[0].loaded_accuracy - rows[0].float_accuracy) < 0.03
    assert rows[1].bytes < rows[0].bytes and rows[1].sqnr["conv2"] < rows[0].sqnr["conv2"]
    _check_rules(told, by_rule)


def _check_rules(told, by_rule):
    int8, int4 = by_rule
    assert abs(int8.points) <= 0.5 and int4.accuracy > 0.8
    # conv1, conv2, dense1, dense2: integers; then a scale, a sum and a bias, 4 bytes each, for every channel
    integers, channels = 9 * 16 + 9 * 16 * 32 + 128 * 64 + 64 * 10, 16 + 32 + 64 + 10
    assert [int8.bytes, int4.bytes] == [integers + 12 * channels, integers // 2 + 12 * channels]
    assert "quantized by a rule and frozen" in told
    for row in by_rule:
        cells = [
            row.name,
            str(row.weight_bits),
            f"{row.accuracy:.1%}",
            f"{row.points:+.1f}",
            f"{row.bytes:,}",
        ]
        assert any(all(cell in line for cell in cells) for line in told.splitlines())
    assert any("float" in line and f"{int8.float_accuracy:.1%}" in line for line in told.splitlines())
