"""StableHLO programs of models: the same numbers to the bit, integers that stay integers, files, errors."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export as jax_export

import jqinject
from jqinject.demo.classifier import Classifier
from jqinject.demo.recipes import CALIBRATION_STEPS, RECIPES
from jqinject.export import stablehlo
from jqinject.nn import QuantLinear
from jqinject.quant import Int8ActPerTensorFloat
from jqinject.quant_tensor import as_array

in_files = pytest.mark.skipif(
    importlib.util.find_spec("flatbuffers") is None, reason="JAX serializes programs with flatbuffers"
)
INT4 = next(recipe for recipe in RECIPES if recipe.name == "int4")


@pytest.fixture(scope="module")
def images():
    return jax.random.uniform(jax.random.key(0), (4, 8, 8, 1))


@pytest.fixture(scope="module", params=[False, True], ids=["quantized", "frozen"])
def classifier(request, images):
    model = Classifier(INT4, rngs=nnx.Rngs(0))
    calibrate = nnx.jit(lambda model, images: as_array(model(images)))
    for _ in range(CALIBRATION_STEPS + 1):
        calibrate(model, images)
    return jqinject.freeze(model) if request.param else model


def calibrated(x):
    layer = QuantLinear(8, 4, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
    layer(x)
    return layer


def served(model, *inputs):
    copy = nnx.clone(model)
    copy.eval()
    return nnx.jit(lambda model, *inputs: model(*inputs))(copy, *inputs)


@pytest.mark.heavy
@in_files
@pytest.mark.parametrize("weights", ["constants", "argument"])
def test_a_loaded_program_gives_the_model_s_output_to_the_bit(classifier, images, weights, tmp_path):
    program = stablehlo(classifier, images, weights=weights)
    program.save(tmp_path / "digits.hlo")
    loaded = stablehlo.load(tmp_path / "digits.hlo")
    expected = served(classifier, images)
    np.testing.assert_array_equal(program.call(images), expected)
    np.testing.assert_array_equal(loaded.call(images, weights=program.weights), expected)


@pytest.mark.heavy
@in_files
def test_any_batch_size(classifier, images):
    (batch,) = jax_export.symbolic_shape("batch")
    program = stablehlo(classifier, jax.ShapeDtypeStruct((batch, 8, 8, 1), jnp.float32))
    program = stablehlo.deserialize(program.serialize())
    for size in (1, 3):
        np.testing.assert_array_equal(program.call(images[:size]), served(classifier, images[:size]))


@pytest.mark.heavy
def test_frozen_integers_stay_integers():
    layer = jqinject.freeze(calibrated(jnp.ones((2, 8))))
    text = stablehlo(layer, jnp.ones((2, 8))).text
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line]
    assert any("tensor<4x8xi8>" in line for line in constants)
    assert any("stablehlo.dot_general" in line and "xi32>" in line for line in text.splitlines())
    narrow = jqinject.freeze(QuantLinear(8, 4, weight_bit_width=4, rngs=nnx.Rngs(0)))
    assert "tensor<4x4xui8>" in stablehlo(narrow, jnp.ones((2, 8))).text  # two to a byte


@in_files
def test_4_bit_constants_stay_4_bit_constants():
    class Held(nnx.Module):
        def __init__(self):
            self.payload = nnx.Variable(jnp.arange(-8, 8).astype(jnp.int4))

        def __call__(self, x):
            return x * self.payload[...].astype(jnp.float32)

    program = stablehlo(Held(), jnp.ones((16,)))
    assert "tensor<16xi4>" in program.text
    loaded = stablehlo.deserialize(program.serialize())
    np.testing.assert_array_equal(loaded.call(jnp.ones((16,))), np.arange(-8, 8))


@in_files
def test_composites_stay_composites():
    class Composed(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.float32(0.25))

        def __call__(self, x):
            def fake_quant(x, scale, *, bits):
                return jnp.clip(jnp.round(x / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale

            return jax.lax.composite(fake_quant, name="quant.fake_quant")(x, self.scale[...], bits=4)

    x = jnp.array([0.3, -0.7, 9.0])
    program = stablehlo(Composed(), x)
    assert 'stablehlo.composite "quant.fake_quant"' in program.text and "bits = 4" in program.text
    loaded = stablehlo.deserialize(program.serialize())
    np.testing.assert_array_equal(loaded.call(x), np.float32([0.25, -0.75, 1.75]))


def test_evaluation_mode_of_a_copy():
    layer = calibrated(jnp.ones((2, 8)))
    before = jax.tree.map(np.asarray, nnx.state(layer))
    stablehlo(layer, jnp.ones((2, 8)))
    assert layer.input_quant.training
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), before)


def test_random_numbers_and_scales_of_the_data(images, dynamic_quantizer):
    model = nnx.Sequential(
        QuantLinear(1, 4, input_quant=dynamic_quantizer, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    )
    for weights in ("constants", "argument"):
        program = stablehlo(model, images, weights=weights)
        for scaled in (images, 7 * images):
            np.testing.assert_array_equal(program.call(scaled), served(model, scaled))


@pytest.mark.heavy
def test_a_stack_of_layers():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return QuantLinear(8, 8, rngs=rngs)

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = stack(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    x = jnp.ones((2, 8))
    model = Stack()
    for weights in ("constants", "argument"):
        np.testing.assert_array_equal(stablehlo(model, x, weights=weights).call(x), served(model, x))


@in_files
def test_a_quantized_output_comes_out_as_its_value():
    layer = QuantLinear(8, 4, output_quant=Int8ActPerTensorFloat, return_quant_tensor=True, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 8))
    layer(x)
    output = stablehlo.deserialize(stablehlo(layer, x).serialize()).call(x)
    np.testing.assert_array_equal(output, served(layer, x).value)


@in_files
def test_other_weights():
    first, second = (QuantLinear(8, 4, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    x = jnp.ones((2, 8))
    program = stablehlo(first, x, weights="argument")
    others = stablehlo(second, x, weights="argument").weights
    assert set(program.weights) == set(others) and "kernel" in others
    np.testing.assert_array_equal(program.call(x, weights=others), served(second, x))
    with pytest.raises(ValueError, match="takes its weights as an argument"):
        stablehlo.deserialize(program.serialize()).call(x)
    with pytest.raises(ValueError, match="holds its weights"):
        stablehlo(first, x).call(x, weights=others)


def test_several_platforms():
    x = jnp.ones((2, 8))
    layer = jqinject.freeze(calibrated(x))
    program = stablehlo(layer, x, platforms=("cpu", "cuda"))
    assert program.exported.platforms == ("cpu", "cuda")
    np.testing.assert_array_equal(program.call(x), served(layer, x))


class Scores(nnx.Module):
    def __init__(self):
        self.dense = QuantLinear(8, 4, rngs=nnx.Rngs(0))

    def score(self, batch, offset, *, mask, positive, other=None):
        y = self.dense(batch["inputs"][0])
        if offset is not None:
            y = y + offset.bias[...] * positive
        return jnp.where(mask, y, 0.0)


@in_files
@pytest.mark.parametrize("weights", ["constants", "argument"])
def test_a_method_with_keywords_flags_and_modules(weights):
    model, x = jqinject.freeze(Scores()), jax.random.normal(jax.random.key(0), (2, 8))
    model.dense.contraction = "float"  # as the exported program: without compiled kernels
    offset = nnx.Linear(4, 4, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(1))
    batch, mask = {"inputs": (x, None), "name": "first"}, np.arange(4) > 0
    given = dict(mask=mask, positive=2.0, other={"unused": False})
    program = stablehlo(model, batch, offset, method="score", weights=weights, **given)
    loaded = stablehlo.deserialize(program.serialize())
    shown = {"inputs": (x, None), "name": None}  # flags, and the module, are parts of the program
    found = loaded.call(shown, mask=mask, weights=program.weights)
    expected = nnx.jit(lambda m, x, offset: m.score({"inputs": [x]}, offset, mask=mask, positive=2.0))
    np.testing.assert_array_equal(found, expected(model, x, offset))
    if weights == "argument":
        assert {name.partition(".")[0] for name in program.weights} == {"dense", "argument1"}

    def score(model, x, mask):
        return model.score({"inputs": [x]}, None, mask=mask, positive=1.0)

    free = stablehlo(model, x, mask, method=score)
    np.testing.assert_array_equal(free.call(x, mask), nnx.jit(score)(model, x, mask))


def test_what_a_program_cannot_return_is_refused():
    class Counts(nnx.Module):
        def __call__(self, x, rngs):
            return x * rngs.params.uniform()

    with pytest.raises(ValueError, match=r"the call changes the Rngs among its arguments.*\n  cure: method="):
        stablehlo(Counts(), jnp.ones(2), nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"stablehlo: Scores has no method 'scores'; did you mean 'score'"):
        stablehlo(Scores(), jnp.ones(2), method="scores")


def test_refusals(tmp_path):
    layer, x = QuantLinear(8, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    with pytest.raises(TypeError, match=r"stablehlo takes an NNX module, got function.\n  cure: "):
        stablehlo(lambda x: x, x)
    with pytest.raises(TypeError, match=r"takes arrays or jax.ShapeDtypeStructs as inputs, got float"):
        stablehlo(layer, 1.0)
    with pytest.raises(TypeError, match="got IntQuantTensor"):
        stablehlo(layer, layer.quant_weight())
    with pytest.raises(ValueError, match="weights must be 'constants' or 'argument', got 'none'"):
        stablehlo(layer, x, weights="none")
    with pytest.raises(FileNotFoundError, match=r"no folder '.*nowhere' to write 'a.hlo' to"):
        stablehlo(layer, x).save(tmp_path / "nowhere" / "a.hlo")


def test_without_flatbuffers(monkeypatch, tmp_path):
    program = stablehlo(QuantLinear(8, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 8)))
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(
        ImportError, match=r'needs the package \'flatbuffers\'.*\n  cure: pip install "jqinject\[export\]"'
    ):
        program.save(tmp_path / "a.hlo")
    assert not list(tmp_path.iterdir())


def test_a_weight_is_a_constant_where_a_program_is_for_another_compiler():
    def marked(x):
        return jax.lax.composite(lambda x: x * 2.0, name="quant.fake_quant")(x)

    class Marked(nnx.Linear):
        def __call__(self, x):
            return x @ marked(self.kernel[...])

    program = jqinject.export.stablehlo(Marked(4, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
    assert "stablehlo.composite" in program.text and "optimization_barrier" not in program.text
    plain = jqinject.export.stablehlo(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
    assert "optimization_barrier" in plain.text
