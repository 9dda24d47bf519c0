"""Sites whose inputs have a scale for each row of the output, and weights with axes of one element."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, freeze, quantize
from jqinject import quant as q
from jqinject.program.jaxpr import Body
from jqinject.program.moves import AxesInParameter, moves_of

ROWS = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8DynamicActPerRowAbsMax)
B, T, N, H, D = 2, 3, 4, 8, 6


class Contraction(nnx.Module):
    def __init__(self, shape: tuple[int, ...], call: Any) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), shape))
        self.call = call

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(x, self.w[...])


def spread(shape: tuple[int, ...]) -> jax.Array:
    """Numbers whose size varies along every axis."""
    x = jax.random.normal(jax.random.key(1), shape)
    for axis, size in enumerate(shape):
        x = x * jnp.arange(1.0, 1 + size).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return x


def contractions(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found.append(eqn)
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += contractions(getattr(inner, "jaxpr", inner))
    return found


def program_of(model: Any, x: jax.Array) -> list[Any]:
    graphdef, state = nnx.split(model, graph=True)
    return contractions(jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x).jaxpr)


def dtypes(eqns: list[Any]) -> set[tuple[str, ...]]:
    return {tuple(x.aval.dtype.name for x in eqn.invars[:2]) for eqn in eqns}


def sites_of(model: Any) -> set[str]:
    return set(model.op_quant.held)


CALLS = {
    "last axes": ((B, T, N, H), (N, H, D), (2, 3), lambda x, w: jnp.einsum("btnh,nhd->btd", x, w)),
    "axes apart": ((N, B, H, T), (N, H, D), (0, 2), lambda x, w: jnp.einsum("nbht,nhd->btd", x, w)),
    "first axis": ((H, B), (H, D), (0,), lambda x, w: jnp.einsum("hb,hd->bd", x, w)),
    "images": (
        (B, 5, 5, N),
        (3, 3, N, D),
        (1, 2, 3),
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", CALLS)
def test_a_row_is_all_that_is_summed_over(name: str) -> None:
    given, shape, summed, call = CALLS[name]
    x = spread(given)
    plain = Contraction(shape, call)
    model: Any = quantize(plain, ROWS, inputs=x)
    model.eval()
    evaluated = model(x)
    scale = jnp.abs(x).max(summed, keepdims=True) / 127.5
    rounded = jnp.clip(jnp.round(x / scale), -128, 127) * scale
    out = shape[:-1]
    w = plain.w[...]
    of_weight = jnp.abs(w).max(tuple(range(len(out))), keepdims=True) / 127
    wanted = call(rounded, jnp.round(w / of_weight) * of_weight)
    np.testing.assert_allclose(evaluated, wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))

    (eqn,) = program_of(model, x)
    assert dtypes([eqn]) == {("int8", "int8")}
    if name != "images":
        assert eqn.params["dimension_numbers"][1] == ((), ())  # no axis is left for floats to sum
    frozen = freeze(model)
    assert dtypes(program_of(frozen, x)) == {("int8", "int8")}
    np.testing.assert_allclose(frozen(x), evaluated, rtol=1e-6, atol=1e-5)


def test_a_value_that_is_summed_along_two_axes_has_scales_for_both() -> None:
    class Both(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = nnx.Param(jnp.eye(4)), nnx.Param(jnp.eye(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.einsum("ij,jk->ik", x, self.a[...]) + jnp.einsum("ij,ik->kj", x, self.b[...])

    x = spread((3, 4))
    assert sites_of(quantize(Both(), ROWS, inputs=x)) == {"einsum0_lhs", "einsum1_lhs"}
    tensor = Rule(weight_quant=q.Int8WeightPerChannelFloat, input_quant=q.Int8DynamicActPerTensorAbsMax)
    assert sites_of(quantize(Both(), tensor, inputs=x)) == {"einsum0_lhs"}


class Products(nnx.Module):
    """Attention without a softmax."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bnts,bsnh->btnh", jnp.einsum("btnh,bsnh->bnts", x, x), x)


def test_products_of_activations_have_rows_of_their_own() -> None:
    x = spread((B, T, N, H))
    model: Any = quantize(Products(), Rule(op="einsum", input_quant=q.Int8DynamicActPerRowAbsMax), inputs=x)
    model.eval()
    assert dtypes(program_of(model, x)) == {("int8", "int8")}


class Groups(q.Int4WeightPerGroupAbsMax):
    group_size = 4


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("given", "shape", "call", "axis"),
    [
        ((B, T, 1, H), (1, H, D), lambda x, w: jnp.einsum("btnh,nhd->btd", x, w), 1),
        ((B, H), (H, 1), lambda x, w: x @ w, 0),
        ((B, H), (1, H, D), lambda x, w: x @ w.reshape(H, D), 1),
        ((B, H), (H, 1, D), lambda x, w: x @ w[:, 0], 0),
        ((B, H), (D, H, 1), lambda x, w: x @ jnp.squeeze(w, 2).T, 1),
    ],
)
def test_groups_lie_along_the_axis_that_is_summed_over(given: Any, shape: Any, call: Any, axis: int) -> None:
    x = spread(given)
    plain = Contraction(shape, call)
    model: Any = quantize(plain, Rule(weight_quant=Groups), inputs=x)
    made = model.op_quant["w"](plain.w[...])
    assert made.groups.dim % len(shape) == axis
    np.testing.assert_allclose(model(x), call(x, made.value), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(freeze(model)(x), call(x, made.value), rtol=1e-5, atol=1e-4)


@pytest.mark.heavy
def test_groups_of_an_axis_of_one_element_are_refused_as_by_a_layer() -> None:
    x, rule = spread((B, 1)), Rule(weight_quant=Groups)
    for model in (
        Contraction((1, D), lambda x, w: x @ w),
        nnx.Sequential(nnx.Linear(1, D, rngs=nnx.Rngs(0))),
    ):
        with pytest.raises(
            ValueError, match=r"groups of 4 do not fill (an axis of 1 elements|axis 0 of \(1, 6\), 1 numbers)"
        ):
            quantize(model, rule, inputs=x)(x)


def test_axes_of_one_element_are_followed() -> None:
    def after(function: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        axes, value = AxesInParameter.of(shape), jax.ShapeDtypeStruct(shape, jnp.float32)
        for eqn in Body.of(jax.make_jaxpr(function)(value)).equations:
            moves = moves_of(eqn, eqn.inputs)
            assert moves is not None
            axes = axes.moved(moves[0])
        return axes.places

    assert after(lambda w: w.transpose(2, 0, 1), (1, 4, 5)) == ((1,), (2,), (0,))
    assert after(lambda w: w.reshape(4, 1, 5), (4, 1, 5)) == ((0,), (1,), (2,))
    assert after(lambda w: w.reshape(1, 20), (1, 4, 5)) == ((0,), (1,), (1,))
    assert after(lambda w: w.reshape(4, 5), (1, 4, 5)) == ((0,), (0,), (1,))
    assert after(lambda w: jax.lax.squeeze(w, (0,)), (1, 4, 5)) == ((), (0,), (1,))
    assert after(lambda w: jax.lax.slice(w, (1, 0), (2, 4)), (3, 4)) == ((), (1,))
    assert after(lambda w: w[None, :, :, None], (1, 4)) == ((1,), (2,))


class Stack(nnx.Module):
    def __init__(self, call: Any) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), (3, H, H)) * 0.3)
        self.call = call

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(self.w[...], x)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "call",
    [
        lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0],
        lambda w, x: jnp.einsum("td,edf->tef", x, w),
        lambda w, x: jax.vmap(lambda w: x @ w)(w),
        lambda w, x: x @ jnp.swapaxes(w, 0, 1).reshape(H, -1),
    ],
)
def test_evaluation_contracts_the_integers_that_the_frozen_model_does(call: Any) -> None:
    x = spread((T, H))
    model: Any = quantize(Stack(call), ROWS, inputs=x)
    assert dtypes(program_of(model, x)) == {("float32", "float32")}  # training
    model.eval()
    evaluated = model(x)
    assert dtypes(program_of(model, x)) == {("int8", "int8")}
    frozen = freeze(model)
    assert dtypes(program_of(frozen, x)) == {("int8", "int8")}
    np.testing.assert_allclose(frozen(x), evaluated, rtol=1e-6, atol=1e-6)
