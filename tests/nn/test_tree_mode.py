"""NNX's tree mode, where modules are plain pytrees: layers that share nothing work there as everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jqinject
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear, QuantReLU
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    ShiftedUint8ActPerTensorFloat,
)

X = jax.random.normal(jax.random.key(0), (6, 5, 4))


class Act(Int8ActPerTensorFloat):
    collect_stats_steps = 2


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        quantizers = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Act, "bias_quant": Int32Bias}
        self.conv = QuantConv(
            4, 8, 3, weight_float_to_int_impl_type="stochastic_round", **quantizers, rngs=rngs
        )
        self.act = QuantReLU(collect_stats_steps=2)
        self.head = QuantLinear(
            8, 2, weight_scaling_impl_type="parameter_from_stats", **quantizers, rngs=rngs
        )
        self.out = QuantIdentity(ShiftedUint8ActPerTensorFloat, collect_stats_steps=2)

    def __call__(self, x):
        return self.out(self.head(self.act(self.conv(x))))


def numbers(model):
    state = nnx.to_flat_state(nnx.state(model, graph=True))
    return [np.array(jax.random.key_data(v[...]) if "key" in str(v.dtype) else v[...]) for _, v in state]


def assert_close(a, b):
    for mine, theirs in zip(a, b, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def _plain(model, x):
    return model(x)


def _jit(model, x):
    return nnx.jit(lambda m, x: m(x), graph=False)(model, x)


def _jax_jit(model, x):
    def run(model, x):
        return model(x), model

    y, new = jax.jit(run)(model, x)
    nnx.update(model, nnx.state(new))
    return y


def _remat(model, x):
    return nnx.remat(lambda m, x: m(x), graph=False)(model, x)


def _split_and_merged(model, x):
    graphdef, state = nnx.split(model, graph=False)
    merged = nnx.merge(graphdef, state, copy=True)
    y = merged(x)
    nnx.update(model, nnx.state(merged, graph=False))
    return y


RUNS = {"jit": _jit, "jax.jit": _jax_jit, "remat": _remat, "split": _split_and_merged}


@pytest.mark.lengthy
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_forward_passes_and_their_state(run):
    with nnx.set_graph_mode(False):
        model, expected = Model(), Model()
        for step in range(4):
            x = X * (step + 1)
            np.testing.assert_allclose(run(model, x), expected(x), rtol=1e-4, atol=1e-5)
        assert_close(numbers(model), numbers(expected))


def test_training():
    with nnx.set_graph_mode(False):
        model = Model()
        optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
        traces = []

        @nnx.jit(graph=False)
        def step(model, optimizer, x):
            traces.append(1)
            graphdef, params, rest = nnx.split(model, nnx.Param, ..., graph=False)

            def loss(params, rest):
                model = nnx.merge(graphdef, params, rest)
                return jnp.mean((model(x) - 1) ** 2)

            value, gradients = nnx.value_and_grad(loss, graph=False)(params, rest)
            optimizer.update(model, gradients)
            return value

        losses = [float(step(model, optimizer, X)) for _ in range(12)]
        assert len(traces) == 1
        assert losses[-1] < losses[3]
        assert int(model.out.act_quant.tensor_quant.scaling_impl.counter[...]) == 3


def test_loading_and_copies():
    with nnx.set_graph_mode(False):
        model, other = Model(0), Model(1)
        model(X)
        jqinject.load_state(other, nnx.state(model))
        assert_close(numbers(other), numbers(model))
        other.eval(), model.eval()
        np.testing.assert_array_equal(nnx.clone(other)(X), model(X))
        jqinject.reassemble(nnx.clone(other))


def test_layers_that_share_are_refused_at_once_and_nothing_changes():
    first = QuantLinear(3, 3, weight_quant=Int8WeightPerTensorFloat, rngs=nnx.Rngs(0))
    act = QuantIdentity(Act)
    with nnx.set_graph_mode(False):
        for share in (
            lambda: QuantLinear(3, 3, weight_quant=first.weight_quant, rngs=nnx.Rngs(1)),
            lambda: QuantReLU(act.act_quant),
        ):
            with pytest.raises(ValueError, match=r"tree mode(?s:.)*cure: leave tree mode"):
                share()
    assert first.weight_quant.tracked_modules == (first,)
    assert act.act_quant.tracked_modules == (act,)
