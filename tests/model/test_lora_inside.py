"""Low-rank updates inside quantizers: what is trained is what is merged and frozen, bit for bit."""

from __future__ import annotations

import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqinject
from jqinject import LossyMergeWarning, Rule, lora, merge_lora
from jqinject.program.low_rank_product import low_rank_sum
from jqinject.quant import Int8WeightPerChannelFloat, IntWeightSymmetricGroupQuant

INT4_GROUPS = IntWeightSymmetricGroupQuant.let(bit_width=4, group_size=16)
RULE = Rule(weight_quant=INT4_GROUPS)
X = jax.random.normal(jax.random.key(0), (8, 32))
run = nnx.jit(lambda model, x: model(x))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(rngs.params.normal((32, 32)) * 0.2)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.w)


class Net(nnx.Module):
    """A scanned stack in `remat`, a layer of Flax's, and a tied table."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.vmap(Block, in_axes=0, out_axes=0)(rngs.split(2))
        self.fc = nnx.Linear(32, 32, rngs=rngs)
        self.table = nnx.Param(rngs.params.normal((32, 32)) * 0.2)

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.blocks)
        step = jax.checkpoint(lambda x, state: (nnx.merge(graphdef, state)(x), None))
        x, _ = jax.lax.scan(step, x + self.table[jnp.arange(8)], state)
        return self.fc(x) @ self.table[...].T


def made(seed: int = 0, **given: Any) -> Any:
    options = {"rank": 3, "alpha": 2.0, "update": "inside", "inputs": X, "rngs": nnx.Rngs(seed)}
    return lora(Net(nnx.Rngs(0)), RULE, **{**options, **given})


@pytest.fixture(scope="module")
def trained() -> Any:
    model = made()
    optimizer = nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss = lambda model: ((model(X) - X[:, ::-1]) ** 2).mean()  # noqa: E731
        value, gradients = jqinject.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(8)]
    assert losses[-1] < losses[0], losses
    model.eval()
    return model


@pytest.mark.heavy
def test_merged_model_is_the_trained_one_bit_for_bit(trained: Any) -> None:
    wanted, eager = run(trained, X), trained(X)
    merged = merge_lora(nnx.clone(trained, graph=True))
    assert not nnx.to_flat_state(nnx.state(merged, nnx.LoRAParam))
    assert jnp.any(merged.fc.kernel[...] != trained.fc.kernel[...])
    np.testing.assert_array_equal(run(merged, X), wanted)
    np.testing.assert_array_equal(merged(X), eager)


@pytest.mark.heavy
def test_frozen_model_is_the_trained_one(trained: Any) -> None:
    frozen = jqinject.freeze(nnx.clone(trained, graph=True))
    of_merged = jqinject.freeze(merge_lora(nnx.clone(trained, graph=True)))
    assert not nnx.to_flat_state(nnx.state(frozen, nnx.LoRAParam))
    held, again = (nnx.to_flat_state(nnx.state(one)) for one in (frozen, of_merged))
    assert frozen.fc.kernel.get_raw_value()["value"].dtype.itemsize == 1
    jax.tree.map(np.testing.assert_array_equal, dict(held), dict(again))
    merged = merge_lora(nnx.clone(trained, graph=True))
    site = merged.op_quant.weight_sites()["fc.kernel"]
    np.testing.assert_array_equal(frozen.fc.kernel[...], site.weight_quant(merged.fc.kernel[...]).value)
    np.testing.assert_allclose(run(frozen, X), run(trained, X), rtol=1e-5, atol=1e-5)  # the order of sums


@pytest.mark.heavy
def test_saved_adapters_merge_to_the_same_bits(trained: Any, tmp_path: Any) -> None:
    wanted = run(trained, X)
    np.testing.assert_array_equal(run(merge_lora(pickle.loads(pickle.dumps(trained))), X), wanted)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "adapters", nnx.as_pure(nnx.state(trained, nnx.LoRAParam)))
        checkpointer.wait_until_finished()
        other = made(seed=7)
        target = nnx.as_pure(nnx.state(other, nnx.LoRAParam))
        saved = checkpointer.restore(tmp_path / "adapters", target)
    jqinject.load_state(other, saved, missing=nnx.Not(nnx.LoRAParam))
    other.eval()
    np.testing.assert_array_equal(run(merge_lora(other), X), wanted)


@pytest.mark.heavy
def test_only_the_adapters_are_trained_through_the_quantizer() -> None:
    """`dA = scale dW B^T`, `dB = scale A^T dW`, with dW the gradient of a fake-quantized weight `w + scale A B`."""
    rule, base = (
        Rule(weight_quant=Int8WeightPerChannelFloat),
        nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0)),
    )
    model = lora(base, rule, rank=2, alpha=6.0, update="inside", inputs=X, rngs=nnx.Rngs(1))
    adapter = model.op_quant.adapters["kernel"]
    adapter.b[...] = jax.random.normal(jax.random.key(2), (2, 16))
    g = jax.random.normal(jax.random.key(3), (8, 16))
    loss = lambda model: (model(X) * g).sum()  # noqa: E731
    (_, gradients), y = jqinject.value_and_grad(loss)(model), model(X)
    assert list(nnx.to_pure_dict(gradients)) == ["op_quant"]
    found = nnx.to_pure_dict(gradients)["op_quant"]["adapters"]["kernel"]
    a, b = adapter.a[...], adapter.b[...]
    merged = merge_lora(model)
    np.testing.assert_array_equal(merged(X), y)
    dense = jqinject.value_and_grad(loss)(merged)[1]["kernel"][...]
    np.testing.assert_allclose(found["a"], 3 * dense @ b.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["b"], 3 * a.T @ dense, rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_sum_has_the_same_bits_compiled_otherwise(dtype: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (48, 64), (48, 1, 11), (1, 64, 11)
    w, a, b = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    w, scale = w.astype(dtype), 2 / 3
    eager = low_rank_sum(w, a, b, scale)

    @jax.jit
    def within(w: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        again, pull = jax.vjp(jax.checkpoint(lambda *given: low_rank_sum(*given, scale)), w * 1, a + 0, b)
        return again.astype(jnp.float32), pull(again)

    compiled, gradients = within(w, a, b)
    assert eager.dtype == dtype
    np.testing.assert_array_equal(eager.astype(jnp.float32), compiled)
    terms = scale * np.float64(a) * np.float64(b)
    roundings = (
        16 * np.finfo(np.float32).eps * (np.abs(w) + np.abs(terms).sum(-1)).max()
    )  # of a sum of 12, and scaling
    exact = np.float64(w) + terms.sum(-1)
    atol = roundings + (float(jnp.finfo(dtype).eps) * np.abs(exact).max() if dtype == jnp.bfloat16 else 0)
    np.testing.assert_allclose(np.float64(eager), exact, rtol=0, atol=atol)
    g = np.float64(eager)
    for found, wanted in zip(
        gradients,
        (g, scale * (g @ np.float64(b)[0])[:, None], scale * (g.T @ np.float64(a)[:, 0])[None]),
        strict=True,
    ):
        np.testing.assert_allclose(np.float64(found), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.heavy
def test_merging_beside_a_quantized_weight_tells_its_error() -> None:
    model = made(update="beside", rank={"fc": 3})
    adapter = model.op_quant.adapters["fc.kernel"]
    adapter.b[...] = 0.05 * jax.random.normal(jax.random.key(1), adapter.b.shape)
    before = np.asarray(model.fc.kernel[...], np.float64)
    update = 2 / 3 * np.asarray(adapter.a[...], np.float64) @ np.asarray(adapter.b[...], np.float64)
    with pytest.warns(
        LossyMergeWarning, match=r"1 weights in low bits(.|\n)*cure: lora\(..., update='inside'\)"
    ) as told:
        merged = merge_lora(model)
    error = np.asarray(merged.fc.kernel[...], np.float64) - (before + update)
    found = re.search(r"fc.kernel: ([\d.]+) dB, ([\d.]+) of the update", str(told[0].message))
    assert found is not None
    ratio = 10 * np.log10(np.square(before + update).sum() / np.square(error).sum())
    assert float(found[1]) == pytest.approx(ratio, abs=0.06)
    assert float(found[2]) == pytest.approx(
        np.sqrt(np.square(error).mean() / np.square(update).mean()), rel=0.01
    )


@pytest.mark.heavy
def test_merging_no_update_into_a_quantized_weight_has_no_error() -> None:
    with pytest.warns(LossyMergeWarning, match=r"fc\.kernel: inf dB, 0 of the update"):
        merge_lora(made(update="beside", rank={"fc": 3}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"update": "within"}, "update is 'beside' or 'inside', got 'within'"),
        ({"dropout": 0.1}, r"inside the quantizer has none; got 0.1.\n  cure: dropout=0"),
        ({"start": "error"}, r"is rounded too.\n  cure: start='zeros'"),
    ],
)
def test_what_has_no_meaning_inside_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**given)


def test_an_update_that_is_not_finite_is_not_frozen(trained: Any) -> None:
    broken = nnx.clone(trained, graph=True)
    broken.op_quant.adapters["fc.kernel"].b[0, 0] = jnp.nan
    with pytest.raises(ValueError, match=r"updates of fc.kernel hold nan or inf"):
        jqinject.freeze(broken)
    assert "fc.kernel" in broken.op_quant.adapters
