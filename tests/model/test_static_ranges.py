"""Static ranges of activations that never saw data: who names them, who refuses, who warns."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject import Rule, UncalibratedWarning
from jqinject.core import FixedRange, SimpleMovingAverage
from jqinject.dot import QDotGeneral
from jqinject.model import NothingFrozenWarning
from jqinject.model.walk import ModelIndex, uncalibrated
from jqinject.nn import QuantIdentity, QuantLinear, TruncAvgPool
from jqinject.quant.aqt import ConfigV4, config_v4
from jqinject.quant_tensor import IntQuantTensor

X = jax.random.normal(jax.random.key(0), (4, 6))
STATIC = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorFloat)
PATHS = ("first.input_quant", "second.input_quant")


class Net(nnx.Module):
    def __init__(self) -> None:
        self.first, self.second = (nnx.Linear(6, 6, rngs=nnx.Rngs(seed)) for seed in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def quantized() -> Any:
    return jqinject.quantize(Net(), STATIC)


def calibrated() -> Any:
    model = quantized()
    jqinject.calibrate(model, [X], progress=False)
    return model


class FixedAct(q.Int8ActPerTensorAbsMax):
    calibration_impl = FixedRange(-1.0, 1.0)


class Never(q.Int8ActPerTensorFloat):
    scaling_impl_type = "stats"


COLLECT = [
    q.Int8ActPerTensorFloat,
    q.Int8ActPerTensorMinMax,
    q.Int8ActPerTensorPercentile,
    q.ShiftedUint8ActPerTensorFloat,
    q.Fp8e4m3OCPActPerTensorFloat,
    q.Fp8e4m3ActPerTensorDelayed,
    Never,
]
READY = [
    q.Int8DynamicActPerRowAbsMax,
    q.Int8DynamicActPerTensorFloat,
    q.MXInt8Act,
    q.Fp8e4m3ActPerTensorCurrent,
    q.Int8ActPerTensorFloatMinMaxInit.let(min_val=-1.0, max_val=1.0),
    q.SignedBinaryActPerTensorConst.let(min_val=-1.0, max_val=1.0),
    FixedAct,
    q.NoneActQuant,
]


@pytest.mark.parametrize("act", COLLECT, ids=lambda act: act.__name__)
def test_evaluation_warns_once_of_a_range_that_never_saw_data(act: type) -> None:
    layer = QuantIdentity(act)
    layer.eval()
    jax.jit(lambda x: layer(x))(X)  # of a traced array nothing is read
    with pytest.warns(
        UncalibratedWarning, match=rf"QuantIdentity\.act_quant \({act.__name__}\).*\n.*calibrate"
    ) as seen:
        for _ in range(2):
            layer(X)
    assert len(seen) == 1
    layer.train()
    layer(X)
    other = nnx.clone(layer)
    other.eval()
    other(X)  # it saw data


@pytest.mark.heavy
@pytest.mark.parametrize("act", READY, ids=str)
def test_a_range_that_needs_no_data_is_calibrated_as_it_is(act: type) -> None:
    layer = QuantLinear(32, 2, weight_quant=q.Int8WeightPerChannelFloat, input_quant=act, rngs=nnx.Rngs(0))
    layer.eval()
    x = jnp.ones((2, 32))
    layer(x)
    assert jqinject.report(layer, x).uncalibrated == ()
    jqinject.freeze(layer)


@pytest.mark.heavy
def test_freeze_and_export_refuse_and_name_every_path() -> None:
    model = quantized()
    before = nnx.graphdef(model)
    for refused, name in (
        (jqinject.freeze, "freeze"),
        (lambda m: jqinject.export.stablehlo(m, X), "stablehlo"),
    ):
        with pytest.raises(
            ValueError, match=rf"{name}: {', '.join(PATHS)}: .*never saw data(.|\n)*allow_unc"
        ):
            refused(model)
    assert nnx.graphdef(model) == before
    jqinject.export.stablehlo(model, X, allow_uncalibrated=True)
    one = quantized()
    one.first(X)
    with pytest.raises(ValueError, match=r"freeze: second\.input_quant: "):
        jqinject.freeze(one)
    frozen = jqinject.freeze(one, allow_uncalibrated=True)
    assert jqinject.report(frozen, X).uncalibrated == ("second.input_quant",)
    one.second.input_quant.disable_quant = True
    jqinject.freeze(one)  # what is off quantizes nothing


@pytest.mark.heavy
def test_reports_list_them() -> None:
    report = jqinject.report(quantized(), X)
    assert report.uncalibrated == PATHS
    said = f"static ranges that never saw data: {', '.join(PATHS)}"
    assert said in str(report) and f"<p>{said}</p>" in report.html()
    assert report.as_dict()["uncalibrated"] == list(PATHS)
    assert "never saw data" not in str(jqinject.report(calibrated(), X))


@pytest.mark.heavy
def test_a_plan_lists_what_is_to_be_calibrated() -> None:
    between = Rule(op="relu", output_quant=q.Int8ActPerTensorMinMax)
    plan = jqinject.rules_report(Net(), [STATIC, between], X)
    assert plan.uncalibrated == (*PATHS, "op_quant.held.relu0_output")
    assert "\nto be calibrated: first.input_quant\n" in str(plan)
    assert jqinject.report(jqinject.quantize(Net(), [STATIC, between], inputs=X), X).uncalibrated == (
        *PATHS,
        "op_quant.held.relu0_output",
    )
    dynamic = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8DynamicActPerRowAbsMax)
    assert jqinject.rules_report(Net(), dynamic).uncalibrated == ()
    abstract = nnx.eval_shape(Net)
    assert jqinject.rules_report(
        abstract, Rule("first", input_quant=q.Int8ActPerTensorFloat)
    ).uncalibrated == ("first.input_quant",)


def test_a_state_with_ranges_is_calibrated() -> None:
    source = calibrated()
    loaded, updated = quantized(), quantized()
    jqinject.load_state(loaded, nnx.to_pure_dict(nnx.state(source)))
    nnx.update(updated, nnx.state(source))
    scales = {"input_quant": {"tensor_quant": {"scaling_impl": {"value": np.float32(0.5)}}}}
    partly = quantized()
    jqinject.load_state(partly, {"first": scales, "second": scales}, missing=...)
    for model in (nnx.clone(source), loaded, updated, partly):
        jqinject.freeze(model)
    abstract = nnx.eval_shape(lambda: jqinject.freeze(quantized()))  # not known, so not refused
    assert nnx.graphdef(abstract) == nnx.graphdef(jqinject.freeze(source))


def test_every_layer_of_a_stack_has_to_see_data() -> None:
    def make(rngs: nnx.Rngs) -> QuantLinear:
        return QuantLinear(6, 6, input_quant=q.Int8ActPerTensorFloat, rngs=rngs)

    stack = nnx.vmap(make)(nnx.Rngs(0).split(2))
    counter = stack.input_quant.tensor_quant.scaling_impl.counter
    for counts, missing in (([0, 0], ("input_quant",)), ([1, 0], ("input_quant",)), ([1, 1], ())):
        counter[...] = jnp.array(counts, jnp.float32)
        assert uncalibrated(ModelIndex(stack)) == missing


@pytest.mark.heavy
def test_contractions_and_accumulators_too() -> None:
    operand = ConfigV4.fwd_lhs.let(averaging_impl=SimpleMovingAverage)
    op = QDotGeneral(ConfigV4.let(fwd_lhs=operand), lhs_shape=(1, 6), rhs_shape=(6, 2))
    layer = nnx.Linear(6, 2, dot_general=op, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"freeze: dot_general: "):
        jqinject.freeze(layer)
    layer.eval()
    with pytest.warns(UncalibratedWarning, match=r"QuantOperand\.quant"):
        layer(X)
    sums = IntQuantTensor.from_int(jnp.arange(4).reshape(1, 4, 1), 1.0, 0.0, 16, signed=True)
    pool = TruncAvgPool((2,), trunc_quant=q.ShiftRoundSaturateTo8bit)
    assert uncalibrated(ModelIndex(pool)) == ("trunc_quant",)
    assert jqinject.calibrate(pool, [(sums,)], progress=False).quantizers == ("trunc_quant",)
    pool(sums)


def test_quantizers_between_operations_warn_by_the_name_of_their_site() -> None:
    model = jqinject.quantize(Net(), Rule(op="relu", output_quant=q.Int8ActPerTensorMinMax), inputs=X)
    model.eval()
    with pytest.warns(
        UncalibratedWarning, match=r"op_quant\['relu0_output'\] \(Int8ActPerTensorMinMax\) quant"
    ):
        model(X)


def test_a_model_without_quantizers_freezes_with_a_warning() -> None:
    with pytest.warns(NothingFrozenWarning, match=r"Net has no quantizer, so nothing was frozen"):
        jqinject.freeze(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jqinject.freeze(jqinject.freeze(calibrated()))
        jqinject.freeze(nnx.Linear(6, 2, dot_general=QDotGeneral(config_v4()), rngs=nnx.Rngs(0)))
