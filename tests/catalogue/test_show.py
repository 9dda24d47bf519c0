"""The page that explores quantizers: what it shows is what the class that it prints computes."""

import itertools
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.catalogue import all_entries, catalogue_command, entry_of, explorer, variants
from jqinject.catalogue.catalogue_command import main
from jqinject.catalogue.entries import quantizer_named
from jqinject.catalogue.explorer import explorer_page, usual_quantizers
from jqinject.catalogue.index import GOALS
from jqinject.inject import ExtendedInjector
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.quant import (
    Fp6e3m2OCPWeight,
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8WeightPerChannelFloat,
    NF4WeightPerGroupFloat,
    NF4WeightPerTensorFloat,
)
from jqinject.quant.enums import ImplEnum
from jqinject.quant.override_names import NAMES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a Chromium: apt install chromium")


class Narrow(NF4WeightPerTensorFloat):
    """Ends a script: </script><script>alert("1")</script> & <b>more</b>."""


@pytest.fixture(scope="module")
def page() -> str:
    return explorer_page([NF4WeightPerGroupFloat, Int8ActPerTensorMinMax, Fp6e3m2OCPWeight, Narrow])


def data_of(page: str) -> dict:
    text = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(text)


def shown(data: dict, name: str) -> dict:
    return next(quantizer for quantizer in data["quantizers"] if quantizer["name"] == name)


def text_of(data: dict, places: list[int]) -> str:
    return "\n".join(data["lines"][place] for place in places) + "\n"


def curve_of(data: dict, variant: dict) -> np.ndarray:
    """The outputs of a curve, from its steps."""
    steps = np.array(variant["curve"]).reshape(-1, 2)
    places = np.searchsorted(steps[:, 0], np.arange(data["points"]), side="right") - 1
    return steps[places, 1]


def built(code: str) -> type[ExtendedInjector]:
    """The quantizer of a text that the page shows."""
    names: dict[str, object] = {}
    exec(code, names)
    return next(names[title] for title in variants.TITLES.values() if title in names)


def weights_through(quantizer: type[ExtendedInjector], x: np.ndarray) -> np.ndarray:
    layer = QuantLinear(*x.shape, weight_quant=quantizer, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(x)
    return np.asarray(layer.quant_weight().value)


def activations_through(quantizer: type[ExtendedInjector], x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    layer = QuantIdentity(quantizer)
    layer(jnp.asarray(seen.T))
    layer.eval()
    return np.asarray(layer(jnp.asarray(x.T))).T


def sqnr(x: np.ndarray, y: np.ndarray) -> float:
    return 10 * math.log10(np.sum(x.astype(np.float64) ** 2) / np.sum((x - y) ** 2))


def assert_numbers(data: dict, variant: dict, through: Callable[..., np.ndarray]) -> None:
    """A variant's curve and errors are those of the class that it shows."""
    quantizer = built(text_of(data, variant["code"]))
    grid = np.stack([np.roll(variants.INPUTS, 16 * row) for row in range(16)], axis=1)
    expected = through(quantizer, grid, grid / np.float32(1.25))[:, 0]
    np.testing.assert_allclose(curve_of(data, variant), expected, atol=6e-5)
    for x, (decibels, mse) in zip(variants.data_sets().values(), variant["errors"], strict=True):
        y = through(quantizer, x, x).astype(np.float64)
        assert float(mse) == pytest.approx(np.mean((x - y) ** 2), rel=5e-3)
        assert float(decibels) == pytest.approx(sqnr(x, y), abs=6e-3)


@pytest.mark.heavy
def test_numbers_of_weights_are_those_of_the_class(page):
    data = data_of(page)
    entry = shown(data, "NF4WeightPerGroupFloat")
    for variant in entry["variants"]:
        assert_numbers(data, variant, lambda quantizer, x, seen: weights_through(quantizer, x))


@pytest.mark.heavy
def test_numbers_of_activations_are_those_of_the_class(page):
    data = data_of(page)
    entry = shown(data, "Int8ActPerTensorMinMax")
    for variant in entry["variants"][::5]:
        assert_numbers(data, variant, activations_through)


@pytest.mark.heavy
def test_every_variant_is_the_combination_of_its_place(page):
    """Each class declares the labels of its place in the product, and nothing where they are the quantizer's own."""
    data = data_of(page)
    entry = shown(data, "Fp6e3m2OCPWeight")
    places = itertools.product(*(range(len(choice["options"])) for choice in entry["choices"]))
    for place, variant in zip(places, entry["variants"], strict=True):
        code = text_of(data, variant["code"])
        for choice, at in zip(entry["choices"], place, strict=True):
            declared = re.search(rf"^    {choice['name']} = (.*)$", code, re.MULTILINE)
            assert (declared is None) == (at == choice["own"]), code
            label = choice["options"][at]
            if declared is not None and choice["name"] != variants.FORMAT:
                assert declared[1].strip('"') == label
            if declared is not None and choice["name"] == variants.FORMAT:
                quantizer = built(code)
                exponent, mantissa = quantizer.exponent_bit_width, quantizer.mantissa_bit_width
                assert f"e{exponent}m{mantissa}" == label and quantizer.bit_width == 1 + exponent + mantissa


@pytest.mark.heavy
def test_the_wiring_is_that_of_explain(page):
    data = data_of(page)
    entry = shown(data, "Fp6e3m2OCPWeight")
    for variant in entry["variants"][::7]:
        quantizer = built(text_of(data, variant["code"]))
        layer = QuantLinear(256, 16, weight_quant=quantizer, rngs=nnx.Rngs(0))
        wiring = text_of(data, variant["wiring"])
        assert wiring == f"{jqinject.explain(layer.weight_quant, module=layer)}\n"
        if "pass" not in text_of(data, variant["code"]):
            assert "  <- MyWeights\n" in wiring


def test_what_is_refused_has_a_reason():
    choices = variants.choices_of(Int8ActPerTensorFloat)
    granularity = next(choice for choice in choices if choice.name == "scaling_per_output_type")
    group = next(option for option in granularity.options if option.label == "group")
    refused = variants.variant_of(Int8ActPerTensorFloat, [group])
    assert refused.curve is None
    assert refused.fault.startswith("an activation's groups have no scales of their own to keep")


def test_choices_are_declared_names_of_their_types():
    for name, values in variants.VALUES.items():
        annotation, meaning = NAMES[name]
        assert meaning
        for value in values:
            if isinstance(value, ImplEnum):
                assert type(value).__name__ == annotation
            else:
                assert annotation == {int: "int", type: "Component"}[type(value)]
    for value, names in variants.FURTHER.items():
        assert any(value in values for values in variants.VALUES.values()) and names.keys() <= NAMES.keys()


def test_a_quantizers_own_values_are_among_the_options():
    choices = {choice.name: choice for choice in variants.choices_of(Int8WeightPerChannelFloat)}
    own = {name: choice.options[choice.own].label for name, choice in choices.items()}
    assert own == {
        "bit_width": "8",
        "scaling_per_output_type": "channel",
        "restrict_scaling_type": "fp",
        "scaling_stats_op": "max",
        "float_to_int_impl_type": "round",
    }
    one_bit = type("OneBit", (Int8WeightPerChannelFloat,), {"bit_width": 12})
    assert variants.choices_of(one_bit)[0].options[0] == variants.OfferedValue("12", {})


class Parts(HTMLParser):
    """The elements of a page with their attributes, and the texts of those with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.cells: list[str] = []
        self.open: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "line", "circle", "path"):
            self.open.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1][0] in ("td", "th"):
            self.cells.append(text)
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + text


@pytest.mark.heavy
def test_the_page_loads_nothing(page):
    """No element names a resource, no style or script fetches one, and the policy forbids it."""
    elements = Parts(page).elements
    harmless = (
        "html head meta title style body div h1 h2 noscript p form label select button b section svg input output "
        "table thead tbody tr th pre span script"
    )
    assert {tag for tag, _ in elements} <= set(harmless.split())
    attributes = {name for _, names in elements for name in names}
    assert not attributes & {"src", "href", "srcset", "action", "background", "data", "poster"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|WebSocket", page)
    policy = next(names["content"] for tag, names in elements if names.get("http-equiv"))
    assert policy == "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


@pytest.mark.heavy
def test_texts_cannot_end_the_script(page):
    assert page.count("<script") == page.count("</script>") == 2
    assert [names.get("id") for tag, names in Parts(page).elements if tag == "script"] == ["data", None]
    assert shown(data_of(page), "Narrow")["about"] == (
        'Ends a script: </script><script>alert("1")</script> & <b>more</b>.'
    )


@pytest.mark.heavy
def test_controls_have_labels(page):
    elements = Parts(page).elements
    labelled = {names["for"] for tag, names in elements if tag == "label"}
    assert {names["id"] for tag, names in elements if tag in ("select", "input")} <= labelled
    described = [names.get("aria-labelledby") for tag, names in elements if tag in ("section", "pre", "svg")]
    ids = {names.get("id") for _, names in elements}
    assert all(described) and {name for text in described for name in text.split()} <= ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["show", "Int8WeightPerChanelFloat"],
            "python -m jqinject show: there is no quantizer 'Int8WeightPerChanelFloat': did you mean "
            "'Int8WeightPerChannelFloat'",
        ),
        (
            ["show", "Int16Bias"],
            "python -m jqinject show: Int16Bias: a quantizer of kind 'bias'; expected one of weights or activations, "
            "which has a curve by itself.\n  cure: python -m jqinject explain Int16Bias\n",
        ),
        (
            ["show", "--goal", "ptq-5bit"],
            "python -m jqinject show: there is no goal 'ptq-5bit'; did you mean 'ptq-8bit' or 'ptq-4bit'?\n",
        ),
        (
            ["show", "--out", "no/such/folder.html"],
            "python -m jqinject show: --out no/such/folder.html: no file can be written there; expected a file in a "
            "folder that exists\n",
        ),
        (["show", "math:pi"], "math:pi is not a quantizer"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(explorer, "variants_of", pytest.fail)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and message in said.err, said.err


def test_the_page_is_written_or_opened(tmp_path, capsys, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(catalogue_command.webbrowser, "open", lambda uri: opened.append(uri) or True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(explorer, "explorer_page", lambda quantizers, progress: str(list(quantizers)))
    assert main(["show", "NVFP4Weight", "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n" and not opened
    assert (tmp_path / "page.html").read_text() == str([jqinject.quant.NVFP4Weight])
    assert main(["show", "--no-browser"]) == 0
    assert not opened
    assert main(["show", "NVFP4Weight", "--goal", "ptq-4bit"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    assert opened == [path.as_uri()] and path.parent == tmp_path
    assert path.read_text().startswith(str(jqinject.quant.NVFP4Weight).join("[,"))


def test_usual_quantizers_are_those_of_the_goals():
    assert len(usual_quantizers()) <= 16
    assert {entry_of(name).kind for name in usual_quantizers()} == {"weight", "act"}
    assert usual_quantizers("finetune-4bit") == GOALS["finetune-4bit"].quantizers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jqinject.core.ZeroWeightsWarning")
def test_the_usual_page_is_small():
    page = explorer_page(map(quantizer_named, usual_quantizers()))
    assert len(page.encode()) < 2e6
    faults = [
        variant["fault"]
        for entry in data_of(page)["quantizers"]
        for variant in entry["variants"]
        if "fault" in variant
    ]
    assert not faults


def rendered(page: str, tmp_path: Path, *, choices: str = "", script: str = "") -> Parts:
    """The page as a browser shows it, after a script of the reader's hands."""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += ["--virtual-time-budget=1000", "--dump-dom", f"{path.as_uri()}#{choices}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Parts(done.stdout)


TURN = """
const select = document.getElementById("choice-{name}");
select.value = [...select.options].findIndex((option) => option.textContent === "{label}");
select.dispatchEvent(new Event("change"));
"""


@needs_browser
@pytest.mark.heavy
def test_a_browser_shows_the_quantizer_of_the_address_and_turns_its_choices(page, tmp_path):
    data = data_of(page)
    declared = rendered(page, tmp_path, choices="Int8ActPerTensorMinMax")
    turned = rendered(
        page, tmp_path, choices="Int8ActPerTensorMinMax", script=TURN.format(name="bit_width", label="3")
    )
    by_address = rendered(page, tmp_path, choices="Int8ActPerTensorMinMax?bit_width=3")
    assert (
        turned.texts["code"]
        == by_address.texts["code"]
        == (
            "from jqinject.quant import Int8ActPerTensorMinMax\n\n\n"
            "class MyActivations(Int8ActPerTensorMinMax):\n    bit_width = 3\n"
        )
    )
    curves = [
        next(names["d"] for tag, names in parts.elements if tag == "path" and names["class"] == "line")
        for parts in (declared, turned, by_address)
    ]
    assert curves[0] != curves[1] == curves[2]
    # A step up of the curve is a vertical line: between the 8 outputs of 3 bits there are 7.
    assert curves[1].count("V") == 7
    quantizer = built(turned.texts["code"])
    rows = [turned.cells[at : at + 4] for at in range(4, len(turned.cells), 4)]
    for x, row in zip(variants.data_sets().values(), rows, strict=True):
        y = activations_through(quantizer, x, x).astype(np.float64)
        assert float(row[1]) == pytest.approx(sqnr(x, y), abs=6e-3)
    assert "MyActivations" in turned.texts["wiring"] and "int3" in turned.texts["facts"]
    assert data["quantizers"][0]["name"] in rendered(page, tmp_path).texts["code"]


@needs_browser
@pytest.mark.heavy
def test_a_browser_shows_texts_as_texts(page, tmp_path):
    parts = rendered(page, tmp_path, choices="Narrow")
    assert parts.texts["about"] == 'Ends a script: </script><script>alert("1")</script> & <b>more</b>.'


def test_a_curve_of_steps_has_no_number_where_it_is_not_finite():
    assert explorer._steps([1.0, 1.00001, 2.0, math.nan, math.inf, 2.0]) == [0, 1.0, 2, 2.0, 3, None, 5, 2.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jqinject.core.ZeroWeightsWarning")
def test_every_quantizer_of_weights_or_activations_can_be_shown():
    for entry in all_entries():
        if entry.kind in variants.TITLES:
            assert all(choice.options[choice.own] for choice in variants.choices_of(entry.quantizer))
            variant = variants.variant_of(entry.quantizer, [])
            assert not variant.fault and np.all(np.isfinite(variant.curve)), entry.name
