"""Compiled models fuse a layer's operations with its product: the same bits as under `jax.jit`, in fewer operations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import native
from jqinject.dot import QDotGeneral
from jqinject.nn import QuantLinear
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    ShiftedUint8ActPerTensorFloat,
)
from jqinject.quant.aqt import config_v4

WIDTH = 32


class Averaged(Int8ActPerTensorFloat):
    scaling_impl_type = "stats"
    scaling_stats_op = "max"


def dense(given, weight=Int8WeightPerChannelFloat, **more):
    return lambda rngs: QuantLinear(WIDTH, WIDTH, weight_quant=weight, input_quant=given, rngs=rngs, **more)


def by_scheme(rngs):
    return nnx.Linear(WIDTH, WIDTH, dot_general=QDotGeneral(config_v4()), rngs=rngs)


class Layers(nnx.Module):
    def __init__(self, make, activation):
        self.layers, self.activation = nnx.List([make(nnx.Rngs(n)) for n in range(3)]), activation

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def inputs(*lead, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), (*lead, WIDTH), dtype)


def programs(model, x):
    """A compiled model's program as text, and its answer beside that of the model under `jax.jit`."""
    model.eval()
    graphdef, state = nnx.split(model, graph=True)
    expected = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)
    answer = jqinject.compiled(model, x)
    text = answer._run.lower(*answer._arguments((x,), {})).compile().as_text()
    return text, answer(x), expected


def calls(text, name="fused_matmul"):
    return len(re.findall(f'custom_call_target="jqinject_{name}', text))


MODELS = {
    "static": (dense(Averaged), nnx.relu),
    "static, ReLU6, 3 axes": (dense(Averaged), nnx.relu6),
    "static, GELU": (dense(Averaged), nnx.gelu),
    "one scale": (dense(Averaged, Int8WeightPerTensorFloat, use_bias=False), jnp.tanh),
    "unsigned with zero point": (dense(ShiftedUint8ActPerTensorFloat), nnx.relu),
    "each row": (dense(Int8DynamicActPerRowFloat), nnx.relu),
    "scheme, 3 axes": (by_scheme, nnx.relu),
    "bfloat16": (dense(Averaged, dtype=jnp.bfloat16), nnx.relu),
    "bfloat16 parameters": (dense(Averaged, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16), nnx.relu),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_with_one_kernel_for_a_layer(kernel, name):
    x = inputs(
        *((2, 3) if "3 axes" in name else (6,)), dtype=jnp.bfloat16 if "param" in name else jnp.float32
    )
    model = Layers(*MODELS[name])
    model(x)
    for layers in (model, jqinject.freeze(model)):
        text, got, expected = programs(layers, x)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
        assert (calls(text), calls(text, "int8_matmul")) == (3, 0)
    assert not re.search(r"32\]\S* round-nearest-even", text), "the inputs are rounded by the kernel"


def test_layers_with_known_scales_hand_on_bytes(kernel):
    model = Layers(dense(Averaged), nnx.relu)
    model(inputs(6))
    text, *_ = programs(jqinject.freeze(model), inputs(6))
    assert len(re.findall(r"s8\[6,32\]\S* custom-call\(", text)) == 2
    assert not re.search(r"f32\[6,32\]\S* fusion\(", text), "nothing is left between the products"


@pytest.mark.parametrize("name", ["each row", "scheme, 3 axes"])
def test_the_kernels_measure_rows_and_make_scales_of_them(kernel, name):
    model = Layers(*MODELS[name])
    model(inputs(6))
    text, *_ = programs(jqinject.freeze(model), inputs(6))
    assert (calls(text, "row_amax"), text.count(" reduce(")) == (3, 0)
    assert not re.search(r"f32\[6,\d+\]\S* (fusion|divide|multiply|select)\((?!%constant)", text)


class Branches(nnx.Module):
    """Three products of one quantized input; a sum that is read twice; a product whose output is returned too."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.quantizer = dense(Averaged)(rngs)
        shared = self.quantizer.input_quant
        self.queries, self.keys = (dense(shared)(rngs) for _ in range(2))
        self.last = dense(Averaged)(rngs)

    def __call__(self, x):
        q, k, v = self.quantizer(x), self.queries(x), self.keys(x)
        y = nnx.relu(q) + k + v
        return self.last(y) + y, v


def test_what_several_operations_read_stays(kernel):
    model = Branches()
    model(inputs(6))
    text, got, expected = programs(jqinject.freeze(model), inputs(6))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (calls(text), calls(text, "int8_matmul")) == (4, 0)


def test_what_python_is_shown_stays(kernel):
    seen = []

    class Shown(Layers):
        def __call__(self, x):
            y = self.layers[0](x)
            jax.debug.callback(lambda y: seen.append(np.asarray(y)), y)
            return self.layers[2](self.layers[1](nnx.relu(y)))

    model = Shown(dense(Averaged), nnx.relu)
    model(inputs(6))
    text, got, expected = programs(jqinject.freeze(model), inputs(6))
    jax.effects_barrier()
    np.testing.assert_array_equal(got, expected)
    in_training, under_jit, compiled = seen
    assert in_training.shape == under_jit.shape
    np.testing.assert_array_equal(compiled, under_jit)
    assert (calls(text), calls(text, "int8_matmul")) == (3, 0), "what is shown is the kernel's own result"


def test_within_a_scan(kernel):
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(dense(Averaged), in_axes=0)(nnx.Rngs(0).split(3))

        def __call__(self, x):
            return nnx.scan(lambda x, layer: nnx.relu(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    model = Stack()
    model(inputs(6))
    text, got, expected = programs(jqinject.freeze(model), inputs(6))
    np.testing.assert_array_equal(got, expected)
    assert (calls(text), calls(text, "int8_matmul")) == (1, 0)


def test_without_kernels_nothing_is_fused(kernel):
    model = jqinject.freeze(Layers(dense(Int8DynamicActPerRowFloat), nnx.relu))
    with native.use(False):
        text, got, expected = programs(model, inputs(6))
    np.testing.assert_array_equal(got, expected)
    assert "custom_call_target" not in text
