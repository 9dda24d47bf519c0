"""Operations between layers, quantized by rules: which tensors, how often, and under which transformations."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jqinject import Rule, quantize
from jqinject.program import OPERATIONS, Kind, known_operations
from jqinject.quant import Int8ActPerTensorMinMax

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
ACT = Int8ActPerTensorMinMax


class Calls(nnx.Module):
    """Runs a function of its input."""

    def __init__(self, function: object) -> None:
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x)  # pyright: ignore[reportCallIssue]


def sites(function: object, rule: Rule, x: jax.Array = X) -> list[str]:
    # Flax's average pooling divides a float by an integer.
    with jax.numpy_dtype_promotion("standard"):
        model = quantize(Calls(function), rule, inputs=x)
        y = model(x)
        assert y.shape == jax.eval_shape(function, x).shape  # pyright: ignore[reportArgumentType]
    return list(model.op_quant)


def both(op: str) -> Rule:
    return Rule(op=op, input_quant=ACT, output_quant=ACT)


FUNCTIONS = {
    "add": lambda x: x + x[::-1],
    "subtract": lambda x: x - x[::-1],
    "multiply": lambda x: x * x[::-1],
    "truediv": lambda x: x / (2 + x[::-1] ** 2),
    "dot_general": lambda x: jax.lax.dot(x, x.T),
    "einsum": lambda x: jnp.einsum("ab,cb->ac", x, x),
    "concatenate": lambda x: jnp.concatenate([x, 2 * x]),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "clip": lambda x: jnp.clip(x, -1, 1),
    "mean": lambda x: jnp.mean(x, axis=1),
    "sum": lambda x: jnp.sum(x, axis=1),
    "max": lambda x: jnp.max(x, axis=1),
    "maximum": lambda x: jnp.maximum(x, x[::-1]),
    "power": lambda x: x**2,
    "negative": lambda x: -x,
    "pad": lambda x: jnp.pad(x, 1),
    "floor": jnp.floor,
    "take": lambda x: jnp.take(x, jnp.array([0, 2]), axis=0),
    "resize": lambda x: jax.image.resize(x, (8, 6), "linear"),
    "avg_pool": lambda x: nnx.avg_pool(x[None, :, :, None], (2, 2)),
    "max_pool": lambda x: nnx.max_pool(x[None, :, :, None], (2, 2)),
}


@pytest.mark.heavy
@pytest.mark.parametrize("op", FUNCTIONS)
def test_an_operation_is_found_by_its_name_and_quantized_as_the_table_says(op: str) -> None:
    found = sites(FUNCTIONS[op], both(op))
    kind = OPERATIONS[op].kind
    has_input = any("output" not in name for name in found)
    has_output = any(name.startswith(op) and name.endswith("_output") for name in found)
    assert has_input == (kind not in (Kind.OUTPUT_ONLY, Kind.JOINING)), found
    assert has_output == (kind is not Kind.INPUT_ONLY), found


def test_the_table_s_names_are_what_rules_know() -> None:
    assert set(FUNCTIONS) <= set(known_operations())
    assert "reshape" not in known_operations()


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.reshape(6, 4),
        lambda x: x.T,
        lambda x: x[1:],
        lambda x: jnp.squeeze(x[None]),
        lambda x: jnp.split(x, 2)[0],
        jax.nn.relu,
        lambda x: jnp.max(x, axis=0),
        lambda x: nnx.max_pool(x[None, :, :, None], (2, 2))[0, :, :, 0],
        lambda x: jnp.concatenate([x, x]),
    ],
)
def test_a_quantized_tensor_stays_so_when_its_numbers_are_moved(move: object) -> None:
    rule = Rule(op=("tanh", "negative"), input_quant=ACT)
    assert sites(lambda x: -move(jnp.tanh(x)), rule) == ["tanh0", "negative0"]  # pyright: ignore
    outputs = Rule(op=("tanh", "negative"), input_quant=ACT, output_quant=ACT)
    assert sites(lambda x: -move(jnp.tanh(x)), outputs) == ["tanh0", "tanh0_output", "negative0_output"]  # pyright: ignore


def test_the_value_is_that_of_its_quantizer() -> None:
    model = quantize(Calls(lambda x: x + x[::-1]), Rule(op="add", output_quant=ACT), inputs=X)
    y = model(X)
    quantizer = model.op_quant["add0_output"]
    quantizer.eval()
    np.testing.assert_array_equal(y, quantizer(X + X[::-1]).value)
    np.testing.assert_allclose(y, X + X[::-1], atol=float(quantizer.scale()))


def test_a_tensor_that_two_operations_take_is_quantized_once() -> None:
    assert sites(
        lambda x: jnp.tanh(x) + jax.nn.sigmoid(x), Rule(op=("tanh", "sigmoid"), input_quant=ACT)
    ) == ["tanh0"]


def test_a_softmax_whose_parts_are_used_elsewhere_is_none() -> None:
    def by_hand(x: jax.Array) -> jax.Array:
        exponentials = jnp.exp(x - jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True)))
        return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True) + exponentials

    with pytest.raises(ValueError, match=r"rules that take nothing"):
        sites(by_hand, Rule(op="softmax", output_quant=ACT))


def test_paths_are_those_of_modules() -> None:
    class Residual(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fc = nnx.Linear(6, 6, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.fc(x)

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.blocks = nnx.List([Residual(rngs), Residual(rngs)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return x + 1.0

    model = quantize(Net(), Rule(r"blocks\.1", op="add", output_quant=ACT), inputs=X)
    assert list(model.op_quant) == ["blocks.1.add0_output"]
    everywhere = quantize(Net(), Rule(op="add", output_quant=ACT), inputs=X)
    assert list(everywhere.op_quant) == ["blocks.0.add0_output", "blocks.1.add0_output", "add0_output"]


class Stateful(nnx.Module):
    """Has statistics, random numbers and an argument that is no array."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.fc = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array, twice: bool = False) -> jax.Array:
        y = self.dropout(self.norm(self.fc(x)))
        return (y + y if twice else y) + x


@pytest.mark.heavy
def test_state_changes_as_by_the_model_s_own_call() -> None:
    plain, model = (
        Stateful(),
        quantize(Stateful(), Rule(op="add", output_quant=ACT), inputs={"x": X, "twice": True}),
    )
    for _ in range(2):
        a, b = plain(X, twice=True), model(X, twice=True)
        np.testing.assert_allclose(a, b, atol=0.1)
    np.testing.assert_allclose(plain.norm.mean[...], model.norm.mean[...], rtol=1e-6)
    assert int(plain.dropout.rngs.count[...]) == int(model.dropout.rngs.count[...])  # pyright: ignore
    assert isinstance(model, Stateful)


def test_a_call_that_leads_elsewhere_is_refused_with_the_cure() -> None:
    model = quantize(Stateful(), Rule(op="add", output_quant=ACT), inputs=X)
    with pytest.raises(ValueError, match=r"add1_output has no quantizer[\s\S]*cure: quantize it with inputs"):
        model(X, twice=True)


def test_it_is_a_module_like_any_other() -> None:
    model = quantize(Stateful(), Rule(op="add", output_quant=ACT), inputs=X)
    # Made before the model is called, which moves its averages.
    others = (nnx.clone(model), pickle.loads(pickle.dumps(model)), nnx.merge(*nnx.split(nnx.clone(model))))
    expected = nnx.view(model, deterministic=True)(X)
    for other in others:
        assert type(other) is type(model)
        np.testing.assert_array_equal(nnx.view(other, deterministic=True)(X), expected)
    assert nnx.graphdef(model) == nnx.graphdef(nnx.clone(model))


def test_one_trace_under_jit_and_the_gradient_passes() -> None:
    model = quantize(Stateful(), Rule(op="add", output_quant=ACT), inputs=X)
    traces = 0

    @nnx.jit
    def step(model: Stateful, x: jax.Array) -> object:
        nonlocal traces
        traces += 1
        return nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)

    for _ in range(3):
        gradient = step(model, X)
    assert traces == 1
    assert float(jnp.abs(gradient["fc"]["kernel"][...]).sum()) > 0  # pyright: ignore
    count = model.op_quant["add0_output"].tensor_quant.scaling_impl.averaging_impl.counter  # pyright: ignore
    assert int(count[...]) == 3


@pytest.mark.heavy
@pytest.mark.parametrize("wrap", ["scan", "remat", "jit", "vmap"])
def test_inside_transformations_of_the_model(wrap: str) -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=3)[0]

    functions = {
        "scan": loop,
        "remat": jax.checkpoint(jnp.tanh),
        "jit": jax.jit(jnp.tanh),
        "vmap": jax.vmap(jnp.tanh),
    }
    model = quantize(Calls(functions[wrap]), Rule(op="tanh", output_quant=ACT), inputs=X)
    assert list(model.op_quant) == ["tanh0_output"]
    y = nnx.jit(lambda m, x: m(x))(model, X)
    np.testing.assert_allclose(y, functions[wrap](X), atol=0.02)
    average = model.op_quant["tanh0_output"].tensor_quant.scaling_impl.averaging_impl
    assert int(average.counter[...]) == 1  # pyright: ignore
    gradient = nnx.jit(nnx.grad(lambda x, m: m(x).sum()))(X, model)
    assert float(jnp.abs(gradient - jax.grad(lambda x: functions[wrap](x).sum())(X)).mean()) < 0.1


def test_loops_of_unknown_length_stay_float_and_branches_have_sites() -> None:
    def branches(x: jax.Array) -> jax.Array:
        y = jax.lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, x)
        return jnp.tanh(jax.lax.while_loop(lambda c: c.sum() > 1e3, lambda c: c / 2, y))

    assert sites(branches, Rule(op="tanh", input_quant=ACT)) == ["cond0.branch1.tanh0", "tanh0"]


def test_a_weight_that_no_layer_holds_gets_the_weight_quantizer() -> None:
    class Raw(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...]

    from jqinject.quant import Int8WeightPerChannelFloat

    rule = Rule(op="dot_general", weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4)
    model = quantize(Raw(), rule, inputs=X)
    assert list(model.op_quant) == ["w"]
    w = model.w[...]
    scale = jnp.abs(w).max(0) / 7
    np.testing.assert_allclose(model(X), X @ (jnp.round(w / scale) * scale), rtol=1e-5, atol=1e-6)
