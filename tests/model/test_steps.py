"""One training step counts once, whatever it is made of: each case against an unrolled reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.nn import QuantLinear
from tests.model._fp8 import (
    FP8,
    WIDTH,
    X,
    assert_same,
    by_hand,
    histories,
    linear,
    loss,
    run,
    statistics,
    step,
)

both_ways = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])


def jitted(function: Any, jit: bool = True) -> Any:
    return nnx.jit(function) if jit else function


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    """Three steps, eager, one layer; itself checked against plain arrays below."""
    return statistics(run(linear(), step))


@pytest.mark.heavy
def test_three_steps_by_hand() -> None:
    expected = by_hand()
    for name, history in histories(run(linear(), step)).items():
        newest, *older = expected[name]
        # Flax's layout: the newest in front, the one before it at the end, and so backwards.
        np.testing.assert_allclose(history, [newest, 0.0, *reversed(older)], rtol=1e-5, err_msg=name)


@pytest.mark.heavy
@both_ways
def test_remat_counts_once(jit: bool, reference: Any) -> None:
    def remat_step(model: Any, x: Any) -> Any:
        return jqinject.value_and_grad(lambda m, x: nnx.remat(loss)(m, x))(model, x)

    assert_same(statistics(run(linear(), jitted(remat_step, jit))), reference)


def test_jit_and_donated_buffers(reference: Any) -> None:
    assert_same(statistics(run(linear(), nnx.jit(step))), reference)
    assert_same(statistics(run(linear(), nnx.jit(step, donate_argnums=0))), reference)


def test_a_step_is_traced_once() -> None:
    traces = []

    def counted(model: Any, x: Any) -> Any:
        traces.append(None)
        return step(model, x)

    run(linear(), nnx.jit(counted), steps=4)
    assert len(traces) == 1


class Stack(nnx.Module):
    def __init__(self, depth: int = 3) -> None:
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> QuantLinear:
            return QuantLinear(WIDTH, WIDTH, **FP8, rngs=rngs)

        self.layers, self.depth = make(nnx.Rngs(0)), depth

    def __call__(self, x: Any, remat: bool = False) -> Any:
        def block(x: Any, layer: QuantLinear) -> Any:
            return jnp.tanh(layer(x))

        block = nnx.remat(block) if remat else block
        return nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Unrolled(nnx.Module):
    """The layers of a stack, one by one."""

    def __init__(self, stack: Stack) -> None:
        graphdef, state = nnx.split(stack.layers)
        one_by_one = [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(stack.depth)]
        self.layers = nnx.List([nnx.merge(graphdef, state) for state in one_by_one])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.heavy
@both_ways
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_stacked_layers_have_a_history_each(jit: bool, remat: bool) -> None:
    def stacked_step(stack: Stack, x: Any) -> Any:
        return jqinject.value_and_grad(lambda m, x: jnp.sum(m(x, remat) ** 2))(stack, x)

    stack = Stack()
    unrolled = run(Unrolled(stack), step)
    stacked = statistics(run(stack, jitted(stacked_step, jit)))
    alone = statistics(unrolled)
    for name, value in stacked.items():
        rows = [alone[name.replace("layers.", f"layers.{number}.")] for number in range(stack.depth)]
        np.testing.assert_allclose(value, np.stack(rows), rtol=1e-5, err_msg=name)


class Recurrent(nnx.Module):
    def __init__(self, scanned: bool) -> None:
        self.cell, self.scanned = linear(), scanned

    def __call__(self, xs: Any) -> Any:
        def advance(cell: QuantLinear, h: Any, x: Any) -> Any:
            h = jnp.tanh(cell(h + x))
            return h, h

        if self.scanned:
            carried = nnx.StateAxes({...: nnx.Carry})
            axes = {"in_axes": (carried, nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
            return nnx.scan(advance, **axes)(self.cell, jnp.zeros(WIDTH), xs)[1]
        h, outputs = jnp.zeros(WIDTH), []
        for x in xs:
            h, output = advance(self.cell, h, x)
            outputs.append(output)
        return jnp.stack(outputs)


@pytest.mark.heavy
@both_ways
def test_over_time_the_maximum_counts(jit: bool) -> None:
    expected = statistics(run(Recurrent(False), step))
    assert_same(statistics(run(Recurrent(True), jitted(step, jit))), expected, rtol=1e-5)


class Shared(nnx.Module):
    def __init__(self) -> None:
        self.a = linear()
        names = ("weight_quant", "input_quant", "grad_quant")
        self.b = QuantLinear(WIDTH, WIDTH, **{n: getattr(self.a, n) for n in names}, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return self.b(3 * self.a(x))


@both_ways
def test_two_layers_that_share_report_the_larger(jit: bool) -> None:
    shared = run(Shared(), jitted(step, jit), steps=1)
    got = histories(shared.a)
    fresh = Shared()
    x8 = X.astype(jnp.float8_e4m3fn).astype(jnp.float32)  # scale 1 in the first step
    k = [layer.kernel.get_value() for layer in (fresh.a, fresh.b)]
    k8 = [kernel.astype(jnp.float8_e4m3fn).astype(jnp.float32) for kernel in k]
    hidden = 3 * (x8 @ k8[0])
    y = hidden.astype(jnp.float8_e4m3fn).astype(jnp.float32) @ k8[1]
    g = [None, 2 * y]
    g[0] = 3 * (g[1].astype(jnp.float8_e5m2).astype(jnp.float32) @ k8[1].T)
    for name, pair in {"input": (X, hidden), "weight": k, "grad": g}.items():
        expected = max(float(jnp.abs(array).max()) for array in pair)
        np.testing.assert_allclose(got[name], [expected, 0, 0, 0], rtol=1e-5, err_msg=name)


# --- gradient accumulation: equal to one big batch


@pytest.mark.heavy
@both_ways
def test_several_calls_before_the_optimizer(jit: bool, reference: Any) -> None:
    layer, call = linear(), jitted(step, jit)
    for number in range(3):
        jqinject.begin_step(layer)
        of_kernel = jnp.zeros((WIDTH, WIDTH))
        for part in jnp.split(X * (number + 1), 4):
            of_kernel += call(layer, part)[1]["kernel"].get_value()
        jqinject.end_step(layer)
    assert_same(statistics(layer), reference)
    big = run(linear(), step, steps=2)
    np.testing.assert_allclose(of_kernel, step(big, X * 3)[1]["kernel"].get_value(), rtol=1e-5)


def micro_batches(function: Any, model: Any, x: Any) -> Any:
    """The sum of `function(model, micro_batch)`, in a scan that carries the model."""

    def body(model: Any, total: Any, part: Any) -> Any:
        return total + function(model, part)

    axes = {"in_axes": (nnx.StateAxes({...: nnx.Carry}), nnx.Carry, 0), "out_axes": nnx.Carry}
    return nnx.scan(body, **axes)(model, jnp.float32(0), x.reshape(4, 2, WIDTH))


def test_micro_batches_inside_the_function(reference: Any) -> None:
    def scanned(model: Any, x: Any) -> Any:
        return jqinject.value_and_grad(lambda m, x: micro_batches(loss, m, x))(model, x)

    assert_same(statistics(run(linear(), nnx.jit(scanned))), reference)


def test_value_and_grad_inside_a_scan(reference: Any) -> None:
    def scanned(model: Any, x: Any) -> Any:
        jqinject.begin_step(model)
        total = micro_batches(lambda m, x: step(m, x)[0], model, x)
        jqinject.end_step(model)
        return total

    assert_same(statistics(run(linear(), nnx.jit(scanned))), reference)


# --- batches that are mapped over or spread over devices


@pytest.mark.heavy
@both_ways
def test_vmap_over_the_batch(jit: bool, reference: Any) -> None:
    def mapped(model: Any, x: Any) -> Any:
        per_example = nnx.vmap(loss, in_axes=(None, 0))
        return jqinject.value_and_grad(lambda m, x: per_example(m, x).sum())(model, x)

    assert_same(statistics(run(linear(), jitted(mapped, jit))), reference)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_arrays(kind: str, reference: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType[kind],))
    over_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with jax.set_mesh(mesh):
        assert_same(statistics(run(linear(), nnx.jit(step), jax.device_put(X, over_rows))), reference)


@pytest.mark.parametrize("tracked", [True, False], ids=["axes-tracked", "axis_name"])
def test_shard_map(tracked: bool, reference: Any) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    names = {} if tracked else {"input_axis_name": "data", "grad_axis_name": "data"}
    graphdef, state = nnx.split(linear(**names))
    rows, everywhere = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    @jax.jit
    def sharded_step(state: Any, x: Any) -> Any:
        def local(state: Any, x: Any) -> Any:
            model = nnx.merge(graphdef, state)
            step(model, x)
            return nnx.state(model)

        return jax.shard_map(
            local, mesh=mesh, in_specs=(everywhere, rows), out_specs=everywhere, check_vma=tracked
        )(state, x)

    for number in range(3):
        state = sharded_step(state, X * (number + 1))
    assert_same(statistics(nnx.merge(graphdef, state)), reference)


# --- what must not move


def test_evaluation_moves_nothing() -> None:
    layer = run(linear(), step)
    before = statistics(layer)
    layer.eval()
    run(layer, step)
    run(layer, nnx.jit(lambda m, x: m(x)))
    assert_same(statistics(layer), before, rtol=0)


def test_plain_gradients_leave_the_statistics_of_gradients() -> None:
    with pytest.warns(jqinject.LostStateWarning, match="Grad quantizes a gradient in training mode"):
        layer = run(linear(), lambda m, x: nnx.grad(loss)(m, x))
    got = histories(layer)
    np.testing.assert_array_equal(got["grad"], np.zeros(4))
    np.testing.assert_allclose(got["input"], histories(run(linear(), step))["input"], rtol=1e-6)


@pytest.mark.heavy
def test_an_orbax_checkpoint_goes_on_bit_for_bit(tmp_path: Any) -> None:
    import orbax.checkpoint as ocp

    layer = run(linear(), nnx.jit(step))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "middle", nnx.to_pure_dict(nnx.state(layer)))
    straight = statistics(run(layer, nnx.jit(step), X * 2))
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "middle")
    restored = linear(seed=5)
    jqinject.load_state(restored, saved)
    assert_same(statistics(run(restored, nnx.jit(step), X * 2)), straight, rtol=0)
