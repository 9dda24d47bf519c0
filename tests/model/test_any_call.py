"""Everything that calls a model takes any call: keywords, nested arguments, None, flags, modules, other methods."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, quantize
from jqinject.program import Call, compiled_call, with_copied_modules
from jqinject.quant import Int8ActPerTensorAbsMax, Int8WeightPerChannelFloat

RULE = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorAbsMax)
X = jax.random.normal(jax.random.key(0), (3, 4))


class Cache(nnx.Module):
    """The sum of what was seen, and how often."""

    def __init__(self):
        self.sum = nnx.Cache(jnp.zeros((3, 4)))
        self.count = nnx.Cache(jnp.zeros((), jnp.int32))


class Net(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, batch, cache, *, mask=None, heads=1, train):
        if train or heads != 2:
            raise ValueError("called with other flags")
        y = self.dense(batch["inputs"][0] * batch["scale"])
        if mask is not None:
            y = jnp.where(mask, y, 0.0)
        cache.sum[...] += y
        cache.count[...] += 1
        return {"logits": self.head(cache.sum[...]), "cache": None}

    def features(self, x):
        return self.dense(x)


def arguments():
    return {
        "batch": {"inputs": (X, None), "scale": np.float32(0.5)},
        "cache": Cache(),
        "mask": np.arange(4) > 0,
        "heads": 2,
        "train": False,
    }


def model():
    return quantize(Net(), RULE)


RUNS = {
    "calibrate": lambda net, given: jqinject.calibrate(net, [given], progress=False).quantizers,
    "correct_biases": lambda net, given: jqinject.correct_biases(net, [given], progress=False),
    "learn_rounding": lambda net, given: tuple(
        site.path.removesuffix(".kernel")
        for site in jqinject.learn_rounding(net, [given], steps=2, progress=False).sites
    ),
    "report": lambda net, given: tuple(
        entry.path for entry in jqinject.report(net, **given).layers if entry.operations
    ),
    "numbers": lambda net, given: tuple(
        entry.path for entry in jqinject.report(net, numbers=True, **given).layers if entry.numbers.calls
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", RUNS)
def test_any_call(name):
    net, given = model(), arguments()
    if name != "calibrate":
        jqinject.calibrate(net, [arguments()], progress=False)
    found = RUNS[name](net, given)
    assert [path.removesuffix(".input_quant") for path in found] == ["dense", "head"]
    # Calibration runs each batch once, as a call of the user's would; everything else leaves the cache alone.
    assert int(given["cache"].count[...]) == (name == "calibrate")


def test_repeated_batches_begin_with_the_same_cache():
    net, first = model(), arguments()
    second = {**arguments(), "cache": first["cache"]}
    jqinject.calibrate(net, [first, second], progress=False)
    assert first["cache"].count[...] == 2
    plain, held = Net(), Cache()
    inputs = [plain(**{**arguments(), "cache": held}) and held.sum[...] for _ in range(2)]
    average = net.head.input_quant.tensor_quant.scaling_impl.averaging_impl
    expected = np.mean([np.abs(x).max() for x in inputs])
    np.testing.assert_allclose(average.sum_of_max[...] / 2, expected, rtol=1e-5)
    calls = with_copied_modules([Call((), first), Call((), second)])
    assert calls[0].modules[0] is calls[1].modules[0] is not first["cache"]


@pytest.mark.heavy
def test_a_method_or_a_function_of_the_user():
    ways = {
        "name": ([X], {"method": "features"}),
        "unbound": ([X], {"method": Net.features}),
        "bound": ([X], {}),
        "function": ([(X, None)], {"method": lambda net, x, unused: net.features(x)}),
        "call": ([{"x": (X, "text")}], {"call": lambda net, batch: net.features(batch["x"][0])}),
    }
    for way, (batches, how) in ways.items():
        net = model()
        how = {"method": net.features} if way == "bound" else how
        report = jqinject.calibrate(net, batches, progress=False, **how)
        assert (report.quantizers, report.missed) == (("dense.input_quant",), ("head.input_quant",)), way
        average = net.dense.input_quant.tensor_quant.scaling_impl.averaging_impl
        np.testing.assert_allclose(average.sum_of_max[...], np.abs(X).max(), rtol=1e-6)
    assert jqinject.correct_biases(net, [X], method="features", progress=False) == ("dense",)
    entries = {entry.path: entry for entry in jqinject.report(net, X, numbers=True, method="features").layers}
    assert entries["dense"].numbers.calls == 1 and entries["head"].numbers.calls == 0
    assert entries["dense"].operations == 3 * 4 * 4 and entries["head"].operations == 0


class Exchanging(nnx.Module):
    """Keeps its last input as it came, and exchanges two Variables."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones((4, 4)))
        self.last = nnx.Cache(jnp.zeros((2, 4)))
        self.ahead, self.behind = nnx.Cache(jnp.zeros(2)), nnx.Cache(jnp.ones(2))

    def __call__(self, x):
        self.last.set_value(x)
        ahead, behind = self.ahead.get_value(), self.behind.get_value()
        self.ahead.set_value(behind)
        self.behind.set_value(ahead)
        return x @ self.weight


def test_variables_that_take_an_argument_or_another_variable():
    x = jnp.full((2, 4), 3.0)
    model = quantize(Exchanging(), Rule(weight_quant=Int8WeightPerChannelFloat), inputs=x)
    model(x)
    np.testing.assert_array_equal(model.last[...], x)
    np.testing.assert_array_equal(model.ahead[...], np.ones(2))
    np.testing.assert_array_equal(model.behind[...], np.zeros(2))


def test_variables_among_the_arguments():
    def count(net, call):
        return call(net)

    class Counts(nnx.Module):
        def __call__(self, cache, by):
            cache["n"][...] += by
            return cache["n"][...] * 1.0

    cache = {"n": nnx.Cache(jnp.float32(1.0))}
    assert compiled_call(count)(Counts(), Call((cache, 2.0), {})) == 3.0
    assert cache["n"][...] == 3.0


REFUSED = {
    "misspelt": ({"method": "feature"}, ValueError, r"Net has no method 'feature'; did you mean 'features'"),
    "far": (
        {"method": "zzz"},
        ValueError,
        r"Net has no method 'zzz'.\n  cure: one of features, or a function",
    ),
    "both": ({"method": "features", "call": abs}, ValueError, r"give method='features'.*or call=.*not both"),
    "no method": ({"method": 3}, TypeError, r"calibrate: method must be the name of a method of Net"),
    "no function": (
        {"call": "features"},
        TypeError,
        r"call must be a function of the model and a batch, got str",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    how, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        jqinject.calibrate(model(), [X], progress=False, **how)


def test_shapes_are_not_batches():
    with pytest.raises(TypeError, match=r"batch 0 has a shape without numbers in \[0\]"):
        jqinject.calibrate(
            model(), [jax.ShapeDtypeStruct((3, 4), jnp.float32)], method="features", progress=False
        )
