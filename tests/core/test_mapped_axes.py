"""Statistics with an `axis_name` are those of the whole tensor on every device, and so are their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jqinject.quant as q
from jqinject import core
from jqinject.core.statistics.ranges import AbsMaxRange, AbsPercentileRange, MinMaxRange, MSERange, RMSRange
from jqinject.nn import QuantBatchNorm, QuantIdentity, QuantLinear

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="the axis has 4 places")

X = jax.random.normal(jax.random.key(0), (8, 12)) * jnp.arange(1.0, 9.0)[:, None]
STATS = [
    core.AbsMax,
    core.SignedAbsMax,
    core.AbsMinMax,
    core.NegativeMinOrZero,
    lambda **named: core.AbsPercentile(90.0, **named),
    lambda **named: core.NegativePercentileOrZero(10.0, **named),
    lambda **named: core.PercentileInterval(10.0, 90.0, **named),
    core.AbsAve,
    lambda **named: core.MeanSigmaStd(2.0, **named),
    lambda **named: core.AbsMaxAve(0, **named),
    lambda **named: core.L1Norm(0, **named),
    lambda **named: core.L2Norm(0, **named),
]


def divided(function, check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    )


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    "make", STATS, ids=lambda make: str(make(stats_reduce_dim=0)) if isinstance(make, type) else str(make())
)
def test_statistics_and_gradients_of_the_whole(make, check_vma):
    whole, named = make(), make(axis_name="data")

    def of_part(x):
        value, pull = jax.vjp(named, x)
        # The loss of each device is a quarter of the statistic.
        cotangent = jnp.full_like(value, 0.25) if not check_vma else jnp.ones_like(value)
        return jnp.broadcast_to(value, (1, *value.shape)), pull(cotangent)[0]

    value, pull = jax.vjp(whole, X)
    found, gradient = divided(of_part, check_vma)(X)
    for one in found:
        np.testing.assert_allclose(one, value, rtol=1e-6)
    np.testing.assert_allclose(gradient, pull(jnp.ones_like(value))[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "method", [AbsMaxRange(), MinMaxRange(), RMSRange(), AbsPercentileRange(90.0), MSERange()], ids=str
)
def test_ranges_of_the_whole(method):
    def ends(x, names=()):
        found = method(x, (0, 1), names)
        return jnp.stack([found.high, found.lowest]).reshape(1, 2)

    found = divided(lambda x: ends(x, ("data",)), False)(X)
    np.testing.assert_allclose(found, np.broadcast_to(ends(X), (4, 2)), rtol=1e-6)


@pytest.mark.parametrize(
    "quantizer",
    [
        q.Int8ActPerTensorFloat,
        q.ShiftedUint8ActPerTensorFloat,
        q.Int8ActPerTensorMinMax,
        q.Int8ActPerTensorFloatMSE,
    ],
)
def test_running_statistics_under_pmap(quantizer):
    """Two steps; the state of every device is that of one device that sees everything."""
    batches = [X, 3 * X[::-1]]

    def state_after(layer, batches):
        for batch in batches:
            layer(batch)
        return nnx.state(layer)

    whole = state_after(QuantIdentity(quantizer), batches)

    def on_device(*parts):
        return state_after(QuantIdentity(quantizer, axis_name="data"), parts)

    found = jax.pmap(on_device, axis_name="data")(*(batch.reshape(4, 2, 12) for batch in batches))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, np.broadcast_to(theirs, ours.shape), rtol=1e-6)


def test_a_search_in_a_stated_order_refuses_a_mapped_axis():
    with pytest.raises(
        ValueError, match="adds errors in a stated order, on one device, got axis_name='data'"
    ):
        QuantIdentity(q.ShiftedUint8ActPerTensorFloatHQO, axis_name="data")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "quantizer",
    [
        q.Int8ActPerTensorFloat,
        q.Int8ActPerTensorAbsMax,
        q.Int8ActPerTensorMinMax,
        q.Fp8e4m3ActPerTensorDelayed,
    ],
)
def test_a_batch_norms_axis_is_that_of_its_quantizers_in_training_alone(quantizer):
    def trained(axis_name, x):
        norm = QuantBatchNorm(12, output_quant=quantizer, axis_name=axis_name, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(norm)

        def step(state, x):
            model = nnx.merge(graphdef, state)
            y = model(x)
            return nnx.state(model), y

        if axis_name is None:
            state, y = step(state, x)
            return nnx.merge(graphdef, state), y
        parts = x.reshape(4, 2, 12)
        state, y = jax.vmap(step, in_axes=(None, 0), axis_name=axis_name)(state, parts)
        same = jax.tree.map(lambda leaf: bool((leaf == leaf[0]).all()), nnx.to_pure_dict(state))
        assert all(jax.tree.leaves(same))
        return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], state)), y.reshape(8, 12)

    whole, y = trained(None, X)
    divided, found = trained("data", X)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-5)
    for model in (whole, divided):
        model.eval()
    # Outside of the mapped axis the tensor is whole: nothing is missed.
    np.testing.assert_allclose(divided(X), whole(X), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(divided, X), whole(X), rtol=1e-5, atol=1e-5)


def test_a_batch_norms_quantizer_may_have_another_axis():
    norm = QuantBatchNorm(4, axis_name="data", output_axis_name=None, rngs=nnx.Rngs(0))
    assert norm.output_quant.binding.resolve("axis_name") is None
    norm = QuantBatchNorm(4, axis_name="data", rngs=nnx.Rngs(0))
    assert norm.output_quant.binding.resolve("axis_name") == "data"


@pytest.mark.parametrize(
    "quantizer",
    [q.Int8DynamicActPerTensorAbsMax, q.Int8DynamicActPerRowFloat, q.Fp8e4m3ActPerTensorCurrent, q.MXInt8Act],
)
def test_a_batch_norms_axis_is_not_that_of_quantizers_that_keep_nothing(quantizer):
    norm = QuantBatchNorm(12, output_quant=quantizer, axis_name="data", rngs=nnx.Rngs(0))
    norm.eval()
    assert norm(X).shape == X.shape


@pytest.mark.parametrize(
    "quantizer",
    [
        q.Int8WeightNormL2PerChannelFixedPoint,
        q.Int8AccumulatorAwareWeightQuant,
        q.Int8AccumulatorAwareZeroCenterWeightQuant,
    ],
)
def test_weight_normalization_refuses_a_mapped_axis(quantizer):
    with pytest.raises(ValueError, match="weight normalization takes the norms of a whole weight"):
        QuantLinear(
            8, 4, weight_quant=quantizer, weight_axis_name="data", input_quant=q.Int8ActPerTensorFloat,
            rngs=nnx.Rngs(0),
        )  # fmt: skip


@pytest.mark.parametrize("stat", [core.AbsMax, core.AbsAve], ids=["largest", "mean"])
def test_an_axis_that_does_not_surround_the_call_is_named(stat):
    with pytest.raises(NameError, match=r"(?s)axis 'data' \(axis_name\).*cure: call it within"):
        stat(axis_name="data")(X)


@pytest.mark.parametrize("quantizer", [q.Int8ActPerTensorFloat, q.Int8ActPerTensorFloatMSE])
def test_a_mapped_axis_that_was_not_named_is_named_with_the_keyword(quantizer):
    layer = QuantLinear(12, 4, input_quant=quantizer, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def call(state, x):
        layer = nnx.merge(graphdef, state)
        return layer(x), nnx.state(layer)

    mapped = jax.shard_map(call, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P("data"), P()))
    with pytest.raises(ValueError, match=r"distributed over 'data'[\s\S]*input_axis_name='data'"):
        jax.jit(mapped)(state, X)


@pytest.mark.heavy
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("quantizer", [q.Int8WeightPerChannelFloat, q.Int4WeightPerChannelLearned])
def test_a_kernel_sharded_by_columns_has_the_scales_of_its_columns(quantizer, check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    layer = QuantLinear(12, 8, weight_quant=quantizer, input_quant=q.Int8ActPerTensorMinMax, rngs=nnx.Rngs(0))
    layer(X)
    layer.eval()
    columns = nnx.StateSharding(
        {
            nnx.PathContains("kernel"): P(None, "data"),
            nnx.PathContains("value"): P(None, "data"),
            nnx.PathContains("bias"): P("data"),
            ...: P(),
        }
    )

    @nnx.shard_map(mesh=mesh, in_specs=(columns, P()), out_specs=P(None, "data"), check_vma=check_vma)
    def mapped(layer, x):
        return layer(x)

    def gradient(call):
        return nnx.grad(lambda layer, x: (call(layer, x) ** 2).sum())(layer, X)

    np.testing.assert_array_equal(mapped(layer, X), layer(X))
    expected = gradient(lambda layer, x: layer(x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradient(mapped), expected)


def test_columns_that_no_axis_divides_are_refused():
    layer = QuantLinear(12, 8, weight_quant=q.Int8WeightPerChannelFloat, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"the statistic has shape \(1, 4\), scaling_shape is \(1, 8\)"):
        layer.weight_quant(layer.kernel[:, :4])
