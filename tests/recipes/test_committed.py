"""What was committed is loaded into other models, and trained on."""

import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, quant
from jqinject.recipes import GPTQ, Recipe, Solve

X = jax.random.normal(jax.random.key(2), (96, 16))
RULES = {
    "zero points": Rule(weight_quant=quant.ShiftedUint8WeightPerChannelFloat.let(bit_width=3)),
    "groups": Rule(weight_quant=quant.Int4WeightPerGroupAbsMax.let(group_size=4)),
}


class Model(nnx.Module):
    """A layer, and a parameter that the model contracts by itself."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        self.table = nnx.Param(jax.random.normal(jax.random.key(1), (8, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.layer(x)) @ self.table.get_value()


def solved(rule: Rule) -> Model:
    return Recipe(Solve(GPTQ())).apply(Model(), rule, [X], progress=False).model


def fresh(rule: Rule) -> Model:
    model = jqinject.quantize(Model(), rule, inputs=X)
    model.eval()
    return model


@pytest.mark.lengthy
@pytest.mark.parametrize("name", RULES)
def test_a_committed_state_is_loaded_into_a_model_that_is_not(name: str, tmp_path: Path) -> None:
    rule = RULES[name]
    model = solved(rule)
    wanted, state = model(X), nnx.state(model)
    path = tmp_path / "state"
    with ocp.StandardCheckpointer() as saver:
        saver.save(path, nnx.to_pure_dict(state))
        saver.wait_until_finished()
        saved = saver.restore(path)
    for given in (state, nnx.to_pure_dict(state), saved, model):
        other = fresh(rule)
        assert not np.array_equal(other(X), wanted)
        jqinject.load_state(other, given)
        np.testing.assert_array_equal(other(X), wanted)
        assert other.layer.weight_quant.committed
    for copy in (nnx.clone(other), pickle.loads(pickle.dumps(other))):
        np.testing.assert_array_equal(copy(X), wanted)
    frozen = (jqinject.freeze(nnx.clone(each)) for each in (model, other))
    np.testing.assert_array_equal(next(frozen)(X), next(frozen)(X))


@pytest.mark.lengthy
def test_a_committed_state_that_does_not_fit_changes_nothing() -> None:
    rule = RULES["zero points"]
    state = nnx.to_pure_dict(nnx.state(solved(rule)))
    state["layer"]["bias"] = state["layer"]["bias"][:3]
    model = fresh(rule)
    before, graph = model(X), nnx.graphdef(model)
    with pytest.raises(ValueError, match=r"layer\.bias: has shape \(3,\)"):
        jqinject.load_state(model, state)
    assert nnx.graphdef(model) == graph
    np.testing.assert_array_equal(model(X), before)


@pytest.mark.heavy
def test_training_goes_on_from_what_was_committed() -> None:
    model = solved(RULES["zero points"])
    target = Model()(X)

    def loss(model: Model) -> jax.Array:
        return jnp.square(model(X) - target).mean()

    committed = float(loss(model))
    scale = np.asarray(model.layer.weight_quant.scale())
    codes, zero_point = model.layer.quant_weight().int(), np.asarray(model.layer.weight_quant.zero_point())
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(0.02), wrt=nnx.Param)
    step = nnx.jit(nnx.value_and_grad(loss))
    first, gradients = step(model)
    assert float(first) == pytest.approx(committed, rel=1e-6)
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))
    losses = []
    for _ in range(40):
        optimizer.update(model, gradients)
        last, gradients = step(model)
        losses.append(float(last))
    assert min(losses) < committed
    kernel = np.asarray(model.layer.kernel[...])
    moved = np.asarray(model.layer.quant_weight().int())
    assert (moved != np.asarray(codes)).any()
    np.testing.assert_array_equal(np.asarray(model.layer.weight_quant.scale()), scale)
    np.testing.assert_array_equal(moved, np.clip(np.round(kernel / scale + zero_point), 0, 7))
