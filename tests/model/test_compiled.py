"""`compiled`: a model as one function that holds its state; caches are carried, everything else is refused by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jqinject
from jqinject import Rule, compiled, freeze, quantize, quantized_cache
from jqinject.nn import QuantLinear
from jqinject.quant import Int8ActPerTensorFloat, Int8DynamicActPerRowFloat, Int8WeightPerChannelFloat
from tests.model._generating_models import Decoder, OwnDecoder, RematAttention, init_cache

BATCH, LENGTH = 2, 6
IDS = jax.random.randint(jax.random.key(0), (BATCH, LENGTH), 0, 32)
X = jax.random.normal(jax.random.key(1), (3, 8))
KEY = jax.random.key(2)
KV8 = Rule(cache_quant=Int8DynamicActPerRowFloat)
W8 = Rule(weight_quant=Int8WeightPerChannelFloat)
WITH_START = nnx.Any(nnx.Cache, nnx.PathContains("start"))


class MLP(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = QuantLinear(8, 8, input_quant=Int8ActPerTensorFloat, rngs=rngs)
        self.down = QuantLinear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array, *, double: bool = False) -> jax.Array:
        y = self.down(nnx.relu(self.up(x)))
        return 2 * y if double else y

    def hidden(self, x: jax.Array) -> jax.Array:
        return self.up(x)


@pytest.fixture(scope="module")
def served() -> Any:
    model = MLP()
    model(X)
    return freeze(model)


@pytest.fixture(scope="module")
def answer(served: Any) -> Any:
    return compiled(served, X)


class Counter(nnx.Module):
    """A cache as simple as can be."""

    def __init__(self, kind: type[nnx.Variable[Any]] = nnx.Cache) -> None:
        self.seen = kind(jnp.zeros((2, 4)))
        self.weight = nnx.Param(jnp.ones(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[...] = self.seen[...] + x
        return self.seen[...] * self.weight[...]


def test_the_same_bits_as_a_compiled_call_of_the_model(served: Any, answer: Any) -> None:
    wanted = nnx.jit(lambda model, x: model(x))(served, X)
    assert (answer(X) == wanted).all()
    assert repr(answer).startswith("CompiledModel(MLP.__call__: x=float32[3, 8]")


def test_weights_are_arguments_and_shared_with_the_model(served: Any, answer: Any) -> None:
    answer.update(served)  # nnx.jit gave it other arrays
    again = answer.model()
    assert again.up.frozen.numbers["value"] is served.up.frozen.numbers["value"]
    assert (again(X) == served(X)).all()


def test_each_size_is_compiled_once(served: Any) -> None:
    answer = compiled(served, jax.ShapeDtypeStruct((3, 8), jnp.float32))
    answer.prepare(jax.ShapeDtypeStruct((5, 8), jnp.float32))
    assert answer.programs == ("x=float32[3, 8]", "x=float32[5, 8]")
    for _ in range(2):
        for rows in (3, 5, 1):
            assert answer(jnp.ones((rows, 8))).shape == (rows, 4)
    assert answer(np.ones((3, 8))).shape == (3, 4)  # float64, which JAX takes for float32
    assert len(answer.programs) == 3


def test_only_what_was_prepared(served: Any) -> None:
    answer = compiled(served, X, shapes="given")
    answer.prepare(X[:1])
    assert answer(X[:1]).shape == (1, 4)
    with pytest.raises(ValueError, match=r"x=float32\[2, 8\]\) was not prepared.*\n  cure: answer.prepare"):
        answer(X[:2])
    assert jnp.allclose(answer(X)[:1], answer(X[:1])), "and it answers on"


def test_flags_methods_and_functions(served: Any, answer: Any) -> None:
    twice = compiled(served, X, double=True)
    assert (twice(X, double=True) == 2 * answer(X)).all()
    assert (twice(X, double=False) == answer(X)).all()
    hidden = compiled(served, x=X, method="hidden")
    assert (hidden(x=X) == nnx.jit(lambda m, x: m.hidden(x))(served, X)).all()
    half = compiled(served, X, 2, method=lambda model, x, n: model(x) / n)
    assert (half(X, 2) == answer(X) / 2).all()
    within = compiled(
        served, {"x": X, "by": [2]}, method=lambda model, given: model(given["x"]) / given["by"][0]
    )
    assert (within({"x": X, "by": [4]}) == answer(X) / 4).all()


def test_caches_are_carried_in_place_and_the_model_keeps_its_own() -> None:
    model = Counter()
    model.eval()
    answer = compiled(model, jnp.ones((2, 4)))
    (before,) = answer._changing
    answer(jnp.ones((2, 4)))
    assert before.is_deleted(), "its memory was taken over"
    assert (answer(jnp.ones((2, 4))) == 2).all()
    assert (model.seen[...] == 0).all()
    present = answer.model()
    assert (present.seen[...] == 2).all() and present.weight.get_raw_value() is model.weight.get_raw_value()
    answer(jnp.ones((2, 4)))
    assert (present.seen[...] == 2).all(), "a copy"
    answer.update(model)
    assert (answer(jnp.ones((2, 4))) == 1).all() and (model.seen[...] == 0).all()
    nnx.update(model, nnx.state(answer.model()))
    assert (model.seen[...] == 1).all()


def test_update_takes_weights_of_the_same_model_only(served: Any) -> None:
    answer = compiled(served, X)
    other = MLP()
    other.down.kernel[...] = other.down.kernel[...] * 2
    other(X)
    freeze(other)
    answer.update(other)
    assert (answer(X) == nnx.jit(lambda m, x: m(x))(other, X)).all() and len(answer.programs) == 1
    wider = Counter()
    counter = compiled(wider, jnp.ones((2, 4)))
    larger = Counter()
    larger.weight = nnx.Param(jnp.ones(1))
    with pytest.raises(ValueError, match=r"weight is float32\[1\], and was compiled as float32\[4\]"):
        counter.update(larger)
    with pytest.raises(ValueError, match="another structure"):
        counter.update(served)  # type: ignore[arg-type]
    assert (counter(jnp.ones((2, 4))) == 1).all(), "nothing was changed"


@pytest.mark.lengthy
def test_generation_with_a_cache_in_low_bits() -> None:
    model = OwnDecoder(nnx.Rngs(0), BATCH, LENGTH)
    made = freeze(quantize(model, [W8, KV8], inputs=IDS[:, :1]))
    with_cache: Any = quantized_cache(made)
    wanted = [with_cache(IDS[:, at : at + 1]) for at in range(2)]
    with_cache = quantized_cache(made)
    with pytest.raises(ValueError, match=r"changes caches\.0\.start, caches\.1\.start.*\n  cure: .*'start'"):
        compiled(with_cache, IDS[:, :1])
    answer = compiled(with_cache, IDS[:, :1], changing=WITH_START)
    got = [answer(IDS[:, at : at + 1]) for at in range(2)]
    assert all(jnp.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))
    assert answer.model().caches[0].k_cache.get_raw_value().nbytes < model.caches[0].k_cache[...].nbytes


@pytest.mark.lengthy
@pytest.mark.parametrize("attention", [None, RematAttention])
def test_a_cache_as_argument_and_result_is_given_away(attention: Any) -> None:
    model = Decoder(nnx.Rngs(0), attention) if attention else Decoder(nnx.Rngs(0))
    empty = init_cache(BATCH, LENGTH)
    made = freeze(quantize(model, [W8, KV8], inputs=(IDS[:, :1], empty)))
    cache = quantized_cache(made, empty)
    answer = compiled(made, IDS[:, :1], cache, donate="cache")
    wanted, _ = nnx.jit(lambda m, ids, cache: m(ids, cache))(made, IDS[:, :1], cache)
    got, new = answer(IDS[:, :1], cache)
    assert (got == wanted).all()
    assert cache["layer_0"]["k"].numbers["value"].is_deleted()
    answer(IDS[:, 1:2], new)


@pytest.mark.parametrize("kind", ["dense", "explicit"])
def test_arrays_on_several_devices_stay_there(kind: str) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, P("data") if kind == "explicit" else P(None, "data"))
    model = Counter()
    model.seen[...] = jax.device_put(model.seen[...], rows)
    model.weight[...] = jax.device_put(model.weight[...], NamedSharding(mesh, P()))
    answer = compiled(model, jnp.ones((2, 4)))
    for count in (1, 2):
        assert (answer(jnp.ones((2, 4))) == count).all()
        assert answer.model().seen[...].sharding == rows
    assert len(answer.programs) == 1


def test_blocks_that_are_rematerialized_or_looped_over_change_nothing() -> None:
    class Looped(nnx.Module):
        def __init__(self) -> None:
            self.block = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.stack = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(KEY))

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.remat(lambda block, x: block(x))(self.block, x)
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.stack
            )

    model = Looped()
    assert jnp.allclose(compiled(model, X[:, :4])(X[:, :4]), model(X[:, :4]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: (X.astype(jnp.bfloat16),), r"x=bfloat16\[3, 8\].*x=float32\[3, 8\]: another dtype"),
        (lambda: (X[0],), "another number of axes"),
        (lambda: (X, X), "the arguments are other ones"),
        (lambda: ([[1.0] * 8],), "the arguments are other ones"),
    ],
)
def test_other_arguments_are_refused(answer: Any, given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said + r"[\s\S]*\n  cure: "):
        answer(*given())


def test_sizes_that_do_not_fit_are_named(answer: Any) -> None:
    with pytest.raises(Exception) as caught:
        answer(X[:, :7])
    assert "while MLP.__call__ was compiled for (x=float32[3, 7])" in caught.value.__notes__


def test_a_call_that_misses_its_arguments_is_named(served: Any) -> None:
    with pytest.raises(TypeError, match="'x'") as caught:
        compiled(served)
    assert "compiled for ()\n  cure: compiled(model, x), with the arguments" in "".join(
        caught.value.__notes__
    )


class Sowing(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen = nnx.Intermediate(x)
        return x


class Growing(nnx.Module):
    def __init__(self) -> None:
        self.keys = nnx.Cache(jnp.zeros((1, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.keys.set_value(jnp.concatenate([self.keys[...], x[:1]]))
        return x


REFUSED = [
    (
        lambda m: compiled(MLP(), X),
        ValueError,
        r"training mode \(.*use_running_average = False\)[\s\S]*model.eval",
    ),
    (
        lambda m: compiled(Counter(nnx.Variable), jnp.ones((2, 4))),
        ValueError,
        "the call changes seen, which are not",
    ),
    (lambda m: compiled(Sowing(), X), ValueError, "more of the model than arrays: seen"),
    (lambda m: compiled(Growing(), X), ValueError, r"makes keys float32\[2, 8\], and it was float32\[1, 8\]"),
    (lambda m: compiled(m, m), TypeError, "x is a MLP, whose changes"),
    (lambda m: compiled(m, X, double={"yes"}), TypeError, "{'yes'} is a set without arrays"),
    (lambda m: compiled(m, X, donate="y"), ValueError, "donate='y' is not an argument"),
    (lambda m: compiled(m, X, double=True, donate="double"), ValueError, "donate='double' is a flag"),
    (lambda m: compiled(m, X, method="hiden"), ValueError, "no method 'hiden'; did you mean 'hidden'"),
    (
        lambda m: compiled(m, X, changing=nnx.BatchStat),
        ValueError,
        "no Variable of the model is what changing",
    ),
    (
        lambda m: compiled(m, X, shapes="all"),  # type: ignore[arg-type]
        ValueError,
        "shapes is 'any' or 'given', got 'all'",
    ),
    (lambda m: compiled(nnx.eval_shape(lambda: m), X), ValueError, "is not an array: the model is abstract"),
    (lambda m: compiled(m.hidden, X), TypeError, "compiled takes an NNX module, got method"),
]


@pytest.mark.parametrize(("build", "kind", "said"), REFUSED)
def test_refusals(served: Any, build: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        build(served)


def test_the_front_door_has_it() -> None:
    assert jqinject.compiled is compiled
