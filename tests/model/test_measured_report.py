"""`report(numbers=True)`: noise, saturation and sensitivity of each layer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject.dot import QDotGeneral
from jqinject.nn import QuantIdentity, QuantLinear, QuantReLU
from jqinject.quant.aqt import config_v4
from jqinject.recipes import GPTQ, RTN, Recipe, SmoothQuant, Solve

X = jax.random.normal(jax.random.key(0), (32, 8))


class Const(q.Int8ActPerTensorFloatMinMaxInit):
    """8 bits, one scale, -2 to 2."""

    min_val = -2.0
    max_val = 2.0


FourBits = q.Int8WeightPerTensorFloat.let(bit_width=4)


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


@pytest.mark.heavy
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


@pytest.mark.heavy
def test_numbers_of_frozen_weights_are_refused(measured):
    model, _ = measured
    for frozen in (("first", "second"), ("second",)):
        partly = nnx.clone(model)
        for name in frozen:
            jqinject.freeze(getattr(partly, name))
        with pytest.raises(
            ValueError,
            match=rf"weights {', '.join(f'{name}.kernel' for name in frozen)} are gone.*\n  cure: keep the model",
        ):
            jqinject.report(partly, X, numbers=True)
        assert jqinject.report(partly, X)["second"].contraction == "float"
    op = nnx.Linear(8, 4, dot_general=QDotGeneral(config_v4()), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"weights kernel are gone"):
        jqinject.report(jqinject.freeze(op), X, numbers=True)


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


@pytest.mark.heavy
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


class Solvable(nnx.Module):
    """A layer, a norm, a layer, a stack of layers in a scan, and a matrix that no layer holds."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(8, 64, rngs=rngs), nnx.RMSNorm(64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(64, 64, rngs=rngs))(rngs.split(3))
        self.head = nnx.Param(jax.random.normal(rngs.params(), (64, 16)))

    def __call__(self, x):
        x = self.second(self.norm(jnp.tanh(self.first(x))))
        scan = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x) @ self.head[...]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("passes", "weight_quant", "keep_masters"),
    [
        ((GPTQ(),), FourBits, False),
        ((SmoothQuant(), RTN()), q.Int4WeightPerGroupAbsMax.let(group_size=8), True),
    ],
)
def test_solved_weights_are_compared_with_those_of_a_reference(passes, weight_quant, keep_masters):
    """Not with themselves."""
    passes = [Solve(step) if hasattr(step, "statistics") else step for step in passes]
    batch = jax.random.normal(jax.random.key(1), (96, 8))  # more rows than columns
    result = Recipe(*passes).apply(
        Solvable(), jqinject.Rule(weight_quant=weight_quant), [batch], progress=False
    )
    model, floats = result.model, result.float_model
    solved = {path: np.asarray(leaf) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    if keep_masters:
        jqinject.freeze(model, keep_masters=True)
    with pytest.raises(
        ValueError, match=r"(?s)weights of first.kernel, .*cure: .*reference=result.float_model"
    ):
        jqinject.report(model, X, numbers=True)
    before = nnx.state(nnx.clone(model))
    found = jqinject.report(result, X)  # keeps the reference
    assert found.output_sqnr_db == pytest.approx(ratio(floats(X), model(X)), rel=1e-3)
    for name, path in (
        ("first", "first.kernel"),
        ("second", "second.kernel"),
        ("layers", "layers.kernel"),
        ("head", "head"),
    ):
        place = tuple(path.split("."))
        weight = dict(nnx.to_flat_state(nnx.state(floats)))[place]
        assert found[name].numbers.weight_sqnr_db == pytest.approx(
            ratio(weight[...], solved[place]), rel=1e-3
        )
        assert found[name].numbers.isolated_sqnr_db < 40 and found[name].numbers.only_quantized < 40
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(before), jax.tree.leaves(nnx.state(model)))


@pytest.mark.heavy
def test_a_reference_that_does_not_fit_is_refused():
    rule = jqinject.Rule(weight_quant=FourBits)
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    result = Recipe(Solve(RTN())).apply(model, rule, [X], progress=False)
    for reference, has in ((nnx.Linear(8, 5, rngs=nnx.Rngs(0)), r"one of shape \(8, 5\)"), (Stack(), "none")):
        with pytest.raises(
            ValueError, match=rf"kernel has shape \(8, 4\) .* has {has}.*\n  cure: reference="
        ):
            jqinject.report(result.model, X, numbers=True, reference=reference)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "weight_quant", [FourBits, q.Int4WeightPerGroupAbsMax.let(group_size=8), q.NF4WeightPerTensorFloat]
)
def test_a_frozen_model_is_compared_with_a_reference(weight_quant):
    floats = Solvable()
    rule = jqinject.Rule(weight_quant=weight_quant, input_quant=q.Int8DynamicActPerRowFloat)
    model = jqinject.quantize(floats, rule, inputs=X)
    live = jqinject.report(model, X, numbers=True)
    model = jqinject.freeze(model)
    frozen = jqinject.report(model, X, reference=floats)
    assert frozen.output_sqnr_db == pytest.approx(ratio(floats(X), model(X)), rel=1e-3)
    assert frozen.output_sqnr_db == pytest.approx(live.output_sqnr_db, rel=1e-2)
    for row in live:
        assert frozen[row.path].numbers.weight_sqnr_db == pytest.approx(row.numbers.weight_sqnr_db, rel=1e-3)
        assert frozen[row.path].formats == row.formats


def test_solved_weights_that_were_trained_since_are_floats():
    rule, model = jqinject.Rule(weight_quant=FourBits), nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    layer = Recipe(Solve(RTN())).apply(model, rule, [X], progress=False).model.layers[0]
    layer.kernel.set_value(layer.kernel[...] + 0.003)
    numbers = jqinject.report(layer, X, numbers=True)[""].numbers
    expected = ratio(layer.kernel[...], layer.weight_quant(layer.kernel[...]).value)
    assert numbers.weight_sqnr_db == pytest.approx(expected, rel=1e-3)


@pytest.mark.heavy
def test_weights_that_depend_on_the_format_of_their_input():
    layer = QuantLinear(
        8, 4, weight_quant=q.Int8AccumulatorAwareWeightQuant, input_quant=Const, rngs=nnx.Rngs(0)
    )
    layer.eval()
    numbers = jqinject.report(layer, X, numbers=True)[""].numbers
    weight = layer.weight_quant(layer.kernel[...], layer.input_quant(X)).value
    weight = np.asarray(weight, np.float64)
    assert numbers.weight_sqnr_db == pytest.approx(ratio(layer.kernel[...], weight), rel=1e-3)
    expected = ratio(np.asarray(X, np.float64) @ np.asarray(layer.kernel[...]), const(np.asarray(X)) @ weight)
    assert numbers.isolated_sqnr_db == pytest.approx(expected, rel=1e-3)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "input_quant", [q.Int8ActPerTensorMinMax, q.Int8ActPerTensorAbsMax, q.Int8ActPerTensorFloat]
)
def test_static_ranges_of_layers_in_a_scan(input_quant):
    """Live and frozen; each layer of the stack has a range of its own."""

    class Ranged(Stack):
        def __init__(self):
            def make(rngs):
                return QuantLinear(8, 8, input_quant=input_quant, rngs=rngs)

            self.layers = nnx.vmap(make, in_axes=0, out_axes=0)(nnx.Rngs(0).split(3))

    model = Ranged()
    jqinject.calibrate(model, [X], progress=False)
    model.eval()
    assert jqinject.report(model, X, numbers=True).output_sqnr_db > 30
    for stage in (model, jqinject.freeze(nnx.clone(model))):
        found = jqinject.report(stage, X)
        assert found["layers"].operations == 3 * 32 * 8 * 8
        assert [(row.weight, row.input) for row in found.coverage.weights] == [("int8", "int8")]
