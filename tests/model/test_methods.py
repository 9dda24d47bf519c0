"""Models with methods other than `__call__`: each is traced and runs quantized, with the same weights and ranges."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject import Rule, quantize
from jqinject.odml import OdmlConversion, OdmlQat
from jqinject.quant import Int8ActPerTensorAbsMax, Int8WeightPerChannelFloat

X = jax.random.normal(jax.random.key(0), (3, 4))
SUMS = Rule(op="add", input_quant=Int8ActPerTensorAbsMax)


class Speech(nnx.Module):
    """An encoder and a decoder; the call raises, as that of published speech models does."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Linear(4, 8, rngs=rngs)
        self.decoder = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, *args, **kwargs):
        raise NotImplementedError("call encode or decode")

    def encode(self, x):
        return self.encoder(x) + 1.0

    def decode(self, x, *, scale, add_bias=True):
        y = self.decoder(x) * scale
        return y + x[..., :4] if add_bias else y


class Both(Speech):
    def __call__(self, x):
        return self.encode(x) + 2.0 * self.encode(x)


H = Speech().encode(X)
METHODS = {"encode": (X,), "decode": {"x": H, "scale": 2.0}}


def fake_quantized(x, top):
    """8 bits, symmetric, with the largest magnitude half a step beyond 127."""
    step = np.abs(top).max() / 127.5
    return np.clip(np.round(np.asarray(x) / step), -128, 127) * step


@pytest.mark.heavy
def test_methods_run_quantized_and_the_call_still_raises():
    model = quantize(Speech(), SUMS, methods=METHODS)
    assert list(model.op_quant) == ["encode:add0_lhs", "decode:add0_lhs", "decode:add0_rhs"]
    jqinject.calibrate(model, [2 * X], method="encode", progress=False)
    plain = Speech()
    inner = plain.encoder(X)
    np.testing.assert_allclose(model.encode(X), fake_quantized(inner, 2 * inner) + 1, rtol=1e-5, atol=1e-6)
    jqinject.calibrate(model, [{"x": 2 * H, "scale": 2.0}], method=Speech.decode, progress=False)
    left = plain.decoder(H) * 2.0
    expected = fake_quantized(left, 2 * left) + fake_quantized(H[:, :4], 2 * H[:, :4])
    np.testing.assert_allclose(nnx.jit(lambda m, h: m.decode(h, scale=2.0))(model, H), expected, atol=1e-5)
    np.testing.assert_array_equal(
        model.decode(H, scale=2.0, add_bias=False), plain.decode(H, scale=2.0, add_bias=False)
    )
    with pytest.raises(NotImplementedError, match="call encode or decode"):
        model(X)


@pytest.mark.heavy
def test_a_method_in_a_method_is_part_of_its_program():
    model = quantize(Both(), SUMS, inputs=X, methods={Both.encode: (X,)})
    alone = quantize(Both(), SUMS, inputs=X)
    assert list(model.op_quant) == list(alone.op_quant)
    jqinject.calibrate(model, [2 * X], progress=False)
    jqinject.calibrate(alone, [2 * X], progress=False)
    np.testing.assert_array_equal(model(X), alone(X))
    inner = Both().encoder(X)
    top = Both().encoder(2 * X)  # encode is served by the range that the call has seen
    np.testing.assert_allclose(model.encode(X), fake_quantized(inner, top) + 1, rtol=1e-5, atol=1e-6)
    assert type(quantize(Both(), SUMS, methods={"__call__": X, "encode": X})) is type(model)
    copy = pickle.loads(pickle.dumps(model))
    assert type(copy) is type(model)
    np.testing.assert_array_equal(copy(X), model(X))


def test_a_call_that_is_not_traced_runs_quantized_methods():
    model = quantize(Both(), SUMS, methods={"encode": (X,)})
    jqinject.calibrate(model, [2 * X], progress=False)  # through the call, which runs encode
    inner = Both().encoder(X)
    y = fake_quantized(inner, 2 * inner) + 1
    np.testing.assert_allclose(model(X), 3 * y, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
def test_methods_of_abstract_models_and_of_models_of_layers():
    rules = [SUMS, Rule(weight_quant=Int8WeightPerChannelFloat)]
    abstract = quantize(
        nnx.eval_shape(Speech), rules, methods={"encode": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
    )
    assert list(abstract.op_quant) == ["encode:add0_lhs"]
    plan = jqinject.rules_report(Speech(), rules, methods=METHODS)
    assert plan.sites == ("encode:add0_lhs", "decode:add0_lhs", "decode:add0_rhs")
    model = quantize(Speech(), rules, methods=METHODS)
    grads = nnx.grad(lambda m: m.decode(m.encode(X), scale=1.0).sum())(model)
    assert all(jnp.abs(grads[part]["kernel"][...]).sum() > 0 for part in ("encoder", "decoder"))


REFUSED = {
    "misspelt": (
        dict(methods={"encod": (X,)}),
        ValueError,
        r"Speech has no method 'encod'; did you mean 'encode'",
    ),
    "no arguments": (
        dict(methods={"encode": 3.0}),
        TypeError,
        r"methods\['encode'\] is what it is called with, got float",
    ),
    "twice": (dict(inputs=X, methods={"__call__": X}), ValueError, "__call__ is given twice"),
    "a function": (dict(methods={abs: X}), TypeError, "is not a method of this class"),
    "a part": (dict(methods={"encoder": X}), TypeError, "is not a method of this class"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    arguments, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        quantize(Speech(), SUMS, **arguments)


class Products(nnx.Module):
    """Parameters and products of activations in methods that the call runs, and one that it does not run."""

    def __init__(self):
        key = jax.random.key(1)
        self.a, self.b = (nnx.Param(jax.random.normal(k, (4, 4))) for k in jax.random.split(key))

    def encode(self, x):
        y = x @ self.a[...]
        return y @ y.T

    def decode(self, y):
        return (y @ y.T) @ self.b[...][:3]

    def score(self, x):
        y = x @ self.a[...]
        return y @ x.T

    def __call__(self, x):
        return self.decode(self.encode(x))


@pytest.mark.heavy
def test_ranges_of_parameters_and_products_are_shared_by_the_methods_that_run_them():
    rule = Rule(weight_quant=Int8WeightPerChannelFloat, input_quant=Int8ActPerTensorAbsMax)
    products = Rule(op="dot_general", input_quant=Int8ActPerTensorAbsMax)
    methods = {"encode": (X,), "decode": (X @ X.T,), "score": (X,)}
    model = quantize(Products(), [rule, products], inputs=X, methods=methods)
    plain = quantize(Products(), [rule, products], inputs=X)
    # The input of `a` is one place in all of them; the product in `score` has another operand.
    assert set(model.op_quant) - set(plain.op_quant) == {"score:dot_general1_lhs", "score:dot_general1_rhs"}
    for one in (model, plain):
        jqinject.calibrate(one, [X, 3 * X], progress=False)
    jqinject.calibrate(model, [X], method="score", progress=False)
    np.testing.assert_array_equal(model.decode(model.encode(X)), plain(X))
    frozen = jqinject.freeze(model)
    np.testing.assert_allclose(frozen.decode(frozen.encode(X)), plain(X), rtol=1e-5, atol=1e-5)
    rows = jqinject.coverage(model, X, method="encode").weights
    assert [(row.parameter, row.input) for row in rows] == [("a", "int8")]


@pytest.mark.heavy
def test_device_compilers_quantize_methods():
    model = quantize(Both(), OdmlQat(strict=False), inputs=X, methods={"encode": (X,)})
    alone = quantize(Both(), OdmlQat(strict=False), inputs=X)
    assert set(model.op_quant) - set(alone.op_quant) == {"encode:final_output0"}
    for one in (model, alone):
        one(X)
    np.testing.assert_array_equal(model(X), alone(X))
    model.encode(X)
    converted = quantize(model, OdmlConversion(), inputs=X, methods={"encode": (X,)})
    model.eval()
    for method in ("__call__", "encode"):
        found = getattr(converted, method)
        np.testing.assert_allclose(found(X), getattr(model, method)(X), rtol=1e-5, atol=1e-5)
        assert str(jax.make_jaxpr(found)(X)).count("name=quant.fake_quant") >= 3
    with pytest.raises(ValueError, match=r"OdmlQat.quantize \(of encode\) needs inputs"):
        quantize(Both(), OdmlQat(), methods={"encode": ()})
