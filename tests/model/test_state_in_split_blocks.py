"""Models that split their own blocks inside transformations: the state of quantizers moves as if they did not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, calibrate, freeze, load_state, quantize
from jqinject.core.state import flat_parts
from jqinject.program import QuantizedProgram
from jqinject.quant import (
    Fp8e4m3ActPerTensorDelayed,
    Fp8e4m3WeightPerTensorDelayed,
    Fp8e5m2GradPerTensorDelayed,
    Int8ActPerTensorFloat,
    Int8ActPerTensorMinMax,
    Int8WeightPerChannelFloat,
)

WIDTH, DEPTH = 6, 3
X = jax.random.normal(jax.random.key(1), (4, WIDTH))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.down = nnx.Param(rngs.params.normal((8, WIDTH)) * 0.3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(self.up(x)) @ self.down


def directly(block: Any, x: jax.Array) -> jax.Array:
    return block(x)


def checkpointed(block: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(block)
    return jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def checkpointed_twice(block: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(block)

    @jax.checkpoint
    def outer(state: Any, x: jax.Array) -> jax.Array:
        return checkpointed(nnx.merge(graphdef, state), x)

    return outer(state, x)


def compiled(block: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(block)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def rematerialized(block: Any, x: jax.Array) -> jax.Array:
    return nnx.remat(type(block).__call__)(block, x)


def copied(block: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(*nnx.split(block))(x)


WAYS = [checkpointed, checkpointed_twice, compiled, rematerialized, copied]


class Model(nnx.Module):
    """Blocks one after another; the first is called twice."""

    def __init__(self, way: Any, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.way = way

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in (*self.blocks, self.blocks[0]):
            x = self.way(block, x)
        return x


W8A8 = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorFloat)


def values(model: Any) -> dict[str, np.ndarray]:
    found = flat_parts(nnx.state(model, nnx.Not(nnx.RngState)))
    return {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in found}


def same(got: dict[str, Any], wanted: dict[str, Any], rtol: float = 1e-6) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol, 1e-7, err_msg=name)


def made(way: Any, rule: Rule = W8A8, kind: Any = Model) -> Any:
    return quantize(kind(way, nnx.Rngs(0)), rule, inputs=X)


@pytest.mark.heavy
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_ranges_run(way: Any, jit: bool) -> None:
    plain, split = made(directly), made(way)
    before = values(plain)
    call = nnx.jit(lambda m, x: m(x)) if jit else lambda m, x: m(x)
    for number in range(2):
        np.testing.assert_allclose(call(split, X * (number + 1)), call(plain, X * (number + 1)), 1e-6, 1e-6)
    moved = {name for name, value in values(plain).items() if not np.array_equal(value, before[name])}
    assert any("up.input_quant" in name for name in moved)
    same(values(split), values(plain))


class Learned(Int8ActPerTensorFloat):
    """Its scale is initialized from the data of two steps."""

    collect_stats_steps = 2


@pytest.mark.heavy
@pytest.mark.parametrize("way", [checkpointed, checkpointed_twice])
def test_scales_start_from_data_and_are_learned(way: Any) -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Learned)
    plain, split = made(directly, rule), made(way, rule)

    @nnx.jit
    def step(model: Any, x: jax.Array) -> Any:
        loss, gradients = nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))
        return loss

    for number in range(4):
        np.testing.assert_allclose(step(split, X * (number + 1)), step(plain, X * (number + 1)), 1e-5)
    same(values(split), values(plain), 1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("way", WAYS)
def test_calibration_collects(way: Any) -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)
    plain, split = made(directly, rule), made(way, rule)
    batches = [X, -3 * X]
    wanted, got = (calibrate(model, batches, progress=False) for model in (plain, split))
    assert got == wanted
    assert (
        len(got.quantizers) == 2 * DEPTH + 1
    )  # the product outside of layers has a quantizer for each of its calls
    same(values(split), values(plain))
    np.testing.assert_allclose(split(X), plain(X), 1e-6, 1e-6)
    loaded = made(way, rule)
    load_state(loaded, nnx.state(plain))
    same(values(loaded), values(plain))
    np.testing.assert_allclose(freeze(split)(X), freeze(plain)(X), 1e-6, 1e-6)


class Act(Fp8e4m3ActPerTensorDelayed):
    amax_history_length = 3


class Weight(Fp8e4m3WeightPerTensorDelayed):
    amax_history_length = 3


class Grad(Fp8e5m2GradPerTensorDelayed):
    amax_history_length = 3


FP8 = Rule(weight_quant=Weight, input_quant=Act, grad_quant=Grad)


@pytest.mark.heavy
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("way", [checkpointed, checkpointed_twice, compiled, rematerialized])
def test_histories_of_both_passes(way: Any, jit: bool) -> None:
    plain, split = made(directly, FP8), made(way, FP8)

    def step(model: Any, x: jax.Array) -> Any:
        return jqinject.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)

    run = nnx.jit(step) if jit else step
    for number in range(2):
        wanted, got = run(plain, X * (number + 1)), run(split, X * (number + 1))
        np.testing.assert_allclose(got[0], wanted[0], 1e-5)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-4, 1e-6), got[1], wanted[1])
    same(values(split), values(plain), 1e-5)
    for block in split.blocks:
        for proxy in (block.up.input_quant, block.up.weight_quant, block.up.grad_quant):
            assert np.all(np.asarray(proxy.amax_history.amax_history[...]) > 0, axis=0).sum() == 0
            assert np.count_nonzero(proxy.amax_history.amax_history[...]) == 2


class Stack(nnx.Module):
    """A stack of blocks, split and scanned over."""

    depth = DEPTH

    def __init__(self, way: Any, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=self.depth)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = stacked(rngs)
        self.way = way

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.blocks)
        if self.way == "nnx.scan":
            return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )

        def body(x: jax.Array, state: Any) -> Any:
            return self.way(nnx.merge(graphdef, state), x), None

        return jax.lax.scan(body, x, state)[0]


@pytest.mark.heavy
@pytest.mark.parametrize("way", [directly, checkpointed])
def test_stacks_in_a_scan(way: Any) -> None:
    plain, split = made("nnx.scan", W8A8, Stack), made(way, W8A8, Stack)
    for number in range(2):
        np.testing.assert_allclose(split(X * (number + 1)), plain(X * (number + 1)), 1e-6, 1e-6)
    same(values(split), values(plain))


def train(model: Any, steps: int = 2) -> Any:
    def step(model: Any, x: jax.Array) -> Any:
        return jqinject.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)

    run = nnx.jit(step)
    return [run(model, X * (number + 1)) for number in range(steps)]


def close(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, 1e-4, 1e-6), got, wanted)


@pytest.mark.heavy
@pytest.mark.parametrize("way", [directly, checkpointed])
def test_histories_of_stacks_in_a_scan(way: Any) -> None:
    plain, split = made("nnx.scan", FP8, Stack), made(way, FP8, Stack)
    close(train(split), train(plain))
    same(values(split), values(plain), 1e-5)
    up = split.blocks.up
    for proxy in (up.input_quant, up.weight_quant, up.grad_quant):
        assert [np.count_nonzero(row) for row in proxy.amax_history.amax_history[...]] == [2] * DEPTH


@pytest.mark.heavy
def test_stacks_are_calibrated_loaded_and_frozen() -> None:
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)
    plain, split = made("nnx.scan", rule, Stack), made(checkpointed, rule, Stack)
    wanted, got = (calibrate(model, [X, -3 * X], progress=False) for model in (plain, split))
    assert got == wanted
    same(values(split), values(plain))
    loaded = made(checkpointed, rule, Stack)
    load_state(loaded, nnx.state(plain))
    for model in (split, loaded):
        np.testing.assert_allclose(freeze(model)(X), freeze(plain)(X), 1e-6, 1e-6)


class Grouped(Stack):
    """Four blocks, scanned over in two groups; or one after another, each cut out of the stack."""

    depth = 4

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.blocks)
        if self.way == "nnx.scan":
            return super().__call__(x)
        if self.way == "cut":
            for number in range(self.depth):
                one = nnx.merge(graphdef, jax.tree.map(lambda s, i=number: s[i], state))
                x = checkpointed(one, x)
            return x

        @jax.checkpoint
        def group(x: jax.Array, state: Any) -> Any:
            return jax.lax.scan(lambda x, one: (nnx.merge(graphdef, one)(x), None), x, state)[0], None

        groups = jax.tree.map(lambda s: s.reshape(2, 2, *s.shape[1:]), state)
        return jax.lax.scan(group, x, groups)[0]


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["cut", "grouped"])
def test_stacks_that_are_cut_or_grouped(way: str) -> None:
    rule = Rule(".*up", weight_quant=Int8WeightPerChannelFloat, input_quant=Learned)
    plain, split = made("nnx.scan", rule, Grouped), made(way, rule, Grouped)
    for number in range(4):
        np.testing.assert_allclose(split(X * (number + 1)), plain(X * (number + 1)), 1e-6, 1e-6)
    same(values(split), values(plain))


@pytest.mark.heavy
def test_histories_of_stacks_in_groups() -> None:
    rule = Rule(".*up", weight_quant=Weight, input_quant=Act, grad_quant=Grad)
    plain, split = made("nnx.scan", rule, Grouped), made("grouped", rule, Grouped)
    close(train(split), train(plain))
    same(values(split), values(plain), 1e-5)


class Recurrent(nnx.Module):
    """A block whose state a scan closes over."""

    def __init__(self, way: Any, rngs: nnx.Rngs) -> None:
        self.block = Block(rngs)
        self.way = way

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.way is directly:
            for _ in range(3):
                x = self.block(x)
            return x
        graphdef, state = nnx.split(self.block)
        return jax.lax.scan(lambda x, _: (self.way(nnx.merge(graphdef, state), x), None), x, length=3)[0]


@pytest.mark.heavy
@pytest.mark.parametrize("way", [copied, checkpointed])
def test_histories_of_one_block_in_every_iteration(way: Any) -> None:
    rule = Rule(r".*\.up", weight_quant=Weight, input_quant=Act, grad_quant=Grad)
    plain, split = made(directly, rule, Recurrent), made(way, rule, Recurrent)
    close(train(split), train(plain))
    same(values(split), values(plain), 1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("way", [copied, checkpointed])
def test_one_block_in_every_iteration(way: Any) -> None:
    plain, split = made(directly, W8A8, Recurrent), made(way, W8A8, Recurrent)
    for number in range(2):
        plain(X * (number + 1)), split(X * (number + 1))
    layers = [values(model.block.up) for model in (split, plain)]
    same(*layers)


def closed_over(block: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: block(x))(x)


def given_and_closed_over(block: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(block)

    @jax.checkpoint
    def half(given: Any, x: jax.Array) -> jax.Array:
        y = nnx.merge(graphdef, given)(x)
        return y + 0.0 * nnx.merge(graphdef, state)(y)

    return half(state, x)


def called_twice(block: Any, x: jax.Array) -> jax.Array:
    y = block(x)
    return y + 0.0 * block(y)


@pytest.mark.heavy
@pytest.mark.parametrize("way", [closed_over])
def test_blocks_that_a_transformation_closes_over(way: Any) -> None:
    plain, split = made(directly), made(way)
    for number in range(2):
        np.testing.assert_allclose(split(X * (number + 1)), plain(X * (number + 1)), 1e-6, 1e-6)
    same(values(split), values(plain))


class Dense(nnx.Module):
    """Layers of Flax's own classes alone."""

    def __init__(self, way: Any, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.way = way

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.nn.relu(self.way(layer, x))
        return x


COLLECTED = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorMinMax)


@pytest.mark.heavy
@pytest.mark.parametrize("way", [checkpointed, closed_over])
def test_models_of_layers_become_programs_where_they_lose_state(way: Any) -> None:
    plain, split = made(directly, COLLECTED, Dense), made(way, COLLECTED, Dense)
    assert not isinstance(plain, QuantizedProgram)
    assert isinstance(split, QuantizedProgram)
    for model in (plain, split):
        assert len(calibrate(model, [X, -3 * X], progress=False).quantizers) == 2
    same(values(split), values(plain))
    np.testing.assert_allclose(split(X), plain(X), 1e-6, 1e-6)
    np.testing.assert_allclose(freeze(split)(X), freeze(plain)(X), 1e-6, 1e-6)


@pytest.mark.heavy
def test_state_that_comes_in_twice() -> None:
    plain, split = made(called_twice, COLLECTED, Dense), made(given_and_closed_over, COLLECTED, Dense)
    for model in (plain, split):
        calibrate(model, [X, -3 * X], progress=False)
    same(values(split), values(plain))


@pytest.mark.parametrize("way", [directly, rematerialized])
def test_models_that_lose_no_state_stay_as_they_are(way: Any) -> None:
    assert not isinstance(made(way, COLLECTED, Dense), QuantizedProgram)


def test_quantizers_without_state_need_no_program() -> None:
    assert not isinstance(
        made(checkpointed, Rule(weight_quant=Int8WeightPerChannelFloat), Dense), QuantizedProgram
    )


def test_calibration_without_a_program_says_what_is_lost() -> None:
    model = quantize(Dense(checkpointed, nnx.Rngs(0)), COLLECTED)
    before = values(model)
    with pytest.raises(
        ValueError, match=r"layers\.0\.input_quant, layers\.1\.input_quant.*\n.*inputs="
    ) as raised:
        calibrate(model, [X], progress=False)
    assert "Dense throws away" in str(raised.value)
    same(values(model), before)


class Unreached(Dense):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def test_calibration_that_reaches_nothing_is_refused() -> None:
    model = quantize(Unreached(directly, nnx.Rngs(0)), COLLECTED)
    with pytest.raises(ValueError, match=r"1 batches, and none reached .*layers\.0\.input_quant"):
        calibrate(model, [X], progress=False)


def mapped(block: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(block)
    return jax.vmap(lambda row: nnx.merge(graphdef, state)(row))(x)


def branched(block: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(block)
    return jax.lax.cond(x.sum() > 0, lambda s, x: nnx.merge(graphdef, s)(x), lambda s, x: x, state, x)


def looped(block: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(block)
    return jax.lax.while_loop(lambda x: x.sum() < -1e9, lambda x: nnx.merge(graphdef, state)(x), x)


@pytest.mark.parametrize("sign", [1, -1])
def test_state_is_kept_of_the_branch_that_runs(sign: int) -> None:
    """The first block runs if the sum of X is positive, which the second batch reverses."""
    batch = sign * jnp.abs(X)
    plain, split = (quantize(Dense(way, nnx.Rngs(0)), W8A8, inputs=X) for way in (directly, branched))
    before = values(split)
    y = nnx.jit(lambda m, x: m(x))(split, batch)
    if sign > 0:
        np.testing.assert_allclose(y, plain(batch), 1e-6, 1e-6)
        moved = {name for name, value in values(plain).items() if not np.array_equal(value, before[name])}
        assert any("layers.0.input_quant" in name for name in moved)
        first = {name: value for name, value in values(plain).items() if name.startswith("layers.0")}
        same({name: values(split)[name] for name in first}, first)
    else:
        np.testing.assert_array_equal(y, jax.nn.relu(batch))
        same(values(split), before)


@pytest.mark.heavy
@pytest.mark.parametrize("way", [mapped, looped])
def test_state_that_cannot_be_kept_is_named(way: Any) -> None:
    model = quantize(Dense(way, nnx.Rngs(0)), W8A8, inputs=X)
    with pytest.warns(jqinject.LostStateWarning, match=r"Dense throws away .*layers\.0\.input_quant"):
        model(X)
