"""Stacks of parameters that loops slice: quantized, trained and frozen layer by layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, freeze, quantize
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3WeightPerTensorDelayed,
    Fp8e5m2GradPerTensorDelayed,
    Int4WeightPerGroupAbsMax,
    Int8ActPerTensorAbsMax,
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFloat,
    NF4WeightPerGroupFloat,
    NVFP4Weight,
)

L, D = 3, 64
X = jax.random.normal(jax.random.key(1), (5, D))


class Learned(Int8WeightPerTensorFloat):
    scaling_impl_type = "parameter_from_stats"


W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
FP8 = Rule(
    weight_quant=Fp8e4m3WeightPerTensorDelayed,
    input_quant=Fp8e4m3ActPerTensorDelayed,
    grad_quant=Fp8e5m2GradPerTensorDelayed,
)
RULES = {
    "int8": (W8A8, "int8"),
    "fp8": (FP8, "float8_e4m3fn"),
    "int4 groups": (Rule(weight_quant=Int4WeightPerGroupAbsMax), "float32"),
    "nf4": (Rule(weight_quant=NF4WeightPerGroupFloat), "float32"),
    "nvfp4": (Rule(weight_quant=NVFP4Weight), "float32"),
    "learned": (Rule(weight_quant=Learned), "float32"),
}


class Raw(nnx.Module):
    """A stack of matrices, scanned over by the model itself."""

    def __init__(self) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (L, D, D)) * 0.1)

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w.astype(h.dtype)), None

        return jax.lax.scan(jax.checkpoint(layer), x, self.w[...])[0]


class Indexed(Raw):
    """The same, with a loop over indices."""

    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.w[...]
        return jax.lax.fori_loop(0, L, lambda i, h: jnp.tanh(h @ w[i]), x)


class Block(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.w = nnx.Param(jax.random.normal(key, (D, D)) * 0.1)

    def __call__(self, h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ self.w)


class Scanned(nnx.Module):
    """Blocks made by `nnx.vmap` and run by `nnx.scan`, rematerialized."""

    def __init__(self) -> None:
        self.blocks = nnx.vmap(Block)(jax.random.split(jax.random.key(0), L))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(block: Block, h: jax.Array) -> jax.Array:
            return block(h)

        return run(self.blocks, x)


class Mapped(Scanned):
    """Blocks side by side."""

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.vmap(lambda block, h: block(h), in_axes=(0, None))
        return run(self.blocks, x).sum(0)


def stack_of(model: Any) -> tuple[str, Any]:
    (name,) = model.op_quant.weight_sites()
    return name, model.blocks.w if hasattr(model, "blocks") else model.w


def contracted_dtypes(jaxpr: Any) -> set[str]:
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found |= {x.aval.dtype.name for x in eqn.invars}
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found |= contracted_dtypes(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("form", RULES)
@pytest.mark.parametrize("kind", [Raw, Scanned, Mapped])
def test_a_stack_is_that_of_its_layers(kind: type, form: str) -> None:
    rule, dtype = RULES[form]
    model: Any = quantize(kind(), rule, inputs=X)
    name, stack = stack_of(model)
    before, (proxy, held) = stack[...], (model.op_quant[name], stack)
    found = jqinject.grad(lambda m: (m(X) ** 2).sum())(model)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(found))
    np.testing.assert_array_equal(held[...], before)  # what a block hands through is not written back rounded
    one: Any = quantize(_Single(before[1]), rule, inputs=X)
    wanted = one.op_quant["w"](before[1])
    model.eval()
    frozen = freeze(nnx.clone(model, graph=True))
    np.testing.assert_allclose(stack_of(model)[1][...], before)
    layers = frozen.blocks.w if hasattr(frozen, "blocks") else frozen.w
    if form != "fp8":  # whose scale is that of an earlier step
        np.testing.assert_array_equal(layers[...][1], wanted.value)
    np.testing.assert_allclose(frozen(X), model(X), rtol=1e-5, atol=1e-5)
    graphdef, state = nnx.split(frozen, graph=True)
    program = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    assert contracted_dtypes(program.jaxpr) == {dtype}
    assert proxy.is_quant_enabled


class _Single(nnx.Module):
    def __init__(self, w: jax.Array) -> None:
        self.w = nnx.Param(w)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w


@pytest.mark.heavy
def test_indexing_a_stack_in_a_loop_is_scanning_over_it() -> None:
    scanned, indexed = quantize(Raw(), W8A8, inputs=X), quantize(Indexed(), W8A8, inputs=X)
    np.testing.assert_allclose(indexed(X), scanned(X), rtol=1e-6, atol=1e-6)
    for model in (scanned, indexed):
        model.eval()
    wanted = scanned(X)
    np.testing.assert_allclose(freeze(indexed)(X), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
def test_gradients_of_a_stack_are_those_of_its_layers_one_by_one() -> None:
    model: Any = quantize(Raw(), RULES["int4 groups"][0], inputs=X)
    singles = [quantize(_Single(w), RULES["int4 groups"][0], inputs=X).op_quant["w"] for w in model.w[...]]

    def unrolled(w: jax.Array) -> jax.Array:
        h = X
        for i, proxy in enumerate(singles):
            h = jnp.tanh(h @ proxy(w[i]).value)
        return (h**2).sum()

    found = jqinject.grad(lambda m: (m(X) ** 2).sum())(model)["w"][...]
    np.testing.assert_allclose(found, jax.grad(unrolled)(model.w[...]), rtol=1e-4, atol=1e-5)


class Growing(nnx.Module):
    """Layers whose inputs have ranges of very different sizes, run in one of several ways."""

    def __init__(self, how: str) -> None:
        sizes = jnp.asarray([0.01, 1.0, 30.0, 0.1])[:, None, None]
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (4, D, D)) * sizes)
        self.how = how

    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.w.get_value()
        if self.how == "one by one":
            for i in range(4):
                x = jnp.tanh(x @ w[i])
            return x
        if self.how == "fori_loop":
            return jax.lax.fori_loop(0, 4, lambda i, h: jnp.tanh(h @ w[i]), x)
        if self.how == "index":
            return jax.lax.scan(lambda h, i: (jnp.tanh(h @ jnp.take(w, i, 0)), None), x, jnp.arange(4))[0]
        if self.how == "while_loop":
            body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w[c[0]]))  # noqa: E731
            return jax.lax.while_loop(lambda c: c[0] < 4, body, (0, x))[1]
        step = jax.checkpoint if self.how == "rematerialized" else lambda function: function
        return jax.lax.scan(step(lambda h, w: (jnp.tanh(h @ w), None)), x, w)[0]


STATIC = {
    "min and max": Int8ActPerTensorMinMax,
    "largest": Int8ActPerTensorAbsMax,
    "learned": Int8ActPerTensorFloat.let(
        scaling_impl_type="parameter_from_stats", collect_stats_steps=2, signed=True
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("how", "name"),
    [
        *(("scan", name) for name in STATIC),
        *((how, "largest") for how in ("fori_loop", "while_loop", "index", "rematerialized")),
    ],
)
def test_steps_through_layers_have_ranges_of_their_own(how: str, name: str) -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=STATIC[name])
    found, plain = (
        quantize(Growing(how), rule, inputs=(X,)),
        quantize(Growing("one by one"), rule, inputs=(X,)),
    )
    for model in (found, plain):
        jqinject.calibrate(model, [X, X / 2], progress=False)
    np.testing.assert_allclose(found(X), plain(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(freeze(nnx.clone(found))(X), plain(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(found, X), found(X), rtol=1e-5, atol=1e-6)
    (one,) = jax.tree.leaves(nnx.state(found.op_quant.held["dot_general0_lhs"]))[:1]  # pyright: ignore
    assert one.shape == (4,)
    again = quantize(Growing(how), rule, inputs=(X,))
    jqinject.load_state(again, nnx.state(found))
    np.testing.assert_array_equal(again.eval() or again(X), found(X))
    assert "int8" in str(jqinject.coverage(found, X)) and jqinject.report(found, X, numbers=True)


@pytest.mark.heavy
def test_gradients_of_layers_with_ranges_of_their_own() -> None:
    rule = Rule(
        weight_quant=Int8WeightPerChannelFloat,
        input_quant=STATIC["learned"],
        grad_quant=Fp8e5m2GradPerTensorDelayed,
    )

    def gradients(how: str) -> Any:
        model = quantize(Growing(how), rule, inputs=(X,))
        jqinject.calibrate(model, [X], progress=False)
        model.train()
        step = jqinject.value_and_grad(lambda m: jnp.sum(m(X) ** 2))
        step(model)
        return model, step(model)[1]

    (stacked, of_stack), (plain, of_plain) = gradients("scan"), gradients("one by one")
    np.testing.assert_allclose(of_stack["w"].get_value(), of_plain["w"].get_value(), rtol=1e-4, atol=1e-4)
    for place in ("lhs", "grad"):
        state = nnx.to_pure_dict(nnx.state(stacked.op_quant.held[f"dot_general0_{place}"]))
        assert jax.tree.leaves(state)
        for layer in range(4):
            own = nnx.to_pure_dict(nnx.state(plain.op_quant.held[f"dot_general{layer}_{place}"]))
            mine = jax.tree.map(lambda x, layer=layer: x[layer], state)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), mine, own)


class OverTime(nnx.Module):
    """A loop over time with a table of positions: its steps share what they quantize, however many there are."""

    def __init__(self) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (D, D)) / 8)
        self.u = nnx.Param(jax.random.normal(jax.random.key(2), (2, D, D)) / 8)
        self.positions = nnx.Param(jnp.ones((7, D)))

    def __call__(self, x: jax.Array) -> jax.Array:
        table, u = self.positions.get_value()[: len(x)], self.u.get_value()

        def step(h: jax.Array, each: Any) -> tuple[jax.Array, jax.Array]:
            x, position, at = each
            h = jnp.tanh(h @ self.w.get_value() + x @ u[at % 2] + position)
            return h, h

        return jax.lax.scan(step, jnp.zeros(D), (x, table, jnp.arange(len(x))))[1]


@pytest.mark.heavy
def test_steps_through_time_share_a_range() -> None:
    model = quantize(OverTime(), W8A8, inputs=(X,))
    jqinject.calibrate(model, [X, X[:3]], progress=False)
    assert all(not leaf.shape for leaf in jax.tree.leaves(nnx.state(model.op_quant.held)))  # pyright: ignore
    assert model(X[:4]).shape == (4, D)


class Rising(nnx.Module):
    """A loop over time whose steps have ever larger inputs."""

    def __init__(self, how: str) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (D, D)) / 8)
        self.how = how

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h) + x @ self.w.get_value()
            return h, h

        if self.how == "scan":
            return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)[1]
        return jnp.stack([step(jnp.zeros(x.shape[1:]), one)[1] for one in x])


@pytest.mark.heavy
@pytest.mark.parametrize("name", STATIC)
def test_the_range_of_steps_through_time_is_the_largest_of_each_batch(name: str) -> None:
    x = (
        jax.random.normal(jax.random.key(1), (5, 8, D))
        * jnp.asarray([1.0, 3.0, 60.0, 20.0, 0.1])[:, None, None]
    )
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=STATIC[name])
    model, largest = (
        quantize(Rising("scan"), rule, inputs=(x,)),
        quantize(_Single(Rising("").w[...]), rule, inputs=x[2]),
    )
    jqinject.calibrate(model, [x, x], progress=False)
    jqinject.calibrate(largest, [x[2], x[2]], progress=False)
    states = (nnx.to_pure_dict(nnx.state(m.op_quant.held)) for m in (model, largest))  # pyright: ignore
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *states)
    reference = Rising("scan")(x)
    for quantized in (model, freeze(nnx.clone(model))):
        noise = jnp.sum((quantized(x) - reference) ** 2)
        assert 10 * jnp.log10(jnp.sum(reference**2) / noise) > 30  # 5.5 where the steps' ranges were averaged
    assert "the 5 steps of a loop share one input range, the largest of each batch" in str(
        jqinject.report(model, x)
    )
    model.train()
    gradient = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
