"""Quantized models under NNX's transforms: each against the plain call, and traces are counted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jqinject
from jqinject.core.state import flat_parts
from jqinject.nn import QuantConv, QuantIdentity, QuantLinear, QuantReLU
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int32Bias,
    ShiftedUint8ActPerTensorFloat,
)


class Act(Int8ActPerTensorFloat):
    collect_stats_steps = 2


class Shifted(ShiftedUint8ActPerTensorFloat):
    collect_stats_steps = 2


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        quants = {"weight_quant": Int8WeightPerChannelFloat, "bias_quant": Int32Bias, "rngs": rngs}
        self.conv = QuantConv(1, 4, (3, 3), input_quant=Act, **quants)
        self.relu = QuantReLU(collect_stats_steps=2, return_quant_tensor=True)
        self.dense = QuantLinear(
            4, 3, input_quant=Act, weight_scaling_impl_type="parameter_from_stats", **quants
        )
        self.out = QuantIdentity(Shifted)

    def __call__(self, x):
        y = self.relu(self.conv(x)).value.mean((1, 2))
        return self.out(self.dense(y))


def batch(seed, size=4):
    return jax.random.normal(jax.random.key(seed), (size, 5, 5, 1))


def everything(model):
    return nnx.to_pure_dict(nnx.state(model))


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.lengthy
def test_jit_equals_eager_through_calibration_and_after():
    eager, jitted = Net(), Net()
    step = nnx.jit(lambda m, x: m(x))
    for seed in range(5):
        np.testing.assert_allclose(step(jitted, batch(seed)), eager(batch(seed)), rtol=1e-4, atol=1e-5)
    assert_close(everything(jitted), everything(eager))


@pytest.mark.heavy
def test_two_models_built_alike_share_one_trace_and_training_never_retraces():
    traces = []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)
        value, gradients = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradients)
        return value

    for seed in range(3):
        model = Net(seed)
        model.train()
        optimizer = nnx.Optimizer(model, TRANSFORM, wrt=nnx.Param)
        losses = [float(step(model, optimizer, batch(i))) for i in range(4)]
        assert np.isfinite(losses).all()
    assert len(traces) == 1


TRANSFORM = optax.sgd(0.05, momentum=0.9)


@pytest.mark.heavy
def test_training_moves_weights_and_learned_scales_and_lowers_the_loss():
    model = Net()
    optimizer = nnx.Optimizer(model, TRANSFORM, wrt=nnx.Param)
    step = nnx.jit(lambda m, o, x: o.update(m, nnx.grad(loss)(m, x)))
    for seed in range(4):
        model(batch(seed))
    before, scale = float(loss(model, batch(0))), model.out.act_quant.tensor_quant.scaling_impl.value[...]
    for _ in range(30):
        step(model, optimizer, batch(0))
    assert float(loss(model, batch(0))) < before
    assert float(model.out.act_quant.tensor_quant.scaling_impl.value[...]) != float(scale)


@pytest.mark.lengthy
def test_gradient_accumulation_over_micro_batches():
    model, other = Net(), Net()
    for seed in range(4):
        model(batch(seed)), other(batch(seed))
    accumulated = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(0.1), 2), wrt=nnx.Param)
    single = nnx.Optimizer(other, optax.sgd(0.1), wrt=nnx.Param)
    for micro in (batch(9)[:2], batch(9)[2:]):
        gradients = nnx.grad(loss)(model, micro)
        with jax.numpy_dtype_promotion("standard"):  # MultiSteps counts in integers
            accumulated.update(model, gradients)
    single.update(other, nnx.grad(loss)(other, batch(9)))
    np.testing.assert_allclose(model.dense.kernel[...], other.dense.kernel[...], rtol=1e-3, atol=1e-5)


@pytest.mark.lengthy
def test_remat_moves_statistics_once():
    plain, remat = Net(), Net()
    for seed in range(4):
        a = nnx.grad(loss)(plain, batch(seed))
        b = nnx.jit(nnx.grad(lambda m, x: jnp.mean(nnx.remat(lambda m, x: m(x))(m, x) ** 2)))(
            remat, batch(seed)
        )
        assert_close(nnx.to_pure_dict(a), nnx.to_pure_dict(b))
    assert int(remat.conv.input_quant.tensor_quant.scaling_impl.counter[...]) == 3
    assert_close(everything(plain), everything(remat))


@pytest.mark.lengthy
def test_stacked_layers_are_scanned_with_statistics_of_their_own():
    def build(rngs):
        return QuantLinear(4, 4, weight_quant=Int8WeightPerChannelFloat, input_quant=Act, rngs=rngs)

    stack = nnx.vmap(build)(nnx.Rngs(0).split(3))

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return layer(x)

    graphdef, state = nnx.split(stack)
    singles = [
        nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state), copy=True) for i in range(3)
    ]
    for seed in range(4):
        x = jax.random.normal(jax.random.key(seed), (5, 4))
        expected = x
        for single in singles:
            expected = single(expected)
        np.testing.assert_allclose(forward(stack, x), expected, rtol=1e-4, atol=1e-5)
    expected = [float(single.input_quant.tensor_quant.scaling_impl.value[...]) for single in singles]
    np.testing.assert_allclose(stack.input_quant.tensor_quant.scaling_impl.value[...], expected, rtol=1e-5)
    gradients = nnx.grad(lambda m: jnp.sum(forward(m, jnp.ones((1, 4)))))(stack)
    assert gradients["kernel"].shape == (3, 4, 4)


def test_eval_shape_allocates_nothing_and_describes_the_model():
    abstract = nnx.eval_shape(lambda: Net())
    leaves = jax.tree.leaves(nnx.state(abstract))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert nnx.graphdef(abstract) == nnx.graphdef(Net())
    output = nnx.eval_shape(lambda m: m(jnp.zeros((2, 5, 5, 1))), Net())
    assert output.shape == (2, 3)


@pytest.mark.heavy
def test_evaluation_moves_nothing_and_views_share_the_variables():
    model = Net()
    for seed in range(4):
        model(batch(seed))
    model.eval()
    before = jax.tree.map(np.asarray, everything(model))
    first = model(10 * batch(0))
    np.testing.assert_array_equal(first, model(10 * batch(0)))
    jax.tree.map(np.testing.assert_array_equal, everything(model), before)
    model.train()
    view = nnx.view(model, use_running_average=True)
    assert view.conv.input_quant.training is False and model.conv.input_quant.training is True
    np.testing.assert_array_equal(view(10 * batch(0)), first)
    assert view.conv.kernel is model.conv.kernel


@pytest.mark.heavy
@pytest.mark.parametrize("axis", ["batch", "weights"])
def test_sharded_arrays_give_what_one_device_gives(axis):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(array, spec):
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))

    def build():
        return QuantLinear(4, 16, weight_quant=Int8WeightPerChannelFloat, input_quant=Act, rngs=nnx.Rngs(0))

    single, sharded = build(), build()
    step = nnx.jit(lambda m, x: (m(x), nnx.grad(lambda m: jnp.mean(m(x) ** 2))(m)["kernel"].get_value()))
    if axis == "weights":
        sharded.kernel.set_value(put(sharded.kernel[...], jax.sharding.PartitionSpec(None, "x")))
    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (16, 4))
        given = put(x, jax.sharding.PartitionSpec("x")) if axis == "batch" else x
        for ours, theirs in zip(step(sharded, given), step(single, x), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_close(everything(sharded), everything(single))


@pytest.mark.heavy
def test_donated_buffers():
    model = Net()
    graphdef, state = nnx.split(model)
    state = jax.tree.map(jnp.copy, state)

    def step(state, x):
        model = nnx.merge(graphdef, state, copy=True)
        y = model(x)
        return nnx.split(model)[1], y

    donating = jax.jit(step, donate_argnums=0)
    for seed in range(4):
        state, y = donating(state, batch(seed))
        np.testing.assert_allclose(y, model(batch(seed)), rtol=1e-4, atol=1e-5)


@pytest.mark.lengthy
def test_bfloat16_outside_and_float32_inside():
    layer = QuantLinear(4, 3, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, input_quant=Act, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    weight = layer.quant_weight()
    assert weight.value.dtype == jnp.bfloat16 and weight.scale.dtype == jnp.float32 and weight.is_valid
    gradients = nnx.grad(lambda m: m(x).sum().astype(jnp.float32))(layer)
    assert gradients["kernel"].get_value().dtype == jnp.bfloat16


@pytest.mark.heavy
def test_an_empty_batch():
    model = Net()
    assert model.conv(batch(0)[:0]).shape == (0, 5, 5, 4)
    assert model(batch(0)[:0]).shape == (0, 3)
    assert all(bool(jnp.isfinite(v.get_value()).all()) for _, v in flat_parts(nnx.state(model)))
    assert np.isfinite(model(batch(1))).all()


@pytest.mark.heavy
def test_a_frozen_layer_without_jit_has_the_same_bits():
    layer = QuantLinear(
        8, 4, weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (3, 8))
    layer(x)
    layer.eval()
    frozen = jqinject.freeze(layer)
    expected = frozen(x)
    with jax.disable_jit():
        y = frozen(x)
    assert (y == expected).all()
    assert (jax.jit(frozen)(x) == expected).all()
