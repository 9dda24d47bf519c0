"""NNX's tree mode, where modules are plain pytrees: layers that share nothing work there as everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jqinject
from jqinject import core
from jqinject.core.memory.clipping_range import SimpleMovingAverage
from jqinject.core.state import flat_parts
from jqinject.core.statistics.ranges import ClippingRange
from jqinject.dot import QDotGeneral
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear, QuantReLU
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e5m2GradPerTensorDelayed,
    Int8AccumulatorAwareWeightQuant,
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    Int32Bias,
    ShiftedUint8ActPerTensorFloat,
)
from jqinject.quant.aqt import config_v4

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
    state = flat_parts(nnx.state(model, graph=True))
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


@pytest.mark.heavy
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


@pytest.mark.heavy
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


class Own(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jax.random.normal(jax.random.key(2), (4, 3)))

    def __call__(self, x):
        return x @ self.w[...]


def _linear(**quantizers):
    return QuantLinear(4, 3, **quantizers, rngs=nnx.Rngs(0))


STATEFUL = {
    "collected and learned": lambda: _linear(
        input_quant=Act, weight_scaling_impl_type="parameter_from_stats"
    ),
    "averaged": lambda: _linear(input_quant=Int8ActPerTensorMinMax),
    "begins late": lambda: _linear(weight_quant_delay_steps=2),
    "by the input": lambda: _linear(
        weight_quant=Int8AccumulatorAwareWeightQuant, input_quant=Int8ActPerTensorMinMax
    ),
    "own parameter": lambda: jqinject.quantize(
        Own(), jqinject.Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Act), inputs=X
    ),
}
BY_PARAMETERS = {
    "stochastic": lambda: _linear(weight_float_to_int_impl_type="stochastic_round"),
    "gradients": lambda: _linear(
        input_quant=Fp8e4m3ActPerTensorDelayed, grad_quant=Fp8e5m2GradPerTensorDelayed
    ),
    "an op": lambda: nnx.Linear(
        4, 3, dot_general=QDotGeneral(config_v4(), rngs=nnx.Rngs(1)), rngs=nnx.Rngs(0)
    ),
}
MODES = {"tree mode": nnx.set_graph_mode, "no updates": nnx.set_graph_updates}


def _loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def _steps(value_and_grad, make):
    """Losses, gradients of parameters and state of three steps with growing inputs."""
    model, found = make(), []
    for step in range(3):
        loss, gradients = value_and_grad(_loss)(model, X * (step + 1))
        found += [np.array(loss), *numbers(nnx.state(gradients, nnx.Param))]
    return found + numbers(model)


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    ("value_and_grad", "make"),
    [
        *((nnx.value_and_grad, make) for make in STATEFUL.values()),
        *((jqinject.value_and_grad, make) for make in {**STATEFUL, **BY_PARAMETERS}.values()),
    ],
    ids=[
        *(f"nnx, {name}" for name in STATEFUL),
        *(f"jqinject, {name}" for name in {**STATEFUL, **BY_PARAMETERS}),
    ],
)
def test_gradients_and_state_are_those_of_graph_mode(mode, value_and_grad, make):
    expected = _steps(value_and_grad, make)
    with mode(False):
        found = _steps(value_and_grad, make)
    assert_close(found, expected)


@pytest.mark.parametrize("value_and_grad", [nnx.value_and_grad, jqinject.value_and_grad], ids=["nnx", "ours"])
def test_a_whole_model_trains(value_and_grad):
    with nnx.set_graph_mode(False):
        model = _linear(input_quant=Act, bias_quant=Int32Bias)
        optimizer = nnx.Optimizer(model, optax.sgd(0.2, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            loss, gradients = value_and_grad(_loss)(model, x)
            optimizer.update(model, gradients)
            return loss

        losses = [float(step(model, optimizer, X)) for _ in range(30)]
        assert losses[-1] < 0.5 * losses[3]
        assert int(model.input_quant.tensor_quant.scaling_impl.counter[...]) == 3


def test_counters_are_exact_as_far_as_they_go():
    """Beyond 2^24 float32 has no next number: there a mean is final, and a momentum goes on."""
    last = jnp.float32(2**24 - 1)
    mean = SimpleMovingAverage()
    mean.counter.set_value(last - 1), mean.sum_of_max.set_value(last - 1)
    counts = []
    for _ in range(4):
        mean(ClippingRange(jnp.float32(1.0)), update=True)
        counts.append(int(mean.counter[...]))
    assert counts == [2**24 - 1, 2**24, 2**24, 2**24]
    mean(ClippingRange(jnp.float32(2.0**24)), update=True)
    assert float(mean.sum_of_max[...]) == 2**24
    cumulative, running = (
        core.RuntimeStatsScaling(core.AbsMax(), scaling_stats_momentum=m) for m in (None, 0.5)
    )
    for scaling, expected in ((cumulative, 1.0), (running, 2.0)):
        scaling.counter.set_value(last + 1)
        scaling(jnp.array([3.0]))
        assert (float(scaling.counter[...]), float(scaling.running_stats[...])) == (2**24, expected)
