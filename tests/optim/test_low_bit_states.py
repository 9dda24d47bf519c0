"""Optimizer states in blocks: with NNX's optimizer, under jit, sharded, in checkpoints; and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jqinject import optim
from jqinject.ops import to_bfloat16_stochastically


@pytest.fixture(autouse=True)
def promotion_of_optax():
    """optax adds updates to parameters of another dtype, and raises floats to the power of integers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Model(nnx.Module):
    def __init__(self, dtype=jnp.float32) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(64, 64, param_dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(64, 128, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(128, 64, param_dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(self.embed(ids))))


def loss_of(model: Model, ids: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(ids), (ids + 1) % 64).mean()


@nnx.jit
def train(model: Model, optimizer: nnx.Optimizer, ids: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, ids)
    optimizer.update(model, grads)
    return loss


IDS = jnp.arange(64)


@pytest.mark.heavy
def test_a_model_learns_with_it_as_with_float_states() -> None:
    losses = {}
    for name, tx in (("float", optax.adamw(3e-3, weight_decay=1e-2)), ("8 bits", optim.adamw8bit(3e-3))):
        model = Model()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        losses[name] = [float(train(model, optimizer, IDS)) for _ in range(30)]
        if name == "8 bits":
            codes = nnx.as_pure(optimizer.opt_state)[0].mu.codes
            kept = codes["embed"]["embedding"], codes["up"]["kernel"], codes["up"]["bias"]
            assert [each.dtype for each in kept] == [jnp.float32, jnp.uint8, jnp.float32]
    assert losses["8 bits"][-1] < losses["8 bits"][0] / 2
    assert abs(losses["8 bits"][-1] - losses["float"][-1]) < 0.1 * losses["float"][0]


@pytest.mark.heavy
def test_the_first_steps_are_those_of_adam_but_for_the_rounding_of_its_states() -> None:
    """One step from zero moments is Adam's to the bit: an update is made before the moments are rounded."""
    params, grads = jnp.ones((64, 64)), jax.random.normal(jax.random.key(0), (64, 64))
    for ours, theirs in (
        (optim.adam8bit(1e-2), optax.adam(1e-2)),
        (optim.adamw4bit(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
        (optim.adamw_fp8(1e-2), optax.adamw(1e-2, weight_decay=1e-2)),
        (optim.lion8bit(1e-2), optax.lion(1e-2, weight_decay=0.0)),
        (optim.sgd8bit(1e-2, 0.9), optax.sgd(1e-2, 0.9)),
    ):
        made, expected = (tx.update(grads, tx.init(params), params)[0] for tx in (ours, theirs))
        np.testing.assert_array_equal(made, expected)


@pytest.mark.heavy
def test_states_take_the_bytes_that_they_say() -> None:
    params = {"kernel": jnp.zeros((256, 256)), "bias": jnp.zeros(256)}

    def bytes_of(tx: optax.GradientTransformation) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(params)))

    kernel, bias, count = 256 * 256, 2 * 4 * (256 + 1), 4
    assert bytes_of(optim.adamw8bit(1e-3)) == 2 * kernel + 2 * 4 * kernel // 256 + bias + count
    assert bytes_of(optim.adamw4bit(1e-3)) == kernel + 2 * 4 * kernel // 128 + bias + count
    assert bytes_of(optim.lion8bit(1e-3)) == kernel + 4 * kernel // 256 + bias // 2 + count


@pytest.mark.heavy
def test_a_resumed_run_has_the_same_bits(tmp_path) -> None:
    import orbax.checkpoint as ocp

    model = Model(jnp.bfloat16)
    optimizer = nnx.Optimizer(model, optim.adamw8bit(1e-3, rounding_seed=3), wrt=nnx.Param)
    train(model, optimizer, IDS)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "it", nnx.to_pure_dict(nnx.state((model, optimizer))))
    expected = [float(train(model, optimizer, IDS)) for _ in range(3)]
    other = Model(jnp.bfloat16)
    again = nnx.Optimizer(other, optim.adamw8bit(1e-3, rounding_seed=3), wrt=nnx.Param)
    state = nnx.state((other, again))
    with ocp.StandardCheckpointer() as saver:
        restored = saver.restore(tmp_path / "it", nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, restored)
    nnx.update((other, again), state)
    assert [float(train(other, again, IDS)) for _ in range(3)] == expected


@pytest.mark.heavy
@pytest.mark.skipif(jax.device_count() < 2, reason="needs devices to spread over")
def test_codes_lie_where_the_parameter_lies() -> None:
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("d", None))
    params = jax.device_put(jnp.ones((64, 256)), spread)
    grads = jax.device_put(jax.random.normal(jax.random.key(0), (64, 256)), spread)
    tx = optim.adamw8bit(1e-2)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    moved, state = step(params, state, grads)
    assert state[0].mu.codes.sharding.is_equivalent_to(spread, 2)
    local, there = step(jnp.ones((64, 256)), tx.init(jnp.ones((64, 256))), jnp.asarray(np.asarray(grads)))
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(local))
    np.testing.assert_array_equal(np.asarray(state[0].nu.codes), np.asarray(there[0].nu.codes))


@pytest.mark.heavy
def test_small_updates_of_bfloat16_are_not_lost() -> None:
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    grads = {"w": jnp.ones((64, 64), jnp.bfloat16)}

    def after(steps: int, seed: int | None) -> float:
        now: Any = params
        tx = optim.adamw8bit(1e-4, weight_decay=0.0, rounding_seed=seed)
        state = tx.init(params)
        step = jax.jit(tx.update)
        for _ in range(steps):
            updates, state = step(grads, state, now)
            now = optax.apply_updates(now, updates)
        return float(now["w"].astype(jnp.float32).mean())

    assert after(10, None) == 1.0  # half a step of bfloat16 below 1 is 2e-3
    assert abs(after(10, 0) - (1 - 10 * 1e-4)) < 2e-4


@pytest.mark.parametrize(
    "make", [optim.adam8bit, optim.adamw8bit, optim.adamw4bit, optim.adamw_fp8, optim.lion8bit, optim.sgd8bit]
)
def test_weight_decay_of_bfloat16_is_that_of_the_same_numbers_in_float32(make: Any) -> None:
    drawn = [jax.random.normal(jax.random.key(place), (64, 64)) for place in range(3)]
    tx = make(1e-2, weight_decay=0.3)

    def updates(dtype: Any) -> list[np.ndarray]:
        params, *grads = ({"w": x.astype(jnp.bfloat16).astype(dtype)} for x in drawn)
        state, found = tx.init(params), []
        for grad in grads:
            update, state = tx.update(grad, state, params)
            found.append(np.asarray(update["w"], np.float32))
        return found

    np.testing.assert_array_equal(updates(jnp.bfloat16), updates(jnp.float32))


def test_rounding_keeps_what_is_not_finite_and_the_largest() -> None:
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, jnp.finfo(jnp.float32).max, 0.0, -1.0])
    y = to_bfloat16_stochastically(x, jax.random.key(0)).astype(jnp.float32)
    assert bool(jnp.isnan(y[0])) and y[1] == jnp.inf and y[2] == -jnp.inf
    assert y[3] == jnp.finfo(jnp.bfloat16).max and y[4] == 0 and y[5] == -1


@pytest.mark.heavy
def test_tables_keep_zero_and_halves() -> None:
    """Zeros come back as zeros, in a table without 0 too; an odd number of codes fills whole bytes."""
    x = jnp.concatenate([jnp.zeros(4), jnp.array([1.0, -0.5, 0.25])])
    signed = optim.BlockTable(optim.dynamic_table(4, True), 4).encode(x)
    assert signed.codes.shape == (4,) and signed.decoded()[:4].tolist() == [0.0] * 4
    unsigned = optim.BlockTable(optim.linear_table(4), 4).encode(jnp.abs(x))
    assert unsigned.decoded().tolist() == [0.0] * 4 + [1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: optim.BlockTable(optim.linear_table(4), 3), "an even int of at least 2"),
        (lambda: optim.BlockFloat8(0), "an int of at least 1; got 0"),
        (
            lambda: optim.low_bit_states(optax.trace(0.9), {"mu": optim.BlockFloat8(4)}).init(jnp.ones(4)),
            "no field 'mu', but 'trace'.\n  cure: name fields",
        ),
        (
            lambda: optim.round_stochastically().update(
                jnp.ones(2), optim.round_stochastically().init(jnp.ones(2))
            ),
            "needs the parameters.\n  cure: tx.update",
        ),
    ],
)
def test_what_is_refused(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
