"""What Flax's own tests ask of its layers, asked of every layer: without quantizers, with them, and frozen."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jqinject
from jqinject import nn
from jqinject.proxy import QuantProxyFromInjector
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8Training,
    Int8WeightPerChannelFloat,
    TruncTo8bit,
    Uint8ActPerTensorFloat,
)
from jqinject.quant_tensor import QuantTensor, as_array

ACT, MINMAX = Int8ActPerTensorFloat, Int8ActPerTensorMinMax
WEIGHTS = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": MINMAX}
OUTPUT = {"output_quant": ACT, "input_quant": MINMAX}
CELL = {"weight_quant": Int8WeightPerChannelFloat, "io_quant": ACT, "gate_acc_quant": ACT}
X = jax.random.normal(jax.random.key(0), (2, 6, 4))
IMAGE = jax.random.normal(jax.random.key(1), (2, 6, 6, 4))
INTEGERS = nn.QuantIdentity(return_quant_tensor=True)(IMAGE)
STATE = jnp.ones((2, 3))


class Layer(NamedTuple):
    """A row: arguments, inputs and quantizers of a layer, its parent in Flax, and its twin in Linen."""

    arguments: tuple[Any, ...]
    inputs: tuple[Any, ...]
    quantizers: dict[str, Any]
    parent: Callable[..., Any] | None = None
    linen: Any = None
    keywords: dict[str, Any] = {}


LAYERS = {
    "QuantLinear": Layer((4, 3), (X,), WEIGHTS, nnx.Linear, linen.Dense(3)),
    "QuantLinearGeneral": Layer((4, (2, 3)), (X,), WEIGHTS, nnx.LinearGeneral, linen.DenseGeneral((2, 3))),
    "QuantEinsum": Layer(
        ("btf,fo->bto", (4, 3), (3,)), (X,), WEIGHTS, nnx.Einsum, linen.Einsum((4, 3), "btf,fo->bto")
    ),
    "QuantLoRALinear": Layer((4, 3), (X,), WEIGHTS, nnx.LoRALinear, keywords={"lora_rank": 2}),
    "QuantEmbed": Layer(
        (5, 4),
        (jnp.arange(6).reshape(2, 3) % 5,),
        {"weight_quant": Int8WeightPerChannelFloat, "output_quant": ACT},
        nnx.Embed,
        linen.Embed(5, 4),
    ),
    "QuantConv": Layer((4, 3, (3, 3)), (IMAGE,), WEIGHTS, nnx.Conv, linen.Conv(3, (3, 3))),
    "QuantConvTranspose": Layer(
        (4, 3, (3, 3)), (IMAGE,), WEIGHTS, nnx.ConvTranspose, linen.ConvTranspose(3, (3, 3))
    ),
    "QuantBatchNorm": Layer((4,), (X,), OUTPUT, nnx.BatchNorm, linen.BatchNorm(use_running_average=False)),
    "QuantLayerNorm": Layer((4,), (X,), OUTPUT, nnx.LayerNorm, linen.LayerNorm()),
    "QuantRMSNorm": Layer((4,), (X,), OUTPUT, nnx.RMSNorm, linen.RMSNorm()),
    "QuantGroupNorm": Layer((4, 2), (X,), OUTPUT, nnx.GroupNorm, linen.GroupNorm(2)),
    "QuantScaleBias": Layer((4,), (X,), WEIGHTS),
    "QuantMultiHeadAttention": Layer(
        (2, 4),
        (X,),
        {"in_proj_weight_quant": Int8WeightPerChannelFloat, "q_scaled_quant": ACT, "k_transposed_quant": ACT},
        nnx.MultiHeadAttention,
        linen.MultiHeadDotProductAttention(2),
        {"decode": False},
    ),
    "QuantScaledDotProductAttention": Layer(
        (), (X[:, :, None],) * 3, {"q_scaled_quant": ACT, "v_quant": ACT, "sdpa_output_quant": ACT}
    ),
    "QuantSimpleCell": Layer((4, 3), (STATE, X[:, 0]), CELL, nnx.SimpleCell, linen.SimpleCell(3)),
    "QuantGRUCell": Layer((4, 3), (STATE, X[:, 0]), CELL, nnx.GRUCell),
    "QuantLSTMCell": Layer((4, 3), ((STATE, STATE), X[:, 0]), CELL, nnx.LSTMCell, linen.LSTMCell(3)),
    "QuantOptimizedLSTMCell": Layer((4, 3), ((STATE, STATE), X[:, 0]), CELL, nnx.OptimizedLSTMCell),
    "QuantRNN": Layer((4, 3), (X,), CELL),
    "QuantLSTM": Layer((4, 3), (X,), CELL),
    "QuantIdentity": Layer((), (X,), {"act_quant": ACT}),
    "QuantReLU": Layer((), (X,), {"act_quant": Uint8ActPerTensorFloat}),
    "QuantSigmoid": Layer((), (X,), {"act_quant": Uint8ActPerTensorFloat}),
    "QuantTanh": Layer((), (X,), {"act_quant": ACT}),
    "QuantHardTanh": Layer((), (X,), {"act_quant": ACT}),
    "QuantHardSwish": Layer((), (X,), {"act_quant": Uint8ActPerTensorFloat}),
    "QuantEltwiseAdd": Layer((), (X, X), OUTPUT),
    "QuantConcat": Layer((), ([X, X],), OUTPUT),
    "QuantMaxPool": Layer(((2, 2),), (IMAGE,), OUTPUT, keywords={"return_quant_tensor": False}),
    "QuantAvgPool": Layer(((2, 2),), (IMAGE,), OUTPUT, keywords={"return_quant_tensor": False}),
    "QuantUpsample": Layer((2,), (IMAGE,), {}, keywords={"return_quant_tensor": False}),
    "QuantCheckpoint": Layer((), (X,), {"act_quant": ACT}),
    **dict.fromkeys(
        ("TruncAvgPool", "TruncAvgPool2d"), Layer(((2, 2),), (INTEGERS,), {"trunc_quant": TruncTo8bit})
    ),
    "TruncAdaptiveAvgPool2d": Layer((2,), (INTEGERS,), {"trunc_quant": TruncTo8bit}),
}
NAMES_IN_LINEN = {"if_": "if", "dense_i": "i", "dense_h": "h"}
NEED_QUANTIZERS = {"QuantCheckpoint", *(name for name in LAYERS if name.startswith("Trunc"))}
CASES = [
    (name, mode)
    for name in LAYERS
    for mode in ("without", "with", "frozen")
    if name not in {"without": NEED_QUANTIZERS, "frozen": {"QuantUpsample"}}.get(mode, ())
]


class Pair(nnx.Module):
    """A layer beside its parent in Flax, whose class Flax's tools change too."""

    def __init__(self, name: str, mode: str) -> None:
        row = LAYERS[name]
        quantizers = row.quantizers if mode != "without" else dict.fromkeys(row.quantizers)
        streams = {} if name == "QuantUpsample" else {"rngs": nnx.Rngs(0)}
        self.layer = getattr(nn, name)(*row.arguments, **row.keywords, **streams, **quantizers)
        streams = {"rngs": nnx.Rngs(0)}
        self.parent = None if row.parent is None else row.parent(*row.arguments, **row.keywords, **streams)

    def __call__(self, *inputs: Any) -> Any:
        return self.layer(*inputs) if self.parent is None else (self.layer(*inputs), self.parent(*inputs))


def _model(name: str, mode: str) -> Pair:
    model = Pair(name, mode)
    model(*LAYERS[name].inputs)  # ranges of activations
    model.eval()
    return jqinject.freeze(model) if mode == "frozen" else model


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, QuantTensor)


def _assert_same(values: Any, expected: Any) -> None:
    assert jax.tree.structure(values) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, values, expected)


@pytest.fixture
def classes_as_before():
    """`nnx.tabulate` leaves on a class what it inherits, `sow` too, which `nnx.capture` then wraps."""
    before = {kind: dict(vars(kind)) for kind in _subclasses(nnx.Module)}
    yield
    for kind, members in before.items():
        for name, member in tuple(vars(kind).items()):
            if name not in members:
                delattr(kind, name)
            elif isinstance(member, FunctionType):
                setattr(kind, name, members[name])


def _subclasses(kind: type) -> set[type]:
    below = kind.__subclasses__()
    return {*below, *(further for subclass in below for further in _subclasses(subclass))}


def test_every_layer_has_a_row():
    layers = {n for n in dir(nn) if n.startswith(("Quant", "Trunc")) and isinstance(getattr(nn, n), type)}
    assert layers - {"QuantCat"} == set(LAYERS)
    assert nn.QuantCat is nn.QuantConcat


@pytest.mark.usefixtures("classes_as_before")
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_tools_that_replace_methods(name, mode):
    model, inputs = _model(name, mode), LAYERS[name].inputs
    kinds = {type(module) for _, module in nnx.iter_modules(model)}
    methods = {
        (kind, n): getattr(kind, n) for kind in kinds for n in dir(kind) if n[0] != "_" or n == "__call__"
    }
    expected = model(*inputs)

    outputs, captured = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(*inputs)
    table = nnx.tabulate(model, *inputs, console_kwargs={"force_terminal": False, "width": 400})
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in table.splitlines() if "│" in line]
    assert ["layer", name] in rows
    _assert_same(outputs, expected)
    (output,) = captured["layer"]["__call__"].get_value()
    _assert_same(output, expected if model.parent is None else expected[0])
    for (kind, method), function in methods.items():
        if isinstance(function, FunctionType):
            assert getattr(kind, method) is function, (kind, method)
    _assert_same(model(*inputs), expected)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_tools_that_only_look(name, mode, capsys):
    model, inputs = _model(name, mode), LAYERS[name].inputs
    nnx.display(model)
    assert name in capsys.readouterr().out
    info = nnx.view_info(model)
    switched = any(isinstance(module, QuantProxyFromInjector) for _, module in nnx.iter_modules(model))
    assert ("use_running_average: bool | None = None\n    evaluation mode" in info) == switched
    assert dict(nnx.iter_modules(model))["layer",] is model.layer
    graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)
    assert all(issubclass(type(leaf), nnx.Param) for _, leaf in nnx.to_flat_state(parameters))
    expected = model(*inputs)
    _assert_same(nnx.merge(graphdef, parameters, rest)(*inputs), expected)
    shapes = nnx.eval_shape(lambda model, inputs: model(*inputs), model, inputs)
    assert jax.tree.map(lambda y: (y.shape, y.dtype), shapes) == jax.tree.map(
        lambda y: (y.shape, y.dtype), expected
    )


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_transforms(name, mode):
    model, inputs = _model(name, mode), LAYERS[name].inputs

    @nnx.jit
    def step(model, inputs):
        def loss(model, inputs):
            outputs = model(*inputs)
            return sum(
                jnp.sum(as_array(leaf) ** 2) for leaf in jax.tree.leaves(outputs, is_leaf=_is_tensor)
            ), outputs

        return nnx.grad(nnx.remat(loss), has_aux=True)(model, inputs)

    gradients, outputs = step(model, inputs)
    if mode == "without" and model.parent is not None:
        _assert_same(*outputs)
    expected = model(*inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), outputs, expected)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", [name for name, row in LAYERS.items() if row.linen is not None])
def test_without_quantizers_a_layer_is_that_of_linen(name):
    layer, row = Pair(name, "without").layer, LAYERS[name]
    parameters = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    variables = {"params": {NAMES_IN_LINEN.get(name, name): value for name, value in parameters.items()}}
    statistics = nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))
    expected, _ = row.linen.apply(
        {**variables, **({"batch_stats": statistics} if statistics else {})},
        *row.inputs,
        mutable=["batch_stats"],
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), layer(*row.inputs), expected
    )


def _site_model():
    class Own(nnx.Module):  # one for each test: `nnx.tabulate` leaves traces on it
        def __init__(self):
            self.weight = nnx.Param(jax.random.normal(jax.random.key(0), (4, 6)))
            self.norm = nnx.RMSNorm(6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x @ self.weight[...])

    return jqinject.quantize(Own(), jqinject.Rule(**WEIGHTS), inputs=(X,))


def _with_scheme():
    return nn.QuantLinear(4, 3, scheme=Int8Training, rngs=nnx.Rngs(0))


@pytest.mark.heavy
@pytest.mark.usefixtures("classes_as_before")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [_site_model, _with_scheme])
def test_models_of_other_kinds(make, frozen):
    model = make()
    model(X)
    model.eval()
    model = jqinject.freeze(model) if frozen else model
    expected = model(X)
    outputs, _ = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(X)
    _assert_same(outputs, expected)
    assert type(model).__name__ in nnx.tabulate(model, X)
    assert nnx.view_info(model)
    _assert_same(model(X), expected)


def test_a_property_that_fails_tells_its_cause():
    layer = nn.QuantLinear(4, 3, rngs=nnx.Rngs(0))
    del layer.kernel
    with pytest.raises(AttributeError, match="'QuantLinear' object has no attribute 'kernel'"):
        _ = layer.weight_shape
