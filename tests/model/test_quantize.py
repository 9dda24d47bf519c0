"""`quantize` by rules: which layers of which structures become ours, and what of the model stays as it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jqinject
import jqinject.quant as q
from jqinject import Rule
from jqinject.nn import (
    QuantBatchNorm,
    QuantEmbed,
    QuantLayerNorm,
    QuantLinear,
    QuantLinearGeneral,
    QuantLoRALinear,
)
from jqinject.odml import OdmlConversion, OdmlQat
from tests.model._flax_models import Decoder

W8A8 = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorMinMax)
WEIGHTS = Rule(weight_quant=q.Int8WeightPerChannelFloat)
X = jax.random.normal(jax.random.key(0), (4, 8))
call = nnx.jit(lambda model, x: model(x))


class Mlp(nnx.Module):
    """Two layers, the second called twice where that is asked for."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, *, twice=False, scale=None):
        x = self.b(nnx.relu(self.a(x)))
        x = self.b(nnx.relu(x)) if twice else x
        return x if scale is None else x * scale


class Stack(nnx.Module):
    """Three layers made under vmap and run under scan."""

    def __init__(self, rngs):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.layers = make(rngs.split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return nnx.relu(layer(x))

        return run(self.layers, x)


class Tied(nnx.Module):
    """One layer under two names."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.again = self.first
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.again(nnx.relu(self.first(x))))


def fake_quantized(kernel):
    """8 bits, symmetric, narrow, one scale for each output channel, by hand."""
    scale = np.abs(kernel).max(axis=0) / np.float32(127)
    return np.round(kernel / scale) * scale


@pytest.mark.heavy
def test_a_sequential_is_quantized_in_place_of_its_layers():
    plain = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    model = jqinject.quantize(plain, WEIGHTS)
    assert [type(layer) for layer in (model.layers[0], model.layers[2])] == [QuantLinear, QuantLinear]
    assert type(plain.layers[0]) is nnx.Linear
    hidden = np.maximum(np.asarray(X) @ fake_quantized(np.asarray(plain.layers[0].kernel[...])), 0)
    expected = hidden @ fake_quantized(np.asarray(plain.layers[2].kernel[...]))
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_layers_deep_in_a_users_modules_become_ours_by_their_kind():
    model: Any = jqinject.quantize(Decoder(rngs=nnx.Rngs(0)), W8A8)
    block = model.blocks[0]
    assert type(block) is type(Decoder(rngs=nnx.Rngs(0)).blocks[0])
    assert isinstance(block.attention, nnx.MultiHeadAttention)
    assert {type(layer) for layer in (block.attention.query, block.attention.out)} == {QuantLinearGeneral}
    assert type(block.fc1) is QuantLinear and type(model.token_embed) is QuantEmbed
    # Nothing of this rule is for normalizations.
    assert type(block.ln1) is nnx.LayerNorm


def test_a_rule_may_name_a_kind_of_layer():
    plain = nnx.Sequential(
        nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(8, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(8, rngs=nnx.Rngs(0)),
    )
    norms = Rule(op=("LayerNorm", "BatchNorm"), output_quant=q.Int8ActPerTensorMinMax)
    model = jqinject.quantize(plain, norms)
    assert [type(layer) for layer in model.layers] == [nnx.Linear, QuantLayerNorm, QuantBatchNorm]


def test_the_first_rule_that_matches_wins():
    four = Rule(r"a", weight_quant=q.Int8WeightPerChannelFloat, weight_bit_width=4)
    model: Any = jqinject.quantize(Mlp(nnx.Rngs(0)), [four, WEIGHTS])
    assert (model.a.quant_weight().bit_width, model.b.quant_weight().bit_width) == (4, 8)
    model = jqinject.quantize(Mlp(nnx.Rngs(0)), [Rule("a"), WEIGHTS])
    assert (type(model.a), type(model.b)) == (nnx.Linear, QuantLinear)


@pytest.mark.heavy
def test_a_shared_layer_stays_one():
    plain = Tied(nnx.Rngs(0))
    model: Any = jqinject.quantize(plain, W8A8)
    assert model.first is model.again and type(model.first) is QuantLinear
    model(X)
    assert int(model.first.input_quant.tensor_quant.scaling_impl.averaging_impl.counter[...]) == 2
    jqinject.load_state(model, nnx.state(Tied(nnx.Rngs(1))))
    model(X)  # ranges start afresh with other weights
    frozen: Any = jqinject.freeze(model)
    assert frozen.first is frozen.again and frozen.first.frozen is not None


@pytest.mark.heavy
def test_a_stack_of_layers_has_a_stack_of_quantizers():
    plain = Stack(nnx.Rngs(0))
    model: Any = jqinject.quantize(plain, W8A8)
    np.testing.assert_array_equal(
        model.layers.input_quant.tensor_quant.scaling_impl.averaging_impl.counter[...], [0, 0, 0]
    )
    assert jqinject.calibrate(model, [X], progress=False).quantizers == ("layers.input_quant",)
    high = model.layers.input_quant.tensor_quant.scaling_impl.averaging_impl.sum_of_max[...]
    kernels, biases = plain.layers.kernel[...], plain.layers.bias[...]
    x, seen = X, []
    for kernel, bias in zip(kernels, biases, strict=True):
        seen.append(float(x.max()))
        x = nnx.relu(x @ kernel + bias)
    np.testing.assert_allclose(high, seen, rtol=1e-5)
    evaluated = call(model, X)
    frozen: Any = jqinject.freeze(model)
    payload = frozen.layers.frozen.numbers["value"]
    assert payload.dtype == jnp.int8 and payload.shape[0] == 3
    np.testing.assert_allclose(call(frozen, X), evaluated, rtol=1e-5, atol=1e-6)


def test_a_stack_trains_for_a_device_and_says_why_it_is_not_converted():
    model = OdmlQat().quantize(Stack(nnx.Rngs(0)), X)
    call(model, X)
    with pytest.raises(
        ValueError, match=r"layers.dot_general0_lhs: lies in a loop over layers.*\n.*unroll the loop"
    ):
        OdmlConversion().quantize(model, X)


@pytest.mark.heavy
def test_low_rank_adaptation_is_quantized_around_its_base():
    plain = nnx.Sequential(
        nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0)),
        nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2)),
    )
    model: Any = jqinject.quantize(plain, WEIGHTS)
    assert type(model.layers[0]) is QuantLoRALinear and type(model.layers[1].base_module) is QuantLinear
    # The second matrix of a low-rank pair is 0 at first: what remains is the base.
    first, base = (np.asarray(p.kernel[...]) for p in (plain.layers[0], plain.layers[1].base_module))
    np.testing.assert_allclose(
        model(X), np.asarray(X) @ fake_quantized(first) @ fake_quantized(base), atol=1e-5
    )
    trainable = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    assert [path[-1] for path, _ in trainable] == ["lora_a", "lora_b"] * 2


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2, name="b")(linen.relu(linen.Dense(8, name="a")(x)))


def test_a_linen_module_is_quantized_through_the_bridge():
    plain = nnx.bridge.ToNNX(LinenMlp(), rngs=nnx.Rngs(0)).lazy_init(X)
    model: Any = jqinject.quantize(plain, WEIGHTS, inputs=X)
    assert sorted(model.op_quant) == ["a.kernel", "b.kernel"]
    hidden = np.maximum(np.asarray(X) @ fake_quantized(np.asarray(plain.a["kernel"][...])), 0)
    expected = hidden @ fake_quantized(np.asarray(plain.b["kernel"][...]))
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)
    other = nnx.bridge.ToNNX(LinenMlp(), rngs=nnx.Rngs(7)).lazy_init(X)
    jqinject.load_state(model, nnx.state(other))
    hidden = np.maximum(np.asarray(X) @ fake_quantized(np.asarray(other.a["kernel"][...])), 0)
    np.testing.assert_allclose(
        model(X), hidden @ fake_quantized(np.asarray(other.b["kernel"][...])), rtol=1e-4, atol=1e-5
    )


RELUS = [Rule(op="relu", output_quant=q.Int8ActPerTensorMinMax), W8A8]


@pytest.mark.heavy
@pytest.mark.parametrize("rules", [RELUS, OdmlQat()], ids=["rules", "odml"])
def test_flags_and_keywords_reach_the_model(rules):
    x = jnp.tile(X[:1], (4, 1))  # devices average the ranges of a batch's rows
    given = {"x": x, "twice": True, "scale": jnp.full(8, 2.0)}
    model: Any = jqinject.quantize(Mlp(nnx.Rngs(0)), rules, inputs=given)
    places = {"relu0_output", "relu1_output"} if rules is RELUS else {"b.dot_general1_lhs", "multiply0_rhs"}
    assert places <= set(model.op_quant)
    report = jqinject.calibrate(model, [given], progress=False)
    assert report.batches == 1
    plain = Mlp(nnx.Rngs(0))
    wanted, other = plain(**given), plain(x, scale=given["scale"])
    # Both calls of one layer share a range, so this is rough; without the flag it is another function.
    assert jnp.linalg.norm(model(**given) - wanted) < 0.25 * jnp.linalg.norm(other - wanted)


def test_a_layers_rule_takes_flags_too():
    model = jqinject.quantize(Mlp(nnx.Rngs(0)), W8A8)
    jqinject.calibrate(model, [{"x": X, "twice": True}], progress=False)
    assert int(model.b.input_quant.tensor_quant.scaling_impl.averaging_impl.counter[...]) == 2


@pytest.mark.heavy
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 8)])
def test_inputs_of_other_sizes_and_ranks_are_welcome(shape):
    for rules in (RELUS, OdmlQat()):
        model = jqinject.quantize(Mlp(nnx.Rngs(0)), rules, inputs=jax.ShapeDtypeStruct(X.shape, X.dtype))
        jqinject.calibrate(model, [X], progress=False)
        rows = jnp.tile(X[:1], (np.prod(shape[:-1]), 1)).reshape(shape)
        np.testing.assert_allclose(
            model(rows), jnp.broadcast_to(model(X[:1])[0], shape), rtol=1e-5, atol=1e-6
        )
