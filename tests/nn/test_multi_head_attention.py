"""Multi-head attention with quantizers: Flax's layer without them, its projections, copies, frozen and loaded."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.formats import attention_from_torch
from jqinject.nn import QuantMultiHeadAttention, QuantScaledDotProductAttention
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8BiasPerTensorFloatInternalScaling,
    Int8WeightPerChannelFloat,
)
from jqinject.quant_tensor import IntQuantTensor
from tests.brevitas_defaults import ATTENTION, PROJECTIONS, WITHIN_ATTENTION

X = jax.random.normal(jax.random.key(0), (2, 3, 8))
MEMORY = jax.random.normal(jax.random.key(1), (2, 5, 6))
MASK = jnp.asarray(np.tril(np.ones((3, 3), bool)))


def _bare(**given):
    return QuantMultiHeadAttention(2, 8, **{"decode": False, "rngs": nnx.Rngs(0), **given})


def _mha(**given):
    return _bare(**ATTENTION | given)


call = nnx.jit(lambda m, *args: m(*args))


def _trained(**given):
    layer = _mha(**given)
    call(layer, X)
    layer.eval()
    return layer


FLAX = {
    "plain": ({}, (X,), {}),
    "sizes": ({"qkv_features": 12, "out_features": 5}, (X,), {}),
    "mask": ({}, (X,), {"mask": MASK}),
    "causal": ({}, (X,), {"is_causal": True}),
    "other keys": ({"in_kv_features": 6}, (X, MEMORY), {}),
    "other values": ({"in_kv_features": 6}, (X, MEMORY, -MEMORY), {}),
    "grouped queries": ({"num_kv_heads": 1}, (X,), {}),
    "normalized": ({"normalize_qk": True}, (X,), {}),
    "no bias": ({"use_bias": False}, (X,), {}),
    "bfloat16": ({"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}, (X,), {}),
    "dropout": ({"dropout_rate": 0.5, "deterministic": False}, (X,), {}),
    "attention of one's own": ({"attention_fn": lambda q, k, v, **_: q + v}, (X,), {}),
}


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("case", FLAX.values(), ids=FLAX)
def test_without_quantizers_it_is_flax_to_the_bit(case, packed):
    given, inputs, options = case
    inputs = [x.astype(given.get("dtype", jnp.float32)) for x in inputs]
    layer = _bare(packed_in_proj=packed, **given)
    twin = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), **given)
    ours, theirs = nnx.to_flat_state(nnx.state(layer)), nnx.to_flat_state(nnx.state(twin))
    assert [(path, type(v), v.shape) for path, v in ours] == [(path, type(v), v.shape) for path, v in theirs]
    with jax.numpy_dtype_promotion("standard"):  # Flax's own attention promotes bfloat16
        y, expected = layer(*inputs, **options), twin(*inputs, **options)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)


def test_the_parameters_keep_their_paths_beside_quantizers():
    held = {path for path, _ in nnx.to_flat_state(nnx.state(_mha(), nnx.Not(jqinject.core.QuantParam)))}
    twin = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    assert {path for path, _ in nnx.to_flat_state(nnx.state(twin))} <= held


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_a_float_checkpoint_loads(packed):
    twin = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(7))
    layer = _mha(packed_in_proj=packed)
    jqinject.load_state(layer, twin)
    largest = [float(jnp.abs(getattr(twin, name).kernel[...]).max()) for name in ("query", "key", "value")]
    found = [float(getattr(layer, name).weight_quant.scale()) * 127 for name in ("query", "key", "value")]
    np.testing.assert_allclose(found, [max(largest)] * 3 if packed else largest, rtol=1e-6)


def test_packed_projections_share_what_is_one_number():
    layer = _mha(packed_in_proj=True, in_proj_bias_quant=Int8BiasPerTensorFloatInternalScaling)
    assert layer.query.weight_quant is layer.key.weight_quant is layer.value.weight_quant
    assert layer.query.bias_quant is layer.value.bias_quant
    assert layer.query.input_quant is None
    channels = _mha(packed_in_proj=True, in_proj_weight_quant=Int8WeightPerChannelFloat)
    assert channels.query.weight_quant is not channels.key.weight_quant
    apart = _mha()
    assert apart.in_proj_input_quant is None
    assert apart.query.weight_quant is not apart.key.weight_quant
    other_inputs = _mha(packed_in_proj=True, in_kv_features=6)
    assert other_inputs.query.input_quant is not None  # one matrix has one input


@pytest.mark.heavy
def test_packed_projections_quantize_each_input_once():
    class Counted(Int8ActPerTensorFloat):
        collect_stats_steps = 10

    def counts(*inputs):
        layer = _mha(packed_in_proj=True, in_proj_input_quant=Counted)
        layer(*inputs)
        return int(layer.in_proj_input_quant.tensor_quant.scaling_impl.counter[...])

    other = X + 1
    assert [counts(X), counts(X, X, X), counts(X, other), counts(X, other, X)] == [1, 1, 2, 2]


@pytest.mark.heavy
@pytest.mark.parametrize("which", ["q", "qq", "qk", "qqq", "qkk", "qkq", "qqk", "qkv"])
def test_packed_projections_record_each_tensor_once(which, monkeypatch):
    tensors = {name: X + shift for shift, name in enumerate("qkv")}
    layer = _mha(packed_in_proj=True, in_proj_input_quant=Int8ActPerTensorFloat)
    proxy, seen = layer.in_proj_input_quant, []
    record = type(proxy).__call__

    def recorded(self, x):
        seen.extend(name for name, tensor in tensors.items() if self is proxy and tensor is x)
        return record(self, x)

    monkeypatch.setattr(type(proxy), "__call__", recorded)
    layer(*(tensors[name] for name in which))
    assert sorted(seen) == sorted(set(which))
    assert proxy.tensor_quant.scaling_impl.counter[...] == len(set(which))
    layer.eval()
    y = layer(*(tensors[name] for name in which))
    q, k, v = (tensors[name] + 0 for name in {1: which * 3, 2: which + which[-1:], 3: which}[len(which)])
    np.testing.assert_array_equal(layer(q, k, v), y)  # each projection has its own tensor


def test_packed_projections_need_graph_mode():
    with nnx.set_graph_mode(False):
        with pytest.raises(
            ValueError, match=r"tree mode knows no shared objects.\n  cure: packed_in_proj=False"
        ):
            _mha(packed_in_proj=True)
        assert call(_mha(), X).shape == X.shape


def test_overrides_go_where_their_prefix_says():
    layer = _mha(
        in_proj_weight_bit_width=3,
        in_proj_input_bit_width=5,
        out_proj_weight_bit_width=4,
        q_scaled_bit_width=6,
        v_bit_width=7,
    )
    widths = [layer.key.weight_quant, layer.value.input_quant, layer.out.weight_quant]
    assert [proxy.bit_width() for proxy in (*widths, layer.q_scaled_quant, layer.v_quant)] == [3, 5, 4, 6, 7]
    with pytest.raises(TypeError, match=r"weight_bitwidth") as caught:
        _mha(in_proj_weight_bitwidth=3)
    assert "keywords start with in_proj_" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match=r"weight_bitwidth") as caught:
        _mha(out_proj_weight_bitwidth=3)
    assert "keywords start with out_proj_" in caught.value.__notes__[0]


def test_an_attention_function_of_ones_own_brings_its_own_quantizers():
    within = QuantScaledDotProductAttention(**WITHIN_ATTENTION, v_bit_width=4)
    layer = _bare(attention_fn=within, **PROJECTIONS)
    assert layer.v_quant is None
    assert call(layer, X).shape == X.shape
    assert float(layer.attention_fn.v_quant.tensor_quant.scaling_impl.counter[...]) == 1
    with pytest.raises(ValueError, match=r"v_quant cannot be put into an attention_fn of your own"):
        _bare(attention_fn=within, v_quant=Int8ActPerTensorFloat)


@pytest.mark.heavy
def test_it_returns_a_quant_tensor_with_the_scale_of_the_accumulator():
    layer = _trained(return_quant_tensor=True)
    y = call(layer, X)
    assert isinstance(y, IntQuantTensor)
    np.testing.assert_allclose(y.scale, layer.out.input_quant.scale() * layer.out.weight_quant.scale())
    assert y.is_valid


def _loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.slow
def test_remat_moves_statistics_once_and_has_the_same_gradients():
    plain, other = _mha(), _mha()
    a = nnx.jit(nnx.grad(_loss))(plain, X)
    b = nnx.jit(nnx.grad(lambda m, x: jnp.mean(nnx.remat(lambda m, x: m(x))(m, x) ** 2)))(other, X)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), nnx.state(plain), nnx.state(other))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_a_stack_of_layers_is_its_layers_and_freezes(packed):
    def one(rngs):
        return QuantMultiHeadAttention(2, 8, decode=False, packed_in_proj=packed, rngs=rngs, **ATTENTION)

    stacked = nnx.split_rngs(splits=2)(nnx.vmap(one))(nnx.Rngs(0))
    run = nnx.jit(nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry))
    run(stacked, X)
    stacked.eval()
    graphdef, state = nnx.split(stacked)
    y = X
    for index in range(2):
        y = call(nnx.merge(graphdef, jax.tree.map(lambda leaf, i=index: leaf[i], state)), y)
    np.testing.assert_allclose(run(stacked, X), y, atol=1e-5)
    frozen = jqinject.freeze(stacked)
    assert frozen.query.frozen.shape == (2, 8, 2, 4)
    np.testing.assert_allclose(run(frozen, X), y, atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_copies_and_the_frozen_layer_compute_the_same(packed):
    layer = _trained(packed_in_proj=packed, contraction="int")
    expected = call(layer, X)
    for copy in (nnx.clone(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(call(copy, X), expected)
        assert (copy.query.weight_quant is copy.key.weight_quant) is packed
    frozen = jqinject.freeze(layer)
    np.testing.assert_array_equal(call(frozen, X), expected)
    kernels = {
        name: getattr(frozen, name).frozen.form.stored.dtype.name for name in ("query", "key", "value", "out")
    }
    assert set(kernels.values()) == {"int8"}


@pytest.mark.heavy
def test_calibration_and_report_find_its_quantizers():
    layer = _mha()
    found = jqinject.calibrate(layer, [X, 2 * X], progress=False).quantizers
    assert {"q_scaled_quant", "k_transposed_quant", "attn_output_weights_quant", "v_quant"} < set(found)
    report = jqinject.report(jqinject.freeze(layer), X)
    assert {entry.path: entry.contraction for entry in report} == dict.fromkeys(
        ("query", "key", "value", "out"), "int"
    )


def test_an_abstract_layer():
    abstract = nnx.eval_shape(lambda: jqinject.freeze(_mha(packed_in_proj=True)))
    assert abstract.value.frozen.shape == (8, 2, 4)
    assert abstract.value.frozen.numbers["value"].dtype == jnp.int8


@pytest.mark.heavy
def test_bfloat16_stays_and_scales_are_float32():
    layer = _trained(dtype=jnp.bfloat16)
    y = call(layer, X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert layer.q_scaled_quant.scale().dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), call(_trained(), X), atol=0.1)


@pytest.mark.heavy
def test_a_sharded_batch():
    layer = _trained()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    y = call(layer, x)
    assert y.sharding.spec == jax.P("data")
    np.testing.assert_allclose(y, call(layer, X), atol=1e-6)


def _torch_attention(weights, x, heads):
    """torch's multi-head attention in NumPy, from its packed weights."""
    q, k, v = np.split(x @ weights["in_proj_weight"].T + weights["in_proj_bias"], 3, -1)
    split = [a.reshape(*a.shape[:-1], heads, -1) for a in (q, k, v)]
    logits = np.einsum("blhd,bmhd->bhlm", split[0], split[1]) / np.sqrt(split[0].shape[-1])
    p = np.exp(logits)
    out = np.einsum("bhlm,bmhd->blhd", p / p.sum(-1, keepdims=True), split[2]).reshape(x.shape)
    return out @ weights["out_proj.weight"].T + weights["out_proj.bias"]


@pytest.mark.heavy
def test_weights_of_torch():
    keys = jax.random.split(jax.random.key(3), 4)
    shapes = {
        "in_proj_weight": (24, 8),
        "in_proj_bias": (24,),
        "out_proj.weight": (8, 8),
        "out_proj.bias": (8,),
    }
    weights = {
        name: np.asarray(jax.random.normal(key, shape)) / 3
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    expected = _torch_attention(weights, np.asarray(X), 2)
    apart = {"out_proj.weight": weights["out_proj.weight"], "out_proj.bias": weights["out_proj.bias"]}
    for name, w, b in zip(
        "qkv", np.split(weights["in_proj_weight"], 3), np.split(weights["in_proj_bias"], 3), strict=True
    ):
        apart |= {f"{name}_proj.weight": w, f"{name}_proj.bias": b}
    for state, prefix in (
        (weights, ""),
        (apart, ""),
        ({f"attn.{n}": w for n, w in weights.items()}, "attn."),
    ):
        layer = _bare()
        jqinject.load_state(layer, attention_from_torch(state, 2, prefix=prefix))
        np.testing.assert_allclose(layer(X), expected, atol=1e-5)


@pytest.mark.heavy
def test_weights_that_are_not_torchs():
    state = {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}
    with pytest.raises(KeyError, match=r"no weight of the query projection .* with the prefix 'x.'"):
        attention_from_torch(state, 2, prefix="x.")
    with pytest.raises(KeyError, match=r"no weight of the out projection .*out_proj\.weight"):
        attention_from_torch({"in_proj_weight": np.ones((24, 8))}, 2)
    with pytest.raises(ValueError, match=r"shape \(25, 8\) is not three of a size"):
        attention_from_torch({**state, "in_proj_weight": np.ones((25, 8))}, 2)
    with pytest.raises(ValueError, match=r"query projection's 8 features cannot be those of 3 heads"):
        attention_from_torch(state, 3)
    with pytest.raises(ValueError, match=r"bias_k \(add_bias_kv=True\)"):
        attention_from_torch({**state, "bias_k": np.ones((1, 1, 8))}, 2)
