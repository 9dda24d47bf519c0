"""Parameters that a model contracts by itself, by a scheme: trained and frozen, forward and backward."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, coverage, freeze, quantize
from jqinject.dot import FrozenParam, Scheme
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8DynamicActPerRowAbsMax,
    Int8DynamicActPerTensorAbsMax,
    Int8DynamicGradPerRowFloat,
    Int8DynamicGradPerTensorFloat,
    Int8WeightPerChannelAbsMax,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorAbsMax,
    MXFloat4e2m1Act,
    MXFloat4e2m1Weight,
    NVFP4Act,
    NVFP4Weight,
)
from jqinject.quant.aqt import config_v4

X = jax.random.normal(jax.random.key(1), (8, 64))


class W8A8(Scheme):
    fprop_lhs = Int8DynamicActPerRowAbsMax
    fprop_rhs = Int8WeightPerChannelAbsMax


class W8A8G8(W8A8):
    dgrad_grad = wgrad_grad = Int8DynamicGradPerRowFloat
    dgrad_rhs = Int8WeightPerChannelAbsMax
    wgrad_lhs = Int8DynamicActPerRowAbsMax


class Collected(W8A8G8):
    fprop_lhs = Int8ActPerTensorFloat


class OneScale(W8A8G8):
    """Of whole images, which a convolution of integers needs."""

    fprop_lhs = Int8DynamicActPerTensorAbsMax
    dgrad_grad = wgrad_grad = Int8DynamicGradPerTensorFloat
    wgrad_lhs = Int8DynamicActPerTensorAbsMax
    dgrad_rhs = Int8WeightPerTensorAbsMax


class Matrix(nnx.Module):
    def __init__(self, shape: tuple[int, ...] = (64, 32)) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), shape) * 0.1)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w


class Mixed(Matrix):
    """A matrix, heads, and experts whose weight JAX contracts from the left."""

    def __init__(self) -> None:
        super().__init__((64, 64))
        self.heads = nnx.Param(jax.random.normal(jax.random.key(2), (64, 4, 16)) * 0.1)
        self.experts = nnx.Param(jax.random.normal(jax.random.key(3), (4, 16, 8)) * 0.1)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.einsum("bd,dnh->bnh", jnp.tanh(x @ self.w), self.heads)
        return jnp.einsum("bed,edf->bef", h, self.experts)


class Stack(nnx.Module):
    """Rematerialized and scanned over by the model itself."""

    def __init__(self) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (3, 64, 64)) * 0.1)

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w.T), None

        return jax.lax.scan(jax.checkpoint(layer), x, self.w[...])[0]


class Unrolled(Stack):
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(3):
            x = jnp.tanh(x @ self.w[number].T)
        return x


class Filter(Matrix):
    def __init__(self) -> None:
        super().__init__((3, 3, 4, 8))

    def __call__(self, x: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, self.w[...], (1, 1), "SAME", dimension_numbers=numbers)


class Ragged(Matrix):
    def __init__(self) -> None:
        super().__init__((2, 64, 32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, self.w[...], jnp.array([3, 5]))


def rounded(x: Any, axis: int, levels: float = 127.5) -> jax.Array:
    """To 8 bits, with one scale along an axis."""
    scale = jnp.abs(x).max(axis, keepdims=True) / levels
    return jnp.clip(jnp.round(x / scale), -128, 127) * scale


def decibels(found: Any, wanted: Any) -> float:
    return float(10 * jnp.log10((wanted**2).sum() / jnp.maximum(((found - wanted) ** 2).sum(), 1e-30)))


def trained(model: nnx.Module, scheme: Any, x: jax.Array = X, **given: Any) -> Any:
    return quantize(model, Rule(scheme=scheme), inputs=(x,), **given)


def gradient(model: Any, x: jax.Array = X) -> jax.Array:
    """Of the input."""
    return jax.grad(lambda x: (model(x) ** 2).sum())(x)


def contracted(model: Any, x: jax.Array, function: Any) -> list[tuple[str, ...]]:
    """The dtypes of all products of matrices in a program."""
    graphdef, state = nnx.split(model, graph=True)
    found = []

    def look(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
                found.append(tuple(var.aval.dtype.name for var in eqn.invars[:2]))
            for inner in eqn.params.values():
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    look(inner)

    look(jax.make_jaxpr(lambda state, x: function(nnx.merge(graphdef, state), x))(state, x).jaxpr)
    return found


@pytest.mark.heavy
def test_all_six_operands_are_rounded_each_along_its_own_sum() -> None:
    plain = Matrix()
    model = trained(plain, W8A8G8)
    w, g = plain.w[...], jnp.cos(jnp.arange(8 * 32.0).reshape(8, 32))
    y = nnx.jit(lambda model, x: model(x))(model, X)
    np.testing.assert_allclose(y, rounded(X, 1) @ rounded(w, 0), rtol=1e-5, atol=1e-5)
    of_model, dx = nnx.jit(nnx.grad(lambda model, x: (model(x) * g).sum(), argnums=(0, 1)))(model, X)
    np.testing.assert_allclose(dx, rounded(g, 1, 127) @ rounded(w, 1).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_model["w"], rounded(X, 0).T @ rounded(g, 0, 127), rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_a_weight_on_the_left_is_still_the_weight() -> None:
    class Left(Matrix):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.einsum("bd,df->fb", x, self.w)

    plain = Left()
    model = trained(plain, W8A8)
    np.testing.assert_allclose(model(X), (rounded(X, 1) @ rounded(plain.w[...], 0)).T, rtol=1e-5, atol=1e-5)


MODELS = {
    "mixed": (Mixed, W8A8G8, X),
    "aqt": (Mixed, config_v4(rng_type=None), X),
    "stack": (Stack, W8A8G8, X),
    "filter": (Filter, OneScale, jax.random.normal(jax.random.key(4), (2, 6, 6, 4))),
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", MODELS)
def test_frozen_both_passes_contract_integers(kind: str) -> None:
    make, scheme, x = MODELS[kind]
    model = trained(make(), scheme, x)
    model.eval()
    wanted = model(x)
    names = [name for name in ("w", "heads", "experts") if name in vars(model)]
    frozen = freeze(model)
    assert all(isinstance(getattr(frozen, name), FrozenParam) for name in names)
    assert not jax.tree.leaves(nnx.state(frozen, nnx.Param))
    assert decibels(frozen(x), wanted) > 60
    products = contracted(frozen, x, gradient)
    assert len(products) >= 2 * len(names) and {*products} == {("int8", "int8")}


@pytest.mark.heavy
def test_the_gradient_of_a_frozen_input_rounds_the_dequantized_weight() -> None:
    frozen = freeze(trained(Matrix(), W8A8G8))
    g = jnp.cos(jnp.arange(8 * 32.0).reshape(8, 32))
    dx = jax.grad(lambda x: (frozen(x) * g).sum())(X)
    w = rounded(Matrix().w[...], 0)
    np.testing.assert_allclose(dx, rounded(g, 1, 127) @ rounded(w, 1).T, rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_a_stack_has_the_gradients_of_its_layers() -> None:
    def of(make: Any) -> Any:
        return nnx.grad(lambda model, x: (model(x) ** 2).sum(), argnums=(0, 1))(trained(make(), W8A8G8), X)

    (stacked, dx), (unrolled, wanted) = of(Stack), of(Unrolled)
    np.testing.assert_allclose(dx, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stacked["w"], unrolled["w"], rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("formats", [(NVFP4Act, NVFP4Weight), (MXFloat4e2m1Act, MXFloat4e2m1Weight)])
def test_four_bit_floats_train_and_freeze(formats: tuple[Any, Any]) -> None:
    model = trained(Matrix(), Scheme.let(fprop_lhs=formats[0], fprop_rhs=formats[1]))
    slopes = nnx.jit(nnx.grad(lambda model: (model(X) ** 2).mean()))
    a, b = slopes(model)["w"][...], slopes(Matrix())["w"][...]
    assert (a * b).sum() / jnp.linalg.norm(a) / jnp.linalg.norm(b) > 0.9
    model.eval()
    call = nnx.jit(lambda model, x: model(x))
    wanted, size = call(model, X), model.w.nbytes
    frozen = freeze(model)
    assert decibels(call(frozen, X), wanted) > 60
    assert sum(x.nbytes for x in frozen.w.get_raw_value().values()) < size / 6


@pytest.mark.heavy
def test_collected_ranges_survive() -> None:
    model = trained(Matrix(), Collected)
    jqinject.calibrate(model, [X, 2 * X], progress=False)
    model.eval()
    wanted, scale = model(X), model.op_quant["dot_general0"].fprop_lhs.quant.scale()
    frozen = freeze(model)
    assert decibels(frozen(X), wanted) > 60
    assert frozen.op_quant["dot_general0"].fprop_lhs.quant.scale() == scale


@pytest.mark.heavy
def test_experts_of_ragged_rows() -> None:
    model = trained(Ragged(), W8A8)
    w, rows = Ragged().w[...], rounded(X, 1)
    wanted = jnp.concatenate([rows[:3] @ rounded(w[0], 0), rows[3:] @ rounded(w[1], 0)])
    np.testing.assert_allclose(model(X), wanted, rtol=1e-5, atol=1e-5)
    frozen = freeze(model)
    assert decibels(frozen(X), wanted) > 60 and contracted(frozen, X, lambda m, x: m(x)) == [("int8", "int8")]
    found = nnx.grad(lambda model: (model(X) ** 2).sum())(trained(Ragged(), W8A8G8)).w[...]
    wanted = nnx.grad(lambda model: (model(X) ** 2).sum())(Ragged()).w[...]
    assert decibels(found, wanted) > 20
    with pytest.raises(ValueError, match=r"the scheme W8A8G8 cuts sums into pieces.*\n  cure"):
        trained(Ragged(), W8A8G8.let(tile_size=16))(X)


def test_tiles_train_and_are_refused_when_frozen() -> None:
    model = trained(Matrix(), W8A8.let(tile_size=16))
    before = nnx.graphdef(model)
    assert decibels(model(X), Matrix()(X)) > 30
    with pytest.raises(ValueError, match=r"\n    w: its forward contraction is cut into pieces.*\n  cure"):
        freeze(model)
    assert nnx.graphdef(model) == before


@pytest.mark.heavy
def test_the_first_rule_that_matches_wins() -> None:
    class Both(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second, self.third = Matrix((64, 64)), Matrix((64, 64)), Matrix()
            self.up = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
            self.head = nnx.Linear(32, 8, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.up(self.third(self.second(self.first(x)))))

    floats = [Rule("first", scheme=None), Rule("head", scheme=None)]
    others = [Rule("second", weight_quant=Int8WeightPerChannelFloat), Rule(scheme=W8A8)]
    model = quantize(Both(), [*floats, *others], inputs=(X,))
    assert {*model.op_quant} == {"second.w", "third.w", "third.dot_general0"}
    model.eval()
    wanted = model(X)
    formats = {row.parameter: row.weight for row in coverage(freeze(model), X).weights}
    assert formats == {
        **{"first.w": "", "second.w": "int8", "third.w": "int8"},
        **{"up.kernel": "int8", "head.kernel": ""},
    }

    assert decibels(model(X), wanted) > 60 and isinstance(model.up.kernel, FrozenParam)


@pytest.mark.heavy
def test_frozen_models_are_copied_saved_and_reported(tmp_path: Any) -> None:
    frozen = freeze(trained(Mixed(), W8A8G8))
    y = frozen(X)
    copies = [nnx.clone(frozen, graph=True), pickle.loads(pickle.dumps(frozen))]
    for copy in copies:
        np.testing.assert_array_equal(copy(X), y)
    np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(frozen, X), y, rtol=1e-5, atol=1e-5)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "frozen", nnx.state(frozen))
    checkpointer.wait_until_finished()
    abstract = nnx.eval_shape(lambda: freeze(trained(Mixed(), W8A8G8)))
    nnx.update(abstract, checkpointer.restore(tmp_path / "frozen", nnx.state(abstract)))
    np.testing.assert_array_equal(abstract(X), y)
    other = Mixed()
    other.w[...] *= 2
    other = freeze(trained(other, W8A8G8))
    jqinject.load_state(other, checkpointer.restore(tmp_path / "frozen"))
    np.testing.assert_array_equal(other(X), y)
    report = coverage(frozen, X)
    assert {row.weight for row in report.weights} == {"int8"} and not report.missed
    assert "w" in str(jqinject.report(frozen, X))


def test_weights_are_loaded_frozen() -> None:
    model = trained(Mixed(), W8A8G8)
    wanted = freeze(nnx.clone(model, graph=True))
    arrays = ((path, x.get_value()) for path, x in nnx.to_flat_state(nnx.state(Mixed())))
    served = jqinject.load_frozen(lambda: trained(Mixed(), W8A8G8), arrays)
    np.testing.assert_array_equal(served.w.get_raw_value()["value"], wanted.w.get_raw_value()["value"])


@pytest.mark.heavy
def test_masters_come_back() -> None:
    model = trained(Mixed(), W8A8G8)
    y, dx = model(X), gradient(model)
    jqinject.unfreeze(freeze(model, keep_masters=True))
    np.testing.assert_array_equal(model(X), y)
    np.testing.assert_array_equal(gradient(model), dx)
