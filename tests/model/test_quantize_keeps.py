"""What of a model `quantize` keeps: structure, sharding, random streams, and that it can be copied and stored."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jqinject
import jqinject.quant as q
from jqinject import Rule
from jqinject.odml import OdmlQat
from tests.model._flax_models import Decoder, Recurrent

W8A8 = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8ActPerTensorMinMax)
RELUS = [Rule(op="relu", output_quant=q.Int8ActPerTensorMinMax), W8A8]
SOFTMAX = [Rule(op="softmax", output_quant=q.Int8ActPerTensorMinMax), W8A8]
X = jax.random.normal(jax.random.key(0), (4, 8))
TOKENS = jax.ShapeDtypeStruct((2, 6), jnp.int32)
call = nnx.jit(lambda model, x: model(x))


class Net(nnx.Module):
    """Two layers; module-level, so that it can be pickled."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


class Rematerialized(nnx.Module):
    """A block whose activations are computed again in the backward pass, called twice."""

    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.block(self.block(x))

    @nnx.remat
    def block(self, x):
        return self.b(nnx.relu(self.a(x)))


class Plain(Rematerialized):
    """The same without."""

    def block(self, x):
        return self.b(nnx.relu(self.a(x)))


def decoder() -> Decoder:
    return Decoder(rngs=nnx.Rngs(0))


def shapes(model: nnx.Module) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(model))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "rules", "inputs"),
    [
        (decoder, W8A8, None),
        (decoder, SOFTMAX, TOKENS),
        (decoder, OdmlQat(), TOKENS),
        (lambda: Recurrent(rngs=nnx.Rngs(0)), W8A8, None),
    ],
    ids=["layers", "operations", "odml", "recurrent"],
)
def test_an_abstract_model_gets_the_structure_of_a_real_one(make, rules, inputs):
    abstract = jqinject.quantize(nnx.eval_shape(make), rules, inputs=inputs)
    real = jqinject.quantize(make(), rules, inputs=inputs)
    assert nnx.graphdef(abstract) == nnx.graphdef(real)
    assert shapes(abstract) == shapes(real)
    assert any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(abstract)))


@pytest.mark.heavy
def test_a_float_checkpoint_is_restored_into_abstract_weights_and_loaded(tmp_path):
    plain = Net(nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "float", nnx.state(plain))
        checkpointer.wait_until_finished()
        target = nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
        restored = checkpointer.restore(tmp_path / "float", target)
    model = jqinject.quantize(Net(nnx.Rngs(9)), W8A8)
    jqinject.load_state(model, restored)
    np.testing.assert_array_equal(call(model, X), call(jqinject.quantize(plain, W8A8), X))


@pytest.mark.heavy
def test_a_quantized_checkpoint_is_restored_into_an_abstract_model(tmp_path):
    model = jqinject.quantize(Net(nnx.Rngs(0)), W8A8)
    jqinject.calibrate(model, [X], progress=False)
    abstract = jqinject.quantize(nnx.eval_shape(lambda: Net(nnx.Rngs(1))), W8A8)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "quantized", nnx.state(model))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "quantized", nnx.state(abstract))
    served = nnx.merge(nnx.graphdef(abstract), restored)
    served.eval()
    np.testing.assert_array_equal(call(served, X), call(model, X))


@pytest.mark.heavy
def test_sharding_and_metadata_of_weights_stay():
    class Sharded(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
            self.a = nnx.Linear(8, 8, kernel_metadata={"out_sharding": (None, "model"), "note": 7}, rngs=rngs)
            self.b = nnx.Linear(8, 2, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return self.b(nnx.relu(self.a(x)))

    with jax.set_mesh(jax.make_mesh((1,), ("model",))):
        plain = Sharded(nnx.Rngs(0))
        for rules, inputs in ((W8A8, None), (OdmlQat(), X)):
            model: Any = jqinject.quantize(plain, rules, inputs=inputs)
            for name in ("a", "b"):
                before, after = getattr(plain, name).kernel, getattr(model, name).kernel
                assert after.get_metadata() == before.get_metadata()
                assert after[...].sharding == before[...].sharding
            assert call(model, X).shape == (4, 2)
        specs = nnx.get_partition_spec(
            nnx.state(jqinject.quantize(nnx.eval_shape(lambda: Sharded(nnx.Rngs(0))), W8A8))
        )
        assert specs["a"]["kernel"].get_value() == PartitionSpec(None, "model")


@pytest.mark.heavy
@pytest.mark.parametrize("rules", [W8A8, RELUS, OdmlQat()], ids=["layers", "operations", "odml"])
def test_random_streams_run_as_in_the_float_model(rules):
    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.a, self.drop = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(nnx.relu(self.a(x)) + 1.0)

    plain = Dropped(nnx.Rngs(0, dropout=7))
    model: Any = jqinject.quantize(plain, rules, inputs=None if rules is W8A8 else X)
    for turn in range(2):
        np.testing.assert_array_equal(model(X) == 0, plain(X) == 0)
        assert int(model.drop.rngs.count[...]) == int(plain.drop.rngs.count[...]) == turn + 1


@pytest.mark.heavy
@pytest.mark.parametrize("rules", [W8A8, RELUS, OdmlQat()], ids=["layers", "operations", "odml"])
def test_copies_and_pickles_are_the_same_model(rules):
    model = jqinject.quantize(Net(nnx.Rngs(0)), rules, inputs=None if rules is W8A8 else X)
    jqinject.calibrate(model, [X], progress=False)
    expected = model(X)
    for twin in (nnx.clone(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert nnx.graphdef(twin) == nnx.graphdef(model)
        np.testing.assert_array_equal(twin(X), expected)
        twin.a.kernel[...] = jnp.zeros((8, 8))
        np.testing.assert_array_equal(model(X), expected)


@pytest.mark.heavy
@pytest.mark.parametrize("rules", [W8A8, OdmlQat()], ids=["layers", "odml"])
def test_a_rematerialized_model_has_the_gradients_and_statistics_of_a_plain_one(rules):
    def step(make: Any) -> Any:
        model = jqinject.quantize(make(nnx.Rngs(0)), rules, inputs=None if rules is W8A8 else X)
        grads = nnx.jit(nnx.grad(lambda m: (m(X) ** 2).sum()))(model)
        return [dict(nnx.to_flat_state(s)) for s in (grads, nnx.state(model))]

    for one, other in zip(step(Rematerialized), step(Plain), strict=True):
        assert one.keys() == other.keys()
        for path, value in other.items():
            parts = zip(jax.tree.leaves(one[path]), jax.tree.leaves(value), strict=True)
            for got, expected in parts:
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5, err_msg=str(path))
