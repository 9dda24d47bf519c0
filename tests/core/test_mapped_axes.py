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
from jqinject.core.calibration import AbsMaxRange, AbsPercentileRange, MinMaxRange, MSERange, RMSRange
from jqinject.nn import QuantIdentity

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
