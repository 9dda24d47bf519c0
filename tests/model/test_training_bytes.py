"""`report(optimizer=...)`: bytes of a training step, against sizes known by hand."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jqinject
from jqinject import Rule
from jqinject.nn import QuantLinear
from jqinject.optim import adamw4bit, adamw8bit
from jqinject.quant import Fp8CurrentTraining, Int8WeightPerChannelFloat, NVFP4Training

ROWS, K, N, LAYERS = 32, 64, 128, 3
X = jax.ShapeDtypeStruct((ROWS, K), jnp.float32)
FLOAT = 4


class Block(nnx.Module):
    def __init__(self, key: jax.Array, scheme: Any) -> None:
        rngs = nnx.Rngs(key)
        self.up = QuantLinear(K, N, use_bias=False, scheme=scheme, rngs=rngs)
        self.down = QuantLinear(N, K, use_bias=False, scheme=scheme, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


class Blocks(nnx.Module):
    def __init__(self, scheme: Any) -> None:
        make = nnx.vmap(lambda key: Block(key, scheme), in_axes=0, out_axes=0)
        self.layers = make(jax.random.split(jax.random.key(0), LAYERS))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


@pytest.mark.lengthy
@pytest.mark.parametrize(("scheme", "numbers_in_a_byte"), [(Fp8CurrentTraining, 1), (NVFP4Training, 2)])
def test_a_compiled_step_holds_no_second_copy_of_a_weight(scheme: Any, numbers_in_a_byte: int) -> None:
    """What the loops over layers carry: each weight as its parameter, or its gradient, and as its payload."""
    model = Blocks(scheme)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        loss, gradients = jqinject.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    text = step.lower(model, optimizer, jnp.ones((ROWS, K))).compile().as_text()
    carried = (line.partition(") while(")[0] for line in text.splitlines() if ") while(" in line)
    stacks = [re.findall(rf"(\w+)\[({LAYERS},[\d,]+)\]", types) for types in carried]
    loops = [
        [(dtype, math.prod(map(int, shape.split(",")))) for dtype, shape in found]
        for found in stacks
        if found
    ]
    forward, backward = (loop for loop in loops if any(dtype == "u8" for dtype, _ in loop))
    for loop in (forward, backward):
        assert [x for x in loop if x[0] == "f32" and x[1] == LAYERS * K * N] == [("f32", LAYERS * K * N)] * 2
        payload = LAYERS * K * N // numbers_in_a_byte
        assert [x for x in loop if x[0] != "f32" and x[1] == payload] == [("u8", payload)] * 2


def bytes_of(*given: Any, **options: Any) -> Any:
    return jqinject.report(*given, **options).training


class Chain(nnx.Module):
    """Layers without activations between them, by two schemes."""

    def __init__(self) -> None:
        def made(depth: int, width: int, scheme: Any, seed: int) -> QuantLinear:
            return QuantLinear(depth, width, use_bias=False, scheme=scheme, rngs=nnx.Rngs(seed))

        self.first = made(K, K, Fp8CurrentTraining, 0)
        self.fp8 = made(K, N, Fp8CurrentTraining, 1)
        self.nvfp4 = made(N, K, NVFP4Training, 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.nvfp4(self.fp8(self.first(x)))


@pytest.fixture(scope="module")
def chain() -> Any:
    return jqinject.report(Chain(), X, optimizer=optax.adam(1e-3))


@pytest.mark.heavy
def test_8_bit_floats_keep_a_byte_of_each_operand(chain: Any) -> None:
    by_site = {one.site: one for one in chain.training.residuals}
    first, fp8 = by_site["first"], by_site["fp8"]
    assert fp8.kept == ROWS * K + K * N + 2 * FLOAT  # two scales
    assert (fp8.float_kept, fp8.float_in_place) == (FLOAT * ROWS * K, FLOAT * K * N)
    assert fp8.ratio == pytest.approx(0.25, rel=1e-3)
    assert first.kept == ROWS * K + FLOAT, "no gradient of the model's input, so none reads the weight"
    assert (first.float_kept, first.float_in_place) == (FLOAT * ROWS * K, 0)


def test_nvfp4_keeps_four_and_a_half_bits_of_each_operand(chain: Any) -> None:
    (found,) = (one for one in chain.training.residuals if one.site == "nvfp4")
    count = ROWS * N + N * K
    blocks, scales_of_tensors, random_keys = count // 16, 2 * FLOAT, 2 * 8  # gradients are rounded at random
    assert found.kept == count // 2 + blocks + scales_of_tensors + random_keys
    assert found.ratio == pytest.approx(4.5 / 32, rel=0.01)


def test_totals_print_and_export(chain: Any) -> None:
    found = chain.training
    assert found.parameters == FLOAT * (K * K + 2 * K * N)
    assert found.optimizer == found.float_optimizer == 2 * found.parameters + 4
    assert found.kept == sum(one.kept for one in found.residuals)
    assert chain.as_dict()["training"]["parameters"] == found.parameters
    line = f"training: parameters {found.parameters:,} bytes"
    assert line in str(chain) and line in chain.html()


class Stack(nnx.Module):
    """A scanned stack of layers, a parameter that is contracted by itself, and an activation between them."""

    def __init__(self, remat: bool = False) -> None:
        def made(key: jax.Array) -> nnx.Linear:
            return nnx.Linear(K, K, use_bias=False, rngs=nnx.Rngs(key))

        self.layers = nnx.vmap(made, in_axes=0, out_axes=0)(jax.random.split(jax.random.key(0), 3))
        self.out = nnx.Param(jnp.ones((K, N)))
        self.remat = nnx.static(remat)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(layer: Any, x: jax.Array) -> jax.Array:
            return jnp.tanh(layer(x))

        body = nnx.remat(step) if self.remat else step
        return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x) @ self.out


def linear() -> Any:
    return nnx.Linear(K, N, use_bias=False, rngs=nnx.Rngs(0))


def sites(model: Any) -> dict[str, Any]:
    return {one.site: one for one in bytes_of(model, X, optimizer=optax.sgd(0.1)).residuals}


@pytest.mark.heavy
def test_each_site_beside_its_float_self() -> None:
    model = jqinject.quantize(Stack(), [Rule(scheme=Fp8CurrentTraining)], inputs=(X,))
    found = sites(model)
    of_layers, of_out = found["layers"], found["out"]
    assert of_layers.kept == 3 * (ROWS * K + K * K + 2 * FLOAT)
    assert (of_layers.float_kept, of_layers.float_in_place) == (3 * FLOAT * ROWS * K, 3 * FLOAT * K * K)
    assert of_out.kept == ROWS * K + K * N + 2 * FLOAT
    assert of_out.float_in_place == FLOAT * K * N
    assert of_layers.ratio == pytest.approx(0.25, rel=1e-2) == of_out.ratio


def test_rematerialised_blocks_keep_their_inputs() -> None:
    found = sites(Stack(remat=True))
    assert found["layers"].kept == found["layers"].float_kept == 3 * FLOAT * ROWS * K
    assert found["layers"].in_place == 3 * FLOAT * K * K


@pytest.mark.heavy
def test_states_in_low_bits() -> None:
    model, count = linear(), K * N
    for tx, payloads, blocks in (
        (adamw8bit(1e-3), 2 * count, 2 * count // 256),
        (adamw4bit(1e-3), count, 2 * count // 128),
    ):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        held = bytes_of(model, X, optimizer=optimizer)
        planned = bytes_of(model, X, optimizer=tx)
        counter = 4
        assert held.optimizer == planned.optimizer == payloads + FLOAT * blocks + counter
        assert held.float_optimizer == 2 * FLOAT * count + counter


@pytest.mark.heavy
def test_adapters_of_a_frozen_base() -> None:
    base = Stack()
    rule = Rule(weight_quant=Int8WeightPerChannelFloat)
    model = jqinject.lora(base, rule, rank=2, inputs=(X,), rngs=nnx.Rngs(1))
    found = bytes_of(model, X, optimizer=optax.adam(1e-3))
    rank = 2
    assert found.parameters == FLOAT * rank * (3 * 2 * K + K + N)
    assert found.float_kept is None is found.ratio and found.kept > 0


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (
            nnx.Optimizer,
            r"takes optimizer=nnx.Optimizer\(model, tx, wrt=nnx.Param\).*; got Optimizer.\n  cure: opt",
        ),
        (optax.adam, r"; got function.\n  cure: optimizer=optax.adam\(1e-3\)"),
        (True, "; got bool."),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        jqinject.report(linear(), X, optimizer=optimizer)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    frozen = jqinject.freeze(QuantLinear(K, N, use_bias=False, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"no variable that is trained \(Param\).\n  cure: .*before freeze"):
        jqinject.report(frozen, X, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match="none is floating-point"):
        jqinject.report(
            linear(), X, optimizer=optax.sgd(0.1), method=lambda model, x: jnp.argmax(model(x), -1)
        )
