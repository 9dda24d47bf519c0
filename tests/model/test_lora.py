"""Low-rank adapters: the update equals that of dense weights, gradients go to it alone, and it is saved alone."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import LossyMergeWarning, Rule, lora, merge_lora
from jqinject.dot import FrozenParam
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    MXFloat4e2m1Weight,
    NF4WeightPerChannelFloat,
    NF4WeightPerGroupFloat,
)

IDS = jnp.arange(12).reshape(2, 6)
INT8 = Rule(weight_quant=Int8WeightPerChannelFloat)
NF4, MXFP4 = NF4WeightPerGroupFloat.let(group_size=8), MXFloat4e2m1Weight.let(group_size=8)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(rngs.params.normal((16, 16)) * 0.3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.w)


class Model(nnx.Module):
    """Einsums, Flax's layers, experts in three ways, a scanned stack, a block in `jax.checkpoint`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def normal(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(rngs.params.normal(shape) * 0.3)

        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.q, self.o = normal(16, 2, 8), normal(2, 8, 16)
        self.experts, self.ragged, self.chosen = normal(3, 16, 16), normal(3, 16, 16), normal(3, 16, 16)
        self.by_index = normal(2, 16, 16)
        self.conv = nnx.Conv(16, 8, (3,), rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3,), feature_group_count=8, rngs=rngs)
        self.block = Block(rngs)
        self.blocks = nnx.vmap(Block, in_axes=0, out_axes=0)(rngs.split(2))
        self.fc = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x + jnp.einsum("btnh,nhd->btd", jnp.tanh(jnp.einsum("btd,dnh->btnh", x, self.q)), self.o)
        x = x + jnp.einsum("btd,edf->ebtf", x, self.experts).sum(0)
        x = x + jnp.einsum("ebd,edf->ebf", jnp.stack([x[:, 0]] * 3), self.experts).sum(0)[:, None]
        rows = x.reshape(-1, 16)
        x = x + jax.lax.ragged_dot(rows, self.ragged[...], jnp.array([3, 4, 5])).reshape(x.shape)
        x = x + jnp.einsum("btd,btdf->btf", x, self.chosen[ids % 3])
        for i in range(2):
            x = x + x @ self.by_index[i].T
        graphdef, state = nnx.split(self.block)
        x = jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)
        graphdef, state = nnx.split(self.blocks)
        x, _ = jax.lax.scan(lambda x, state: (nnx.merge(graphdef, state)(x), None), x, state)
        return self.fc(self.depthwise(jnp.tanh(self.conv(x))))


SHAPES = {
    "q": ((16, 4), (4, 2, 8)),
    "o": ((2, 8, 4), (4, 16)),
    "experts": ((16, 4), (4, 3, 16)),
    "ragged": ((3, 16, 4), (3, 4, 16)),
    "chosen": ((3, 16, 4), (3, 4, 16)),
    "by_index": ((2, 16, 4), (2, 4, 16)),
    "conv.kernel": ((3, 16, 4), (4, 8)),
    "depthwise.kernel": ((3, 1, 4), (4, 8)),
    "block.w": ((16, 4), (4, 16)),
    "blocks.w": ((2, 16, 4), (2, 4, 16)),
    "fc.kernel": ((8, 4), (4, 16)),
}
# path -> how A and B make the weight's update
UPDATES = {
    "q": "dr,rnh->dnh",
    "o": "nhr,rd->nhd",
    "experts": "dr,ref->edf",
    "by_index": "lfr,lrd->ldf",
    "conv.kernel": "kir,ro->kio",
    "depthwise.kernel": "kir,ro->kio",
    "block.w": "dr,rf->df",
    "fc.kernel": "dr,rf->df",
}


def adapted(rule: Rule = INT8, **given: Any) -> Any:
    model = lora(Model(nnx.Rngs(0)), rule, rank=4, alpha=2.0, inputs=IDS, rngs=nnx.Rngs(1), **given)
    for number, adapter in enumerate(model.op_quant.adapters.values()):
        adapter.b[...] = jax.random.normal(jax.random.key(number), adapter.b.shape) * 0.2
    return model


def holder(model: Any, path: str) -> tuple[Any, str]:
    *above, name = path.split(".")
    for key in above:
        model = getattr(model, key)
    return model, name


def dense(model: Any, adapters: Any = None) -> Any:
    """The float model whose weights are the dequantized base and the update."""
    plain = Model(nnx.Rngs(0))
    plain.embed.embedding[...] = model.embed.embedding[...]
    for path in SHAPES:
        found = model.op_quant.adapters[path] if adapters is None else adapters[path]
        equation = UPDATES.get(path, "edr,erf->edf")
        at, name = holder(model, path)
        update = jnp.einsum(equation, jnp.asarray(found["a"] if adapters else found.a), _b(found, adapters))
        there, _ = holder(plain, path)
        setattr(there, name, nnx.Param(getattr(at, name)[...] + 2.0 / 4 * update))
    return plain


def _b(found: Any, adapters: Any) -> Any:
    return jnp.asarray(found["b"] if adapters else found.b)


call = nnx.jit(lambda model, ids: model(ids))


@pytest.fixture(scope="module")
def model() -> Any:
    return adapted()


@pytest.mark.heavy
def test_factors_have_documented_shapes_and_paths(model: Any) -> None:
    found = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))["op_quant"]["adapters"]
    assert {path: (of["a"].shape, of["b"].shape) for path, of in found.items()} == SHAPES
    assert all(isinstance(getattr(*holder(model, path)), FrozenParam) for path in SHAPES)


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [None, NF4, MXFP4])
def test_update_equals_that_of_dense_weights(quantizer: Any) -> None:
    model = adapted(Rule(weight_quant=quantizer))
    np.testing.assert_allclose(call(model, IDS), call(dense(model), IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_update_follows_integers_and_their_inputs(model: Any) -> None:
    np.testing.assert_allclose(call(model, IDS), call(dense(model), IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_model_is_unchanged_at_first(model: Any) -> None:
    float_lora = lora(Model(nnx.Rngs(0)), Rule(), rank={"q|fc": 2}, inputs=IDS, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(float_lora(IDS), Model(nnx.Rngs(0))(IDS))
    assert set(float_lora.op_quant.adapters) == {"q", "fc.kernel"}


@pytest.mark.heavy
def test_gradients_are_those_of_the_factors_alone(model: Any) -> None:
    def loss(model: Any) -> jax.Array:
        return (model(IDS) ** 2).mean()

    found = jqinject.value_and_grad(loss)(model)[1]
    asked = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    pure = nnx.to_pure_dict(found)["op_quant"]["adapters"]
    factors = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))["op_quant"]["adapters"]

    def of_dense(factors: Any) -> jax.Array:
        return loss(dense(model, factors))

    wanted = jax.grad(of_dense)(factors)
    assert jax.tree.structure(pure) == jax.tree.structure(wanted)
    for got, expected in zip(jax.tree.leaves(pure), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-4 * float(jnp.abs(expected).max()))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(asked), nnx.to_pure_dict(found))


@pytest.mark.heavy
def test_adapters_are_saved_and_loaded_alone(model: Any, tmp_path: Any) -> None:
    import orbax.checkpoint as ocp

    other = lora(Model(nnx.Rngs(0)), INT8, rank=4, alpha=2.0, inputs=IDS, rngs=nnx.Rngs(5))
    saved = nnx.as_pure(nnx.state(model, nnx.LoRAParam))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "adapters", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "adapters", saved)
    report = jqinject.load_state(other, restored)
    assert len(report.loaded) == 2 * len(SHAPES)
    assert not report.missing and f"kept {len(report.base)} variables of their base" in str(report)
    assert report.base and not any("adapters" in path for path in report.base)
    np.testing.assert_array_equal(other(IDS), model(IDS))


@pytest.mark.heavy
def test_models_with_adapters_are_cloned_pickled_and_made_in_shapes(model: Any) -> None:
    wanted = call(model, IDS)
    np.testing.assert_array_equal(call(nnx.clone(model, graph=True), IDS), wanted)
    np.testing.assert_array_equal(call(pickle.loads(pickle.dumps(model)), IDS), wanted)
    shapes = nnx.eval_shape(lambda: lora(Model(nnx.Rngs(0)), INT8, rank=4, inputs=IDS, rngs=nnx.Rngs(1)))
    of_floats = lora(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), INT8, rank=4, inputs=IDS, rngs=nnx.Rngs(1))
    for abstract in (shapes, of_floats):
        assert jax.tree.map(jnp.shape, nnx.as_pure(nnx.state(abstract))) == jax.tree.map(
            jnp.shape, nnx.as_pure(nnx.state(model))
        )


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [None, Int8WeightPerChannelFloat])
def test_merged_weights_hold_the_update(quantizer: Any) -> None:
    model = adapted(Rule(weight_quant=quantizer))
    wanted = dense(model)
    lossy = (
        contextlib.nullcontext() if quantizer is None else pytest.warns(LossyMergeWarning, match="11 weights")
    )
    with lossy:
        merged = merge_lora(model)
    assert not nnx.to_flat_state(nnx.state(merged, nnx.LoRAParam))
    if quantizer is None:
        assert type(merged) is Model
        np.testing.assert_allclose(merged(IDS), wanted(IDS), rtol=1e-4, atol=1e-4)
    else:
        again = jqinject.freeze(jqinject.quantize(wanted, INT8, inputs=IDS))
        for path in set(SHAPES) - {"depthwise.kernel", "conv.kernel", "fc.kernel"}:
            got, expected = (getattr(*holder(one, path)) for one in (merged, again))
            np.testing.assert_allclose(
                got[...], expected[...], atol=float(jnp.abs(expected[...]).max()) / 100
            )


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(rngs.params.normal((32, 16)))
        self.w = nnx.Param(rngs.params.normal((16, 16)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return (self.table[ids] @ self.w) @ self.table[...].T


@pytest.mark.heavy
def test_tied_table_is_looked_up_without_the_update() -> None:
    model = lora(Tied(nnx.Rngs(0)), INT8, rank=2, inputs=IDS, rngs=nnx.Rngs(1))
    adapter = model.op_quant.adapters["table"]
    assert (adapter.a.shape, adapter.b.shape) == ((16, 2), (2, 32))
    adapter.b[...] = jnp.ones((2, 32))
    table = model.table[...]
    wanted = (table[IDS] @ model.w[...]) @ (table.T + adapter.a[...] @ jnp.ones((2, 32)))
    np.testing.assert_allclose(model(IDS), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"rows of table \(take0\) are looked up too"):
        merge_lora(model)
    with pytest.warns(LossyMergeWarning, match=r"w: inf|w: [\d.]+ dB, inf of the update"):
        merge_lora(model, "w")  # its B is still zeros
    assert set(model.op_quant.adapters) == {"table"}


@pytest.mark.heavy
def test_adapters_see_the_float_input() -> None:
    base = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (5, 8))
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
    model = lora(base, rule, rank=2, alpha=6.0, inputs=x, rngs=nnx.Rngs(1))
    without = model(x)
    model.eval()
    without, adapter = model(x), model.op_quant.adapters["kernel"]
    adapter.b[...] = jnp.ones((2, 4))
    np.testing.assert_allclose(
        model(x) - without, 3 * (x @ adapter.a[...]) @ adapter.b[...], rtol=1e-4, atol=1e-5
    )


@pytest.mark.heavy
def test_dropout_is_for_the_input_of_the_update_alone() -> None:
    base = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    x = jnp.ones((200, 8))
    model = lora(base, Rule(), rank=8, dropout=0.5, inputs=x, rngs=nnx.Rngs(1))
    adapter = model.op_quant.adapters["kernel"]
    adapter.a[...], adapter.b[...] = jnp.eye(8), jnp.eye(8)
    seen = model(x) - base(x)
    assert set(np.round(np.unique(seen), 4)) <= {0.0, 2.0} and 0.4 < float((seen > 1).mean()) < 0.6
    assert not np.array_equal(model(x), model(x))
    model.eval()
    np.testing.assert_allclose(model(x), base(x) + x, rtol=1e-5)


def test_what_cannot_be_adapted_is_refused() -> None:
    base = Tied(nnx.Rngs(0))

    def make(model: Any = base, rules: Any = INT8, **given: Any) -> Any:
        return lora(model, rules, **{"rank": 2, "inputs": IDS, "rngs": nnx.Rngs(0), **given})

    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(base)))
    for given, message in (
        ({"rank": 0}, r"rank must be at least 1, got 0"),
        ({"rank": {"w": 0}}, r"rank\['w'\] must be at least 1"),
        ({"rank": {"tabel": 4}}, r"'tabel'.*table"),
        (
            {"rules": [INT8, Rule("other")]},
            r"rules that take nothing(.|\n)*'other'(.|\n)*layers and weights here: table, w",
        ),
        ({"rules": Rule("w", op="take")}, r"rules that take nothing"),
        ({"model": make()}, r"adapters already: op_quant.adapters.(table|w).a"),
        ({"model": jqinject.quantize(base, INT8, inputs=IDS)}, r"quantized already, in the model itself"),
        ({"inputs": None}, r"inputs=\(x,\)"),
        ({"dropout": 1.0}, r"dropout is a share from 0 to below 1, got 1.0"),
        ({"alpha": 0.0}, r"alpha is a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**given)
    with pytest.raises(TypeError, match=r"rank is an integer, got float 2.0"):
        make(rank=2.0)
    with pytest.raises(ValueError, match=r"no adapter matches 'x'; here are table, w"):
        merge_lora(make(), "x")
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(base)), before)


def wave(shape: tuple[int, ...], frequency: float) -> jax.Array:
    numbers = np.arange(1, np.prod(shape) + 1) ** 1.1
    return jnp.asarray(np.sin(frequency * numbers).reshape(shape).astype(np.float32))


class Waves(nnx.Module):
    def __init__(self, with_conv: bool) -> None:
        rngs = nnx.Rngs(0)
        self.with_conv = with_conv
        self.fc1, self.fc2 = nnx.Linear(8, 6, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)
        self.ein = nnx.Einsum("bd,dnh->bnh", (4, 2, 3), None, rngs=rngs)
        self.conv = nnx.Conv(3, 5, (2,), rngs=rngs)
        for number, layer in enumerate((self.fc1, self.fc2, self.ein, self.conv)):
            layer.kernel[...] = wave(layer.kernel.shape, 1 + number)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.ein(self.fc2(jax.nn.relu(self.fc1(x))))
        return self.conv(y) if self.with_conv else y


QWIX = {
    None: """ 0.8112162   1.6234305   1.3698003   0.40868807 -0.34446573 -0.16272119  0.693388    0.18041766
        -0.9790505  -0.8593145   1.2764032   2.5534897   2.2697632   0.7863333  -0.6699071  -0.69162095  1.1759883
        0.4673561  -1.7338297  -1.9608071  -0.32711878 -0.33245838  0.08609366  0.60801333  0.72434896 -1.3290614
        0.02085914  0.13868913 -0.7363957  -0.9055004""",
    NF4WeightPerChannelFloat: """ 0.27481234  0.2676096  -0.8089664   1.536525   -1.1350052   0.18557604  0.35247314
        0.7582526  -1.0497283   2.702524   -1.4219456   0.40239102 -0.2955158   0.47598377  1.1171536   1.127816
        -0.02208716  1.0670714""",
}


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", QWIX)
def test_outputs_are_those_of_qwix(quantizer: Any) -> None:
    """Reference: Qwix 0.1.8, `apply_lora_to_model(Waves(...), LoraProvider(module_path=".*", rank=2, alpha=5.0,
    weight_qtype=None or "nf4"), x)` with each `kernel_lora_a` set to `0.5 * wave(shape, 3.3)`, each `kernel_lora_b` to
    `0.5 * wave(shape, 0.37)`, in the same shapes as here.
    """
    x = wave((3, 8), 0.7)
    base = Waves(with_conv=quantizer is None)
    model = lora(base, Rule(weight_quant=quantizer), rank=2, alpha=5.0, inputs=x, rngs=nnx.Rngs(1))
    for adapter in model.op_quant.adapters.values():
        adapter.a[...], adapter.b[...] = (
            0.5 * wave(adapter.a.shape, 3.3),
            0.5 * wave(adapter.b.shape, 0.37),
        )
    wanted = np.array(QWIX[quantizer].split(), np.float32)
    np.testing.assert_allclose(model(x).reshape(-1), wanted, rtol=1e-5, atol=1e-6)


class Sharded(nnx.Module):
    def __init__(self) -> None:
        self.fc = nnx.Linear(8, 6, kernel_metadata={"out_sharding": ("m", None)}, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x, out_sharding=jax.P("d", None))


@pytest.mark.heavy
@pytest.mark.parametrize("quantizer", [None, Int8WeightPerChannelFloat])
def test_factors_are_sharded_as_the_axes_that_they_have(quantizer: Any) -> None:
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(wave((4, 8), 0.3), jax.NamedSharding(mesh, jax.P("d", "m")))
        model = lora(Sharded(), Rule(weight_quant=quantizer), rank=2, inputs=x, rngs=nnx.Rngs(1))
        adapter = model.op_quant.adapters["fc.kernel"]
        assert adapter.a.sharding.spec == jax.P("m", None) and adapter.b.sharding.spec == jax.P(None, None)
        assert adapter.a.get_metadata("out_sharding") == ("m", None)
        without = np.asarray(model(x))
        adapter.b[...] = jax.device_put(jnp.ones((2, 6)), adapter.b.sharding)
        found = model(x)
    wanted = np.asarray(x) @ np.asarray(adapter.a[...]) @ np.ones((2, 6))
    np.testing.assert_allclose(np.asarray(found) - without, wanted, rtol=1e-4, atol=1e-5)
