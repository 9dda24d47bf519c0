"""Quantizers on a mesh with explicit axes, where every reshape and gather has to say what becomes of a sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject.quant as q
from jqinject.nn import QuantIdentity, QuantLinear

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")

X = jax.random.normal(jax.random.key(0), (8, 4, 32))


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


@nnx.jit
def step(layer, x):
    return nnx.value_and_grad(lambda layer, x: jnp.mean(layer(x) ** 2), argnums=(0, 1))(layer, x)


def alone(make, x):
    with jax.set_mesh(jax.make_mesh((), (), axis_types=())):
        return step(make(), x)


def assert_alike(found, expected, rtol):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("spec", [(None, "model"), ("data", None)], ids=str)
@pytest.mark.parametrize(
    "weight",
    [
        q.Int8WeightPerTensorFloat,  # the whole tensor in one axis
        q.Int8WeightPerChannelFloatMSE,  # a parameter that is filled once
        q.Fp8e4m3WeightPerChannelDelayed,  # a history for each channel
        q.NF4WeightPerChannelFloat,  # a table
        q.NVFP4Weight,  # groups that shards do not fill
        q.Int8WeightPerChannelFloatHQO,  # sums in a stated order
    ],
)
def test_sharded_weights(weight, spec, mesh):
    def make(**metadata):
        return QuantLinear(32, 32, weight_quant=weight, kernel_metadata=metadata, rngs=nnx.Rngs(0))

    layer = make(out_sharding=spec)
    assert layer.kernel[...].sharding.spec == P(*spec)
    assert_alike(step(layer, X), alone(make, X), rtol=2e-6)


@pytest.mark.parametrize("spec", [("data", None, "model"), (None, "data", None)], ids=str)
@pytest.mark.parametrize(
    "act",
    [
        q.Int8ActPerTensorFloat,
        q.Int8ActPerTensorPercentile,
        q.Int8DynamicActPerRowFloat,
        q.ShiftedUint8ActPerTensorFloat,
        q.NVFP4Act,
    ],
)
def test_sharded_activations(act, spec, mesh):
    x = jax.device_put(X, NamedSharding(mesh, P(*spec)))
    found = step(QuantIdentity(act), x)
    assert found[1][1].sharding.spec == P(*spec)
    assert_alike(found, alone(lambda: QuantIdentity(act), X), rtol=2e-6)
