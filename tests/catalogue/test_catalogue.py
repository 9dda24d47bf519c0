"""The catalogue: every ready-made quantizer is found by what it is, explained, and drawn."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

import jqinject
from catalogue_index import curve_points, transfer_curve, with_curve
from catalogue_pages import index_page, line_svg, section, write_catalogue
from jqinject.__main__ import main as program
from jqinject.catalogue import all_entries, entry_of, find
from jqinject.catalogue.catalogue_command import main
from jqinject.catalogue.entries import entry_from_wiring, ready_made
from jqinject.catalogue.examples import example_of
from jqinject.catalogue.index import GOALS
from jqinject.dot import Scheme
from jqinject.inject import ExtendedInjector
from jqinject.nn import QuantLinear
from jqinject.quant import Int8WeightPerTensorFloat, NF4WeightPerTensorFloat, QuestWeightPerChannelFloat

COMMITTED = Path(__file__).parents[2] / "docs" / "catalogue"


class Mine(Int8WeightPerTensorFloat):
    """My own three bits."""

    bit_width = 3


def test_every_quantizer_says_what_it_is():
    offered = {
        name
        for name, member in vars(jqinject.quant).items()
        if isinstance(member, type)
        and issubclass(member, ExtendedInjector)
        and not issubclass(member, Scheme)
    }
    found = all_entries()
    assert {entry.name for entry in found} == offered
    unknown = [entry.name for entry in found if "-" in (entry.format, entry.granularity, entry.scaling)]
    assert all(name.startswith("None") for name in unknown), unknown


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("Int8WeightPerChannelFloat", ("weight", "int8", "channel", "statistics")),
        ("ShiftedUint8ActPerTensorFloat", ("act", "uint8", "tensor", "parameter from statistics")),
        ("Int16Bias", ("bias", "int16", "tensor", "of input and weight")),
        ("Int8DynamicActPerRowAbsMax", ("act", "int8", "row", "dynamic")),
        ("Fp8e5m2GradPerTensorDelayed", ("grad", "fp8 e5m2", "tensor", "delayed")),
        ("SignedBinaryActPerTensorConst", ("act", "binary", "tensor", "constant")),
    ],
)
def test_facts(name, facts):
    entry = entry_of(name)
    assert (entry.kind, entry.format, entry.granularity, entry.scaling) == facts


def test_filters_narrow_the_list():
    weights = find(kind="weight", format="int8", granularity="channel")
    assert {"Int8WeightPerChannelFloat", "Int8WeightPerChannelFixedPoint"} <= {e.name for e in weights}
    assert all((e.kind, e.format, e.granularity) == ("weight", "int8", "channel") for e in weights)
    assert find(kind="weight", format="int8", text="PERCHANNELFLOAT")[0].name == "Int8WeightPerChannelFloat"
    with pytest.raises(ValueError, match=r"no quantizer has the kind 'wait'; there are: act, bias"):
        find(kind="wait")


def test_list_prints_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["list", "FixedPoint", "--kind", "bias"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["quantizer", "kind", "format", "granularity", "scaling"]
    assert [line.split()[0] for line in lines[1:]] == ["Int8BiasPerTensorFixedPointInternalScaling"]
    assert main(["list", "nothing of this name"]) == 0
    assert capsys.readouterr().out == "no quantizer is of all these kinds\n"


def test_explain_shows_overrides_and_who_decided(capsys):
    assert (
        main(["explain", "Int8WeightPerTensorFloat", "bit_width=4", "restrict_scaling_type=power_of_two"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "bit_width = 4  <- override by let" in shown
    assert "restrict_scaling_impl: PowerOfTwoRestrictValue" in shown
    assert "format       int4" in shown
    assert "y = (clamp(round(x / s + z)" in shown


def test_explain_does_not_call_the_changed_quantizer_what_its_docstring_says(capsys):
    assert main(["explain", "Int8WeightPerChannelFloat", "bit_width=4"]) == 0
    title, _, about = capsys.readouterr().out.splitlines()[:3]
    assert title == "Int8WeightPerChannelFloat with bit_width=4"
    assert about.startswith("Without it: 8-bit narrow signed weights")
    assert main(["explain", "Int8WeightPerChannelFloat"]) == 0
    title, _, about = capsys.readouterr().out.splitlines()[:3]
    assert title == "Int8WeightPerChannelFloat"
    assert about.startswith("8-bit narrow signed weights")


def test_explain_asks_for_a_name_alone(capsys):
    with pytest.raises(SystemExit):
        main(["explain"])
    said = capsys.readouterr().err
    assert "the following arguments are required: NAME\n" in said


def test_explain_takes_a_users_own_quantizer(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_quantizers", SimpleNamespace(W3=Mine))
    assert main(["explain", "my_quantizers:W3", "float_to_int_impl=FloorSte"]) == 0
    shown = capsys.readouterr().out
    assert "My own three bits." in shown
    assert "bit_width = 3  <- Mine" in shown
    assert "float_to_int_impl: FloorSte  <- override by let" in shown


@pytest.mark.parametrize("values", [(-1.0, -0.25, 0.0, 0.25, 1.0), [-1, 0, 2]])
@pytest.mark.parametrize("base", [NF4WeightPerTensorFloat, QuestWeightPerChannelFloat])
def test_explain_takes_a_table_of_plain_numbers(capsys, monkeypatch, base, values):
    table = type("Table", (base,), {"codebook": values, "__doc__": "A table of my own."})
    monkeypatch.setitem(sys.modules, "my_quantizers", SimpleNamespace(Table=table))
    assert main(["explain", "my_quantizers:Table"]) == 0
    shown = capsys.readouterr().out
    assert "A table of my own." in shown and f"codebook of {len(values)}" in shown
    proxy = QuantLinear(4, 2, weight_quant=table, rngs=nnx.Rngs(0)).weight_quant
    assert proxy.tensor_quant.codebook.values == tuple(map(float, values))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "Int8WeightPerTensorFlot"], "did you mean 'Int8WeightPerTensorFloat'"),
        (["explain", "Int8WeightPerTensorFloat", "bit_widht=3"], "did you mean 'weight_bit_width'?"),
        (["explain", "Int8WeightPerTensorFloat", "bit_width"], "an override is name=value, got 'bit_width'"),
        (["explain", "no_such_module:Q"], "cannot be imported"),
        (["explain", "math:pi"], "math:pi is not a quantizer"),
        (["list", "--format", "int9"], "no quantizer has the format 'int9'"),
    ],
)
def test_wrong_arguments_are_one_message(arguments, message, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, message in said.err) == ("", True), said.err


def test_the_program_knows_the_commands(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jqinject", "list", "Int16Bias"])
    assert program() == 0
    assert "Int16Bias" in capsys.readouterr().out


def test_a_curve_has_the_steps_of_its_quantizer():
    x, y = transfer_curve(example_of(jqinject.quant.Int8WeightPerTensorFloat, {"bit_width": 3}))
    assert (x[0], x[-1]) == (-1, 1)
    np.testing.assert_allclose(np.unique(y), np.arange(-3, 4) / 3, rtol=1e-6)
    assert np.all(np.diff(y) >= 0)
    x, y = transfer_curve(example_of(jqinject.quant.Int8ActPerTensorFloat, {"bit_width": 3}))
    assert (x[0], x[-1]) == (-1.25, 1.25)
    assert (y.min(), len(np.unique(y))) == (-1.0, 8)
    drawn = line_svg(curve_points(x, y), "a curve")
    points = re.search(r'points="([^"]*)"', drawn).group(1).split()
    assert len(points) == 2 * 8  # both ends of each of the eight steps


def test_a_section_has_all_parts():
    text = section(entry_of("Int8WeightPerChannelFloat"), "curves/it.svg", ["weight_int/003"])
    parts = [
        "## Int8WeightPerChannelFloat",
        "max |w| / 127",
        "![transfer curve](curves/it.svg)",
        "AbsMax: `factor * max |x|`",
        "├── int_quant: IntQuant",
        "Reference cases: `weight_int/003`",
    ]
    for part in parts:
        assert part in text


def test_the_committed_catalogue_is_of_these_quantizers():
    known = sorted(all_entries(), key=lambda entry: (entry.kind, entry.name))
    cure = "python tools/catalogue_pages.py"
    assert (COMMITTED / "README.md").read_text(encoding="utf-8") == index_page(known), cure
    for entry in known:
        page = (COMMITTED / f"{entry.kind}.md").read_text(encoding="utf-8")
        assert f"## {entry.name}\n" in page, cure
        assert (COMMITTED / "curves" / f"{entry.name}.svg").is_file() == (entry.kind != "grad"), cure


ANEW = "python tools/catalogue_index.py, then catalogue_pages.py"


@pytest.mark.heavy
def test_the_index_is_of_these_quantizers():
    indexed = {entry.name: dataclasses.replace(entry, points="") for entry in all_entries()}
    made = {name: entry_from_wiring(name, quantizer, {}) for name, quantizer in ready_made().items()}
    assert indexed.keys() == made.keys(), ANEW
    assert [name for name in made if made[name] != indexed[name]] == [], ANEW


def assert_same_curve(entry):
    """Within the tenth of a pixel that points are rounded to; which of them are corners is a matter of compilers."""
    made = with_curve(dataclasses.replace(entry, points=""), example_of(entry.quantizer, {}))
    one, two = (
        np.array([[float(number) for number in point.split(",")] for point in points.split()])
        for points in (entry.points, made.points)
    )
    across = np.union1d(one[:, 0], two[:, 0])
    lines = [np.interp(across, curve[:, 0], curve[:, 1]) for curve in (one, two)]
    np.testing.assert_allclose(*lines, atol=0.21, err_msg=f"{entry.name}: {ANEW}")


@pytest.mark.parametrize("name", ["Int8WeightPerTensorFloat", "Int8ActPerTensorMinMax", "Fp8e4m3OCPWeight"])
def test_curves_in_the_index_are_theirs(name):
    assert_same_curve(entry_of(name))


@pytest.mark.slow
def test_all_curves_in_the_index_are_theirs():
    for entry in all_entries():
        assert bool(entry.points) == (entry.kind != "grad")
        if entry.points:
            assert_same_curve(entry)


def test_the_catalogue_is_written(tmp_path):
    written = write_catalogue(tmp_path / "pages", golden=None)
    assert all(path.stat().st_size > 200 for path in written)
    assert {"README.md", "weight.md", "act.md", "bias.md", "grad.md"} <= {path.name for path in written}
    curve = Path("curves", "Int8Bias.svg")
    assert (tmp_path / "pages" / curve).read_text() == (COMMITTED / curve).read_text()


def test_goals_name_quantizers():
    known = {entry.name for entry in all_entries()}
    for name, goal in GOALS.items():
        assert len(goal.aim) <= 76, name
        assert set(goal.quantizers) <= known, name
        assert {entry.name for entry in find(goal=name)} == set(goal.quantizers)
    kinds = {entry.kind for entry in find(goal="train-fp8")}
    assert kinds == {"weight", "act", "grad"}
    with pytest.raises(ValueError, match=r"there is no goal 'train-fp9'; did you mean 'train-fp8'"):
        find(goal="train-fp9")
    with pytest.raises(ValueError, match=r"no goal 'x'; there are: serve-int, ptq-8bit"):
        find(goal="x")


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("asked", [["--goal", "serve-int"], ["AccumulatorAware"], []])
def test_lines_of_the_list_fit_the_terminal(asked, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["list", *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).split()
    assert all(word in words for word in ("quantizer", "kind", "format", "granularity", "scaling"))
    if asked[:1] == ["--goal"]:
        assert lines[0] == GOALS["serve-int"].aim


@pytest.mark.parametrize(
    "arguments", [["list", "--goal", "ptq-4bit"], ["explain", "NVFP4Weight"], ["list", "--help"], ["--help"]]
)
def test_the_catalogue_answers_without_jax(arguments):
    program = (
        "import sys, jqinject.__main__ as m; sys.argv[1:] = {!r}\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program.format(arguments)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout) > 100
