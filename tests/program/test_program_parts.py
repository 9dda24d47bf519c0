"""Branches, and functions with derivative rules of their own: quantizers inside, their state, and their derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import OwnDerivativeWarning, Rule, calibrate, coverage, freeze, quantize
from jqinject.dot import LowBitCache
from jqinject.quant import (
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8DynamicActPerRowFloat,
    Int8DynamicActPerTensorFloat,
    Int8Training,
    Int8WeightPerChannelFloat,
)
from jqinject.quant_tensor import as_array

X = jax.random.normal(jax.random.key(0), (4, 8))
WEIGHT = Rule(weight_quant=Int8WeightPerChannelFloat)
STATIC = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)
DYNAMIC = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8DynamicActPerTensorFloat)


def param(seed: int, shape: tuple[int, ...] = (8, 8)) -> nnx.Param[jax.Array]:
    return nnx.Param(jax.random.normal(jax.random.key(seed), shape) * 0.3)


def rounded(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Symmetric integers from -127 to 127 times a scale, of the tensor or along an axis."""
    scale = jnp.max(jnp.abs(x), axis, keepdims=axis is not None) / 127
    return jnp.clip(jnp.round(x / scale), -127, 127) * scale


class Model(nnx.Module):
    """Parameters, and a function of these and of the input."""

    def __init__(
        self, function: Callable[..., jax.Array], count: int = 2, shape: tuple[int, ...] = (8, 8)
    ) -> None:
        self.w = nnx.List([param(seed + 1, shape) for seed in range(count)])
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x, *(w[...] for w in self.w))


def sites(model: Any) -> list[str]:
    return sorted(model.op_quant)


# --- branches


def branches(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ v) @ w, lambda x: x @ w, x)


def test_each_branch_has_sites_and_both_share_a_parameter() -> None:
    model = quantize(Model(branches), STATIC, inputs=X)
    # The branch of False is the first.
    activations = ["cond0.branch0.dot_general0_lhs", *(f"cond0.branch1.dot_general{i}_lhs" for i in (0, 1))]
    assert sites(model) == [*activations, "w.0", "w.1"]
    covered = coverage(model, X)
    assert (covered.quantized_matrices, covered.missed, covered.share_of_operations) == (2, (), 1.0)
    assert {row.name for row in covered.weights} == {name.removesuffix("_lhs") for name in activations}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_branch_that_runs_is_quantized(sign: int) -> None:
    model = quantize(Model(branches), WEIGHT, inputs=X)
    x = X.at[0, 0].set(sign)
    v, w = (rounded(parameter[...], 0) for parameter in model.w)
    expected = x @ v @ w if sign > 0 else x @ w
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), expected, 1e-5, 1e-5)


def count(model: Any, name: str) -> int:
    return int(model.op_quant[name].tensor_quant.scaling_impl.averaging_impl.counter[...])


@pytest.mark.parametrize("way", ["plain", "jit", "grad", "remat", "scan"])
def test_state_leaves_the_branch_that_runs_alone(way: str) -> None:
    function: Callable[..., jax.Array] = branches
    if way == "remat":
        function = jax.checkpoint(branches)
    if way == "scan":
        function = lambda x, *w: jax.lax.scan(lambda x, _: (branches(x, *w), None), x, None, length=1)[0]  # noqa: E731
    model = quantize(Model(function), STATIC, inputs=X)
    call = nnx.jit(lambda m, x: m(x)) if way == "jit" else lambda m, x: m(x)
    if way == "grad":
        call = lambda m, x: nnx.grad(lambda m: m(x).sum())(m)  # noqa: E731
    call(model, X.at[0, 0].set(1))
    taken, other = "cond0.branch1.dot_general0_lhs", "cond0.branch0.dot_general0_lhs"
    assert (count(model, taken), count(model, other)) == (1, 0)
    call(model, X.at[0, 0].set(-1))
    assert (count(model, taken), count(model, other)) == (1, 1)


@pytest.mark.heavy
def test_a_switch_is_calibrated_differentiated_and_frozen() -> None:
    def switched(x: jax.Array, *w: jax.Array) -> jax.Array:
        number = jnp.int32(x[0, 0])
        return jax.lax.switch(number, [lambda x, w=w: jnp.tanh(x @ w) for w in w], x)

    plain = Model(switched, 3)
    model = quantize(plain, STATIC, inputs=X)
    batches = [X.at[0, 0].set(number) for number in range(3)]
    report = calibrate(model, batches, progress=False)
    assert len(report.quantizers) == 3
    frozen = freeze(nnx.clone(model))
    model.eval()
    for number, x in enumerate(batches):
        expected = jnp.tanh(rounded(x) @ rounded(plain.w[number][...], 0))
        np.testing.assert_allclose(model(x), expected, 0.02, 0.02)
        np.testing.assert_allclose(frozen(x), model(x), 1e-5, 1e-5)
    gradient = nnx.grad(lambda m: m(batches[1]).sum())(model)
    own, floats = gradient["w"], nnx.grad(lambda m: m(batches[1]).sum())(plain)["w"]
    np.testing.assert_allclose(own[1][...], floats[1][...], 0.05, 0.1)
    assert not np.any(own[0][...]) and not np.any(own[2][...])


# --- functions with a derivative of their own

BOUND = 0.25


@jax.custom_vjp
def clipped(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product that clips the gradient of its output."""
    return x @ w


def _clipped_backward(residuals: Any, gradient: jax.Array) -> Any:
    x, w = residuals
    gradient = jnp.clip(gradient, -BOUND, BOUND)
    return gradient @ w.T, x.T @ gradient


clipped.defvjp(lambda x, w: (x @ w, (x, w)), _clipped_backward)


@jax.custom_jvp
def doubled(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose derivative is twice what it is."""
    return x @ w


@doubled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    return doubled(x, w), 2 * (dx @ w + x @ dw)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("function", [clipped, doubled])
def test_a_function_keeps_its_rule_at_quantized_numbers(function: Any, jit: bool) -> None:
    model: Any = quantize(Model(function, 1), DYNAMIC, inputs=X)
    plain = quantize(Model(jnp.matmul, 1), DYNAMIC, inputs=X)
    np.testing.assert_array_equal(model(X), plain(X))
    assert coverage(model, X).quantized_matrices == 1
    assert [row.contraction for row in coverage(model, X).weights] == ["int"]
    cotangent = jax.random.normal(jax.random.key(5), (4, 8))

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model(x) * cotangent)

    differentiated = nnx.grad(loss, argnums=(0, 1))
    of_model, of_x = (nnx.jit(differentiated) if jit else differentiated)(model, X)
    bounded = jnp.clip(cotangent, -BOUND, BOUND) if function is clipped else 2 * cotangent
    x, w = as_array(model.op_quant["dot_general0_lhs"](X)), rounded(model.w[0][...], 0)

    def through(name: str, x: jax.Array, gradient: jax.Array) -> jax.Array:
        """The gradient of a quantizer's input: also of its range."""
        return jax.vjp(lambda x: as_array(model.op_quant[name](x)), x)[1](gradient)[0]

    expected = through("dot_general0_lhs", X, bounded @ w.T), through("w.0", model.w[0][...], x.T @ bounded)
    np.testing.assert_allclose(of_x, expected[0], 1e-4, 1e-5)
    np.testing.assert_allclose(of_model["w"][0][...], expected[1], 1e-4, 1e-5)
    if function is doubled:
        tangent = jax.jvp(model, (X,), (cotangent,))[1]
        np.testing.assert_allclose(jnp.sum(tangent * cotangent), jnp.sum(of_x * cotangent), 1e-4)


def test_state_is_recorded_in_such_a_function_and_frozen_numbers_are_contracted() -> None:
    def twice(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        return clipped(clipped(x, v), w)

    model = quantize(Model(twice), STATIC, inputs=X)
    assert sites(model) == ["dot_general0_lhs", "dot_general1_lhs", "w.0", "w.1"]
    nnx.jit(nnx.grad(lambda m, x: m(x).sum()))(model, X)
    assert (count(model, "dot_general0_lhs"), count(model, "dot_general1_lhs")) == (1, 1)
    frozen = freeze(nnx.clone(model))
    model.eval()
    np.testing.assert_allclose(frozen(X), model(X), 1e-5, 1e-5)
    assert [row.contraction for row in coverage(frozen, X).weights] == ["int", "int"]


def test_a_function_without_a_weight_stays_as_it_is() -> None:
    @jax.custom_vjp
    def activation(x: jax.Array) -> jax.Array:
        return jnp.maximum(x, 0)

    activation.defvjp(lambda x: (activation(x), None), lambda _, gradient: (3 * gradient,))
    model = quantize(
        Model(lambda x, w: activation(x) @ w, 1),
        [Rule(op="maximum", input_quant=Int8ActPerTensorFloat), WEIGHT],
        inputs=X,
        allow_idle=True,
    )
    assert sites(model) == ["w.0"]
    gradient = jax.grad(lambda x: model(x).sum())(X)
    np.testing.assert_allclose(gradient, 3 * jnp.ones((4, 8)) @ rounded(model.w[0][...], 0).T, 1e-5, 1e-5)


def test_backward_quantizers_that_the_rule_replaces_are_named() -> None:
    text = r"^dot_general0: a rule quantizes the backward pass, and the function around it has a derivative of its own"
    with pytest.warns(OwnDerivativeWarning, match=text):
        model = quantize(Model(clipped, 1), Rule(scheme=Int8Training), inputs=X, rngs=nnx.Rngs(0))
    cotangent = jnp.full((4, 8), 9.0)
    gradient = nnx.grad(lambda m, x: jnp.sum(m(x) * cotangent), argnums=1)(model, X)
    np.testing.assert_allclose(gradient, BOUND * jnp.ones((4, 8)) @ model.w[0][...].T, 0.05, 0.05)


@pytest.mark.heavy
def test_adapters_train_through_the_rule() -> None:
    model: Any = jqinject.lora(Model(clipped, 1), WEIGHT, rank=2, inputs=X, rngs=nnx.Rngs(0))
    adapter = model.op_quant.adapters["w.0"]
    cotangent = jax.random.normal(jax.random.key(5), (4, 8))
    gradient = nnx.grad(lambda m: jnp.sum(m(X) * cotangent), argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    of_weight = X.T @ jnp.clip(cotangent, -BOUND, BOUND)
    expected = adapter.scale * adapter.a[...].T @ of_weight
    np.testing.assert_allclose(gradient["op_quant"]["adapters"]["w.0"]["b"][...], expected, 1e-4, 1e-5)


# --- caches


class Cached(nnx.Module):
    """Writes into a cache in one branch; the other leaves it, or computes with it."""

    def __init__(self, other: Callable[..., jax.Array]) -> None:
        self.w, self.other = param(1), other

    def __call__(self, x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        def write(cache: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(cache, rows, (0, 0))

        cache = jax.lax.cond(x[0, 0] > 0, write, self.other, cache, x @ self.w[...])
        return x @ cache.T, cache


def test_a_cache_in_low_bits_goes_through_branches() -> None:
    inputs = {"x": X, "cache": jnp.zeros((8, 8))}
    model = quantize(
        Cached(lambda cache, rows: cache), Rule(cache_quant=Int8DynamicActPerRowFloat), inputs=inputs
    )
    low_bits = jqinject.quantized_cache(model, {"cache": inputs["cache"]})["cache"]
    for sign in (1, -1):
        x = X.at[0, 0].set(sign)
        y, low_bits = model(x, low_bits)
        assert isinstance(low_bits, LowBitCache)
        expected, inputs["cache"] = model(x, inputs["cache"])
        np.testing.assert_allclose(y, expected, 1e-5, 1e-5)


def test_a_branch_that_computes_with_a_cache_in_low_bits_is_refused() -> None:
    inputs = {"x": X, "cache": jnp.zeros((8, 8))}
    model = quantize(
        Cached(lambda cache, rows: 2 * cache), Rule(cache_quant=Int8DynamicActPerRowFloat), inputs=inputs
    )
    low_bits = jqinject.quantized_cache(model, {"cache": inputs["cache"]})["cache"]
    with pytest.raises(
        ValueError, match=r"^cache: the cache was given in low bits, and a branch leaves a float array"
    ):
        model(X, low_bits)
