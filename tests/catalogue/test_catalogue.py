"""The catalogue: every ready-made quantizer is found by what it is, explained, and drawn."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import jqinject
from jqinject.__main__ import main as program
from jqinject.catalogue import all_entries, entry_of, find, write_catalogue
from jqinject.catalogue.command import main
from jqinject.catalogue.curves import curve_svg, transfer_curve
from jqinject.catalogue.examples import example_of
from jqinject.catalogue.pages import index_page, section
from jqinject.inject import ExtendedInjector
from jqinject.quant import Int8WeightPerTensorFloat

COMMITTED = Path(__file__).parents[2] / "docs" / "catalogue"


class Mine(Int8WeightPerTensorFloat):
    """My own three bits."""

    bit_width = 3


def test_every_quantizer_says_what_it_is():
    offered = {
        name
        for name, member in vars(jqinject.quant).items()
        if isinstance(member, type) and issubclass(member, ExtendedInjector)
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
        ("Int8ActDynamicPerRow", ("act", "int8", "row", "dynamic")),
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


def test_list_prints_a_table(capsys):
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
    drawn = curve_svg(x, y, "a curve")
    points = re.search(r'points="([^"]*)"', drawn).group(1).split()
    assert len(points) == 2 * 8  # both ends of each of the eight steps


def test_a_section_has_all_parts():
    entry = entry_of("Int8WeightPerChannelFloat")
    example = example_of(entry.quantizer, {})
    text = section(entry, example, "curves/it.svg", ["weight_int/003"])
    parts = [
        "## Int8WeightPerChannelFloat",
        "max |w| / 127",
        "![transfer curve](curves/it.svg)",
        "AbsMax: `max |x|`",
        "├── int_quant: IntQuant",
        "Reference cases: `weight_int/003`",
    ]
    for part in parts:
        assert part in text


def test_the_committed_catalogue_is_of_these_quantizers():
    known = sorted(all_entries(), key=lambda entry: (entry.kind, entry.name))
    cure = "python -m jqinject catalogue docs/catalogue --golden tests/golden/brevitas/manifest.json"
    assert (COMMITTED / "README.md").read_text(encoding="utf-8") == index_page(known), cure
    for entry in known:
        page = (COMMITTED / f"{entry.kind}.md").read_text(encoding="utf-8")
        assert f"## {entry.name}\n" in page, cure
        assert (COMMITTED / "curves" / f"{entry.name}.svg").is_file() == (entry.kind != "grad"), cure


@pytest.mark.slow
def test_the_whole_catalogue_is_written(tmp_path):
    written = write_catalogue(tmp_path / "pages", golden=None)
    assert all(path.stat().st_size > 200 for path in written)
    assert {"README.md", "weight.md", "act.md", "bias.md", "grad.md"} <= {path.name for path in written}
