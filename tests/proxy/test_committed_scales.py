"""A committed scale is the proxy's own record, beside its quantizer."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject.nn import QuantLinear
from jqinject.proxy import stack_of
from jqinject.quant import (
    Int4WeightPerChannelLearned,
    Int8WeightPerChannelFloat,
    ShiftedUint8WeightPerChannelFloat,
)

X = jax.random.normal(jax.random.key(0), (5, 4))


def linear(quantizer, seed=0):
    return QuantLinear(4, 3, weight_quant=quantizer, rngs=nnx.Rngs(seed))


def parameters_of(layer):
    return [path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))]


@pytest.mark.parametrize(
    "quantizer",
    [Int8WeightPerChannelFloat, ShiftedUint8WeightPerChannelFloat, Int4WeightPerChannelLearned],
)
def test_a_committed_scale_stays_until_it_is_released(quantizer):
    layer = linear(quantizer)
    layer(X)
    before, graph = layer(X), nnx.graphdef(layer)
    scale, parameters = layer.weight_quant.scale(), parameters_of(layer)
    layer.weight_quant.commit()
    assert parameters_of(layer) == parameters  # optimizers keep their place
    np.testing.assert_array_equal(layer(X), before)
    layer.kernel[...] = layer.kernel[...] / 2
    np.testing.assert_array_equal(layer.weight_quant.scale(), scale)
    for copy in (nnx.clone(layer), pickle.loads(pickle.dumps(layer))):
        assert copy.weight_quant.committed
        np.testing.assert_array_equal(nnx.jit(lambda layer: layer(X))(copy), layer(X))
    assert ("zero_point" in layer.weight_quant.record[...]) == layer.weight_quant.has_zero_point
    layer.weight_quant.release()
    assert not layer.weight_quant.committed and nnx.graphdef(layer) == graph
    np.testing.assert_allclose(layer.weight_quant.scale(), np.asarray(scale) / 2, rtol=1e-6)


@pytest.mark.heavy
def test_each_layer_of_a_stack_keeps_its_own_scales():
    stacked = nnx.vmap(lambda rngs: QuantLinear(4, 3, weight_quant=Int8WeightPerChannelFloat, rngs=rngs))(
        nnx.Rngs(0).split(2)
    )
    assert stack_of((stacked,)) == (2,)
    run = nnx.vmap(lambda layer: layer(X))
    before = run(stacked)
    stacked.weight_quant.commit(stacked)
    assert stacked.weight_quant.record[...]["scale"].shape == (2, 1, 3)
    np.testing.assert_array_equal(run(stacked), before)
    other = jax.tree.map(lambda kernel: 3 * kernel, stacked.kernel.get_value())
    stacked.kernel = nnx.Param(jnp.asarray(other))  # assembled again: the scales are those of the new weight
    np.testing.assert_allclose(
        stacked.weight_quant.record[...]["scale"] * 127, abs(other).max(1, keepdims=True)
    )
