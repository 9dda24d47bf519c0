"""Parameters with an axis of experts: batched contractions, ragged ones, and experts that a router looks up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, freeze, quantize
from jqinject.dot import FrozenParam
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    ShiftedUint8ActPerTensorFloat,
    ShiftedUint8WeightPerChannelFloat,
)

E, D, F = 3, 8, 6
X = jax.random.normal(jax.random.key(1), (10, D))
SIZES = jnp.array([4, 0, 5])  # one row belongs to no expert
SYMMETRIC = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)
SHIFTED = Rule(weight_quant=ShiftedUint8WeightPerChannelFloat, input_quant=ShiftedUint8ActPerTensorFloat)


class Experts(nnx.Module):
    def __init__(self, call: Any, shape: tuple[int, ...] = (E, D, F)) -> None:
        self.w = nnx.Param(
            jax.random.normal(jax.random.key(0), shape) * jnp.arange(1.0, 1 + shape[0])[:, None, None]
        )
        self.call = call

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(self.w[...], x)


def ragged(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, SIZES)


def batched(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("td,edf->tef", x, w.astype(x.dtype))


def dispatched(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.einsum("ecd,edf->ecf", jnp.stack([x, 2 * x, -x]), w)


def routed(w: jax.Array, x: jax.Array) -> jax.Array:
    chosen = jnp.argsort(x[:, :E], axis=1)[:, :2]
    return jnp.einsum("td,tkdf->tkf", x, w[chosen])


def one_by_one(w: jax.Array, x: jax.Array) -> jax.Array:
    return sum(x @ w[i] for i in range(E)) + x @ jax.lax.dynamic_index_in_dim(w, 1, keepdims=False)


CALLS = [ragged, batched, dispatched, routed, one_by_one]


def contracted_dtypes(jaxpr: Any) -> set[tuple[str, ...]]:
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            found.add(tuple(x.aval.dtype.name for x in eqn.invars[:2]))
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found |= contracted_dtypes(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("rule", [SYMMETRIC, SHIFTED], ids=["symmetric", "shifted"])
@pytest.mark.parametrize("call", CALLS)
def test_experts_are_quantized_each_with_scales_of_its_own(call: Any, rule: Rule) -> None:
    model: Any = quantize(Experts(call), rule, inputs=X)
    quantized = model.op_quant["w"](model.w[...])
    assert quantized.scale.shape == (E, 1, F)
    model(X)
    model.eval()
    wanted = model(X)
    (name,) = [name for name in model.op_quant if name != "w"][:1]
    rounded = model.op_quant[name](X).value
    if call is not dispatched and call is not one_by_one:
        np.testing.assert_allclose(wanted, call(quantized.value, rounded), rtol=1e-5, atol=1e-4)
    frozen = freeze(model)
    assert isinstance(frozen.w, FrozenParam) and frozen.w.numbers["value"].dtype.itemsize == 1
    graphdef, state = nnx.split(frozen, graph=True)
    program = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    assert contracted_dtypes(program.jaxpr) == {("int8", "int8")}
    np.testing.assert_allclose(frozen(X), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("call", CALLS)
def test_gradients_pass_through_the_quantizer(call: Any) -> None:
    model: Any = quantize(Experts(call), Rule(weight_quant=Int8WeightPerChannelFloat), inputs=X)
    found = jqinject.grad(lambda m: (m(X) ** 2).sum())(model)["w"][...]
    quantizer = model.op_quant["w"]
    wanted = jax.grad(lambda w: (call(quantizer(w).value, X) ** 2).sum())(model.w[...])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.heavy
def test_gradients_of_a_frozen_model_reach_its_inputs() -> None:
    model = quantize(Experts(ragged), SHIFTED, inputs=X)
    model(X)
    model.eval()
    wanted = jax.grad(lambda x: (model(x) ** 2).sum())(X)
    frozen = freeze(model)
    np.testing.assert_allclose(jax.grad(lambda x: (frozen(x) ** 2).sum())(X), wanted, rtol=1e-4, atol=1e-2)
