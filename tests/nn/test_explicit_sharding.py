"""Quantizers on a mesh with explicit axes, where every reshape and gather has to say what becomes of a sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject
import jqinject.quant as q
from jqinject.nn import (
    QuantConv,
    QuantConvTranspose,
    QuantEinsum,
    QuantIdentity,
    QuantLinear,
    QuantLinearGeneral,
)

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")

X = jax.random.normal(jax.random.key(0), (8, 4, 32))
IMAGES = jax.random.normal(jax.random.key(0), (8, 4, 4, 32))


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


class Crossing(q.ShiftedUint8WeightGroupQuantFloat):
    group_size = 24  # of shards of 16


class CrossingRanges(q.Int4WeightPerGroupAbsMax):
    group_size = 24
    group_padding = True


@pytest.mark.heavy
@pytest.mark.parametrize("spec", [(None, "model"), ("data", None)], ids=str)
@pytest.mark.parametrize(
    "weight",
    [
        Crossing,
        CrossingRanges,
        q.Int8WeightPerTensorFloat,  # the whole tensor in one axis
        q.Int8WeightPerChannelFloatMSE,  # a parameter that is filled once
        q.Fp8e4m3WeightPerChannelDelayed,  # a history for each channel
        q.NF4WeightPerChannelFloat,  # a table
        q.NVFP4Weight,  # groups that shards do not fill
        q.Int8WeightPerChannelFloatHQO,  # sums in a stated order
        q.ShiftedUint8WeightPerGroupFloatHQO,  # a zero point that is searched
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


@pytest.mark.lengthy
@pytest.mark.parametrize("spec", [(None, None, None, "model"), (None, None, "model", None)], ids=str)
@pytest.mark.parametrize(
    ("kind", "act"),
    [
        (QuantConv, q.Int8ActPerTensorFloat),
        (QuantConv, q.ShiftedUint8ActPerTensorFloat),
        (QuantConvTranspose, q.ShiftedUint8ActPerTensorFloat),
    ],
    ids=str,
)
def test_convolutions_of_integers_take_out_sharding(kind, act, spec, mesh):
    x = IMAGES
    out = P("data", None, None, spec[3])

    def outputs(x, metadata, **kwargs):
        layer = kind(32, 16, (3, 3), input_quant=act, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        layer(x, **kwargs)
        loss = nnx.grad(lambda layer: jnp.mean(layer(x, **kwargs) ** 2))(layer)
        layer.eval()
        return jqinject.freeze(layer)(x, **kwargs), loss["kernel"].get_value()

    with jax.set_mesh(jax.make_mesh((), (), axis_types=())):
        expected = outputs(x, {})
    x = jax.device_put(x, NamedSharding(mesh, P("data", None, None, spec[2])))
    found = outputs(x, {"out_sharding": spec}, out_sharding=out)
    assert found[0].sharding.spec == out
    assert_alike(found, expected, rtol=2e-5)


@pytest.mark.lengthy
@pytest.mark.parametrize("spec", [("data", "model"), ("model", None)], ids=str)
@pytest.mark.parametrize("kind", [QuantLinear, QuantLinearGeneral], ids=str)
@pytest.mark.parametrize(
    ("weight", "act"),
    [
        (q.ShiftedUint8WeightPerChannelFloat, q.ShiftedUint8ActPerTensorFloat),
        (q.Fp8e4m3WeightPerTensorDelayed, q.Fp8e4m3ActPerTensorDelayed),
    ],
    ids=str,
)
def test_rows_that_are_sharded_take_out_sharding(weight, act, kind, spec, mesh):
    def outputs(x, metadata, **kwargs):
        layer = kind(32, 16, weight_quant=weight, input_quant=act, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        slopes = nnx.grad(lambda layer: jnp.mean(layer(x, **kwargs) ** 2))(layer)
        layer.eval()
        return jqinject.freeze(layer)(x, **kwargs), slopes["kernel"].get_value()

    with jax.set_mesh(jax.make_mesh((), (), axis_types=())):
        expected = outputs(X, {})
    x = jax.device_put(X, NamedSharding(mesh, P("data", None, "model")))
    found = outputs(x, {"out_sharding": spec}, out_sharding=P("data", None, None))
    assert_alike(found, expected, rtol=2e-6)


@pytest.mark.heavy
def test_an_einsum_of_integers_takes_out_sharding(mesh):
    def output(x, metadata, **kwargs):
        layer = QuantEinsum(
            "bte,ehd->bthd", (32, 4, 8), input_quant=q.Int8ActPerTensorFloat, kernel_metadata=metadata,
            rngs=nnx.Rngs(0))  # fmt: skip
        layer(x, **kwargs)
        layer.eval()
        return jqinject.freeze(layer)(x, **kwargs)

    with jax.set_mesh(jax.make_mesh((), (), axis_types=())):
        expected = output(X, {})
    x = jax.device_put(X, NamedSharding(mesh, P("data", None, "model")))
    out = P("data", None, None, None)
    found = output(x, {"out_sharding": ("model", None, None)}, out_sharding=out)
    assert found.sharding.spec == out
    assert_alike(found, expected, rtol=2e-5)
