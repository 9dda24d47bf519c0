"""`report`: what a compiled program contracts, layer by layer."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject.dot import QDotGeneral
from jqinject.nn import QuantConv, QuantLinear
from jqinject.quant.aqt import config_v4

IMAGES = jnp.ones((2, 6, 6, 3))


class Model(nnx.Module):
    def __init__(self, rngs):
        quantized = {"input_quant": q.Int8ActPerTensorFloat, "weight_quant": q.Int8WeightPerChannelFloat}
        float8 = {
            "input_quant": q.Fp8e4m3ActPerTensorCurrent,
            "weight_quant": q.Fp8e4m3WeightPerTensorCurrent,
        }
        self.conv = QuantConv(3, 8, (3, 3), rngs=rngs, **quantized)
        self.dense = nnx.List([QuantLinear(8, 16, rngs=rngs, **quantized)])
        self.no_input = QuantLinear(16, 16, rngs=rngs)
        self.no_weight = QuantLinear(16, 16, weight_quant=None, rngs=rngs)
        self.plain = nnx.Linear(16, 16, rngs=rngs)
        self.op = nnx.Linear(16, 16, dot_general=QDotGeneral(config_v4(rng_type=None)), rngs=rngs)
        half = config_v4(rng_type=None).let(fwd_lhs_bits=None)
        self.half = nnx.Linear(16, 16, dot_general=QDotGeneral(half), rngs=rngs)
        self.float8 = QuantLinear(16, 16, rngs=rngs, **float8)
        self.unused = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        x = self.dense[0](self.conv(x).mean((1, 2)))
        for name in ("no_input", "no_weight", "plain", "op", "half", "float8"):
            x = nnx.relu(getattr(self, name)(x))
        return x


@pytest.fixture(scope="module")
def reports():
    model = Model(nnx.Rngs(0))
    model(IMAGES)
    before = nnx.graphdef(model)
    training = jqinject.report(model, IMAGES)
    assert nnx.graphdef(model) == before
    abstract = jax.ShapeDtypeStruct(IMAGES.shape, IMAGES.dtype)
    return training, jqinject.report(jqinject.freeze(model), abstract)


@pytest.mark.heavy
def test_what_is_contracted(reports):
    def kinds(report):
        return {entry.path: entry.contraction for entry in report}

    training, frozen = map(kinds, reports)
    never = {"no_input": "float", "no_weight": "float", "plain": "float", "half": "float", "unused": "none"}
    assert training == frozen == {**never, "conv": "int", "dense.0": "int", "op": "int", "float8": "float"}
    assert reports[1]["op"].program == reports[1]["dense.0"].program == "s8 x s8 -> s32"


@pytest.mark.parametrize(
    ("path", "note"),
    [
        ("dense.0", ""),
        ("no_input", "give it input_quant=..."),
        ("no_weight", "its layer has no weight quantizer"),
        ("plain", "it has no quantizer"),
        ("half", "the input has no bits in the configuration"),
        ("float8", "this backend has no such product and takes floats"),
        ("unused", "was not called"),
        ("op", ""),
    ],
)
def test_why_not(reports, path, note):
    assert note in reports[0][path].note
    assert (reports[0][path].note == "") == (note == "")


def test_bytes_of_the_weights(reports):
    training, frozen = reports
    assert training["plain"].weight_bytes == frozen["plain"].weight_bytes == 16 * 16 * 4
    assert training["op"].weight_bytes == 16 * 16 * 4
    assert frozen["op"].weight_bytes == 16 * 16 + 16 * 4  # and the scales
    assert frozen["dense.0"].weight_bytes == 8 * 16 + 16 * 4 + 16 * 4  # and sums of integers
    assert frozen.weight_bytes == sum(entry.weight_bytes for entry in frozen)


def test_it_prints(reports):
    lines = str(reports[1]).splitlines()
    names = ["layer", "class", "input x weight", "contracts", "program", "bytes", "operations", "note"]
    assert re.split(r"  +", lines[0]) == names
    assert lines[-2:] == list(reports[1].coverage.summary)  # the line, and how many small ones are float
    assert len({line.split("  ")[0] for line in lines[1:11]}) == 10 and lines[10].startswith("all layers  ")
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.heavy
def test_operations():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.conv = QuantConv(4, 8, (3, 3), feature_group_count=2, rngs=rngs)
            self.up = nnx.ConvTranspose(8, 2, (2, 2), strides=(2, 2), rngs=rngs)
            self.dense = QuantLinear(8, 5, input_quant=q.Int8ActPerTensorFloat, contraction="int", rngs=rngs)
            self.unused = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            x = self.conv(x)
            return self.up(x), self.dense(self.dense(x)[..., :1].repeat(8, axis=-1))

    abstract = jax.ShapeDtypeStruct((2, 6, 7, 4), jnp.float32)
    found = jqinject.report(Model(), abstract)
    pixels = 2 * 6 * 7
    assert found["conv"].operations == pixels * 8 * 3 * 3 * (4 // 2)
    assert found["up"].operations == pixels * 8 * 2 * 2 * 2
    assert found["dense"].operations == 2 * pixels * 8 * 5
    assert found["unused"].operations == 0
    assert found.operations == sum(entry.operations for entry in found)
    assert found["dense"].numbers is None and found.output_sqnr_db is None


@pytest.mark.heavy
def test_layers_inside_scan():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(8, 8, dot_general=QDotGeneral(config_v4(rng_type=None)), rngs=nnx.Rngs(key))

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = make(jax.random.split(jax.random.key(0), 3))

        def __call__(self, x):
            return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
                self.layers, x
            )

    assert jqinject.report(Stack(), jnp.ones((2, 8)))["layers"].contraction == "int"


def test_not_a_module():
    with pytest.raises(TypeError, match="report takes an NNX module, got function"):
        jqinject.report(lambda x: x, 1)


def test_a_layer_that_contracts_floats_names_the_reason_of_the_table():
    layer = QuantLinear(8, 4, input_quant=q.Int8ActPerTensorFloat, input_bit_width=16, rngs=nnx.Rngs(0))
    layer(jnp.ones((2, 8)))
    (entry,) = jqinject.report(jqinject.freeze(layer), jnp.ones((2, 8)))
    assert "no payload in common that backends contract" in entry.note


class Bilinear(QuantLinear):
    """Contracts its product with a second input, in floats."""

    def __call__(self, left, right):
        return jnp.einsum("bjk,bj->bk", super().__call__(left).reshape(-1, 6, 3), right)


@pytest.mark.heavy
def test_of_a_layer_only_the_contraction_of_its_weight_counts():
    """Also where the layer is the model, so that the contraction has no path."""
    layer = Bilinear(8, 18, input_quant=q.Int8ActPerTensorFloat, rngs=nnx.Rngs(0))
    left, right = jnp.ones((2, 8)), jnp.ones((2, 6))
    layer(left, right)
    frozen = jqinject.freeze(layer)
    for model, path in ((frozen, ""), (nnx.Sequential(frozen), "layers.0")):
        row = jqinject.report(model, left, right)[path]
        assert (row.contraction, row.operation) == ("int", "dot_general")
