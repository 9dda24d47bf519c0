"""The slots of layers: class attributes through which a proxy knows the layer that it is read from."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.nn import QuantEmbed, QuantIdentity, QuantLinear, QuantLSTMCell
from jqinject.nn.base.slots import BIAS, GRAD, INPUT, OUTPUT, WEIGHT, Slot, slots_of
from jqinject.proxy import WeightQuantProxyFromInjector
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat

COPIES = {
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "merge": lambda m: nnx.merge(*nnx.split(m), copy=True),
    "tree": lambda m: jax.tree.map(lambda x: x, m),
}


def linear(seed=0, quant=Int8WeightPerTensorFloat, **given):
    return QuantLinear(4, 3, weight_quant=quant, **given, rngs=nnx.Rngs(seed))


def scale_of(layer):
    return np.abs(layer.kernel[...]).max() / 127


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_proxy_knows_the_copy_that_it_is_read_from(duplicate):
    original = linear(input_quant=Int8ActPerTensorFloat)
    twin = duplicate(original)
    twin.kernel = nnx.Param(3 * original.kernel[...])
    for layer in (twin, original):
        np.testing.assert_allclose(layer.weight_quant.scale(), scale_of(layer), rtol=1e-6)
    assert twin.weight_quant.tracked_modules == (twin,)
    assert twin.input_quant.tracked_modules == (twin,)
    assert original.weight_quant.tracked_modules == (original,)
    assert nnx.graphdef(duplicate(original)) == nnx.graphdef(original)


def test_a_read_changes_nothing_where_all_layers_are_known():
    first, other = linear(0), linear(1, None)
    other.weight_quant = first.weight_quant  # not shared: the quantizer is put together from `first` alone
    assert other.weight_quant is first.weight_quant
    assert first.weight_quant.tracked_modules == (first,)
    np.testing.assert_allclose(other.weight_quant.scale(), scale_of(first), rtol=1e-6)
    shared = linear(2, first.weight_quant)
    for layer in (shared, first, shared):
        assert layer.weight_quant.tracked_modules == (first, shared)


def test_a_copy_of_layers_that_share_is_completed_by_the_reads_that_are_missing():
    first = linear(0)
    pair = nnx.clone(nnx.List([first, linear(1, first.weight_quant)]))
    proxy = pair[1].weight_quant
    assert proxy.tracked_modules == (pair[1],)
    assert pair[0].weight_quant.tracked_modules == (pair[1], pair[0])
    assert jqinject.reassemble(pair).reassembled == ("0.weight_quant",)
    assert proxy.tracked_modules == (pair[0], pair[1])


def test_layers_under_transformations():
    layer = linear(input_quant=Int8ActPerTensorFloat)
    x = jnp.ones((2, 4))
    abstract = nnx.eval_shape(lambda: linear(input_quant=Int8ActPerTensorFloat))
    assert abstract.weight_quant.tracked_modules == (abstract,)
    run = nnx.jit(lambda m, x: (m(x), m.weight_quant.scale()))
    expected = nnx.clone(layer)(x)
    y, scale = run(layer, x)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    np.testing.assert_allclose(scale, scale_of(layer), rtol=1e-6)
    stack = nnx.vmap(lambda rngs: QuantLinear(4, 3, weight_quant=Int8WeightPerTensorFloat, rngs=rngs))(
        nnx.Rngs(0).split(2)
    )
    assert stack.weight_quant.tracked_modules == (stack,)
    assert not stack.weight_quant.init_tensor_quant()


def test_slots_are_declared_once_by_the_class():
    assert slots_of(QuantLinear) == (WEIGHT, BIAS, INPUT, OUTPUT, GRAD)
    assert slots_of(QuantEmbed) == (WEIGHT, OUTPUT, GRAD)
    assert QuantLinear.weight_quant == WEIGHT and QuantEmbed.input_quant is None
    arguments = {slot.name: slot.argument for slot in slots_of(QuantLSTMCell)}
    assert arguments["forget_acc_quant"] == "gate_acc_quant" and arguments["io_quant"] == "io_quant"


def test_a_layer_of_the_users_own_declares_a_slot():
    class Scaled(nnx.Module):
        own_quant = Slot("own_quant", "own_", WeightQuantProxyFromInjector, "weights")

    layer = Scaled()
    assert layer.own_quant is None and vars(layer).get("own_quant") is None
    held = QuantIdentity(Int8ActPerTensorFloat).act_quant
    layer.own_quant = held
    assert layer.own_quant is held and vars(layer)["own_quant"] is held
    del layer.own_quant
    assert layer.own_quant is None
    with pytest.raises(AttributeError, match="Scaled holds no own_quant"):
        del layer.own_quant


def test_quantizers_are_children_of_their_layer_for_nnx():
    layer = linear(input_quant=Int8ActPerTensorFloat)
    paths = {path for path, _ in nnx.iter_modules(layer)}
    assert {("weight_quant",), ("input_quant",)} <= paths
    popped = nnx.pop(layer, jqinject.core.QuantStat)
    assert "input_quant" in popped
