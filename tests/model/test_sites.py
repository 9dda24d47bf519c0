"""Parameters that a model contracts by itself: quantized, trained, frozen and loaded like those of layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, freeze, load_state, quantize, unfreeze
from jqinject.dot import FrozenParam
from jqinject.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Int8WeightPerTensorFloat

W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
W8 = Rule(weight_quant=Int8WeightPerChannelFloat)
IDS = jnp.arange(12).reshape(2, 6)


class Einsum(nnx.Module):
    def __init__(self, equation: str, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.equation = equation
        self.w = nnx.Param(rngs.params.normal(shape) * 0.1)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.equation, x, jnp.astype(self.w[...], x.dtype))


class Decoder(nnx.Module):
    """A tied table, einsums of its own, a layer of Flax and a bare matrix."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(rngs.params.normal((32, 16)))
        self.q = Einsum("btd,dnh->btnh", (16, 2, 8), rngs)
        self.o = Einsum("btnh,nhd->btd", (2, 8, 16), rngs)
        self.up = nnx.Linear(16, 24, rngs=rngs)
        self.down = nnx.Param(rngs.params.normal((24, 16)) * 0.1)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table[(ids,)]
        x = x + self.o(jnp.tanh(self.q(x)))
        x = x + jax.nn.relu(self.up(x)) @ self.down
        return jnp.dot(x, self.table[...].T)


def rounded(w: jax.Array, shared: tuple[int, ...]) -> jax.Array:
    scale = jnp.abs(w).max(shared, keepdims=True) / 127
    return jnp.round(w / scale) * scale


def contracted_dtypes(jaxpr: Any) -> list[tuple[str, ...]]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found.append(tuple(x.aval.dtype.name for x in eqn.invars))
        for inner in eqn.params.values():
            found += contracted_dtypes(inner.jaxpr) if hasattr(inner, "jaxpr") else []
    return found


@pytest.fixture(scope="module")
def trained() -> Any:
    model = quantize(Decoder(nnx.Rngs(0)), W8A8, inputs=IDS)
    step = nnx.jit(lambda m, x: m(x))
    for _ in range(3):
        step(model, IDS)
    return model


@pytest.mark.heavy
def test_weights_are_quantized_along_axes_that_no_use_sums_over() -> None:
    plain = Decoder(nnx.Rngs(0))
    model = quantize(plain, W8, inputs=IDS)
    table = rounded(plain.table[...], (1,))
    x = table[IDS]
    y = jnp.tanh(jnp.einsum("btd,dnh->btnh", x, rounded(plain.q.w[...], (0,))))
    x = x + jnp.einsum("btnh,nhd->btd", y, rounded(plain.o.w[...], (0, 1)))
    up = x @ rounded(plain.up.kernel[...], (0,)) + plain.up.bias[...]
    x = x + jax.nn.relu(up) @ rounded(plain.down[...], (0,))
    np.testing.assert_allclose(model(IDS), x @ table.T, rtol=2e-5, atol=2e-5)


def test_quantizers_of_parameters_have_documented_paths(trained: Any) -> None:
    assert set(trained.op_quant) == {
        *("table", "q.w", "o.w", "down"),
        *("q.einsum0_lhs", "o.einsum0_lhs", "dot_general0_lhs", "dot_general1_lhs"),
    }
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(trained))}
    assert {"table", "q/w", "o/w", "up/kernel", "down"} <= paths
    assert trained.op_quant["q.w"].scale().shape == (1, 2, 8)
    assert trained.op_quant["table"].scale().shape == (32, 1)


@pytest.mark.heavy
def test_gradients_reach_every_parameter(trained: Any) -> None:
    def loss(model: Any) -> jax.Array:
        return (model(IDS) ** 2).mean()

    found = jqinject.grad(loss)(trained)
    wanted = nnx.grad(loss)(Decoder(nnx.Rngs(0)))
    for path in (("table",), ("q", "w"), ("o", "w"), ("up", "kernel"), ("down",)):
        a, b = nnx.to_pure_dict(found), nnx.to_pure_dict(wanted)
        for key in path:
            a, b = a[key], b[key]
        cosine = (a * b).sum() / jnp.linalg.norm(a) / jnp.linalg.norm(b)
        assert cosine > 0.99


@pytest.mark.heavy
def test_frozen_parameters_are_contracted_as_integers(trained: Any) -> None:
    model = nnx.clone(trained, graph=True)
    model.eval()
    wanted = model(IDS)
    frozen = freeze(model)
    assert all(isinstance(w, FrozenParam) for w in (frozen.table, frozen.q.w, frozen.o.w, frozen.down))
    assert frozen.down.shape == (24, 16) and not frozen.op_quant.weight_sites()
    graphdef, state = nnx.split(frozen, graph=True)
    program = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, IDS)
    assert contracted_dtypes(program.jaxpr) == [("int8", "int8")] * 5
    np.testing.assert_allclose(frozen(IDS), wanted, rtol=1e-5, atol=2e-5)


def test_masters_come_back(trained: Any) -> None:
    model = freeze(nnx.clone(trained, graph=True), keep_masters=True)
    unfreeze(model)
    np.testing.assert_array_equal(model.table[...], trained.table[...])
    assert set(model.op_quant) == set(trained.op_quant)
    bare = quantize(Einsum("bd,de->be", (4, 2), nnx.Rngs(0)), W8, inputs=jnp.ones((3, 4)))
    with pytest.raises(ValueError, match=r"float numbers of w are gone"):
        unfreeze(freeze(bare))


def test_loading_reassembles_them() -> None:
    class Learned(Int8WeightPerTensorFloat):
        scaling_impl_type = "parameter_from_stats"

    model = quantize(Decoder(nnx.Rngs(0)), Rule(weight_quant=Learned), inputs=IDS)
    other = Decoder(nnx.Rngs(1))
    report = load_state(model, nnx.state(other))
    assert "op_quant.weights.q.w.weight_quant" in report.reassembled
    np.testing.assert_allclose(model.op_quant["q.w"].scale(), jnp.abs(other.q.w[...]).max() / 127, rtol=1e-6)


def test_a_program_cannot_branch_on_values() -> None:
    class Branching(Einsum):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x) if x.sum() > 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        quantize(Branching("bd,de->be", (4, 4), nnx.Rngs(0)), W8, inputs=jnp.ones((3, 4)))
    notes = "\n".join(caught.value.__notes__)
    assert "Branching is read as a program" in notes and "cure: jnp.where" in notes


def test_uses_of_one_parameter_agree() -> None:
    rules = [Rule("q", op="einsum", weight_quant=Int8WeightPerTensorFloat), W8]
    quantize(Decoder(nnx.Rngs(0)), rules, inputs=IDS)
    apart = [Rule(op="take", weight_quant=Int8WeightPerTensorFloat), W8]
    with pytest.raises(
        ValueError, match=r"table has one payload(.|\n)*take0 \(take\): Int8WeightPerTensorFloat"
    ):
        quantize(Decoder(nnx.Rngs(0)), apart, inputs=IDS)
