"""ONNX models, run by onnxruntime: the numbers of the model, and real quantized ones in the file."""

import pickle
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export as jax_export

import jqinject
from jqinject.demo.classifier import Classifier
from jqinject.demo.recipes import CALIBRATION_STEPS, RECIPES
from jqinject.dot import QDotGeneral
from jqinject.export._marks import mark_quantizers
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear, QuantLSTM, QuantReLU
from jqinject.quant import (
    Fp4e2m1OCPActPerTensorFloat,
    Fp6e3m2OCPAct,
    Fp8e4m3ActPerTensorCurrent,
    Fp8e4m3OCPActPerTensorFloat,
    Fp8e4m3OCPWeightPerChannelFloat,
    Fp8e4m3WeightPerTensorCurrent,
    Fp8e5m2Act,
    Fp8e5m2FNUZWeightPerTensorFloat,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8ActPerTensorFloatMinMaxInit,
    Int8ActPerTensorMinMax,
    Int8ActPerTensorMSE,
    Int8ActPerTensorPercentile,
    Int8ActPerTensorRMS,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8WeightPerTensorFloat,
    SignedBinaryActPerTensorConst,
    SignedTernaryActPerTensorConst,
    Uint8ActPerTensorFloat,
)
from jqinject.quant.aqt import config_v4
from jqinject.quant_tensor import as_array, avg_pool, max_pool

REASON = "ONNX needs jax2onnx, onnx and onnxruntime: pip install 'jqinject[export]' onnxruntime"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of other packages, as they are imported
    pytest.importorskip("jax2onnx", reason=REASON)
    onnxruntime = pytest.importorskip("onnxruntime", reason=REASON)
    onnx = pytest.importorskip("onnx", reason=REASON)


COLLECTED = [
    Int8ActPerTensorMinMax,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorPercentile,
    Int8ActPerTensorRMS,
    Int8ActPerTensorMSE,
]


def run(proto, *inputs):
    """The first output, by onnxruntime, of a model that ONNX's own checker accepts."""
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, dict(zip(names, map(np.asarray, inputs), strict=True)))[0]


def calibrated(model, *inputs, steps=1):
    call = nnx.jit(lambda model, *inputs: as_array(model(*inputs)))
    for _ in range(steps):
        call(model, *inputs)
    return model


def served(model, *inputs):
    copy = nnx.clone(model)
    copy.eval()
    return np.asarray(nnx.jit(lambda model, *inputs: as_array(model(*inputs)))(copy, *inputs))


def nodes(proto, operator):
    return [node for node in proto.graph.node if node.op_type == operator]


def initializers(proto):
    return {entry.name: onnx.numpy_helper.to_array(entry) for entry in proto.graph.initializer}


def stored(proto, shape):
    """The one array of integers of this shape that is dequantized: integers, scale, zero point, axis."""
    known = initializers(proto)
    ((node, integers),) = [
        (node, known[node.input[0]])
        for node in nodes(proto, "DequantizeLinear")
        if node.input[0] in known and known[node.input[0]].shape == shape
    ]
    zero = known[node.input[2]] if len(node.input) > 2 else None
    axis = next((a.i for a in node.attribute if a.name == "axis"), None)
    return integers, known[node.input[1]], zero, axis


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (5, 8))


@pytest.fixture(scope="module")
def images():
    return jax.random.uniform(jax.random.key(0), (4, 8, 8, 1))


@pytest.mark.lengthy
@pytest.mark.parametrize("frozen", [False, True], ids=["quantized", "frozen"])
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, id=r.name, marks=[] if r.name == "int4" else pytest.mark.slow) for r in RECIPES],
)
def test_the_digits_classifier(recipe, frozen, images):
    model = calibrated(Classifier(recipe, rngs=nnx.Rngs(0)), images, steps=CALIBRATION_STEPS + 1)
    expected = served(model, images)
    if frozen:
        jqinject.freeze(model)
    (batch,) = jax_export.symbolic_shape("batch")
    proto = jqinject.export.onnx(model, jax.ShapeDtypeStruct((batch, 8, 8, 1), jnp.float32))
    # Within a step of the accumulator of the last layer: no value has gone over the edge of a rounding.
    np.testing.assert_allclose(run(proto, images), expected, atol=1e-5, rtol=0)
    assert run(proto, images[:1]).shape == (1, 10)
    integers, scale, zero, axis = stored(proto, (3, 3, 16, 32))
    assert integers.dtype == np.int8 and scale.shape == (32,) and not zero.any() and axis == 3
    assert len(np.unique(integers)) <= 2**recipe.weight_bits + (recipe.name == "ternary")
    assert len(nodes(proto, "QuantizeLinear")) == 4  # the image and three activations
    biases = [a for a in initializers(proto).values() if a.dtype == np.int32]
    assert sorted(a.shape for a in biases) == [(10,), (16,), (32,), (64,)]
    assert not any(a.dtype == np.float32 and a.size > 64 for a in initializers(proto).values())


@pytest.mark.heavy
def test_integers_scale_and_zero_point_are_the_layer_s(x):
    layer = QuantLinear(8, 4, weight_quant=ShiftedUint8WeightPerTensorFloat, use_bias=False, rngs=nnx.Rngs(0))
    proto = jqinject.export.onnx(layer, x)
    weight = layer.quant_weight()
    integers, scale, zero, axis = stored(proto, (8, 4))
    np.testing.assert_array_equal(integers, weight.int())
    assert (scale, zero, axis) == (float(weight.scale), int(weight.zero_point), None) and zero > 0
    assert not nodes(proto, "QuantizeLinear")
    np.testing.assert_allclose(run(proto, x), served(layer, x), atol=1e-6)


@pytest.mark.parametrize("weight", [Int8WeightPerTensorFloat, Int8WeightPerChannelFloat])
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_in_8_and_4_bits(weight, bits, x):
    layer = QuantLinear(8, 4, weight_quant=weight, weight_bit_width=bits, rngs=nnx.Rngs(0))
    proto = jqinject.export.onnx(layer, x)
    integers, scale, _, axis = stored(proto, (8, 4))
    np.testing.assert_array_equal(integers, layer.quant_weight().int())
    assert scale.size == (4 if axis == 1 else 1) and np.abs(integers).max() == 2 ** (bits - 1) - 1
    np.testing.assert_allclose(run(proto, x), served(layer, x), atol=1e-6)


@pytest.mark.parametrize(
    ("act", "dtype", "clamps"),
    [
        (Int8ActPerTensorFloat, np.int8, False),
        (ShiftedUint8ActPerTensorFloat, np.uint8, False),
        (Int8ActPerTensorFloat.let(bit_width=4), np.int8, True),
        (Int8ActPerTensorFloatMinMaxInit.let(min_val=-2.0, max_val=2.0), np.int8, False),
    ],
    ids=["int8", "shifted uint8", "int4", "learned scale"],
)
def test_static_quantizers_of_activations(act, dtype, clamps, x):
    model = calibrated(QuantIdentity(act), x, steps=3)
    proto = jqinject.export.onnx(model, x)
    (quantize,), (dequantize,) = nodes(proto, "QuantizeLinear"), nodes(proto, "DequantizeLinear")
    known = initializers(proto)
    assert dequantize.input[0] == quantize.output[0]
    assert known[quantize.input[2]].dtype == known[dequantize.input[2]].dtype == dtype
    np.testing.assert_array_equal(known[quantize.input[1]], model.act_quant.scale())
    np.testing.assert_array_equal(known[quantize.input[2]], model.act_quant.zero_point())
    assert bool(nodes(proto, "Max") and nodes(proto, "Min")) == clamps
    far = jnp.concatenate([x, 9 * x])
    output = run(jqinject.export.onnx(model, far), far)
    np.testing.assert_allclose(output, served(model, far), atol=1e-6, rtol=0)


@pytest.mark.parametrize("frozen", [False, True], ids=["calibrated", "frozen"])
@pytest.mark.parametrize("act", COLLECTED)
def test_ranges_that_were_collected_are_constants(act, frozen, x):
    layer = QuantLinear(8, 4, weight_quant=Int8WeightPerChannelFloat, input_quant=act, rngs=nnx.Rngs(0))
    jqinject.calibrate(layer, [x, 2 * x], progress=False)
    if frozen:
        jqinject.freeze(layer)
    proto = jqinject.export.onnx(layer, x)
    operators = [node.op_type for node in proto.graph.node]
    assert sorted(operators[:3]) == ["DequantizeLinear", "DequantizeLinear", "QuantizeLinear"]
    assert not {"ReduceMax", "Where", "Div", "Round", "Abs", "Max", "Clip"} & set(operators)
    known = initializers(proto)
    (quantize,) = nodes(proto, "QuantizeLinear")
    assert quantize.input[0] == proto.graph.input[0].name and set(quantize.input[1:]) <= set(known)
    far = 3 * x
    np.testing.assert_allclose(run(proto, far), served(layer, far), atol=1e-5)


def test_a_scale_of_the_data_is_computed(x, dynamic_quantizer):
    layer = QuantLinear(8, 4, input_quant=dynamic_quantizer, rngs=nnx.Rngs(0))
    proto = jqinject.export.onnx(layer, x)
    assert not nodes(proto, "QuantizeLinear") and len(nodes(proto, "DequantizeLinear")) == 1
    for scaled in (x, 100 * x):
        expected = served(layer, scaled)
        np.testing.assert_allclose(run(proto, scaled), expected, atol=1e-5 * np.abs(expected).max())


def test_other_roundings_are_computed_and_stored(x):
    model = calibrated(QuantIdentity(Int8ActPerTensorFloat, float_to_int_impl_type="floor"), x)
    proto = jqinject.export.onnx(model, x)
    assert nodes(proto, "Floor") and nodes(proto, "QuantizeLinear")
    np.testing.assert_allclose(run(proto, x), served(model, x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("act", [SignedBinaryActPerTensorConst, SignedTernaryActPerTensorConst])
def test_binary_and_ternary_activations(act, x):
    model = QuantIdentity(act, min_val=-0.5, max_val=0.5)
    proto = jqinject.export.onnx(model, x)
    assert len(nodes(proto, "QuantizeLinear")) == 1
    np.testing.assert_array_equal(run(proto, x), served(model, x))


def test_8_bit_floats_are_computed(x):
    fp8 = {"weight_quant": Fp8e4m3WeightPerTensorCurrent, "input_quant": Fp8e4m3ActPerTensorCurrent}
    layer = QuantLinear(8, 4, **fp8, rngs=nnx.Rngs(0))
    for model in (layer, jqinject.freeze(nnx.clone(layer))):
        np.testing.assert_allclose(run(jqinject.export.onnx(model, x), x), served(layer, x), atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True], ids=["quantized", "frozen"])
@pytest.mark.parametrize(
    ("weight", "dtype"),
    [
        (Fp8e4m3WeightPerTensorCurrent, jnp.float8_e4m3fn),
        (Fp8e4m3OCPWeightPerChannelFloat, jnp.float8_e4m3fn),
        (Fp8e5m2FNUZWeightPerTensorFloat, jnp.float8_e5m2fnuz),
    ],
)
def test_weights_in_8_bit_floats_are_stored_as_such(weight, dtype, frozen, x):
    layer = QuantLinear(8, 4, weight_quant=weight, use_bias=False, rngs=nnx.Rngs(0))
    expected, quantized = served(layer, x), layer.quant_weight()
    if frozen:
        jqinject.freeze(layer)
    proto = jqinject.export.onnx(layer, x)
    payload, scale, zero, axis = stored(proto, (8, 4))
    assert payload.dtype == dtype and zero is None and axis == (1 if quantized.scale.size > 1 else None)
    np.testing.assert_array_equal(payload, quantized.payload())
    np.testing.assert_allclose(payload.astype(np.float32) * scale, quantized.value, rtol=1e-6)
    np.testing.assert_allclose(run(proto, x), expected, atol=1e-6)


@pytest.mark.parametrize(
    "act", [Fp8e4m3OCPActPerTensorFloat, Fp8e5m2Act, Fp6e3m2OCPAct, Fp4e2m1OCPActPerTensorFloat]
)
def test_minifloats_of_activations_are_computed_without_bits(act):
    numbers = jnp.concatenate([s * jnp.arange(256.0) * 2.0**e for s in (1, -1) for e in (-20, -9, -3, 2)])
    model = QuantIdentity(act)
    calibrated(model, numbers / 64, steps=2)
    infinite = jnp.concatenate([numbers, jnp.array([jnp.inf, -jnp.inf, 3.3e38, jnp.nan])])
    exported = run(jqinject.export.onnx(model, infinite), infinite)
    np.testing.assert_array_equal(exported[:-2], served(model, infinite)[:-2])


@pytest.mark.heavy
def test_layers_that_run_both_ways():
    layer = QuantLSTM(3, 4, bidirectional=True, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 5, 3))
    expected = jax.tree.leaves(nnx.view(layer, use_running_average=True)(x))
    np.testing.assert_allclose(run(jqinject.export.onnx(layer, x), x), expected[0], atol=1e-6)


def test_a_quantizer_that_waits_is_left_out(x):
    model = QuantIdentity(Int8ActPerTensorFloat, quant_delay_steps=100)
    calibrated(model, x)
    proto = jqinject.export.onnx(model, x)
    assert not nodes(proto, "QuantizeLinear")
    np.testing.assert_array_equal(run(proto, x), x)


def test_16_bits_need_opset_21(x):
    model = calibrated(QuantIdentity(Int8ActPerTensorFloat, bit_width=16), x)
    assert not nodes(jqinject.export.onnx(model, x), "QuantizeLinear")
    proto = jqinject.export.onnx(model, x, opset=21)
    (quantize,) = nodes(proto, "QuantizeLinear")
    assert initializers(proto)[quantize.input[2]].dtype == np.int16
    np.testing.assert_allclose(run(proto, x), served(model, x), atol=1e-6, rtol=0)


def test_scales_along_two_axes_keep_integers(x):
    class Grouped(Int8WeightPerChannelFloat):
        scaling_impl_type = "const"
        scaling_init = jnp.linspace(0.001, 0.004, 32).reshape(8, 4)

    layer = QuantLinear(8, 4, weight_quant=Grouped, use_bias=False, rngs=nnx.Rngs(0))
    assert layer.quant_weight().scale.shape == (8, 4)
    proto = jqinject.export.onnx(layer, x)
    integers, scale, _, _ = stored(proto, (8, 4))
    np.testing.assert_array_equal(integers, layer.quant_weight().int())
    assert scale == 1
    np.testing.assert_allclose(run(proto, x), served(layer, x), atol=1e-6)


@pytest.mark.heavy
def test_pools(images):
    class Pools(nnx.Module):
        def __init__(self):
            self.conv = QuantConv(1, 3, (3, 3), rngs=nnx.Rngs(0))
            self.relu = QuantReLU()

        def __call__(self, x):
            y = self.relu(self.conv(x))
            y = max_pool(y, (3, 3), strides=(2, 2), padding="SAME")
            return avg_pool(y, (3, 2), strides=(1, 2), padding=((1, 1), (0, 0))).mean(axis=(1, 2))

    model = calibrated(Pools(), images)
    proto = jqinject.export.onnx(model, images)
    assert len(nodes(proto, "MaxPool")) == len(nodes(proto, "AveragePool")) == 1
    np.testing.assert_allclose(run(proto, images), served(model, images), atol=1e-6)


def test_composites_are_written_out(x):
    class Composed(nnx.Module):
        def __call__(self, x):
            body = jax.lax.composite(lambda x, s: jnp.round(x / s) * s, name="quant.fake_quant")
            return body(x, jnp.float32(0.25))

    np.testing.assert_array_equal(run(jqinject.export.onnx(Composed(), x), x), np.round(x * 4) / 4)


@pytest.mark.heavy
def test_a_stack_of_layers_is_computed(x):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return QuantLinear(8, 8, input_quant=Int8ActPerTensorFloat, rngs=rngs)

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = stack(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    model = calibrated(Stack(), x)
    np.testing.assert_allclose(run(jqinject.export.onnx(model, x), x), served(model, x), atol=1e-5)


def test_exports_leave_no_classes_behind(x):
    layer = calibrated(
        QuantLinear(8, 4, bias_quant=Int32Bias, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0)), x
    )

    def classes():
        kinds = {type(node) for _, node in nnx.iter_modules(layer)}
        return sum(len(kind.__subclasses__()) for kind in kinds)

    mark_quantizers(nnx.clone(layer))
    before = classes()
    for _ in range(20):
        mark_quantizers(nnx.clone(layer))
    assert classes() == before


def test_names_files_and_the_model_stays(x, tmp_path):
    layer = QuantLinear(8, 4, bias_quant=Int32Bias, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
    calibrated(layer, x)
    before = jax.tree.map(np.asarray, nnx.state(layer))
    path = tmp_path / "layer.onnx"
    proto = jqinject.export.onnx(layer, x, path=path, input_names=["tokens"], output_names=["scores"])
    assert onnx.load(path) == proto
    assert [entry.name for entry in (*proto.graph.input, *proto.graph.output)] == ["tokens", "scores"]
    assert type(layer) is QuantLinear and layer.contraction == "auto" and layer.input_quant.training
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), before)


def test_what_jax2onnx_can_not_write():
    class Odd(nnx.Module):
        def __call__(self, x):
            return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(
        ValueError, match=r"Odd has an operation that jax2onnx has no ONNX for: .*'pure_callback'"
    ):
        jqinject.export.onnx(Odd(), jnp.ones(2))


@pytest.mark.parametrize("kind", ["float16", "integers"])
def test_what_jax2onnx_writes_wrong_is_refused(kind):
    half = jnp.float16 if kind == "float16" else jnp.float32
    dot_general = QDotGeneral(config_v4(), rngs=nnx.Rngs(0)) if kind == "integers" else jax.lax.dot_general
    layer = nnx.Linear(8, 4, dtype=half, param_dtype=half, dot_general=dot_general, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"what jax2onnx made of Linear is not valid: (.|\n)*cure: a model in"
    ):
        jqinject.export.onnx(layer, jnp.ones((2, 8), half))


def test_a_method_with_keywords_and_flags(x):
    class Scores(nnx.Module):
        def __init__(self):
            self.dense = QuantLinear(8, 4, rngs=nnx.Rngs(0))

        def score(self, x, *, offset, negative):
            y = self.dense(x) + offset["by"]
            return -y if negative else y

    model, offset = jqinject.freeze(Scores()), jnp.arange(4.0)
    proto = jqinject.export.onnx(model, x, method="score", offset={"by": offset, "name": "b"}, negative=True)
    assert [held.name for held in proto.graph.input] == ["in_0", "in_1"]
    found = run(proto, x, offset)
    np.testing.assert_allclose(
        found, model.score(x, offset={"by": offset}, negative=True), rtol=1e-5, atol=1e-6
    )


def test_refusals(x, tmp_path):
    layer = QuantLinear(8, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"onnx takes an NNX module, got function"):
        jqinject.export.onnx(lambda x: x, x)
    with pytest.raises(TypeError, match=r"takes arrays or jax.ShapeDtypeStructs as inputs, got str"):
        jqinject.export.onnx(layer, "a")
    with pytest.raises(ValueError, match=r"opset must be at least 13"):
        jqinject.export.onnx(layer, x, opset=9)
    with pytest.raises(FileNotFoundError, match=r"no folder '.*nowhere' to write 'a.onnx' to"):
        jqinject.export.onnx(layer, x, path=tmp_path / "nowhere" / "a.onnx")


def test_without_jax2onnx(monkeypatch, x, tmp_path):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(
        ImportError, match=r"onnx needs the package 'jax2onnx'.*\n  cure: pip install \"jqinject\[export\]"
    ):
        jqinject.export.onnx(QuantLinear(8, 4, rngs=nnx.Rngs(0)), x, path=tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_it_prints_a_line(x, tmp_path):
    layer = QuantLinear(8, 3, input_quant=Int8ActPerTensorFloatMinMaxInit, input_min_val=-1.0, input_max_val=1.0,
                        rngs=nnx.Rngs(0))  # fmt: skip
    model = jqinject.export.onnx(layer, x, path=tmp_path / "one.onnx")
    shown = repr(model)
    assert len(shown) < 240 and "\n" not in shown
    assert "'QuantLinear', opset" in shown and "DequantizeLinear" in shown and "in_0 -> " in shown
    assert isinstance(model.proto, onnx.ModelProto) and model == model.proto
    model.save(tmp_path / "two.onnx")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    assert pickle.loads(pickle.dumps(model)) == model


class Convolutions(nnx.Module):
    """Three convolutions and a dense layer, all inputs and outputs quantized; biases are quantized or not."""

    def __init__(self, bias_quant):
        rngs = nnx.Rngs(0)
        layer = {"bias_quant": bias_quant, "bias_init": nnx.initializers.normal(1.0), "rngs": rngs}
        conv = layer | {"weight_quant": Int8WeightPerChannelFloat, "return_quant_tensor": True}
        self.image = QuantIdentity(Collected, return_quant_tensor=True, rngs=rngs)
        self.convs = nnx.List(
            QuantConv(size, 8, (3, 3), strides=strides, **conv) for size, strides in ((1, 1), (8, 2), (8, 1))
        )
        self.relus = nnx.List(QuantReLU(CollectedRelu, return_quant_tensor=True, rngs=rngs) for _ in range(3))
        self.fc = QuantLinear(128, 10, weight_quant=Int8WeightPerTensorFloat, output_quant=Collected, **layer)

    def __call__(self, x):
        x = self.image(x)
        for conv, relu in zip(self.convs, self.relus, strict=True):
            x = relu(conv(x))
        return self.fc(x.reshape((x.shape[0], -1)))


class Collected(Int8ActPerTensorFloat):
    collect_stats_steps = 1


class CollectedRelu(Uint8ActPerTensorFloat):
    collect_stats_steps = 1


@pytest.mark.heavy
@pytest.mark.parametrize("bias_quant", [Int32Bias, None], ids=["int32", "float"])
def test_onnxruntime_contracts_integers(bias_quant, images, tmp_path):
    model = calibrated(Convolutions(bias_quant), images, steps=2)
    proto = jqinject.export.onnx(model, images, output_names=["logits"])
    assert not nodes(proto, "Add") and not nodes(proto, "Max") and len(nodes(proto, "Relu")) == 3
    assert [entry.name for entry in proto.graph.output] == ["logits"]
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert (len(nodes(optimized, "QLinearConv")), len(nodes(optimized, "QGemm"))) == (3, 1)
    difference = run(proto, images) - served(model, images)
    scale = initializers(proto)[nodes(proto, "DequantizeLinear")[-1].input[1]]
    assert np.abs(difference / scale).max() < 1.5  # a sum of floats may fall on the other side of a rounding


def test_a_bias_stays_where_it_is_not_one_vector_added_to_a_contraction(x):
    class Sums(nnx.Module):
        def __init__(self):
            self.fc = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
            self.offset = nnx.Param(jnp.arange(40.0).reshape(5, 8))
            self.bias = nnx.Param(jnp.arange(8.0))

        def __call__(self, x):
            y = self.fc(x)
            return jnp.maximum(y + self.bias[...], 0.5) + y + self.offset[...]

    model = Sums()
    proto = jqinject.export.onnx(model, x)
    assert len(nodes(proto, "Add")) == 3 and len(nodes(proto, "Max")) == 1
    np.testing.assert_allclose(run(proto, x), served(model, x), atol=1e-5)
