"""What a component of the user's own makes a program gather is said, and only where there is something to gather."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject.quant as q
from jqinject import GatheredWarning
from jqinject.core import ClippingRange, TwoPhaseStat
from jqinject.nn import QuantLinear

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")

X = jax.random.normal(jax.random.key(0), (8, 256))


@dataclass(frozen=True)
class Peak:
    """The largest magnitude, as a user may write it."""

    stats_reduce_dim: int | None = None

    def __call__(self, x):
        return jnp.max(jnp.abs(x), axis=self.stats_reduce_dim, keepdims=x.ndim == 3)


@dataclass(frozen=True)
class PeakAlong(Peak):
    """One that can reduce other axes, and has never heard of groups that cross shards."""

    takes_axes = True
    takes_several = False

    def along(self, axes):
        return PeakAlong(axes)

    def __call__(self, x):
        return jnp.max(jnp.abs(x), axis=self.stats_reduce_dim, keepdims=x.ndim == 3)


@dataclass(frozen=True)
class Mean:
    """The mean magnitude."""

    stats_reduce_dim: int | None = None

    def __call__(self, x):
        return jnp.mean(jnp.abs(x), axis=self.stats_reduce_dim, keepdims=x.ndim == 3)


@dataclass(frozen=True)
class MeanInPhases(TwoPhaseStat):
    """The same as the warning's cure asks for it."""

    stats_reduce_dim: Any = None

    def measure(self, x):
        return self.over.sum(jnp.abs(x)) / self.over.count(x)

    def statistic(self, measured):
        return self.finished(measured)

    def change(self, dx, x, measured, located):
        return self.over.sum(jnp.sign(x) * dx) / self.over.count(x)


class OfTensor(q.Int8WeightPerTensorFloat):
    scaling_stats_impl = Peak


class OfGroups(q.MXInt8Weight):
    scaling_stats_impl = Peak
    group_size = 48  # of shards of 64


class OfGroupsAlong(OfGroups):
    scaling_stats_impl = PeakAlong


class OfMeans(OfGroups):
    scaling_stats_impl = Mean


class OfMeansInPhases(OfGroups):
    scaling_stats_impl = MeanInPhases


class PeakRange:
    def __call__(self, x, axes, names=()):
        return ClippingRange(jnp.max(jnp.abs(x), axis=axes, keepdims=True))


class OfOwnRange(q.Int4WeightPerGroupAbsMax):
    calibration_impl = PeakRange
    group_size = 48
    group_padding = True


def layer_of(weight, **metadata):
    return QuantLinear(256, 64, weight_quant=weight, kernel_metadata=metadata, rngs=nnx.Rngs(0))


def called(layer, mesh, spec):
    """The output of a layer whose weight lies on a mesh, in a compiled program."""
    graphdef, state = nnx.split(layer, graph=True)
    places = jax.tree.map(lambda x: NamedSharding(mesh, spec if x.ndim == 2 else P()), state)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(jax.device_put(state, places), X)


@pytest.mark.parametrize(
    ("weight", "spec", "said"),
    [
        (OfTensor, P(None, "model"), r"^Peak merges axes .* \(256, 64\) .* along axis 1\.\n  cure: .*TwoPhaseStat"),
        (OfGroups, P("model", None), r"^Peak needs groups of 48, .* along axis 0\.\n  cure: .*TwoPhaseStat"),
        (OfGroupsAlong, P("model", None), r"^PeakAlong needs groups of 48, .*\n  cure: .*TwoPhaseStat"),
        (OfOwnRange, P("model", None), r"^PeakRange needs groups of 48, .*\n  cure: .*takes_cut = True"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)  # fmt: skip
def test_a_component_that_gathers_a_weight_is_named(weight, spec, said):
    layer = layer_of(weight)
    expected = jax.jit(lambda layer, x: layer(x))(layer, X)  # for one device: nothing is said
    with pytest.warns(GatheredWarning, match=said):
        found = called(layer, jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,)), spec)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("spec", [P("model", None), P(None, "model")], ids=["rows", "columns"])
def test_what_is_reduced_in_place_is_not_named(spec):
    expected = layer_of(OfMeans)(X)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    np.testing.assert_allclose(called(layer_of(OfMeansInPhases), mesh, spec), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
def test_concrete_shards_are_known():
    layer = layer_of(OfTensor)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    kernel = layer.kernel[...]
    layer.kernel.set_value(jax.device_put(kernel, NamedSharding(mesh, P("model", None))))
    layer(X)  # flattened, rows stay where they are
    layer.kernel.set_value(jax.device_put(kernel, NamedSharding(mesh, P(None, "model"))))
    with pytest.warns(GatheredWarning, match="Peak"):
        layer(X)


@pytest.mark.heavy
def test_explicit_shards_are_known():
    with jax.set_mesh(jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,))):
        rows = layer_of(OfTensor, out_sharding=("model", None))
        columns = layer_of(OfTensor, out_sharding=(None, "model"))
        jax.make_jaxpr(lambda x: rows.weight_quant(x).value)(rows.kernel[...])
        with pytest.warns(GatheredWarning, match="Peak"):
            jax.make_jaxpr(lambda x: columns.weight_quant(x).value)(columns.kernel[...])


def test_weights_that_share_a_statistic_are_named():
    first = layer_of(OfTensor)
    second = QuantLinear(256, 64, weight_quant=first.weight_quant, rngs=nnx.Rngs(1))
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    both = nnx.List([first, second])
    graphdef, state = nnx.split(both, graph=True)
    places = jax.tree.map(lambda x: NamedSharding(mesh, P("model", None) if x.ndim == 2 else P()), state)
    run = jax.jit(lambda state, x: nnx.merge(graphdef, state)[0](x))
    with pytest.warns(GatheredWarning, match="Peak joins the weights of several layers"):
        run(jax.device_put(state, places), X)


@pytest.mark.heavy
def test_it_passes_through_transformations():
    layers = nnx.vmap(lambda key: QuantLinear(256, 8, weight_quant=OfTensor, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 2)
    )
    loss = nnx.remat(lambda layer, x: jnp.sum(layer(x) ** 2))
    gradients = nnx.jit(nnx.vmap(nnx.grad(loss), in_axes=(0, None)))(layers, X)
    assert gradients["kernel"][...].shape == (2, 256, 8)
    assert jax.export.export(jax.jit(layer_of(OfTensor)))(X).call(X).shape == (8, 64)
