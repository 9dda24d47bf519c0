"""Checkpoints through Orbax: whatever it is given and however it gives it back."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jqinject import load_state
from jqinject.core.state.record import flat_parts
from jqinject.nn import QuantLinear, QuantReLU
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

X = jax.random.normal(jax.random.key(3), (5, 4))


class Model(nnx.Module):
    def __init__(self, seed, quantized=True):
        rngs = nnx.Rngs(seed)
        quantizers = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": Int8ActPerTensorFloat}
        learned = {"weight_scaling_impl_type": "parameter_from_stats", "input_collect_stats_steps": 1}
        self.blocks = nnx.List(
            QuantLinear(4, 4, **quantizers, **learned, rngs=rngs)
            if quantized
            else nnx.Linear(4, 4, rngs=rngs)
            for _ in range(2)
        )
        self.act = QuantReLU(collect_stats_steps=1) if quantized else nnx.relu
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = self.act(block(x))
        return self.dropout(self.norm(x))


def _saved(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _restored(path, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def _without_keys(model):
    """Orbax as it comes does not save typed random keys."""
    return nnx.state(model, nnx.Not(nnx.RngState))


SAVES = {"state": _without_keys, "pure dict": lambda m: nnx.to_pure_dict(_without_keys(m))}


@pytest.mark.lengthy
@pytest.mark.parametrize("quantized", [False, True], ids=["float", "quantized"])
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_saved_and_restored_without_a_target(tmp_path, save, quantized):
    source, model = Model(0, quantized), Model(1)
    source(X), source(2 * X)
    _saved(tmp_path / "checkpoint", save(source))
    report = load_state(model, _restored(tmp_path / "checkpoint"), missing=nnx.RngState)
    assert report.replaced == ()
    for path, variable in flat_parts(_without_keys(source)):
        held = dict(flat_parts(nnx.state(model)))[path]
        np.testing.assert_array_equal(held[...], variable[...], err_msg=str(path))
    if quantized:
        source.eval(), model.eval()
        np.testing.assert_array_equal(model(X), source(X))


def test_restored_onto_a_target_with_shardings(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    source, model = Model(0), Model(1)
    for block in model.blocks:
        block.kernel.set_value(jax.device_put(block.kernel[...], sharding))
    _saved(tmp_path / "checkpoint", _without_keys(source))
    target = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), _without_keys(model)
    )
    load_state(model, _restored(tmp_path / "checkpoint", target), missing=nnx.RngState)
    for block, wanted in zip(model.blocks, source.blocks, strict=True):
        assert block.kernel.get_value().sharding == sharding
        np.testing.assert_array_equal(block.kernel[...], wanted.kernel[...])
