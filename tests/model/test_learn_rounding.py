"""`learn_rounding`: the error of outputs falls, scales stay, and wrong input changes nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, learn_rounding
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Fp8e4m3OCPWeightPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerChannelFloatMSE,
    MXInt8Weight,
    NF4WeightPerGroupFloat,
    ShiftedUint8WeightPerChannelFloat,
)
from jqinject.recipes import Solved

BATCHES = [jax.random.normal(jax.random.key(seed), (48, 12)) @ jnp.linspace(0.1, 1.5, 144).reshape(12, 12)
           for seed in range(2)]  # fmt: skip


def floating():
    return nnx.Sequential(nnx.Linear(12, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 5, rngs=nnx.Rngs(1)))


def quantized(quant=Int8WeightPerChannelFloat, bits=3, **more) -> Any:
    return jqinject.quantize(floating(), Rule(weight_quant=quant.let(bit_width=bits, **more)))


def of_a_table() -> Any:
    return jqinject.quantize(floating(), Rule(weight_quant=NF4WeightPerGroupFloat))


def error(model, reference):
    return float(np.mean([np.mean((model(x) - reference(x)) ** 2) for x in BATCHES]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hard_sigmoid", "identity"])
def test_the_models_error_falls_below_that_of_nearest_rounding(kind):
    model, reference = quantized(Int8WeightPerChannelFloatMSE), floating()
    nearest = nnx.clone(model)
    for layer in (nearest.layers[0], nearest.layers[2]):
        layer.quant_weight()  # the scale is searched, and kept
    nearest.eval()
    report = learn_rounding(model, BATCHES, learned_round_impl_type=kind, steps=200, progress=False)
    assert [site.path for site in report.sites] == ["layers.0.kernel", "layers.2.kernel"]
    assert all(site.solved <= site.nearest for site in report.sites)
    assert error(model, reference) < 0.7 * error(nearest, reference)
    for mine, theirs in ((model.layers[i], nearest.layers[i]) for i in (0, 2)):
        weight = mine.quant_weight()
        assert weight.is_valid
        np.testing.assert_array_equal(weight.scale, theirs.quant_weight().scale)
        steps = theirs.kernel[...] / weight.scale
        inside = np.abs(steps) < 3
        assert np.all(
            np.abs(weight.int(float_datatype=True) - steps)[inside] < 1
        )  # up or down, never further
    x = BATCHES[0]
    np.testing.assert_allclose(jqinject.freeze(nnx.clone(model))(x), model(x), rtol=1e-4, atol=1e-4)
    assert "(layers.0.kernel): error" in str(report)


@pytest.mark.lengthy
@pytest.mark.parametrize(("quant", "overrides"), [
    (MXInt8Weight, {"weight_bit_width": 4}),  # 3 bits clip more of a block than rounding can mend
    (Fp8e4m3OCPWeightPerTensorFloat, {}),
    (ShiftedUint8WeightPerChannelFloat, {"weight_bit_width": 3}),
])  # fmt: skip
def test_groups_floats_and_zero_points_learn_too(quant, overrides):
    layer = QuantLinear(12, 6, weight_quant=quant, rngs=nnx.Rngs(0), **overrides)
    nearest = nnx.clone(layer)
    nearest.eval()
    wanted = BATCHES[0] @ layer.kernel[...]
    (site,) = learn_rounding(layer, BATCHES[:1], steps=100, progress=False).sites
    for model, found in ((nearest, site.nearest), (layer, site.solved)):
        wrong = model(BATCHES[0]) - layer.bias[...] - wanted
        np.testing.assert_allclose(found, np.sum(wrong**2) / np.sum(wanted**2), rtol=1e-3)
    assert site.solved < site.nearest
    assert layer.quant_weight().is_valid


@pytest.mark.heavy
def test_where_nothing_is_gained_nearest_rounding_is_kept():
    # Each weight has an output of its own: nothing is better than nearest.
    layer, nearest = (QuantLinear(12, 4, weight_bit_width=3, rngs=nnx.Rngs(0)) for _ in range(2))
    report = learn_rounding(layer, [jnp.eye(12)], steps=1, learning_rate=1e6, progress=False)
    (site,) = report.sites
    assert site.solved == site.nearest > 0
    np.testing.assert_array_equal(layer.quant_weight().int(), nearest.quant_weight().int())


@pytest.mark.heavy
def test_layers_that_share_a_quantizer_stay_as_they_are():
    first = QuantLinear(12, 12, weight_bit_width=3, rngs=nnx.Rngs(0))
    second = QuantLinear(12, 12, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
    third = QuantLinear(12, 4, weight_bit_width=3, rngs=nnx.Rngs(2))
    with pytest.warns(UserWarning, match="layers.0.kernel: rounded to nearest: .* shares the quantizer"):
        report = learn_rounding(nnx.Sequential(first, second, third), BATCHES, steps=2, progress=False)
    assert [site.path for site in report.sites if isinstance(site, Solved)] == ["layers.2.kernel"]


@pytest.mark.parametrize(("arguments", "text"), [
    ({"steps": 0}, "steps must be an int of at least 1, got 0"),
    ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ({"regularization": -1.0}, "regularization must be at least 0"),
    ({"beta": (20.0, 0.0)}, "beta must be two numbers above 0"),
    ({"warmup": 2.0}, "warmup must be between 0 and 1"),
    ({"learned_round_impl_type": "nearest"}, "'nearest' is not a LearnedRoundImplType"),
    ({"batches": []}, "got no batch.\n  cure:"),
    ({"batches": [jnp.full((2, 12), jnp.nan)]}, "batch 0 has nan or inf"),
    ({"model": floating()}, "ran no quantized contraction with a quantized weight.*\n  cure: quantize it first"),
    ({"model": of_a_table()}, "kernel.*: LearnedRounding .* is a TableGrid.\n  cure: GPTQ"),
])  # fmt: skip
def test_wrong_input_is_refused_and_nothing_changes(arguments, text):
    given = {"model": quantized(), "batches": BATCHES, "progress": False, **arguments}
    model = given["model"]
    before, trained = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model))), model.layers[0]
    with pytest.raises(ValueError, match=text):
        learn_rounding(**given)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))
    assert model.layers[0] is trained
