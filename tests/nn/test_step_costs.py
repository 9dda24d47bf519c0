"""What a training step of one quantized layer costs, as the compiler counts it: memory accessed, branches, loops.

Time depends on the machine, these counts do not. Each bound is a figure that was reached, so a change that makes
a program pass over its tensors more often has to raise the bound where everybody sees it.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject.nn import QuantLinear

WIDTH, BATCH = 1024, 512
W8 = {"weight_quant": q.Int8WeightPerChannelFloat}


class Running(q.Int8ActPerTensorFloat):
    scaling_impl_type = "stats"
    scaling_stats_op = "max"


def float8(scaling):
    return {
        "weight_quant": getattr(q, f"Fp8e4m3WeightPerTensor{scaling}"),
        "input_quant": getattr(q, f"Fp8e4m3ActPerTensor{scaling}"),
        "grad_quant": getattr(q, f"Fp8e5m2GradPerTensor{scaling}"),
    }


# keywords of the layer; at most: bytes accessed over the float layer's, conditionals, loops
CASES = {
    "w8": (W8, 1.92, 0, 0),
    "w8, learned scales": ({"weight_quant": q.Int8WeightPerChannelLearned}, 1.92, 1, 0),
    "w4 in groups": ({"weight_quant": q.Int4WeightPerGroupAbsMax, "weight_group_size": 128}, 1.84, 0, 0),
    "w8, least squared error": ({"weight_quant": q.Int8WeightPerChannelFloatMSE}, 2.83, 3, 1),
    "uint8, shifted": ({"weight_quant": q.ShiftedUint8WeightPerChannelFloat}, 2.19, 0, 0),
    "ternary": ({"weight_quant": q.SignedTernaryWeightPerTensorConst}, 1.18, 0, 0),
    "w8a8, running": (W8 | {"input_quant": Running}, 2.32, 0, 0),
    "w8a8, min and max": (W8 | {"input_quant": q.Int8ActPerTensorMinMax}, 2.5, 0, 0),
    "w8a8, largest magnitude": (W8 | {"input_quant": q.Int8ActPerTensorAbsMax}, 2.42, 0, 0),
    "w8a8, learned": (W8 | {"input_quant": q.Int8ActPerTensorFloat}, 2.46, 2, 0),
    "w8a8, dynamic": (W8 | {"input_quant": q.Int8DynamicActPerRowFloat}, 2.32, 0, 0),
    "fp8, delayed": (float8("Delayed"), 2.09, 0, 0),
    "fp8, current": (float8("Current"), 2.09, 0, 0),
    "mx, 8-bit floats": (
        {"weight_quant": q.MXFloat8e4m3Weight, "input_quant": q.MXFloat8e4m3Act},
        4.83,
        0,
        0,
    ),
    "nvfp4": ({"weight_quant": q.NVFP4Weight, "input_quant": q.NVFP4Act}, 5.28, 0, 0),
    "scheme, int8": ({"scheme": q.Int8Training}, 2.21, 0, 3),
    "scheme, mxfp8": ({"scheme": q.MXFP8Training}, 3.67, 0, 0),
}


@pytest.fixture(scope="module", autouse=True)
def optimized():
    """What is counted is the program that users run."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def costs_of_step(make):
    """Return bytes accessed, conditionals and loops of one step that gives the gradients of weights and input."""
    layer = nnx.eval_shape(make)
    layer.train()
    graphdef, state = nnx.split(layer)

    def step(state, x):
        model = nnx.merge(graphdef, state)
        loss_and_gradients = jqinject.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), argnums=(0, 1))
        return loss_and_gradients(model, x), nnx.state(model)

    compiled = jax.jit(step).lower(state, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)).compile()
    conditionals, loops = (
        len(re.findall(rf" {name}\(", compiled.as_text())) for name in ("conditional", "while")
    )
    return compiled.cost_analysis()["bytes accessed"], conditionals, loops


@pytest.fixture(scope="module")
def float_bytes():
    return costs_of_step(lambda: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))[0]


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_a_step_costs_no_more_than_it_did(name, float_bytes):
    keywords, most, conditionals, loops = CASES[name]
    costs = costs_of_step(lambda: QuantLinear(WIDTH, WIDTH, rngs=nnx.Rngs(0), **keywords))
    relative = round(costs[0] / float_bytes, 2)
    assert relative <= most, f"{relative} times the bytes of the float step, {float_bytes:.0f}"
    assert costs[1] <= conditionals
    assert costs[2] <= loops


def operations(jaxpr):
    """Return the number of equations, those of inner programs included."""
    inner = [
        part
        for eqn in jaxpr.eqns
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns"))
    ]
    inner = [getattr(part, "jaxpr", part) for part in inner]
    return len(jaxpr.eqns) + sum(operations(part) for part in inner if hasattr(part, "eqns"))


@pytest.mark.heavy
def test_a_program_of_8_bit_floats_is_small():
    layer = QuantLinear(8, 4, rngs=nnx.Rngs(0), **float8("Delayed"))
    layer.train()
    graphdef, state = nnx.split(layer)

    def forward(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model)

    def step(state, x):
        model = nnx.merge(graphdef, state)
        return jqinject.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x), nnx.state(model)

    x = jnp.ones((2, 8))
    of_forward, of_step = (jax.make_jaxpr(function)(state, x).jaxpr for function in (forward, step))
    assert operations(of_forward) <= 50
    assert operations(of_step) <= 114
