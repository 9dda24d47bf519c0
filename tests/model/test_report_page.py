"""`report(numbers=True)` of every kind of layer: as an object, as data, as a table and as a page."""

import io
import json
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject.dot import QDotGeneral
from jqinject.model.inspect.layer_numbers import Clipped, histogram
from jqinject.model.inspect.page import histogram_chart
from jqinject.nn import QuantCheckpoint, QuantIdentity, QuantLinear, QuantReLU
from jqinject.quant.aqt import config_v4

X = jax.random.normal(jax.random.key(0), (32, 8))


class Const(q.Int8ActPerTensorFloatMinMaxInit):
    """8 bits, one scale, -2 to 2."""

    min_val = -2.0
    max_val = 2.0


class Mlp(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = QuantLinear(8, 16, weight_bit_width=4, input_quant=Const, rngs=rngs)
        self.act = QuantReLU(act_quant=q.Uint8ActPerTensorFloatMaxInit, max_val=1.0)
        self.second = QuantLinear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(self.act(self.first(x)))


def ratio(y, q):
    y, q = np.asarray(y, np.float64), np.asarray(q, np.float64)
    return 10 * np.log10((y**2).sum() / ((y - q) ** 2).sum())


class Everything(nnx.Module):
    """Whatever flows as a QuantTensor, is shared, records, or must not run without its quantizer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        fp8 = {
            "input_quant": q.Fp8e4m3ActPerTensorDelayed,
            "weight_quant": q.Fp8e4m3WeightPerTensorDelayed,
            "grad_quant": q.Fp8e5m2GradPerTensorDelayed,
        }
        self.float8 = QuantLinear(8, 8, rngs=rngs, **fp8)
        self.act = QuantReLU(return_quant_tensor=True)
        self.biased = QuantLinear(8, 8, bias_quant=q.Int8Bias, contraction="int", rngs=rngs)
        self.keep = QuantCheckpoint(q.Int8ActPerTensorFloat)
        self.out = QuantLinear(8, 8, input_quant=Const, return_quant_tensor=True, rngs=rngs)
        self.op = nnx.Linear(8, 8, dot_general=QDotGeneral(config_v4(rng_type=None)), rngs=rngs)
        self.shared = QuantLinear(8, 8, weight_quant=self.biased.weight_quant, rngs=rngs)
        self.unused = QuantLinear(8, 8, rngs=rngs)
        self.plain = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        x = self.act(self.float8(x))
        x = self.out(self.keep(self.biased(x)))
        return self.plain(self.shared(self.op(x.value))), x


def snapshot(model):
    return nnx.graphdef(model), jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))


@pytest.fixture(scope="module")
def run():
    model = Everything()
    step = nnx.jit(lambda model, x: model(x))
    for _ in range(3):
        step(model, X)
    before = snapshot(model)
    found = jqinject.report(model, X, numbers=True)
    return model, found, before


@pytest.fixture
def everything(run):
    return run[:2]


@pytest.mark.heavy
def test_the_model_stays_as_it_is(run):
    model, _, (graphdef, state) = run
    assert nnx.graphdef(model) == graphdef
    assert model.act.act_quant.training and type(model.out) is QuantLinear
    jax.tree.map(np.testing.assert_array_equal, snapshot(model)[1], state)


def test_every_kind_of_layer(everything):
    _, found = everything
    numbers = {entry.path: entry.numbers for entry in found}
    assert numbers["plain"] is None
    assert numbers["unused"].calls == 0 and numbers["unused"].isolated_sqnr_db is None
    assert numbers["unused"].only_quantized is None
    for path in ("float8", "act", "biased", "keep", "out", "op", "shared"):
        of_layer = numbers[path]
        assert of_layer.calls == 1
        assert 10 < of_layer.accumulated_sqnr_db < of_layer.isolated_sqnr_db + 1 < 100
        assert 10 < of_layer.only_quantized < 100 and 10 < of_layer.only_float < 100
    assert found["act"].contraction == "none" and found["act"].weight_bytes == 0


@pytest.mark.heavy
def test_numbers_of_a_quantized_op(everything):
    model, found = everything
    kernel, bias = model.op.kernel[...], model.op.bias[...]
    model.eval()
    y = model(X)[1].value
    model.train()
    # What comes in is the float model's there, so it is the noise of 8 bits alone; checked on the layer by itself.
    alone = jqinject.report(model.op, y, numbers=True)[""].numbers
    assert alone.isolated_sqnr_db == pytest.approx(ratio(y @ kernel + bias, model.op(y)), rel=1e-3)
    assert found["op"].numbers.isolated_sqnr_db == pytest.approx(alone.isolated_sqnr_db, abs=3)


def test_histories(everything):
    _, found = everything
    kept = {(h.slot, h.name): h for h in found["float8"].numbers.histories}
    amax = kept["input_quant", "scaling_impl.amax_history"]
    assert amax.values == pytest.approx([float(jnp.abs(X).max())] * 3)
    assert kept["grad_quant", "scaling_impl.amax_history"].values == ()


@pytest.mark.heavy
def test_the_newest_amax_is_last():
    class Short(q.Fp8e4m3ActPerTensorDelayed):
        amax_history_length = 3

    layer = QuantIdentity(act_quant=Short)
    for amax in (1.0, 5.0, 2.0, 3.0):
        layer(jnp.full((2,), amax))
    (history,) = jqinject.report(layer, X, numbers=True)[""].numbers.histories
    assert history.values == (5.0, 2.0, 3.0)


def test_plain_data(everything):
    _, found = everything
    data = found.as_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["operations"] == found.operations and data["weight_bytes"] == found.weight_bytes
    (op,) = [layer for layer in data["layers"] if layer["path"] == "act"]
    assert op["numbers"]["saturation"]["output"] == found["act"].numbers.saturation.output
    assert len(op["numbers"]["histograms"]["output"]["counts"]) == 48


@pytest.fixture(scope="module")
def measured():
    model = Mlp()
    return model, jqinject.report(model, X, numbers=True)


@pytest.mark.heavy
def test_it_prints(measured):
    _, found = measured
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines[:5]] == ["layer", "act", "first", "second", "all layers"]
    for name in (
        "operations",
        "alone dB",
        "here dB",
        "weight dB",
        "clipped w/in/out",
        "only quantized",
        "only float",
    ):
        assert name in lines[0]
    row = next(line for line in lines if line.startswith("first"))
    numbers = found["first"].numbers
    assert f"{numbers.isolated_sqnr_db:.1f}" in row and f"0.00% {numbers.saturation.input:.2%} -" in row
    assert f"{found.output_sqnr_db:.1f}" in lines[4]
    legend = "\n".join(lines[5:-1])
    assert all(name in legend for name in re.split(r"  +", lines[0])[2:-1])
    assert lines[-1] == found.coverage.line


@pytest.mark.heavy
def test_it_shows_the_bits_that_quantizers_make():
    """Not those of the containers that the program has."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Embed(5, 8, rngs=rngs)
            self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
            self.plain, self.own = nnx.Linear(16, 16, rngs=rngs), nnx.Param(jnp.ones((16, 4)))

        def __call__(self, ids):
            x = self.plain(self.second(self.first(self.embed(ids))))
            return x @ self.own[...], x @ x.T

    int3 = q.Int8WeightPerChannelFloat.let(bit_width=3)
    rules = [
        jqinject.Rule("plain|.*dot_general1"),
        jqinject.Rule("second", weight_quant=q.Int4WeightPerGroupAbsMax.let(group_size=8)),
        jqinject.Rule("own", weight_quant=q.NF4WeightPerTensorFloat),
        jqinject.Rule("embed|first", weight_quant=int3, input_quant=Const),
        jqinject.Rule(op="dot_general", lhs_quant=Const, rhs_quant=q.Int8ActPerTensorFloat.let(bit_width=6)),
    ]
    ids = jnp.arange(3)
    model = jqinject.quantize(Net(), rules, inputs=ids)
    expected = {
        "embed": "int3",
        "first": "int8 x int3",
        "second": "float x int4 in groups of 8",
        "plain": "",
        "own": "float x 4-bit table",
    }
    for stage in (model, jqinject.freeze(nnx.clone(model), allow_uncalibrated=True)):
        found = jqinject.report(stage, ids)
        assert {entry.path: entry.formats for entry in found} == expected
        assert "int8 x int3" in str(found) and "int8 x int3" in found.html()
    (product,) = [entry for entry in jqinject.report(model, ids, numbers=True) if entry.path not in expected]
    assert product.formats == "int8 x int6"


def test_it_prints_with_rich(measured):
    from rich.console import Console

    console = Console(width=300, record=True, file=io.StringIO())
    console.print(measured[1])
    text = console.export_text()
    assert "alone dB" in text and "first" in text and f"{measured[1].output_sqnr_db:.1f}" in text


class Page(HTMLParser):
    """Checks that tags are closed in order, and counts."""

    VOID = {"meta", "!doctype", "rect", "line", "polyline", "circle"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page(everything, tmp_path):
    _, found = everything
    file = tmp_path / "report.html"
    text = found.html(file)
    assert file.read_text(encoding="utf-8") == text == found.html()
    assert text.startswith("<!doctype html>")
    for outside in ("http", "src=", "href", "url(", "@import", "<script", "<link"):
        assert outside not in text
    page = Page(text)
    for entry in found:
        assert entry.path in page.text
    drawn = [n.histograms for n in (entry.numbers for entry in found) if n is not None]
    count = sum(part is not None for h in drawn for part in (h.weight, h.input, h.output))
    clips = [value for name, value in page.attributes if (name, value) == ("class", "clip")]
    assert count > 6 and len(clips) == 2 * count
    assert page.tags.count("polyline") >= 2  # amaxes of input and weight
    assert "input_quant.scaling_impl.amax_history" in page.text


def test_what_a_notebook_shows(everything):
    _, found = everything
    shown = found._repr_html_()
    assert not Page(shown).open and "<html" not in shown and 'class="jqinject"' in shown
    covered = found.coverage._repr_html_()
    assert not Page(covered).open and "multiply-adds" in covered and "op.kernel" in covered


def test_lines_fit_a_terminal(everything, monkeypatch):
    _, found = everything
    monkeypatch.setenv("COLUMNS", "80")
    for shown in (str(found), str(found.coverage)):
        assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(str(found).split())
    for name in ("contracts", "operations", "alone dB", "clipped w/in/out", "only quantized", "only float"):
        assert name in words
    for entry in found:
        assert " ".join(entry.note.split()) in words


def test_outliers_leave_room_for_the_others():
    numbers = np.concatenate([np.linspace(-1, 1, 999), [1000.0]])
    drawn = histogram([Clipped(numbers, numbers, np.float64(1), np.float64(0), -128.0, 127.0)])
    counts, edges = np.array(drawn.counts), np.array(drawn.edges)
    assert counts.sum() == 1000 and edges[0] == -128 and edges[-1] == 1000
    assert np.all(np.diff(edges) > 0)
    assert counts[-1] == 1 and np.sum(counts > 0) > 6, "the others do not share a bin"
    chart = histogram_chart("x", drawn)
    low, high = (float(at) for at in re.findall(r'class="clip" x1="([\d.]+)"', chart))
    edges_drawn = np.linspace(8, 312, len(edges))  # bars have one width
    place = int(np.searchsorted(edges, 127.0)) - 1
    assert low == edges_drawn[0] and edges_drawn[place] - 0.05 <= high <= edges_drawn[place + 1] + 0.05


def test_a_page_without_numbers():
    text = jqinject.report(Mlp(), jax.ShapeDtypeStruct((2, 8), jnp.float32)).html()
    page = Page(text)
    assert "first" in page.text and "svg" not in page.tags and "alone dB" not in page.text


@pytest.mark.heavy
def test_a_hostile_path_is_only_text():
    hostile = '<script>alert("1")</script>)&:'

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.Dict({hostile: QuantLinear(8, 4, input_quant=Const, rngs=nnx.Rngs(0))})

        def __call__(self, x):
            return self.layers[hostile](x)

    found = jqinject.report(Model(), X, numbers=True)
    assert found[f"layers.{hostile}"].contraction == "int"
    text = found.html()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert f"layers.{hostile}" in Page(text).text
