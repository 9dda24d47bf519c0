"""Frozen models through the kernel: the numbers of evaluation, programs that leave it out, reports that see it."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject import native
from jqinject.dot import FrozenParam, QDotGeneral, QEinsum
from jqinject.dot.kernels.kernel_table import XLA_CONVOLVES
from jqinject.export import stablehlo
from jqinject.native.library import FUNCTION
from jqinject.nn import QuantConv, QuantEinsum, QuantLinear, QuantLinearGeneral, QuantMultiHeadAttention
from jqinject.quant.aqt import config_v4
from jqinject.quant_tensor import as_array
from tests.brevitas_defaults import ATTENTION

COMMON = {"input_quant": q.Int8ActPerTensorFloat, "weight_quant": q.Int8WeightPerChannelFloat}
IMAGES = jax.random.normal(jax.random.key(1), (2, 9, 9, 4))


class Model(nnx.Module):
    def __init__(self, *, contraction="auto"):
        given = {**COMMON, "contraction": contraction, "rngs": nnx.Rngs(0)}
        self.conv = QuantConv(4, 8, (3, 3), **given)
        self.linear = QuantLinear(8, 24, **given)
        self.general = QuantLinearGeneral(24, (2, 5), **given)
        self.einsum = QuantEinsum("bhwkf,kfd->bhwd", (2, 5, 12), (12,), **given)
        self.last = QuantLinear(12, 3, **{**given, "bias_quant": q.Int32Bias})

    def __call__(self, x):
        for name in ("conv", "linear", "general", "einsum", "last"):
            x = nnx.relu(getattr(self, name)(x))
        return x


DENSE = ("linear", "general", "einsum", "last")


def trained(model, *inputs):
    step = nnx.jit(lambda model, *inputs: as_array(model(*inputs)))
    for scale in (1.0, 0.5):
        step(model, *(scale * x for x in inputs))
    model.eval()
    return model


def run(both, model, *inputs):
    graphdef, state = nnx.split(model)
    return both(lambda state, *inputs: as_array(nnx.merge(graphdef, state)(*inputs)), state, *inputs)


@pytest.mark.lengthy
def test_a_frozen_model_is_the_evaluated_one(both):
    model = trained(Model(contraction="int"), IMAGES)
    calls, evaluated, by_xla = run(both, model, IMAGES)
    frozen_calls, frozen, frozen_by_xla = run(both, jqinject.freeze(nnx.clone(model)), IMAGES)
    assert calls == frozen_calls == len(DENSE) + (not XLA_CONVOLVES)
    for other in (by_xla, frozen, frozen_by_xla):
        np.testing.assert_array_equal(evaluated, other)
    assert bool(jnp.any(evaluated > 0))


@pytest.mark.heavy
@pytest.mark.parametrize("input_quant", [q.Uint8ActPerTensorFloat, q.ShiftedUint8ActPerTensorFloat])
@pytest.mark.parametrize("weight_quant", [q.Int8WeightPerTensorFloat, q.ShiftedUint8WeightPerTensorFloat])
def test_unsigned_numbers_and_zero_points(both, input_quant, weight_quant):
    x = jax.random.uniform(jax.random.key(0), (6, 40))
    layer = QuantLinear(
        40, 5, input_quant=input_quant, weight_quant=weight_quant, contraction="int", rngs=nnx.Rngs(0)
    )
    layer = jqinject.freeze(trained(layer, x))
    calls, with_kernel, without = run(both, layer, x)
    assert calls == 1
    np.testing.assert_array_equal(with_kernel, without)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_packed_weights(both, bits):
    x = jax.random.normal(jax.random.key(0), (6, 40))
    layer = QuantLinear(40, 5, **COMMON, weight_bit_width=bits, rngs=nnx.Rngs(0))
    calls, with_kernel, without = run(both, jqinject.freeze(trained(layer, x)), x)
    assert calls == 1
    np.testing.assert_array_equal(with_kernel, without)


@pytest.mark.heavy
def test_flax_layers_with_our_operations(both):
    config = config_v4(rng_type=None)

    class Flax(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.first = nnx.Linear(40, 24, dot_general=QDotGeneral(config), rngs=rngs)
            self.second = nnx.LinearGeneral(24, (2, 5), dot_general=QDotGeneral(config), rngs=rngs)
            self.embedded = QEinsum(config)
            self.table = nnx.Param(jax.random.normal(jax.random.key(3), (7, 2, 5)))

        def __call__(self, x):
            return self.embedded("bkf,vkf->bv", self.second(self.first(x)), self.table[...])

    x = jax.random.normal(jax.random.key(0), (6, 40))
    model = Flax()
    calls, with_kernel, without = run(both, model, x)
    assert calls == 3
    np.testing.assert_array_equal(with_kernel, without)
    frozen = jqinject.freeze(model)
    assert isinstance(frozen.first.kernel, FrozenParam)
    calls, frozen_result, _ = run(both, frozen, x)
    assert calls == 3
    np.testing.assert_array_equal(frozen_result, with_kernel)


@pytest.mark.heavy
def test_attention(both):
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    model = trained(
        QuantMultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0), **ATTENTION),
        x,
        x,
        x,
    )
    calls, with_kernel, without = run(both, jqinject.freeze(model), x, x, x)
    assert calls >= 1
    jax.tree.map(np.testing.assert_array_equal, with_kernel, without)


@pytest.mark.heavy
def test_stacked_layers(both):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return QuantLinear(16, 16, **COMMON, contraction="int", rngs=rngs)

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = stack(nnx.Rngs(0))

        def __call__(self, x):
            each = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)
            in_order = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return in_order(x, self.layers) + jnp.sum(each, 0)

    model = Stack()
    model.eval()
    calls, with_kernel, without = run(both, model, jax.random.normal(jax.random.key(0), (4, 16)))
    assert calls == 2
    np.testing.assert_array_equal(with_kernel, without)


# --- programs for other machines


@pytest.mark.heavy
@pytest.mark.skipif(importlib.util.find_spec("flatbuffers") is None, reason="JAX serializes with flatbuffers")
@pytest.mark.parametrize("weights", ["constants", "argument"])
def test_an_exported_program_does_without_the_kernel(kernel, weights):
    model = jqinject.freeze(trained(Model(), IMAGES))
    served = nnx.jit(lambda model, x: model(x))
    expected = served(model, IMAGES)
    assert FUNCTION in served.lower(model, IMAGES).as_text()
    program = stablehlo(model, IMAGES, weights=weights)
    assert FUNCTION not in program.text and "dot_general" in program.text
    loaded = stablehlo.deserialize(program.serialize())
    np.testing.assert_array_equal(loaded.call(IMAGES, weights=program.weights), expected)
    # The model itself goes on with it.
    assert FUNCTION in served.lower(model, IMAGES).as_text()


@pytest.mark.heavy
def test_a_model_that_rules_made_is_exported_without_it_too(kernel):
    class Net(nnx.Module):
        def __init__(self):
            self.first, self.second = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    x = jax.random.normal(jax.random.key(0), (4, 8))
    rules = [
        jqinject.Rule(".*", weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorFloat)
    ]
    model = jqinject.freeze(trained(jqinject.quantize(Net(), rules), x))
    assert FUNCTION in jax.jit(model).lower(x).as_text()
    assert FUNCTION not in stablehlo(model, x).text


# --- reports


@pytest.mark.heavy
def test_reports_see_integers(kernel):
    model = jqinject.freeze(trained(Model(), IMAGES))
    report = jqinject.report(model, IMAGES)
    with native.use(False):
        by_xla = jqinject.report(model, IMAGES)
    for name in DENSE:
        assert report[name].contraction == "int" and report[name].program == "s8 x s8 -> s32"
        assert report[name].note == ""
    assert report["conv"].contraction == "int"
    assert [entry.operations for entry in report] == [entry.operations for entry in by_xla]
