"""`report(numbers=True)`: noise, saturation and sensitivity of each layer, as table, data and page."""

import io
import json
import math
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject.dot import QDotGeneral, config_v4
from jqinject.nn import QuantCheckpoint, QuantConv, QuantIdentity, QuantLinear, QuantReLU

X = jax.random.normal(jax.random.key(0), (32, 8))


class Const(q.Int8ActPerTensorFloatMinMaxInit):
    """8 bits, one scale, -2 to 2."""

    min_val = -2.0
    max_val = 2.0


class Mlp(nnx.Module):
    def __init__(self, bits=(8, 8), **options):
        rngs = nnx.Rngs(0)
        self.first = QuantLinear(8, 16, weight_bit_width=bits[0], input_quant=Const, rngs=rngs, **options)
        self.act = QuantReLU(act_quant=q.Uint8ActPerTensorFloatMaxInit, max_val=1.0)
        self.second = QuantLinear(16, 4, weight_bit_width=bits[1], rngs=rngs)

    def __call__(self, x):
        return self.second(self.act(self.first(x)))


def ratio(y, q):
    y, q = np.asarray(y, np.float64), np.asarray(q, np.float64)
    return 10 * np.log10((y**2).sum() / ((y - q) ** 2).sum())


def narrow(w, bits):
    """Int8WeightPerTensorFloat with other bits: the largest magnitude is the last of 2**(bits-1) - 1 steps."""
    top = 2 ** (bits - 1) - 1
    scale = np.abs(w).max() / top
    return np.clip(np.rint(w / scale), -top, top) * scale


def const(x):
    scale = 2.0 / 128
    return np.clip(np.rint(x / scale), -128, 127) * scale


def unsigned(x):
    scale = 1.0 / 255
    return np.clip(np.rint(x / scale), 0, 255) * scale


@pytest.fixture(scope="module")
def measured():
    model = Mlp(bits=(4, 8))
    return model, jqinject.report(model, X, numbers=True)


def test_noise_against_numpy(measured):
    model, found = measured
    x, w1, w2 = (np.asarray(a, np.float64) for a in (X, model.first.kernel[...], model.second.kernel[...]))
    q1, q2 = narrow(w1, 4), narrow(w2, 8)
    h, hq = x @ w1, const(x) @ q1
    a, aq = np.maximum(h, 0), unsigned(np.maximum(hq, 0))
    y = a @ w2
    numbers = {entry.path: entry.numbers for entry in found}
    assert list(numbers) == ["act", "first", "second"]  # as NNX lists them
    close = {"rel": 1e-4}
    act, first, second = numbers.values()
    assert first.weight_sqnr_db == pytest.approx(ratio(w1, q1), **close)
    assert first.isolated_sqnr_db == pytest.approx(ratio(h, hq), **close)
    assert first.accumulated_sqnr_db == pytest.approx(ratio(h, hq), **close)
    assert act.isolated_sqnr_db == pytest.approx(ratio(a, unsigned(a)), **close)
    assert act.accumulated_sqnr_db == pytest.approx(ratio(a, aq), **close)
    assert act.weight_sqnr_db is None
    assert second.isolated_sqnr_db == pytest.approx(ratio(y, a @ q2), **close)
    assert second.accumulated_sqnr_db == found.output_sqnr_db == pytest.approx(ratio(y, aq @ q2), **close)
    assert first.only_quantized == pytest.approx(ratio(y, np.maximum(hq, 0) @ w2), **close)
    assert act.only_quantized == pytest.approx(ratio(y, unsigned(a) @ w2), **close)
    assert first.only_float == pytest.approx(ratio(y, unsigned(a) @ q2), **close)
    assert second.only_float == pytest.approx(ratio(y, aq @ w2), **close)


def test_saturation_against_numpy(measured):
    model, found = measured
    x, h = np.asarray(X), const(X) @ narrow(np.asarray(model.first.kernel[...]), 4)
    assert found["first"].numbers.saturation.input == np.mean((x < -2) | (x > 2 * 127 / 128)) > 0
    assert found["act"].numbers.saturation.output == np.mean(np.maximum(h, 0) > 1) > 0
    assert found["first"].numbers.saturation.weight == 0
    assert found["first"].numbers.saturation.output is None
    assert found["second"].numbers.saturation.input is None


def test_saturation_counted_by_hand():
    layer = QuantIdentity(act_quant=Const, bit_width=2)  # steps of 1, from -2 to 1
    x = jnp.array([-2.001, -2.0, -1.4, 0.0, 0.99, 1.0, 1.001, 9.0, jnp.inf])
    numbers = jqinject.report(layer, x, numbers=True)[""].numbers
    assert numbers.saturation.output == 4 / 9
    drawn = numbers.histograms.output
    assert (drawn.low, drawn.high, drawn.unit) == (-2.0, 1.0, "value")
    assert sum(drawn.counts) == 8  # not inf
    assert drawn.edges[0] == pytest.approx(-2.001) and drawn.edges[-1] == 9.0


def test_the_largest_weight_is_not_clipped():
    layer = QuantLinear(8, 16, weight_quant=q.Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
    numbers = jqinject.report(layer, X, numbers=True)[""].numbers
    assert numbers.saturation.weight == 0.0
    drawn = numbers.histograms.weight
    assert (drawn.unit, drawn.low, drawn.high) == ("steps", -127.0, 127.0)  # 16 scales, one range
    assert sum(drawn.counts) == 8 * 16


def test_float8_saturates_at_its_largest():
    layer = QuantLinear(8, 4, input_quant=q.Fp8e4m3ActPerTensorDelayed, rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 8)).at[0, :3].set(jnp.array([448.0, -449.0, 1.0]))  # the scale is 1 at first
    assert jqinject.report(layer, x, numbers=True)[""].numbers.saturation.input == 1 / 8


def test_what_is_representable_has_no_noise():
    class Halves(Const):
        bit_width = 4  # steps of 1/4

    layer = QuantLinear(4, 2, use_bias=False, input_quant=Halves, weight_quant=None, rngs=nnx.Rngs(0))
    x = jnp.array([[-2.0, -0.25, 0.5, 1.75]])
    numbers = jqinject.report(layer, x, numbers=True)[""].numbers
    assert numbers.isolated_sqnr_db == numbers.accumulated_sqnr_db == numbers.only_quantized == math.inf
    assert numbers.only_float == math.inf
    assert numbers.saturation.input == 0


def test_no_signal_and_only_noise():
    class Shifted(nnx.Module):
        def __init__(self):
            self.act = QuantIdentity(act_quant=q.SignedBinaryActPerTensorConst, scaling_init=1.0)

        def __call__(self, x):
            return self.act(x)

    noise = jqinject.report(Shifted(), jnp.zeros(3), numbers=True)
    assert noise.output_sqnr_db == noise["act"].numbers.isolated_sqnr_db == -math.inf
    none = jqinject.report(QuantIdentity(), jnp.zeros(3), numbers=True)
    assert none.output_sqnr_db == math.inf
    assert noise.as_dict()["output_sqnr_db"] == "-inf"


def test_the_layer_with_fewest_bits_is_the_most_sensitive():
    class Deep(nnx.Module):
        def __init__(self):
            bits = (8, 8, 2, 8)
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([QuantLinear(8, 8, weight_bit_width=b, rngs=rngs) for b in bits])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    found = jqinject.report(Deep(), X, numbers=True)
    assert [entry.path for entry in found.most_sensitive(1)] == ["layers.2"]
    assert len(found.most_sensitive()) == 4
    best = max(found, key=lambda entry: entry.numbers.only_float)
    assert best.path == "layers.2" and best.numbers.only_float > found.output_sqnr_db + 20
    others = [found[f"layers.{i}"].numbers for i in (0, 1, 3)]
    assert all(n.only_float == pytest.approx(found.output_sqnr_db, abs=1) for n in others)


def test_operations():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.conv = QuantConv(4, 8, (3, 3), feature_group_count=2, rngs=rngs)
            self.up = nnx.ConvTranspose(8, 2, (2, 2), strides=(2, 2), rngs=rngs)
            self.dense = QuantLinear(8, 5, input_quant=Const, contraction="int", rngs=rngs)
            self.unused = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            x = self.conv(x)
            return self.up(x), self.dense(self.dense(x)[..., :1].repeat(8, axis=-1))

    abstract = jax.ShapeDtypeStruct((2, 6, 7, 4), jnp.float32)
    found = jqinject.report(Model(), abstract)
    pixels = 2 * 6 * 7
    assert found["conv"].operations == pixels * 8 * 3 * 3 * (4 // 2)
    assert found["up"].operations == pixels * 8 * 2 * 2 * 2
    assert found["dense"].operations == 2 * pixels * 8 * 5
    assert found["unused"].operations == 0
    assert found.operations == sum(entry.operations for entry in found)
    assert found["dense"].numbers is None and found.output_sqnr_db is None


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
    model, found = everything
    kept = {(h.slot, h.name): h for h in found["float8"].numbers.histories}
    amax = kept["input_quant", "scaling_impl.amax_history"]
    assert amax.along == "steps"
    assert amax.values == pytest.approx([float(jnp.abs(X).max())] * 3)
    assert kept["grad_quant", "scaling_impl.amax_history"].values == ()
    assert kept["input_quant", "scaling_impl.scale"].along == "elements"
    (running,) = [h for h in found["act"].numbers.histories if h.name == "scaling_impl.buffer"]
    assert running.values == (float(model.act.act_quant.tensor_quant.scaling_impl.buffer[...]),)


def test_the_newest_amax_is_last():
    class Short(q.Fp8e4m3ActPerTensorDelayed):
        amax_history_length = 3

    layer = QuantIdentity(act_quant=Short)
    for amax in (1.0, 5.0, 2.0, 3.0):
        layer(jnp.full((2,), amax))
    (history,) = [
        h for h in jqinject.report(layer, X, numbers=True)[""].numbers.histories if h.along == "steps"
    ]
    assert history.values == (5.0, 2.0, 3.0)


def test_frozen_weights_have_no_float_numbers(measured):
    model, trained = measured
    frozen = jqinject.report(jqinject.freeze(nnx.clone(model)), X, numbers=True)
    for path in ("first", "second"):
        numbers = frozen[path].numbers
        assert numbers.calls == 1
        assert numbers.isolated_sqnr_db is numbers.accumulated_sqnr_db is numbers.weight_sqnr_db is None
        assert numbers.only_quantized is numbers.only_float is numbers.saturation.weight is None
    assert frozen["first"].numbers.saturation.input == trained["first"].numbers.saturation.input
    drawn = frozen["first"].numbers.histograms.weight
    assert sum(drawn.counts) == 8 * 16 and drawn.low < 0 < drawn.high
    act = trained["act"].numbers
    assert frozen["act"].numbers.only_quantized == pytest.approx(act.only_quantized, abs=1)


def test_frozen_weights_with_their_masters(measured):
    layer = measured[0].first
    trained = jqinject.report(layer, X, numbers=True)[""].numbers
    kept = jqinject.freeze(nnx.clone(layer), keep_masters=True)
    master = jqinject.report(kept, X, numbers=True)[""].numbers
    for name in ("weight_sqnr_db", "isolated_sqnr_db", "accumulated_sqnr_db", "only_quantized"):
        assert getattr(master, name) == pytest.approx(getattr(trained, name), rel=1e-3)
    assert master.only_float == math.inf and master.saturation == trained.saturation


def test_a_layer_called_twice():
    class Twice(nnx.Module):
        def __init__(self):
            self.layer = QuantLinear(8, 8, input_quant=Const, weight_bit_width=3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(jnp.tanh(self.layer(x)))

    model = Twice()
    w = np.asarray(model.layer.kernel[...], np.float64)
    x, wq = np.asarray(X, np.float64), narrow(w, 3)
    h, isolated = x @ w, const(x) @ wq
    y, again = np.tanh(h) @ w, const(np.tanh(h)) @ wq
    found = jqinject.report(model, X, numbers=True)["layer"].numbers
    assert found.calls == 2
    assert found.isolated_sqnr_db == pytest.approx(
        ratio(np.concatenate([h, y]), np.concatenate([isolated, again])), rel=1e-3
    )
    through = const(np.tanh(isolated)) @ wq
    assert found.accumulated_sqnr_db == pytest.approx(
        ratio(np.concatenate([h, y]), np.concatenate([isolated, through])), rel=1e-3
    )
    assert found.only_float == math.inf
    assert sum(found.histograms.input.counts) == 2 * X.size


class Stack(nnx.Module):
    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(key):
            return QuantLinear(8, 8, input_quant=Const, weight_bit_width=3, rngs=nnx.Rngs(key))

        self.layers = make(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def test_layers_in_a_scan():
    model = Stack()
    w, x = np.asarray(model.layers.kernel[...], np.float64), np.asarray(X, np.float64)
    found = jqinject.report(model, X, numbers=True)
    numbers = found["layers"].numbers
    floats, isolated, flowing = [], [], const(x) @ narrow(w[0], 3)
    accumulated = []
    for i in range(3):
        floats.append(x @ w[i])
        isolated.append(const(x) @ narrow(w[i], 3))
        accumulated.append(flowing := isolated[0] if i == 0 else const(flowing) @ narrow(w[i], 3))
        x = x @ w[i]
    assert numbers.calls == 3
    assert found["layers"].operations == 3 * 32 * 8 * 8
    close = {"rel": 1e-3}
    assert numbers.weight_sqnr_db == pytest.approx(ratio(w, [narrow(one, 3) for one in w]), **close)
    assert numbers.isolated_sqnr_db == pytest.approx(ratio(floats, isolated), **close)
    assert numbers.accumulated_sqnr_db == pytest.approx(ratio(floats, accumulated), **close)
    assert numbers.only_quantized == found.output_sqnr_db == pytest.approx(ratio(x, accumulated[-1]), **close)
    assert numbers.histograms.weight.unit == "steps"  # a scale for each layer


def test_only_floats_count_in_the_output():
    class Several(Mlp):
        def __call__(self, x):
            y = super().__call__(x)
            return {"logits": y, "class": 1000 * jnp.argmax(y, axis=-1), "none": None}

    plain, several = (jqinject.report(kind(), X, numbers=True).output_sqnr_db for kind in (Mlp, Several))
    assert several == pytest.approx(plain, rel=1e-6)


def test_layers_under_vmap_and_remat():
    class Mapped(Stack):
        def __call__(self, x):
            each = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=0)(self.layers, x)
            return jax.checkpoint(jnp.tanh)(each)

    found = jqinject.report(Mapped(), X, numbers=True)
    assert found["layers"].numbers.isolated_sqnr_db == found["layers"].numbers.accumulated_sqnr_db
    assert found["layers"].operations == 3 * 32 * 8 * 8


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (
            Mlp,
            (X, {"mask": jax.ShapeDtypeStruct((2, 3), jnp.float32)}),
            r"needs numbers; input 1 is a ShapeDtypeStruct \(float32\[2, 3\]\).\n  cure: give it arrays",
        ),
        (
            lambda: nnx.eval_shape(Mlp),
            (X,),
            r"needs numbers; [a-z._]*scaling_impl.value is a ShapeDtypeStruct \(float32.*\).\n  cure: a model with",
        ),
    ],
)
def test_numbers_of_shapes_are_refused(model, inputs, said):
    with pytest.raises(TypeError, match=said):
        jqinject.report(model(), *inputs, numbers=True)


def test_most_sensitive_needs_numbers():
    with pytest.raises(
        ValueError, match=r"this report has none.\n  cure: report\(model, ..., numbers=True\)"
    ):
        jqinject.report(QuantLinear(8, 4, rngs=nnx.Rngs(0)), X).most_sensitive()


def test_a_model_that_needs_its_quantizers_says_so():
    class Needy(nnx.Module):
        def __init__(self):
            self.proxy = QuantIdentity(return_quant_tensor=True).act_quant

        def __call__(self, x):
            return self.proxy(x).scale

    with pytest.raises(AttributeError) as raised:
        jqinject.report(Needy(), X, numbers=True)
    notes = "\n".join(raised.value.__notes__)
    assert "quantizers switched off" in notes and "cure: report(model, ...) without numbers" in notes


def test_plain_data(everything):
    _, found = everything
    data = found.as_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["operations"] == found.operations and data["weight_bytes"] == found.weight_bytes
    (op,) = [layer for layer in data["layers"] if layer["path"] == "act"]
    assert op["numbers"]["saturation"]["output"] == found["act"].numbers.saturation.output
    assert len(op["numbers"]["histograms"]["output"]["counts"]) == 48


def test_it_prints(measured):
    _, found = measured
    lines = str(found).splitlines()
    assert len({len(line.split("  ")[0]) for line in lines[1:-1]}) == 3
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
    assert f"{found.output_sqnr_db:.1f}" in lines[-1]


def test_it_prints_with_rich(measured):
    from rich.console import Console

    console = Console(width=300, record=True, file=io.StringIO())
    console.print(measured[1])
    text = console.export_text()
    assert "alone dB" in text and "first" in text and f"{measured[1].output_sqnr_db:.1f}" in text


class Page(HTMLParser):
    """Checks that tags are closed in order, and counts."""

    VOID = {"meta", "!doctype", "rect", "line", "polyline"}

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


def test_a_page_without_numbers():
    text = jqinject.report(Mlp(), jax.ShapeDtypeStruct((2, 8), jnp.float32)).html()
    page = Page(text)
    assert "first" in page.text and "svg" not in page.tags and "alone dB" not in page.text


def test_a_hostile_path_is_only_text():
    hostile = '<script>alert("1")</script>)&:'

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.Dict({hostile: QuantLinear(8, 4, input_quant=Const, rngs=nnx.Rngs(0))})

        def __call__(self, x):
            return self.layers[hostile](x)

    found = jqinject.report(Model(), X, numbers=True)
    assert found[f"layers.{hostile}"].contraction == "float"
    text = found.html()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert f"layers.{hostile}" in Page(text).text
