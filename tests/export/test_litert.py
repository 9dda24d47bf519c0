"""LiteRT files, run by LiteRT's interpreter: integer operations alone, and the integers of the model."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.nn import QuantLinear
from jqinject.odml import Int4Weight, Int8Act, Int8Weight, Int16Act, OdmlConversion, OdmlQat
from jqinject.quant import Int8DynamicActPerRowFloat, Int8WeightPerChannelFloat

REASON = "LiteRT files need its converter and interpreter: pip install 'jqinject[litert]'"
pytest.importorskip("litert_converter", reason=REASON)
interpreters = pytest.importorskip("ai_edge_litert.interpreter", reason=REASON)
schema = pytest.importorskip("ai_edge_litert.schema_py_generated", reason=REASON)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.fc1, self.fc2 = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(nnx.relu(self.fc1(x)))


class Cnn(nnx.Module):
    """Convolution and batch norm, max-pool, a depthwise convolution, average-pool, dense."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.fc = nnx.Linear(32, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.depthwise(x)), (2, 2), (2, 2))
        return self.fc(x.reshape(x.shape[0], -1))


class Attention(nnx.Module):
    """Attention with two heads, and a residual connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.out = (nnx.Linear(16, 16, rngs=rngs) for _ in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, features = x.shape
        q, k, v = (layer(x).reshape(batch, length, 2, 8).swapaxes(1, 2) for layer in (self.q, self.k, self.v))
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / jnp.sqrt(8.0), axis=-1)
        return x + self.out((weights @ v).swapaxes(1, 2).reshape(batch, length, features))


MODELS: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], tuple[int, ...], set[str]]] = {
    "mlp": (Mlp, (4, 16), {"FULLY_CONNECTED"}),
    "cnn": (Cnn, (2, 8, 8, 3), {"CONV_2D", "DEPTHWISE_CONV_2D", "MAX_POOL_2D", "AVERAGE_POOL_2D"}),
    "attention": (Attention, (2, 6, 16), {"BATCH_MATMUL", "FULLY_CONNECTED", "MUL", "SOFTMAX", "ADD"}),
}


def converted(make: Callable[[nnx.Rngs], nnx.Module], x: jax.Array, rule: Rule | None = None) -> nnx.Module:
    model = OdmlQat(rule).quantize(make(nnx.Rngs(0)), x)
    model.train()
    nnx.jit(lambda model, x: model(x))(model, x)
    model.eval()
    return OdmlConversion().quantize(model, x)


def loaded(file: bytes) -> Any:
    interpreter = interpreters.Interpreter(
        model_content=file,
        experimental_op_resolver_type=interpreters.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    interpreter.allocate_tensors()
    return interpreter


def run(file: bytes, x: jax.Array) -> np.ndarray:
    interpreter = loaded(file)
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.asarray(x))
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def operations(file: bytes) -> dict[str, set[str]]:
    """Name of an operation -> the dtypes of its activations and weights."""
    interpreter = loaded(file)
    dtypes = {tensor["index"]: np.dtype(tensor["dtype"]).name for tensor in interpreter.get_tensor_details()}
    dtypes_of: dict[str, set[str]] = {}
    for operation in interpreter._get_ops_details():
        places = [*operation["inputs"], *operation["outputs"]]
        dtypes_of.setdefault(operation["op_name"], set()).update(dtypes[p] for p in places if p >= 0)
    return dtypes_of


def step_of_output(file: bytes) -> float:
    """The scale of the integers before the last DEQUANTIZE."""
    interpreter = loaded(file)
    (last,) = [op for op in interpreter._get_ops_details() if op["op_name"] == "DEQUANTIZE"]
    details = {tensor["index"]: tensor for tensor in interpreter.get_tensor_details()}
    return float(details[last["inputs"][0]]["quantization"][0])


@pytest.mark.parametrize("name", MODELS)
def test_every_operation_is_on_integers_and_agrees_within_a_step(name: str) -> None:
    make, shape, expected = MODELS[name]
    x = jax.random.normal(jax.random.key(1), shape)
    with jax.numpy_dtype_promotion("standard"):  # Flax divides the sums of a pool by an integer
        model = converted(make, x)
        file = jqinject.export.tflite(model, x)
        outputs = np.asarray(model(x))  # pyright: ignore[reportCallIssue]
    kinds = operations(file)
    assert expected <= set(kinds)
    floats = {kind for kind, dtypes in kinds.items() if "float32" in dtypes}
    assert floats == {"QUANTIZE", "DEQUANTIZE"}
    steps = (run(file, x) - outputs) / step_of_output(file)
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
    assert np.abs(steps).max() < 1.5


#: Quantizers of weights and activations, and the types of activations and weights in the file.
SCHEMES = {
    "16x8": (Int8Weight, Int16Act, ("INT16", "INT8")),
    "8x4": (Int4Weight, Int8Act, ("INT8", "INT4")),
    "16x4": (Int4Weight, Int16Act, ("INT16", "INT4")),
}


class Gated(nnx.Module):
    """A gain, a sigmoid and a tanh."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gain = nnx.Param(jnp.linspace(0.5, 1.5, 16))
        self.a, self.b, self.c = (nnx.Linear(16, 16, rngs=rngs) for _ in range(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x * self.gain[...]
        return self.c(nnx.sigmoid(self.a(x)) * jnp.tanh(self.b(x)))


def types_of(file: bytes) -> dict[str, list[list[str]]]:
    """Name of an operation -> the types of the operands and results of each, as the file has them."""
    names = {number: name for name, number in vars(schema.TensorType).items() if isinstance(number, int)}
    kinds = {number: name for name, number in vars(schema.BuiltinOperator).items() if isinstance(number, int)}
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file, 0))
    types: dict[str, list[list[str]]] = {}
    (graph,) = model.subgraphs
    for op in graph.operators:
        code = model.operatorCodes[op.opcodeIndex]
        kind = kinds[max(code.builtinCode, code.deprecatedBuiltinCode)]
        places = [place for place in (*op.inputs, *op.outputs) if place >= 0]
        types.setdefault(kind, []).append([names[graph.tensors[place].type] for place in places])
    return types


@pytest.mark.parametrize(
    ("name", "scheme"),
    [pair for pair in itertools.product([*MODELS, "gated"], SCHEMES) if pair != ("cnn", "16x4")],
)
def test_activations_of_16_and_weights_of_4_bits(name: str, scheme: str) -> None:
    make, shape, expected = MODELS.get(name, (Gated, (4, 16), {"LOGISTIC", "TANH", "MUL"}))
    weight, act, (wide, narrow) = SCHEMES[scheme]
    x = jax.random.normal(jax.random.key(1), shape)

    def with_biases(rngs: nnx.Rngs) -> nnx.Module:
        model = make(rngs)
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            if path[-1] == "bias":
                variable[...] = 0.3 * jax.random.normal(rngs(), variable.shape)
        return model

    with jax.numpy_dtype_promotion("standard"):
        model = converted(with_biases, x, Rule(weight_quant=weight, output_quant=act))
        file = jqinject.export.tflite(model, x)
        outputs = np.asarray(model(x))  # pyright: ignore[reportCallIssue]
    types = types_of(file)
    assert expected <= {*types}
    floats = {kind for kind, own in types.items() if any("FLOAT32" in tensors for tensors in own)}
    assert floats == {"QUANTIZE", "DEQUANTIZE"}
    for kind, bias in (("FULLY_CONNECTED", "INT32"), ("CONV_2D", "INT64"), ("DEPTHWISE_CONV_2D", "INT64")):
        for tensors in types.get(kind, []):
            assert tensors == [wide, narrow, bias if wide == "INT16" else "INT32", wide]
    steps = (run(file, x) - outputs) / step_of_output(file)
    assert np.abs(steps).max() < 2.5


def test_a_convolution_with_weights_of_4_bits_and_activations_of_16_is_refused() -> None:
    x, rule = jnp.ones((1, 4, 4, 3)), Rule(weight_quant=Int4Weight, output_quant=Int16Act)
    model = converted(lambda rngs: nnx.Conv(3, 4, (3, 3), rngs=rngs), x, rule)
    with pytest.raises(
        ValueError, match=r"convolution of 16-bit activations with 4-bit weights; expected[\s\S]*cure:"
    ):
        jqinject.export.tflite(model, x)
    first = Rule(op="conv_general_dilated", weight_quant=Int8Weight, output_quant=Int16Act)
    model = converted(lambda rngs: nnx.Conv(3, 4, (3, 3), rngs=rngs), x, [first, rule])
    assert types_of(jqinject.export.tflite(model, x))["CONV_2D"] == [["INT16", "INT8", "INT64", "INT16"]]


def test_what_the_converter_has_not_in_16_bits_is_refused_with_its_reason() -> None:
    rule = Rule(weight_quant=Int8Weight, output_quant=Int16Act)
    model = converted(lambda rngs: nnx.Embed(4, 16, rngs=rngs), jnp.arange(4), rule)
    with pytest.raises(
        ValueError, match=r"LiteRT's converter refuses the program: [\s\S]*'tfl.gather_nd' op operand #0"
    ):
        jqinject.export.tflite(model, jnp.arange(4))


def test_a_path_is_the_last_argument_or_a_keyword_and_names_are_those_of_the_signature(tmp_path: Any) -> None:
    x = jnp.ones((1, 16))
    model = Mlp(nnx.Rngs(0))
    file = jqinject.export.tflite(
        model, x, tmp_path / "a.tflite", input_names=["image"], output_names=["logits"]
    )
    assert (tmp_path / "a.tflite").read_bytes() == file
    jqinject.export.tflite(model, x, path=tmp_path / "b.tflite")
    signatures = loaded(file).get_signature_list()
    assert signatures == {"serving_default": {"inputs": ["image"], "outputs": ["logits"]}}
    np.testing.assert_allclose(run((tmp_path / "b.tflite").read_bytes(), x), model(x), atol=1e-5)


def test_what_a_device_cannot_do_is_refused_with_its_cure(tmp_path: Any) -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    with pytest.raises(ValueError, match=r"the size batch .* is symbolic.*\n.*export with a number"):
        jqinject.export.tflite(Mlp(nnx.Rngs(0)), jax.ShapeDtypeStruct((batch, 16), jnp.float32))
    layer = QuantLinear(
        8, 4, weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowFloat, rngs=nnx.Rngs(0)
    )
    with pytest.raises(
        ValueError, match=r"_quant quantizes, and is not marked for devices.*\n.*OdmlConversion"
    ):
        jqinject.export.tflite(layer, jnp.ones((2, 8)))
    with pytest.raises(ValueError, match="input_names names 2 arrays, and the program has 1"):
        jqinject.export.tflite(Mlp(nnx.Rngs(0)), jnp.ones((1, 16)), input_names=["a", "b"])
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        jqinject.export.tflite(Mlp(nnx.Rngs(0)), jnp.ones((1, 16)), tmp_path / "none" / "a.tflite")
