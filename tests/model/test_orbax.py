"""Checkpoints through Orbax: whatever it is given and however it gives it back."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, fold_batch_norm, freeze, load_state, quantize
from jqinject.core.state import flat_parts
from jqinject.nn import QuantLinear, QuantReLU
from jqinject.quant import (
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8WeightPerChannelFloat,
    NF4WeightPerChannelFloat,
)

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"
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


class Own(nnx.Module):
    """Contracts parameters of its own, as Tunix's models do."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (11, 8)))
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 2, 16)))
        self.out = nnx.Param(jax.random.normal(rngs.params(), (2, 16, 8)))

    def __call__(self, ids):
        x = jnp.einsum("bd,dhk->bhk", self.table[...][ids], self.w[...])
        return jnp.einsum("bhk,hkd->bd", x, self.out[...]) @ self.table[...].T


class Folded(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.conv(x))).mean((1, 2))))


class Blocks(nnx.Module):
    """A stack of layers under a scan."""

    def __init__(self, rngs):
        self.blocks = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(rngs.split(3))

    def __call__(self, x):
        return nnx.scan(lambda x, block: (block(x), None), in_axes=(nnx.Carry, 0))(x, self.blocks)[0]


RULE = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)
FOUR_BITS = Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=4))
SHAPES = {
    Own: jnp.array([1, 5, 3, 0]),
    Folded: jax.random.normal(jax.random.key(1), (4, 6, 6, 3)),
    Blocks: X,
}


def _made(kind, rule, seed=0):
    model = kind(nnx.Rngs(seed))
    if kind is Folded:
        fold_batch_norm(model, SHAPES[kind])
    return quantize(model, rule, inputs=SHAPES[kind])


def _page(make, model, x, folder):
    """Run what the page prints of frozen models."""
    (block,) = re.findall(r"```python\n(def make_served.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names = {"jax": jax, "jnp": jnp, "nnx": nnx, "ocp": ocp, "jqinject": jqinject}
    names |= {"make": make, "model": model, "x": x, "folder": folder}
    exec(block, names)
    return names


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Own, RULE),
        (Own, FOUR_BITS),
        (Blocks, Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=3))),
        (Own, Rule(weight_quant=NF4WeightPerChannelFloat)),
        (Folded, RULE),
        (Blocks, RULE),
    ],
    ids=["own", "own in 4 bits", "stacked in 3 bits", "own in a table", "folded", "stacked"],
)
def test_what_the_page_prints_of_frozen_models(tmp_path, kind, rule):
    model, x = _made(kind, rule), SHAPES[kind]
    jqinject.calibrate(model, [x], progress=False) if rule is RULE else None
    names = _page(lambda: _made(kind, rule, seed=7), model, x, tmp_path)
    served, frozen = names["served"], names["frozen"]
    assert nnx.graphdef(served) == nnx.graphdef(frozen)
    same = jax.tree.map(jnp.array_equal, nnx.as_pure(nnx.state(served)), nnx.as_pure(nnx.state(frozen)))
    assert all(jax.tree.leaves(jax.tree.map(bool, same)))
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(run(served, x), run(frozen, x))


@pytest.mark.heavy
@pytest.mark.parametrize("save", [nnx.to_pure_dict, nnx.as_pure], ids=["pure dict", "pure"])
def test_the_numbers_of_frozen_parameters_are_stored(tmp_path, save):
    model = freeze(_made(Own, FOUR_BITS))
    _saved(tmp_path / "frozen", save(nnx.state(model)))
    stored = _restored(tmp_path / "frozen")
    assert {path: leaf.dtype.name for path, leaf in jax.tree_util.tree_leaves_with_path(stored["w"])} == {
        (jax.tree_util.DictKey("value"),): "uint8",
        (jax.tree_util.DictKey("scale"),): "float32",
    }
    other = nnx.eval_shape(lambda: freeze(_made(Own, FOUR_BITS)))
    nnx.update(other, save(nnx.state(model)))
    np.testing.assert_array_equal(other(SHAPES[Own]), model(SHAPES[Own]))


@pytest.mark.heavy
@pytest.mark.parametrize("input_quant", [Int8ActPerTensorMinMax, Int8ActPerTensorAbsMax])
def test_a_model_frozen_without_data_takes_the_state_of_a_calibrated_one(tmp_path, input_quant):
    """Constants of its ranges among it; compiled functions take one for the other."""
    rule, x = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=input_quant), SHAPES[Own]
    calibrated, blank = _made(Own, rule), freeze(_made(Own, rule, seed=7), allow_uncalibrated=True)
    jqinject.calibrate(calibrated, [x], progress=False)
    calibrated = freeze(calibrated)
    traces = []
    run = nnx.jit(lambda model, x: traces.append(None) or model(x))
    expected = run(calibrated, x)
    state, graphdef = nnx.to_pure_dict(nnx.state(calibrated)), nnx.graphdef(blank)
    with pytest.raises(ValueError, match=r"w\.value: has shape"):
        load_state(blank, {**state, "w": {**state["w"], "value": jnp.zeros((3, 3), jnp.int8)}})
    assert nnx.graphdef(blank) == graphdef
    _saved(tmp_path / "frozen", state)
    report = load_state(blank, _restored(tmp_path / "frozen"))
    assert not report.missing and not report.replaced
    np.testing.assert_array_equal(run(blank, x), expected)
    assert len(traces) == 1


def test_what_could_not_be_restored_is_refused_before_it_is_saved(tmp_path):
    model = _made(Own, FOUR_BITS)
    with pytest.raises(ValueError, match=r"w: is frozen with bit_width=4, the model needs 3"):
        _page(
            lambda: _made(Own, Rule(weight_quant=Int8WeightPerChannelFloat.let(bit_width=3))),
            model,
            SHAPES[Own],
            tmp_path,
        )
    with pytest.raises(ValueError, match=r"out: is a mapping with 'scale', the model needs one array"):
        _page(
            lambda: _made(Own, Rule("w", weight_quant=Int8WeightPerChannelFloat)),
            model,
            SHAPES[Own],
            tmp_path,
        )
    learned = Int8WeightPerChannelFloat.let(bit_width_impl_type="parameter")
    with pytest.raises(ValueError, match="bit width"):
        _page(lambda: _made(Own, Rule(weight_quant=learned)), model, SHAPES[Own], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_an_abstract_model_under_a_mesh_is_filled_where_its_annotations_say(tmp_path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def make(seed=0):
        annotated = {"kernel_metadata": {"out_sharding": (None, "x")}, "rngs": nnx.Rngs(seed)}
        return nnx.Sequential(QuantLinear(4, 8, weight_quant=Int8WeightPerChannelFloat, **annotated))

    with jax.set_mesh(mesh):
        names = _page(make, make(), X, tmp_path)
    for model in (names["frozen"], names["served"]):
        payload = model.layers[0].frozen.numbers["value"]
        assert {shard.data.shape for shard in payload.addressable_shards} == {(2, 4)}
