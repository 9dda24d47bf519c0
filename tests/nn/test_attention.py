"""Attention between quantizers: each part against NumPy, and without quantizers against Flax to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

import jqinject
from jqinject.nn import QuantMultiHeadAttention, QuantScaledDotProductAttention, ScaledDotProductAttention
from jqinject.quant import (
    Fp8e4m3ActPerTensorCurrent,
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowAbsMax,
    Int8WeightPerChannelFloat,
)
from jqinject.quant_tensor import IntQuantTensor
from tests.brevitas_defaults import WITHIN_ATTENTION

WITHIN = ("q_scaled", "k_transposed", "softmax_input", "attn_output_weights", "v")
OFF = {f"{name}_quant": None for name in WITHIN}


def _operands(*shape, heads=2, kv_heads=2, lengths=(3, 4), features=4):
    keys = jax.random.split(jax.random.key(len(shape)), 3)
    of_heads = (heads, kv_heads, kv_heads)
    return [
        jax.random.normal(key, (*shape, lengths[i > 0], n, features))
        for i, (key, n) in enumerate(zip(keys, of_heads, strict=True))
    ]


def _signed(x):
    """On the grid of 8 signed bits whose range is the largest magnitude."""
    scale = np.abs(x).max() / 128
    return np.clip(np.round(x / scale), -128, 127) * scale


MASK = np.tril(np.ones((3, 4), bool), 1)


class Range(Int8ActPerTensorFloat):
    """The largest magnitude, of the batch at hand while it trains: without a percentile to reproduce."""

    scaling_stats_op = "max"
    collect_stats_steps = 2


class Unsigned(Range):
    signed = False


@pytest.mark.heavy
def test_every_quantizer_is_where_it_is_said_to_be():
    q, k, v = (np.asarray(x, np.float64) for x in _operands(2))
    names = dict.fromkeys((f"{n}_quant" for n in WITHIN), Range)
    layer = QuantScaledDotProductAttention(
        **names | {"attn_output_weights_quant": Unsigned}, sdpa_output_quant=Range
    )
    y = layer(*_operands(2), mask=jnp.asarray(MASK))
    logits = _signed(np.einsum("bqhd,bkhd->bhqk", _signed(q / 2), _signed(k)))
    weights = np.exp(np.where(MASK, logits, -np.inf))
    weights = weights / weights.sum(-1, keepdims=True)
    weights = np.round(weights * 255 / weights.max()) * weights.max() / 255
    expected = _signed(np.einsum("bhqk,bkhd->bqhd", weights, _signed(v)))
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("contraction", ["float", "int"])
def test_integers_are_contracted_as_their_values(contraction):
    operands = _operands(2)
    layer = QuantScaledDotProductAttention(contraction=contraction, **WITHIN_ATTENTION)
    layer(*operands)
    layer.eval()
    integers = nnx.jit(lambda m, *o: m(*o))
    expected = QuantScaledDotProductAttention(contraction="float", **WITHIN_ATTENTION)
    expected(*operands)
    expected.eval()
    np.testing.assert_allclose(integers(layer, *operands), expected(*operands), atol=1e-6)


def _dots(layer, *operands, train=False):
    layer.train() if train else layer.eval()
    graphdef, state = nnx.split(layer)
    jaxpr = jax.make_jaxpr(lambda s, *o: nnx.merge(graphdef, s)(*o))(state, *operands)
    return [
        tuple(v.aval.dtype.name for v in equation.invars)
        for equation in _equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
    ]


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params):
            if isinstance(parameter, core.ClosedJaxpr):
                yield from _equations(parameter.jaxpr)
            elif isinstance(parameter, core.Jaxpr):
                yield from _equations(parameter)


def test_evaluation_contracts_integers_and_training_what_they_stand_for():
    layer, operands = QuantScaledDotProductAttention(**WITHIN_ATTENTION), _operands(2)
    assert set(_dots(layer, *operands, train=True)) == {("float32", "float32")}
    assert set(_dots(layer, *operands)) == {("int8", "int8")}
    rows = QuantScaledDotProductAttention(**WITHIN_ATTENTION | {"v_quant": Int8DynamicActPerRowAbsMax})
    # Scales that vary along the keys cannot be multiplied in after the sum over the keys.
    assert set(_dots(rows, *operands)) == {("int8", "int8"), ("float32", "float32")}
    fp8 = QuantScaledDotProductAttention(**dict.fromkeys(OFF, Fp8e4m3ActPerTensorCurrent))
    assert {d for pair in _dots(fp8, *operands) for d in pair} == {"float8_e4m3fn"}


FLAX_CALLS = {
    "plain": ((), {}, {}),
    "batches": ((2, 3), {}, {}),
    "causal": ((2,), {"lengths": (4, 4)}, {"is_causal": True}),
    "mask": ((2,), {}, {"mask": jnp.asarray(MASK)}),
    "causal and mask": ((2,), {}, {"mask": jnp.asarray(MASK)[None, None], "is_causal": True}),
    "bias": ((2,), {}, {"bias": jnp.linspace(-1, 1, 12).reshape(1, 1, 3, 4)}),
    "grouped queries": ((2,), {"heads": 4}, {}),
    "grouped queries, dropout": (
        (2,),
        {"heads": 4},
        {"dropout_rate": 0.5, "dropout_rng": jax.random.key(1)},
    ),
    "dropout of each weight": (
        (2,),
        {},
        {"dropout_rate": 0.5, "dropout_rng": jax.random.key(1), "broadcast_dropout": False},
    ),
    "dropout that is off": ((2,), {}, {"dropout_rate": 0.5, "deterministic": True}),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", FLAX_CALLS.values(), ids=FLAX_CALLS)
def test_flax_in_all_its_calls(case):
    shape, given, call = case
    operands = _operands(*shape, **given)
    expected = nnx.dot_product_attention(*operands, **call)
    for twin in (ScaledDotProductAttention(), QuantScaledDotProductAttention()):
        np.testing.assert_array_equal(twin(*operands, **call), expected)
    # A quantizer of so many bits that it changes nothing leads the other way through the code.
    nearly = QuantScaledDotProductAttention(v_quant=Range, v_bit_width=23)
    np.testing.assert_allclose(nearly(*operands, **call), expected, atol=1e-5)


def test_a_mask_does_not_widen_the_range_of_the_softmax_input():
    operands = _operands(2)
    layer = QuantScaledDotProductAttention(softmax_input_quant=Range)
    layer(*operands, mask=jnp.asarray(MASK))
    assert float(layer.softmax_input_quant.tensor_quant.scaling_impl.buffer[...]) < 10


def test_functions_that_come_first_and_a_scale():
    q, k, v = _operands(2)
    given = {
        "pre_process_q": lambda x: 2 * x,
        "pre_process_k": lambda x: x[..., ::-1],
        "pre_process_v": jnp.abs,
    }
    expected = nnx.dot_product_attention(2 * q, k[..., ::-1], jnp.abs(v))
    np.testing.assert_array_equal(ScaledDotProductAttention(**given)(q, k, v), expected)
    np.testing.assert_array_equal(QuantScaledDotProductAttention(**given)(q, k, v), expected)
    shifted = {"pre_process_q": lambda x, at: x + at, "pre_process_k": lambda x, at: x - at}
    placed = ScaledDotProductAttention(**shifted)(q, k, v, input_positions=jnp.float32(2))
    np.testing.assert_array_equal(placed, nnx.dot_product_attention(q + 2, k - 2, v))
    # features = 4, so that a scale of 1 is twice the queries
    scaled = QuantScaledDotProductAttention(**given | {"pre_process_q": lambda x: x})
    np.testing.assert_allclose(scaled(q, k, v, scale=1.0), expected, atol=1e-6)


def test_it_returns_a_quant_tensor_if_asked():
    layer = QuantScaledDotProductAttention(sdpa_output_quant=Range, return_quant_tensor=True)
    y = layer(*_operands(2))
    assert isinstance(y, IntQuantTensor)
    assert y.is_valid
    with pytest.raises(ValueError, match=r"needs sdpa_output_quant to have a scale"):
        QuantScaledDotProductAttention(return_quant_tensor=True)


@pytest.mark.heavy
def test_it_is_an_attention_function_of_flax():
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    float_twin = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    within = QuantScaledDotProductAttention(**WITHIN_ATTENTION)
    mha = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=within, rngs=nnx.Rngs(0))
    y, sown = nnx.capture(mha, nnx.Intermediate)(x, sow_weights=True)
    np.testing.assert_allclose(y, float_twin(x), atol=0.05)
    (weights,) = sown["attention_weights"].get_value()
    scale = mha.attention_fn.attn_output_weights_quant.scale()
    np.testing.assert_allclose(weights / scale, np.round(weights / scale), atol=1e-3)


@pytest.mark.heavy
def test_attention_of_a_quantized_model_is_given_quantizers_afterwards():
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    mha = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    model = jqinject.quantize(mha, jqinject.Rule(weight_quant=Int8WeightPerChannelFloat))
    model.attention_fn = nnx.data(QuantScaledDotProductAttention(**WITHIN_ATTENTION))
    run = nnx.jit(lambda m, x: m(x))
    run(model, x)
    model.eval()
    np.testing.assert_allclose(run(model, x), mha(x), atol=0.05)
    np.testing.assert_allclose(run(jqinject.freeze(model), x), run(model, x), atol=1e-6)


@pytest.mark.parametrize("layer", [QuantScaledDotProductAttention, QuantMultiHeadAttention])
def test_what_is_no_argument(layer):
    size = (2, 8) if layer is QuantMultiHeadAttention else ()
    rngs = {"rngs": nnx.Rngs(0)}
    with pytest.raises(TypeError, match=r"takes no argument 'q_scale_bit_width'"):
        layer(*size, q_scale_bit_width=4, **rngs)
    with pytest.raises(TypeError, match=r"'q_scaled_bit_width' would have no effect: there is no quantizer"):
        layer(*size, q_scaled_bit_width=4, **rngs)
    with pytest.raises(ValueError, match=r"contraction must be one of 'auto', 'float', 'int', 'fp8'"):
        layer(*size, contraction="int4", **rngs)


SHAPES = {
    "ranks": ([(3, 2, 4), (1, 4, 2, 4), (1, 4, 2, 4)], r"the same number of axes"),
    "batches": ([(1, 3, 2, 4), (2, 4, 2, 4), (2, 4, 2, 4)], r"the batch axes differ"),
    "features": ([(3, 2, 4), (4, 2, 5), (4, 2, 4)], r"as many features"),
    "lengths": ([(3, 2, 4), (4, 2, 4), (5, 2, 4)], r"the same length and heads"),
    "heads": ([(3, 3, 4), (4, 2, 4), (4, 2, 4)], r"queries' 3 heads cannot share 2 heads"),
}


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_shapes_that_do_not_fit(case):
    shapes, text = case
    with pytest.raises(ValueError, match=text):
        QuantScaledDotProductAttention(**WITHIN_ATTENTION)(*(jnp.ones(shape) for shape in shapes))


def test_dropout_needs_a_key():
    with pytest.raises(ValueError, match=r"dropout_rate=0.5 needs a dropout_rng"):
        QuantScaledDotProductAttention(**WITHIN_ATTENTION)(*_operands(2), dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate has to be in \[0, 1\), got 1.5"):
        QuantScaledDotProductAttention(**WITHIN_ATTENTION)(*_operands(2), dropout_rate=1.5)
