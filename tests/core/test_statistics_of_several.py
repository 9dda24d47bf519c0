"""One statistic of several tensors is that of all their elements, without joining them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject.core import (
    AbsAve,
    AbsMax,
    AbsMaxAve,
    AbsMaxL2,
    AbsMinMax,
    AbsPercentile,
    L1Norm,
    L2Norm,
    MeanLearnedSigmaStd,
    MeanSigmaStd,
    NegativeMinOrZero,
    NegativePercentileOrZero,
    OverOutputChannelView,
    OverSubChannelBlockView,
    OverTensorView,
    PercentileInterval,
    SignedAbsMax,
    StatsFromParameterScaling,
)
from jqinject.core.statistics.statistic import in_place

STATS = {
    "largest": lambda axis: AbsMax(axis),
    "signed": lambda axis: SignedAbsMax(axis),
    "width": lambda axis: AbsMinMax(axis),
    "smallest": lambda axis: NegativeMinOrZero(axis),
    "mean": lambda axis: AbsAve(axis),
    "deviation": lambda axis: MeanSigmaStd(2.0, axis),
    "learned": lambda axis: MeanLearnedSigmaStd(2.0, () if axis is None else (5,), axis),
    "percentile": lambda axis: AbsPercentile(70.0, axis),
    "low percentile": lambda axis: NegativePercentileOrZero(10.0, axis),
    "interval": lambda axis: PercentileInterval(10.0, 90.0, axis),
}
OVER_CHANNELS = {
    "mean of channels": AbsMaxAve,
    "norm of channels": AbsMaxL2,
    "l1": L1Norm,
    "l2": L2Norm,
}
CASES = [(make, axis) for make in STATS.values() for axis in (None, 1)]
CASES += [(make, 1) for make in OVER_CHANNELS.values()]
IDS = [f"{name}-{axis}" for name in STATS for axis in (None, 1)] + list(OVER_CHANNELS)
A = jax.random.normal(jax.random.key(0), (6, 5))
B = 1.5 * jax.random.normal(jax.random.key(1), (9, 5))
TIED = A.at[2].set(4.0)  # an extreme in each channel of both


@pytest.mark.heavy
@pytest.mark.parametrize(("make", "axis"), CASES, ids=IDS)
@pytest.mark.parametrize("tensors", [(A, B), (TIED, TIED), (A, B[:0])], ids=["two", "ties", "one empty"])
def test_is_that_of_the_tensors_side_by_side(make, axis, tensors):
    stat = make(axis)
    view = OverTensorView() if axis is None else OverOutputChannelView((1, 0))

    def apart(*tensors):
        found, laid = in_place(stat, view, tensors, axis or 0)
        return jnp.sum(jnp.sin(found(laid))), found(laid).ravel()

    def joined(*tensors):
        found = stat(jnp.concatenate([view(x) for x in tensors], axis or 0))
        return jnp.sum(jnp.sin(found)), found.ravel()

    both = (0, 1)
    slopes, found = jax.grad(apart, both, has_aux=True)(*tensors)
    expected, wanted = jax.grad(joined, both, has_aux=True)(*tensors)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for slope, other in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(slope, other, rtol=1e-5, atol=1e-6)


OF_GROUPS = [name for name in STATS if name != "learned"] + ["l1", "l2"]


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 8, reason="groups cross shards on several devices")
@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("length", [120, 80], ids=["full", "filled up"])
def test_groups_that_cross_shards_are_reduced_where_they_lie(name, length):
    x = jax.random.normal(jax.random.key(0), (length, 3)).at[length - 10 :].add(2.0)
    x = x.at[length - 16 :, 0].set(
        -jnp.abs(x[length - 16 :, 0])
    )  # below the zeros that fill up the last group
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(x, NamedSharding(mesh, P("model")))
    stat = (STATS | OVER_CHANNELS)[name](1)
    view = OverSubChannelBlockView((-(-length // 24), 24, 3), 24, 0)
    found, laid = in_place(stat, view, sharded)
    assert laid is sharded
    np.testing.assert_allclose(found(sharded).ravel(), stat(view(x)).ravel(), rtol=1e-6)
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(found(x))))(sharded)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(stat(view(x)))))(x)
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-6)


def test_layers_of_different_ranks_share_a_scale():
    kernel = jax.random.normal(jax.random.key(2), (3, 3, 2, 5))
    view = OverOutputChannelView(channel_shape=(5,))
    quantizer = StatsFromParameterScaling(AbsMax(1), view, 1, [A, kernel], (5,))
    largest = np.maximum(np.abs(A).max(0), np.abs(kernel).max((0, 1, 2)))
    np.testing.assert_array_equal(quantizer(A), largest)


def test_a_statistic_of_the_user_gets_the_tensors_joined():
    def range_of(x):
        return jnp.max(x) - jnp.min(x)

    found, laid = in_place(range_of, OverTensorView(), (A, B))
    assert laid.shape == (A.size + B.size,)
    assert float(found(laid)) == float(max(A.max(), B.max()) - min(A.min(), B.min()))
