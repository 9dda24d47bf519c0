"""Functions of shards (`jax.shard_map`): quantized as the same function of the whole arrays is."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jqinject import Rule, calibrate, coverage, freeze, quantize, report
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3WeightPerTensorDelayed,
    Fp8e5m2GradPerTensorDelayed,
    Int4WeightPerGroupAbsMax,
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8DynamicActPerRowFloat,
    Int8DynamicActPerTensorFloat,
    Int8Training,
    Int8WeightPerChannelFloat,
)
from jqinject.recipes import RTN, Recipe, Solve

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="the mesh has 8 devices")

X = jax.random.normal(jax.random.key(0), (8, 16)) * jnp.arange(1.0, 9.0)[:, None]
CHANNELS = Int8WeightPerChannelFloat
DYNAMIC = Rule(weight_quant=CHANNELS, input_quant=Int8DynamicActPerTensorFloat)
STATIC = Rule(weight_quant=CHANNELS, input_quant=Int8ActPerTensorMinMax)


call = nnx.jit(lambda model, x: model(x))


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def product(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.tanh(x @ up) @ down


class Feedforward(nnx.Module):
    """Two products; the first divided by columns and the second by rows, or neither."""

    def __init__(self, function: Callable[..., jax.Array] = product) -> None:
        self.up = nnx.Param(jax.random.normal(jax.random.key(1), (16, 32)) * 0.1)
        self.down = nnx.Param(jax.random.normal(jax.random.key(2), (32, 16)) * 0.2)
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x, self.up[...], self.down[...])


SPECS = (P("data", None), P(None, "model"), P("model", None))


def divided(check_vma: bool = True, kind: AxisType = AxisType.Auto) -> Feedforward:
    def of_shards(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.lax.psum(product(x, up, down), "model")

    how: Any = {"mesh": mesh_of(kind), "in_specs": SPECS, "out_specs": SPECS[0], "check_vma": check_vma}
    model = Feedforward(jax.shard_map(of_shards, **how))
    if kind == AxisType.Explicit:
        for parameter, spec in zip((model.up, model.down), SPECS[1:], strict=True):
            parameter.set_value(jax.device_put(parameter[...], NamedSharding(mesh_of(kind), spec)))
    return model


def gathered() -> Feedforward:
    """Parameters are divided, and gathered before they are contracted (FSDP)."""

    def of_shards(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        up = jax.lax.all_gather(up, "model", axis=1, tiled=True)
        return product(x, up, jax.lax.all_gather(down, "model", axis=0, tiled=True))

    return Feedforward(
        jax.shard_map(of_shards, mesh=mesh_of(), in_specs=SPECS, out_specs=SPECS[0], check_vma=False)
    )


CASES = {
    "checked": (divided, STATIC),
    "unchecked": (lambda: divided(check_vma=False), STATIC),
    "dynamic": (lambda: divided(check_vma=False), DYNAMIC),
    "gathered": (gathered, DYNAMIC),
}


def trained(model: nnx.Module, rule: Rule) -> tuple[Any, list[Any]]:
    """A quantized model after two steps, and the outputs and gradients of each."""
    quantized = quantize(model, rule, inputs=X)

    @nnx.jit
    def step(model: Any, x: jax.Array) -> Any:
        def loss(model: Any) -> Any:
            y = model(x)
            return jnp.mean(y**2), y

        return nnx.grad(loss, has_aux=True)(model)

    return quantized, [step(quantized, batch) for batch in (X, 2 * X[::-1])]


@functools.cache
def trained_whole(rule: Rule) -> tuple[Any, list[Any]]:
    return trained(Feedforward(), rule)


def state_of(model: Any, name: str) -> list[Any]:
    return jax.tree.leaves(nnx.state(model.op_quant[name]))


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_shards_are_quantized_as_the_whole_is(name: str) -> None:
    """Dynamic and running ranges, state, outputs and gradients."""
    make, rule = CASES[name]
    (whole, expected), (parts, steps) = trained_whole(rule), trained(make(), rule)
    sites = [f"shard_map0.dot_general{number}_lhs" for number in (0, 1)]
    assert sorted(parts.op_quant) == ["down", *sites, "up"]
    for (gradients, y), (of_whole, y_of_whole) in zip(steps, expected, strict=True):
        np.testing.assert_allclose(y, y_of_whole, 1e-4, 1e-4)
        for parameter in ("up", "down"):
            np.testing.assert_allclose(gradients[parameter][...], of_whole[parameter][...], 1e-3, 1e-4)
    for site in sites:
        for ours, theirs in zip(
            state_of(parts, site), state_of(whole, site.removeprefix("shard_map0.")), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, 1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "weight", [CHANNELS, Int4WeightPerGroupAbsMax.let(group_size=4)], ids=["int8", "groups"]
)
def test_shards_of_frozen_parameters_are_contracted_by_their_payloads(weight: Any) -> None:
    rule = Rule(weight_quant=weight, input_quant=Int8ActPerTensorMinMax)
    whole, parts = quantize(Feedforward(), rule, inputs=X), quantize(divided(), rule, inputs=X)
    for model in (whole, parts):
        calibrate(model, [X], progress=False)
    # Both frozen: what goes into the second product is then the same to the bit, and no code lies between two integers.
    frozen, whole = freeze(parts), freeze(whole)
    np.testing.assert_allclose(call(frozen, X), call(whole, X), 1e-5, 1e-5)
    covered = coverage(frozen, X)
    assert (covered.quantized_matrices, covered.share_of_operations) == (2, 1.0)
    assert {row.contraction for row in covered.weights} == {
        row.contraction for row in coverage(whole, X).weights
    }


def test_rows_have_ranges_of_their_own_on_each_device() -> None:
    """Rows that lie on one device as a whole have the range that they have without devices."""
    rule = Rule("up", weight_quant=CHANNELS, input_quant=Int8DynamicActPerRowFloat)
    whole, parts = quantize(Feedforward(), rule, inputs=X), quantize(divided(), rule, inputs=X)
    np.testing.assert_allclose(call(parts, X), call(whole, X), 1e-4, 1e-4)


@pytest.mark.heavy
def test_explicit_axes_in_a_loop_over_rematerialized_layers() -> None:
    def layers(model: Feedforward) -> Callable[..., jax.Array]:
        step = jax.checkpoint(lambda x, w: (x + model.function(x, *w), None))
        return lambda x, *stacks: jax.lax.scan(step, x, stacks)[0]

    def stacked(model: Feedforward, specs: Any = None) -> Any:
        function = layers(model)
        values = [jnp.stack([p[...], p[...] * 0.5]) for p in (Feedforward().up, Feedforward().down)]
        if specs is not None:
            mesh = mesh_of(AxisType.Explicit)
            values = [
                jax.device_put(v, NamedSharding(mesh, P(None, *s)))
                for v, s in zip(values, specs, strict=True)
            ]
        new = Feedforward(function)
        new.up, new.down = map(nnx.Param, values)
        return new

    whole = quantize(stacked(Feedforward()), STATIC, inputs=X)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        x = jax.device_put(X, NamedSharding(mesh_of(AxisType.Explicit), SPECS[0]))
        parts = quantize(stacked(divided(kind=AxisType.Explicit), SPECS[1:]), STATIC, inputs=x)
        y = nnx.jit(lambda m, x: m(x))(parts, x)
        np.testing.assert_allclose(y, whole(X), 1e-4, 1e-4)
        ranges = [
            jax.tree.leaves(nnx.state(m.op_quant[f"{part}dot_general0_lhs"]))
            for m, part in ((parts, "shard_map0."), (whole, ""))
        ]
    for ours, theirs in zip(*ranges, strict=True):
        assert ours.shape[:1] == (2,)
        np.testing.assert_allclose(ours, theirs, 1e-5)


class Act(Fp8e4m3ActPerTensorDelayed):
    amax_history_length = 2


class Weight(Fp8e4m3WeightPerTensorDelayed):
    amax_history_length = 2


class Grad(Fp8e5m2GradPerTensorDelayed):
    amax_history_length = 2


FP8 = Rule(weight_quant=Weight, input_quant=Act, grad_quant=Grad)


@pytest.mark.heavy
def test_histories_of_both_passes_are_those_of_the_whole() -> None:
    from jqinject import value_and_grad

    histories = []
    for model, part in ((Feedforward(), ""), (divided(), "shard_map0.")):
        quantized: Any = quantize(model, FP8, inputs=X)
        step = nnx.jit(lambda m, x: value_and_grad(lambda m: jnp.mean(m(x) ** 2))(m))
        for batch in (X, 2 * X):
            step(quantized, batch)
        histories.append(
            [
                np.asarray(leaf)
                for name in ("dot_general0_lhs", "dot_general0_grad", "dot_general1_lhs")
                for leaf in jax.tree.leaves(nnx.state(quantized.op_quant[part + name], nnx.Not(nnx.Param)))
            ]
        )
    for ours, theirs in zip(*histories, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4)


def test_histories_of_gradients_need_the_check_of_what_varies() -> None:
    text = (
        "the model: a quantizer inside jax.shard_map records gradients, and with check_vma=False JAX adds up what the "
        "devices record.\n  cure: jax.shard_map(..., check_vma=True); or a quantizer of gradients without a history"
    )
    model = quantize(divided(check_vma=False), FP8, inputs=X)
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        model(X)


@pytest.mark.heavy
def test_learned_ranges_start_from_all_shards() -> None:
    rule = Rule(weight_quant=CHANNELS, input_quant=Int8ActPerTensorFloat)
    whole, parts = quantize(Feedforward(), rule, inputs=X), quantize(divided(), rule, inputs=X)
    for batch in (X, 3 * X):
        np.testing.assert_allclose(call(parts, batch), call(whole, batch), 1e-4, 1e-4)


@pytest.mark.heavy
def test_a_scheme_quantizes_both_passes_of_shards() -> None:
    whole, parts = (
        quantize(model, Rule(scheme=Int8Training), inputs=X, rngs=nnx.Rngs(0))
        for model in (Feedforward(), divided())
    )
    gradients = [nnx.jit(nnx.grad(lambda m: jnp.mean(m(X) ** 2)))(model) for model in (whole, parts)]
    for parameter in ("up", "down"):
        expected, own = (gradient[parameter][...] for gradient in gradients)
        assert float(jnp.abs(own - expected).max() / jnp.abs(expected).max()) < 0.03


@pytest.mark.heavy
def test_a_report_measures_the_shards_of_all_devices() -> None:
    reports = []
    for model in (Feedforward(), divided()):
        quantized = quantize(model, STATIC, inputs=X)
        calibrate(quantized, [X], progress=False)
        reports.append(report(quantized, X, numbers=True))
    whole, parts = (found["up"].numbers for found in reports)
    assert whole is not None and parts is not None
    for name in ("isolated_sqnr_db", "accumulated_sqnr_db", "only_float"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), abs=0.01), name


def test_recipes_say_which_parts_they_do_not_look_into() -> None:
    text = "up: rounded to nearest: shard_map: it is contracted inside a function of shards (shard_map), which is not"
    with pytest.warns(UserWarning, match=re.escape(text)):
        Recipe(Solve(RTN())).apply(divided(), Rule(weight_quant=CHANNELS), [X], progress=False)


def test_a_parameter_whose_groups_shards_would_cut_is_dequantized_before() -> None:
    rule = Rule(weight_quant=Int4WeightPerGroupAbsMax.let(group_size=16))
    whole, parts = quantize(Feedforward(), rule, inputs=X), quantize(divided(), rule, inputs=X)
    np.testing.assert_allclose(call(parts, X), call(whole, X), 1e-4, 1e-4)
