"""`quantize_function`: models that are functions of parameters, of no library, of Equinox and of Linen."""

import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject
from jqinject import FunctionModel, Rule, quantize_function
from jqinject.quant import Int8ActPerTensorMinMax, Int8DynamicActPerRowFloat, Int8WeightPerChannelFloat
from jqinject.recipes import GPTQ, RTN, Recipe, Solve

X = jax.random.normal(jax.random.key(0), (6, 8))
EVERYWHERE = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerRowFloat)
STATIC = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)
FOUR_BITS = Rule(weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4)


def mlp(params, x):
    """A function of parameters."""
    hidden, out = params["layers"]
    x = jax.nn.relu(x @ hidden["w"] + hidden["b"])
    return x @ out["w"] + params["b.out"]


def layers():
    """The same in Flax's layers."""
    return nnx.Sequential(
        nnx.Linear(8, 16, rngs=nnx.Rngs(0)), jax.nn.relu, nnx.Linear(16, 4, rngs=nnx.Rngs(1))
    )


def params_of(model):
    """The parameters of these layers, as the function takes them."""
    first, _, last = model.layers
    hidden = {"w": first.kernel[...], "b": first.bias[...]}
    return {"layers": [hidden, {"w": last.kernel[...]}], "b.out": last.bias[...]}


PARAMS = params_of(layers())


def quantized(rule=EVERYWHERE):
    """The function, quantized."""
    return quantize_function(mlp, PARAMS, rule, inputs=(X,))


def sqnr(expected, values):
    """The ratio of signal to noise, in dB."""
    expected, values = np.asarray(expected, np.float64), np.asarray(values, np.float64)
    return 10 * np.log10((expected**2).sum() / ((expected - values) ** 2).sum())


def test_a_function_and_flax_layers_with_the_same_weights_have_the_same_bits():
    twin = jqinject.quantize(layers(), EVERYWHERE)
    model = quantized()
    np.testing.assert_array_equal(model(X), twin(X))

    def loss(params):
        return (model.apply(model.state._replace(params=params), X)[0] ** 2).sum()

    gradients = jax.jit(jax.grad(loss))(PARAMS)
    expected = jqinject.grad(lambda twin: (twin(X) ** 2).sum())(twin)
    np.testing.assert_allclose(gradients["layers"][0]["w"], expected.layers[0].kernel[...], rtol=1e-5)
    np.testing.assert_allclose(gradients["b.out"], expected.layers[2].bias[...], rtol=1e-5)
    np.testing.assert_array_equal(jqinject.freeze(model)(X), jqinject.freeze(twin)(X))


def test_paths_are_those_of_the_parameters():
    rules = [Rule(r"layers\.0\.w", weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4), EVERYWHERE]
    model = quantize_function(mlp, PARAMS, rules, inputs=(X,))
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert paths >= {"layers.0.w", "layers.0.b", "layers.1.w", "b_out"}
    assert {row.parameter: row.weight for row in jqinject.coverage(model, X).weights} == {
        "layers.0.w": "int4",
        "layers.1.w": "int8",
    }


def test_apply_is_pure_and_what_it_returns_is_the_state_after_the_call():
    model = quantized(STATIC)
    before = jax.tree.leaves(model.state)
    apply = jax.jit(model.apply)
    _, state = apply(model.state, X)
    _, again = apply(state, 2 * X)
    assert apply._cache_size() == 1
    for old, new in zip(before, jax.tree.leaves(model.state), strict=True):
        np.testing.assert_array_equal(old, new)
    model.update(again)
    other = quantized(STATIC)
    other(X)
    other(2 * X)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(other.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    model.eval()
    other.eval()
    np.testing.assert_allclose(model(X), other(X), rtol=1e-6)
    assert jax.tree.structure(model.state.params) == jax.tree.structure(PARAMS)


def test_frozen_parameters_are_payloads_in_the_structure_of_the_float_ones():
    model = quantized(STATIC)
    jqinject.calibrate(model, [X], progress=False)
    expected = jax.jit(model)(X)
    served = jqinject.freeze(model)
    y, state = jax.jit(served.apply)(served.state, X)
    np.testing.assert_array_equal(y, expected)
    weight = state.params["layers"][0]["w"]
    assert weight["value"].dtype == jnp.int8 and weight["value"].size == 8 * 16
    assert state.params["layers"][0]["b"].dtype == jnp.float32


def test_recipes_take_the_float_model():
    x = jax.random.normal(jax.random.key(1), (64, 8)) @ jax.random.normal(jax.random.key(2), (8, 8))
    expected = mlp(PARAMS, x)
    values = {}
    for solver in (RTN(), GPTQ()):
        solved = Recipe(Solve(solver)).apply(FunctionModel(mlp, PARAMS), FOUR_BITS, [x], progress=False).model
        values[type(solver)] = sqnr(expected, jqinject.freeze(solved)(x))
    assert values[GPTQ] > values[RTN] + 1


def test_adapters_are_trained_beside_a_frozen_function():
    model = jqinject.lora(FunctionModel(mlp, PARAMS), EVERYWHERE, rank=2, inputs=(X,), rngs=nnx.Rngs(0))
    assert model.state.params["layers"][0]["w"]["value"].dtype == jnp.int8
    before = model(X)

    def loss(quantizers):
        y, _ = model.apply(model.state._replace(quantizers=quantizers), X)
        return ((y - 1) ** 2).mean()

    start = model.state.quantizers
    gradients = jax.grad(loss, allow_int=True)(start)["adapters"]
    adapters = jax.tree.map(lambda a, g: a - 0.1 * g, start["adapters"], gradients)
    model.update(model.state._replace(quantizers={**start, "adapters": adapters}))
    assert ((model(X) - 1) ** 2).mean() < ((before - 1) ** 2).mean()


class Block(eqx.Module):
    """A block of a transformer in Equinox."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, *, key):
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[0])
        self.mlp = eqx.nn.MLP(16, 16, 32, 1, activation=jax.nn.gelu, key=keys[1])
        self.norms = eqx.nn.LayerNorm(16), eqx.nn.LayerNorm(16)

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """A small transformer in Equinox."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(32, 16, key=keys[0])
        self.blocks = [Block(key=keys[1]), Block(key=keys[2])]
        self.head = eqx.nn.Linear(16, 32, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


@pytest.mark.heavy
def test_an_equinox_transformer():
    transformer = Transformer(key=jax.random.key(0))
    tokens = jnp.arange(10).reshape(2, 5)

    def function(transformer, tokens):
        return jax.vmap(transformer)(tokens)

    model = quantize_function(function, transformer, EVERYWHERE, inputs=(tokens,))
    assert jqinject.coverage(model, tokens).share_of_bytes == 1
    state = model.state
    assert isinstance(state.params, Transformer)

    @jax.jit
    def loss(params, tokens):
        y, _ = model.apply(state._replace(params=params), tokens)
        return (y**2).mean()

    gradients = jax.grad(loss)(state.params, tokens)
    expected = eqx.filter_grad(lambda t: (function(t, tokens) ** 2).mean())(transformer)
    for name in ("embedding", "blocks", "head"):
        pair = [
            np.concatenate([x.ravel() for x in jax.tree.leaves(eqx.filter(getattr(g, name), eqx.is_array))])
            for g in (expected, gradients)
        ]
        assert sqnr(*pair) > 25
    trained = eqx.tree_at(lambda t: t.head.bias, state.params, jnp.full(32, 3.0))
    model.update(state._replace(params=trained))
    served = jqinject.freeze(model)
    y, _ = jax.jit(served.apply)(served.state, tokens)
    assert sqnr(function(eqx.combine(trained, transformer), tokens), y) > 25


def dense(features, name, spec=None, axis=-1):
    """A layer of Linen; with a sharding of its output on an explicit mesh."""
    dot = jax.lax.dot_general if spec is None else partial(jax.lax.dot_general, out_sharding=spec)
    return linen.DenseGeneral(features, axis=axis, use_bias=False, name=name, dot_general=dot)


class LinenBlock(linen.Module):
    """A block of a decoder in Linen."""

    sharded: bool = False

    @linen.compact
    def __call__(self, x, _):
        rows = P("data", None, None) if self.sharded else None
        h = linen.RMSNorm(use_scale=False)(x)
        q, k, v = (dense((4, 4), name)(h) for name in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
        h = jnp.einsum("bhts,bshd->bthd", weights, v)
        x = x + dense(16, "out", rows, axis=(-2, -1))(h)
        h = dense(32, "up")(linen.RMSNorm(use_scale=False)(x))
        return x + dense(16, "down", rows)(linen.silu(h)), None


class Decoder(linen.Module):
    """A decoder in Linen: scanned and rematerialized blocks."""

    sharded: bool = False

    @linen.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        x, _ = linen.scan(linen.remat(LinenBlock), **axes)(self.sharded, name="blocks")(x, None)
        return linen.Dense(8, name="head")(x)


SHARDED = {
    **dict.fromkeys(("query", "key", "value"), P(None, None, "model", None)),
    "out": P(None, "model", None, None),
    "up": P(None, None, "model"),
    "down": P(None, "model", None),
}


@pytest.mark.heavy
def test_a_linen_decoder_scanned_rematerialized_and_explicitly_sharded():
    x = jax.random.normal(jax.random.key(0), (4, 6, 16))
    params = Decoder().init(jax.random.key(1), x)
    rules = [Rule("head"), Rule(r"blocks\..*", **dict(EVERYWHERE.quantizers))]

    def build(decoder, params, x):
        return quantize_function(decoder.apply, params, rules, inputs=(x,))

    model = build(Decoder(), params, x)
    rows = {row.parameter: row.weight for row in jqinject.coverage(model, x).weights}
    assert rows.pop("params.head.kernel") == ""
    assert len(rows) == 6 and {*rows.values()} == {"int8"}
    expected, y = Decoder().apply(params, x), jax.jit(model.apply)(model.state, x)[0]
    assert sqnr(expected, y) > 25

    def loss(model, params, x):
        return (model.apply(model.state._replace(params=params), x)[0] ** 2).mean()

    gradients = jax.jit(jax.grad(partial(loss, model)))(params, x)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = jax.tree_util.tree_map_with_path(
            lambda path, a: jax.device_put(a, NamedSharding(mesh, SHARDED.get(path[-2].key, P()))), params
        )
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        sharded = build(Decoder(sharded=True), placed, x)
        outputs, state = jax.jit(sharded.apply)(sharded.state, x)
        np.testing.assert_allclose(outputs, y, atol=1e-5)
        up = state.params["params"]["blocks"]["up"]["kernel"]
        assert up.sharding.spec == SHARDED["up"]
        there = jax.jit(jax.grad(partial(loss, sharded)))(placed, x)
        served = jqinject.freeze(sharded)
        frozen, _ = jax.jit(served.apply)(served.state, x)
    # Integers are summed exactly: an input between two codes may become the other one, a step of 1/127 in one row.
    assert sqnr(y, frozen) > 45
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), there, gradients)


ERRORS = {
    "not a function": (
        lambda: FunctionModel(PARAMS, mlp),
        TypeError,
        "FunctionModel takes a function of parameters, got dict.\n"
        "  cure: FunctionModel(lambda params, x: ..., params)",
    ),
    "a Linen module, not its function": (
        lambda: FunctionModel(Decoder(), {"params": PARAMS}),
        TypeError,
        "FunctionModel takes a function of parameters, got Decoder.\n  cure: FunctionModel(module.apply, variables)",
    ),
    "no array": (
        lambda: FunctionModel(mlp, {"w": 1.0, "name": "a"}),
        ValueError,
        "FunctionModel: no floating-point array among the parameters, which hold str, float.\n"
        "  cure: FunctionModel(f, params), whose f takes params, a pytree of arrays, first",
    ),
    "an unhashable constant": (
        lambda: FunctionModel(mlp, {"w": X, "sizes": {1, 2}}),
        TypeError,
        "FunctionModel: a constant must be hashable, got set {1, 2}.\n"
        "  cure: an array in its place; or bind it to the function",
    ),
    "two parameters with one path": (
        lambda: FunctionModel(mlp, {"a.b": X, "a_b": X}),
        ValueError,
        "FunctionModel: a_b and a_b cannot both be paths of parameters; a dot within a key is written as an "
        "underscore.\n  cure: rename one of the keys",
    ),
    "the name of a method": (
        lambda: FunctionModel(mlp, {"train": {"w": X}}),
        ValueError,
        "FunctionModel: train.w begins with the name of an attribute of the model itself.\n"
        "  cure: params one level below, {'params': params}, and f that takes them from there",
    ),
    "other parameters": (
        lambda: FunctionModel(mlp, PARAMS).apply(quantized().state._replace(params={"layers": 1}), X),
        ValueError,
        "FunctionModel: these parameters have another structure than the model's: ",
    ),
    "a parameter of another shape": (
        lambda: quantized().update(quantized().state._replace(params={**PARAMS, "b.out": X})),
        ValueError,
        "FunctionModel: b_out: the state has (6, 8), the model (4,).\n"
        "  cure: a state like model.state, with arrays of the same shapes",
    ),
    "an unknown quantizer": (
        lambda: quantized().update(quantized().state._replace(quantizers={"scale": X})),
        ValueError,
        "FunctionModel: scale: the state has (6, 8), the model nothing.",
    ),
    "a Linen module": (
        lambda: jqinject.quantize(Decoder(), EVERYWHERE, inputs=(X,)),
        TypeError,
        "quantize takes an NNX module, got Decoder.\n  cure: quantize_function(f, params, rules, inputs=(x,)), for "
        "f(params, x) of any library: lambda params, x: linen_module.apply(params, x); lambda params, x: params(x) of "
        "an Equinox module",
    ),
    "a rule for no parameter": (
        lambda: quantize_function(
            mlp, PARAMS, Rule("layer.0.w", weight_quant=Int8WeightPerChannelFloat), inputs=(X,)
        ),
        ValueError,
        "'layer.0.w' matches none; did you mean 'layers.0.w'",
    ),
}


@pytest.mark.parametrize("row", ERRORS)
def test_errors(row):
    call, kind, text = ERRORS[row]
    with pytest.raises(kind, match=re.escape(text)):
        call()
