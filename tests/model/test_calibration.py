"""Static ranges, statistics of batch normalizations and biases, from batches of data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import (
    Rule,
    calibrate,
    calibrate_batch_norm,
    correct_biases,
    freeze,
    post_training_quantize,
    quantize,
    unfreeze,
)
from jqinject.core import OverOutputChannelView, SimpleMovingAverage
from jqinject.dot import FrozenParam, QDotGeneral
from jqinject.nn import QuantIdentity, QuantLinear
from jqinject.odml import OdmlConversion, OdmlQat
from jqinject.quant import (
    Fp8e4m3ActPerTensorCurrent,
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3OCPActPerTensorFloat,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8ActPerTensorMSE,
    Int8ActPerTensorPercentile,
    Int8ActPerTensorRMS,
    Int8DynamicActPerRowAbsMax,
    Int8WeightPerChannelFloat,
    ShiftedUint8ActPerTensorFloat,
    Uint8ActPerTensorFloat,
)
from jqinject.quant.aqt import ConfigV4

BATCHES = [jnp.asarray(np.random.default_rng(i).normal(size=(8, 6)).astype(np.float32)) for i in range(3)]


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.fc1 = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.fc2 = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.dropout(nnx.relu(self.norm(self.fc1(x)))))


def quantized(act: object = Int8ActPerTensorMinMax) -> Net:
    return quantize(Net(), Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=act))


@pytest.mark.heavy
def test_ranges_are_those_of_the_float_model() -> None:
    model = quantized(Int8ActPerTensorAbsMax)
    report = calibrate(model, BATCHES, progress=False)
    assert (report.batches, report.quantizers) == (3, ("fc1.input_quant", "fc2.input_quant"))
    plain = Net()
    plain.eval()
    hidden = [nnx.relu(plain.norm(plain.fc1(x))) for x in BATCHES]
    for layer, seen in ((model.fc1, BATCHES), (model.fc2, hidden)):
        expected = np.mean([np.abs(x).max() for x in seen])
        average = layer.input_quant.tensor_quant.scaling_impl.averaging_impl  # pyright: ignore[reportAttributeAccessIssue]
        np.testing.assert_allclose(average.sum_of_max[...] / 3, expected, rtol=1e-5)


def test_quantized_ranges_are_those_of_the_quantized_model() -> None:
    a, b = quantized(), quantized()
    for model, choice in ((a, False), (b, True)):
        calibrate(model, BATCHES, quantized=choice, progress=False)
    tops = [float(m.fc2.input_quant.tensor_quant.scaling_impl.averaging_impl.sum_of_max[...]) for m in (a, b)]  # pyright: ignore
    assert tops[0] != tops[1]
    assert tops[0] == pytest.approx(tops[1], rel=0.05)


def test_nothing_but_statistics_changes() -> None:
    model = quantized()
    before = {p: np.asarray(v.get_value()) for p, v in _plain_variables(model)}
    calibrate(model, BATCHES, progress=False)
    after = {p: np.asarray(v.get_value()) for p, v in _plain_variables(model)}
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path], err_msg=str(path))
    assert model.fc1.input_quant.use_running_average and model.dropout.deterministic  # pyright: ignore


def _plain_variables(model: nnx.Module) -> list[tuple[tuple[object, ...], nnx.Variable[jax.Array]]]:
    flat = nnx.to_flat_state(nnx.state(model))
    return [(p, v) for p, v in flat if "input_quant" not in p and not isinstance(v, nnx.RngKey)]


METHODS = (
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorPercentile,
    Int8ActPerTensorMSE,
    Int8ActPerTensorRMS,
)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_leaves_a_model_close_to_the_float_one(method: type) -> None:
    layer = QuantLinear(6, 4, weight_quant=None, input_quant=method, rngs=nnx.Rngs(0))
    calibrate(layer, BATCHES, progress=False)
    x = BATCHES[0]
    error = jnp.abs(layer(x) - x @ layer.kernel[...] - layer.bias[...])  # pyright: ignore
    assert float(jnp.mean(error)) < 0.05


class NamedMomentum(Int8ActPerTensorFloat):
    scaling_stats_momentum = 0.5


class NamedDefault(Int8ActPerTensorFloat):
    scaling_stats_momentum = 0.1


class Never(Int8ActPerTensorFloat):
    """Whose scale is never learned."""

    scaling_impl_type = "stats"


class TwoSteps(Int8ActPerTensorFloat):
    collect_stats_steps = 2


class PerChannel(Int8ActPerTensorFloat):
    scaling_per_output_type = "channel"
    per_channel_broadcastable_shape = (1, 2)
    scaling_stats_permute_dims = (1, 0)
    scaling_stats_input_view_shape_impl = OverOutputChannelView


class NamedAverage(Int8ActPerTensorAbsMax):
    momentum = 0.5


# Each batch is [low, high]; the second column is three times the first, with its sign turned.
HIGHS = (1.0, 3.0, 8.0)
SPREAD = [jnp.array([[-high / 3, high]]) for high in HIGHS]
MEAN = 4.0


@pytest.mark.parametrize(
    ("act", "scale", "zero_point"),
    [
        (Int8ActPerTensorFloat, MEAN / 128, 0),
        (Uint8ActPerTensorFloat, MEAN / 255, 0),
        (Never, MEAN / 128, 0),
        (TwoSteps, MEAN / 128, 0),
        (PerChannel, np.array([[MEAN / 3, MEAN]]) / 128, 0),
        (ShiftedUint8ActPerTensorFloat, MEAN * 4 / 3 / 255, 64),
        (Int8ActPerTensorAbsMax, MEAN / 127.5, 0),
        (Int8ActPerTensorMinMax, MEAN * 4 / 3 / 255, -64),
        (Fp8e4m3OCPActPerTensorFloat, MEAN / 448, 0),
        (NamedMomentum, ((1 + 3) / 2 + 8) / 2 / 128, 0),
        (NamedDefault, ((1 * 0.9 + 3 * 0.1) * 0.9 + 8 * 0.1) / 128, 0),
        (NamedAverage, ((1 + 3) / 2 + 8) / 2 / 127.5, 0),
        (Fp8e4m3ActPerTensorDelayed, 8 / 448, 0),  # the history's own: the largest
    ],
)
def test_a_range_is_the_mean_of_all_batches(act: type, scale: object, zero_point: float) -> None:
    """Of these alone: not of what was collected before, by training or by another calibration."""
    layer = QuantIdentity(act)
    proxy = layer.act_quant
    layer(100 * SPREAD[2])
    calibrate(layer, (1000 * x for x in SPREAD[:1]), progress=False)
    assert calibrate(layer, iter(SPREAD), progress=False).quantizers == ("act_quant",)
    np.testing.assert_allclose(proxy.scale(), scale, rtol=1e-6)
    assert float(proxy.zero_point()) == zero_point
    before = nnx.to_pure_dict(nnx.state(layer))
    calibrate(layer, SPREAD, progress=False)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer)), before)


def test_a_calibrated_scale_is_learned_from_the_next_step_on() -> None:
    layer = QuantIdentity(Int8ActPerTensorFloat)
    calibrate(layer, SPREAD, progress=False)
    layer.train()
    gradient = nnx.grad(lambda layer: layer(100 * SPREAD[0]).sum())(layer)
    assert float(layer.act_quant.scale()) == MEAN / 128
    assert float(gradient.act_quant.tensor_quant.scaling_impl.value[...]) != 0


class Chosen(nnx.Module):
    """Of two layers the one that is asked for."""

    def __init__(self) -> None:
        self.first, self.second = QuantIdentity(Int8ActPerTensorFloat), QuantIdentity(Int8ActPerTensorFloat)

    def __call__(self, x: jax.Array, *, second: bool) -> jax.Array:
        return self.second(x) if second else self.first(x)


@pytest.mark.parametrize("quantizer", [Fp8e4m3ActPerTensorCurrent, Int8ActPerTensorMinMax])
def test_quantizers_that_no_batch_reaches_are_named(quantizer: Any) -> None:
    class Beside(nnx.Module):
        def __init__(self) -> None:
            self.unused = QuantIdentity(quantizer)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x

    with pytest.raises(ValueError, match=r"none reached a quantizer of activations: unused\.act_quant\."):
        calibrate(Beside(), BATCHES, progress=False)


def test_what_no_batch_reaches_stays_and_is_named() -> None:
    model = Chosen()
    first = calibrate(model, [{"x": SPREAD[0], "second": False}], progress=False)
    assert (first.quantizers, first.missed) == (("first.act_quant",), ("second.act_quant",))
    assert str(first).endswith("; no batch reached second.act_quant")
    scale = float(model.first.act_quant.scale())
    second = calibrate(model, [{"x": SPREAD[2], "second": True}], progress=False)
    assert second.missed == ("first.act_quant",)
    assert (float(model.first.act_quant.scale()), float(model.second.act_quant.scale())) == (scale, 8 / 128)


@pytest.mark.heavy
def test_every_layer_of_a_stack_has_its_own_range() -> None:
    class Stack(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.vmap(lambda rngs: nnx.Linear(2, 2, use_bias=False, rngs=rngs))(
                nnx.Rngs(0).split(2)
            )
            self.layers.kernel[...] = jnp.stack([2 * jnp.eye(2), jnp.eye(2)])

        def __call__(self, x: jax.Array) -> jax.Array:
            def call(x: jax.Array, layer: nnx.Linear) -> jax.Array:
                return layer(x)

            return nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    model = quantize(Stack(), Rule(weight_quant=None, input_quant=Int8ActPerTensorFloat))
    calibrate(model, SPREAD, progress=False)
    value = model.layers.input_quant.tensor_quant.scaling_impl.value[...]  # pyright: ignore
    np.testing.assert_allclose(value, [MEAN, 2 * MEAN], rtol=1e-6)


def test_static_ranges_of_contractions_are_calibrated_too() -> None:
    operand = ConfigV4.fwd_lhs.let(averaging_impl=SimpleMovingAverage)
    op = QDotGeneral(ConfigV4.let(fwd_lhs=operand), lhs_shape=(1, 2), rhs_shape=(2, 2))
    layer = nnx.Linear(2, 2, dot_general=op, rngs=nnx.Rngs(0))
    assert calibrate(layer, SPREAD, progress=False).quantizers == ("dot_general",)
    assert float(op.fprop_lhs.quant.tensor_quant.scaling_impl.averaged_range().high) == pytest.approx(MEAN)


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], r"got no batch"),
        ([BATCHES[0], BATCHES[1].at[2, 3].set(jnp.nan)], r"batch 1 has nan or inf in .*shape \(8, 6\)"),
    ],
)
def test_bad_batches_are_refused_and_nothing_changes(batches: list[jax.Array], text: str) -> None:
    model = quantized()
    with pytest.raises(ValueError, match=text):
        calibrate(model, batches, progress=False)
    assert int(model.fc1.input_quant.tensor_quant.scaling_impl.averaging_impl.counter[...]) == 0  # pyright: ignore
    assert not model.fc1.input_quant.use_running_average  # pyright: ignore


def test_a_model_without_static_ranges_has_nothing_to_calibrate() -> None:
    for act in (None, Int8DynamicActPerRowAbsMax):
        with pytest.raises(ValueError, match=r"nothing to calibrate"):
            calibrate(quantized(act), BATCHES, progress=False)


def test_batches_may_be_keywords() -> None:
    model = quantized()
    assert calibrate(model, [{"x": BATCHES[0]}], progress=False).batches == 1


@pytest.mark.heavy
def test_odml_models_are_calibrated_too() -> None:
    model = OdmlQat().quantize(Net(), BATCHES[0])
    assert "final_output0" in str(calibrate(model, BATCHES, progress=False).quantizers)
    converted = OdmlConversion().quantize(model, BATCHES[0])
    np.testing.assert_allclose(converted(BATCHES[0]), model(BATCHES[0]), atol=1e-5)


def test_statistics_of_batch_normalization_are_those_of_the_quantized_model() -> None:
    model = quantized()
    calibrate(model, BATCHES, progress=False)
    assert calibrate_batch_norm(model, BATCHES, progress=False) == ("norm",)
    outputs = [np.asarray(model.fc1(x)) for x in BATCHES]
    np.testing.assert_allclose(model.norm.mean[...], np.mean([y.mean(0) for y in outputs], 0), atol=1e-5)
    np.testing.assert_allclose(model.norm.var[...], np.mean([y.var(0) for y in outputs], 0), rtol=1e-4)


def test_a_model_without_batch_normalization_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no nnx.BatchNorm"):
        calibrate_batch_norm(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), BATCHES)


@pytest.mark.heavy
def test_corrected_biases_give_every_layer_its_float_mean() -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, weight_bit_width=3)
    plain, model = Net(), quantize(Net(), rule)
    for net in (plain, model):
        net.eval()
    shift = _mean_shift(plain, model)
    assert correct_biases(model, BATCHES, progress=False) == ("fc1", "fc2")
    assert shift > 1e-2
    assert _mean_shift(plain, model) < 1e-5


def _mean_shift(plain: Net, model: Net) -> float:
    means = [sum(net(x).mean(0) for x in BATCHES) / len(BATCHES) for net in (plain, model)]
    return float(jnp.abs(means[0] - means[1]).max())


def test_biases_of_a_float_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"quantize it first"):
        correct_biases(Net(), BATCHES)


@pytest.mark.parametrize("activations", ["float", "dynamic", "static"])
def test_post_training_quantization_in_one_step(activations: str) -> None:
    plain = Net()
    served = post_training_quantize(
        plain,
        activations,
        batches=BATCHES,
        keep_float="fc2",
        bias_correction=True,
        progress=False,  # pyright: ignore
    )
    plain.eval()
    assert served.fc1.frozen.numbers["value"].dtype == jnp.int8  # pyright: ignore[reportAttributeAccessIssue]
    assert type(served.fc2) is nnx.Linear
    scale = float(jnp.abs(plain(BATCHES[0])).max())
    np.testing.assert_allclose(served(BATCHES[0]), plain(BATCHES[0]), atol=0.03 * scale)


@pytest.mark.heavy
@pytest.mark.parametrize("frozen", [False, True])
def test_post_training_quantization_returns_the_model_unfrozen_and_its_report(frozen: bool) -> None:
    model, report = post_training_quantize(
        Net(), "static", batches=BATCHES, freeze=frozen, report=True, progress=False
    )
    assert [entry.path for entry in report.most_sensitive()] in (["fc1", "fc2"], ["fc2", "fc1"])
    assert report.uncalibrated == ()
    assert isinstance(model.fc1.kernel, FrozenParam) is frozen
    if not frozen:
        again = jqinject.report(model, BATCHES[0], numbers=True)
        assert again.output_sqnr_db == report.output_sqnr_db
        np.testing.assert_allclose(freeze(nnx.clone(model))(BATCHES[0]), model(BATCHES[0]), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "more", "text"),
    [
        (("statics",), {}, r"activations must be one of"),
        (("static",), {}, r"cure: batches="),
        (("float",), {"report": True}, r"a report are made from data"),
        (("float",), {"report": True, "batches": BATCHES, "method": "cal"}, r"Net has no method 'cal'"),
    ],
)
def test_post_training_quantization_refuses(
    arguments: tuple[str, ...], more: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        post_training_quantize(Net(), *arguments, **more)  # pyright: ignore[reportArgumentType]


def test_a_frozen_model_reduces_nothing_to_find_its_ranges() -> None:
    layer = QuantLinear(6, 4, input_quant=Int8ActPerTensorMinMax, rngs=nnx.Rngs(0))
    calibrate(layer, BATCHES, progress=False)
    y = layer(BATCHES[0])
    frozen = freeze(layer, keep_masters=True)
    graphdef, state = nnx.split(frozen)
    text = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x)).lower(state, BATCHES[0]).as_text()
    assert "reduce" not in text
    np.testing.assert_allclose(frozen(BATCHES[0]), y, atol=1e-5)
    again = unfreeze(frozen)
    again(10 * BATCHES[0])
    average = again.input_quant.tensor_quant.scaling_impl.averaging_impl  # pyright: ignore[reportOptionalMemberAccess]
    assert int(average.counter[...]) == len(BATCHES) + 1
