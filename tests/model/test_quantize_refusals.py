"""Wrong input of whole models: every mistake is refused with its place and its cure, and nothing is changed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
import jqinject.quant as q
from jqinject import Rule, calibrate, quantize
from jqinject.odml import OdmlConversion, OdmlQat

W, A = q.Int8WeightPerChannelFloat, q.Int8ActPerTensorMinMax
W8A8 = Rule(weight_quant=W, input_quant=A)
RELUS = [Rule(op="relu", output_quant=A), W8A8]
X = jax.random.normal(jax.random.key(0), (4, 8))
WIDE = jnp.ones((4, 9))


class Net(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


class Bare(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((8, 2)))

    def __call__(self, x):
        return x @ self.w[...]


class Broken(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.a(x) + self.missing


class Outer(nnx.Module):
    def __init__(self):
        self.inner = Broken()

    def __call__(self, x):
        return self.inner(x)


def refused(action: Any, kind: type[Exception], text: str, *models: nnx.Module) -> BaseException:
    """What `action` raises; the models are afterwards what they were before."""
    before = [(nnx.graphdef(m), jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(m)))) for m in models]
    with pytest.raises(kind, match=text) as caught:
        action()
    for model, (graph, numbers) in zip(models, before, strict=True):
        assert nnx.graphdef(model) == graph
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), numbers)
    return caught.value


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Rule("(", weight_quant=W), ValueError, r"'\(' is not a regular expression"),
        (lambda: Rule(3, weight_quant=W), TypeError, r"regular expression in a string, got int 3"),
        (lambda: Rule(weights=W), TypeError, r"unexpected keyword 'weights': did you mean 'weight_quant'\?"),
        (lambda: Rule(weight_quant=W, wieght_bit_width=4), TypeError, r"did you mean 'weight_'\?"),
        (
            lambda: Rule(weight_quant=W, input_bit_width=4),
            TypeError,
            r"'input_bit_width' changes .* not there",
        ),
    ],
    ids=["pattern", "path", "keyword", "prefix", "slot"],
)
def test_a_rule_that_can_not_be(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize(
    ("rules", "kind", "text", "where"),
    [
        (
            Rule(weight_quant=W, weight_bitwidth=3),
            TypeError,
            r"did you mean 'weight_bit_width'\?",
            "quantizing a",
        ),
        (Rule(r"b", weight_quant="int8"), TypeError, r"takes an injector .* got str 'int8'", "quantizing b"),
        (Rule(weight_quant=A), TypeError, r"quantizes weights, and Int8ActPerTensorMinMax", "quantizing a"),
        (Rule(weight_quant=W, contraction="int4"), ValueError, r"contraction must be one of", "quantizing a"),
        (
            Rule(op="relu", output_quant=A, output_bitwidth=3),
            TypeError,
            r"relu0_output: 'bitwidth' would have no effect",
            "",
        ),
        (Rule(op="relu", output_quant="int8"), TypeError, r"relu0_output takes an injector .* 'int8'", ""),
        (
            Rule(op="relu", output_quant=W),
            TypeError,
            r"relu0_output quantizes activations, and Int8Weight",
            "",
        ),
        (
            Rule(op="sotfmax", output_quant=A),
            ValueError,
            r"'sotfmax' is neither .* did you mean 'softmax'\?",
            "",
        ),
        (Rule(op="Liner", weight_quant=W), ValueError, r"'Liner' is neither .* did you mean 'Linear'\?", ""),
        (
            Rule("encoder.*", weight_quant=W),
            ValueError,
            r"take nothing .*\n.*'encoder\.\*'.*\n  layers and weights here: a, b",
            "",
        ),
        (
            [W8A8, Rule("a", weight_quant=W)],
            ValueError,
            r"take nothing \(the first rule that matches wins\)",
            "",
        ),
        (Rule(), ValueError, r"these rules quantize nothing", ""),
        ([], ValueError, r"no rule was given", ""),
        (None, TypeError, r"rules are jqinject.Rule objects, got NoneType", ""),
        (W, TypeError, r"rules are jqinject.Rule objects, got .*Int8WeightPerChannelFloat", ""),
        ({".*": W}, TypeError, r"rules are jqinject.Rule objects, got dict", ""),
        (
            OdmlQat,
            TypeError,
            r"rules are jqinject.Rule objects, got .*\n  cure: .* jqinject.odml.OdmlQat\(\)",
            "",
        ),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else None,
)
def test_rules_that_do_not_fit_the_model(rules, kind, text, where):
    model = Net()
    error = refused(lambda: quantize(model, rules, inputs=X), kind, text, model)
    assert where in notes(error)


def test_idle_rules_are_let_pass_where_that_is_asked_for():
    model = Net()
    assert type(quantize(model, Rule("encoder.*", weight_quant=W), allow_idle=True).a) is nnx.Linear


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (None, r"takes an NNX module, got NoneType"),
        (Net, r"takes an NNX module, got ModuleMeta"),
        (jnp.ones(3), r"takes an NNX module, got ArrayImpl"),
    ],
)
def test_what_is_no_model(model, text):
    for rules in (W8A8, OdmlQat()):
        with pytest.raises(TypeError, match=text):
            quantize(model, rules, inputs=X)


def test_a_model_without_layers():
    model = Bare()
    refused(
        lambda: quantize(model, W8A8),
        ValueError,
        r"Bare has no layer .*\n  cure: quantize\(model, rules, inputs=\(x,\)\)",
        model,
    )


@pytest.mark.parametrize(
    ("inputs", "kind", "text"),
    [
        (None, ValueError, r"(found by tracing the model|needs inputs)"),
        ("x", TypeError, r"inputs are what the model is called with, got str"),
        (3, TypeError, r"inputs are what the model is called with, got int"),
    ],
)
@pytest.mark.parametrize("rules", [RELUS, OdmlQat()], ids=["rules", "odml"])
def test_inputs_that_are_none(rules, inputs, kind, text):
    model = Net()
    refused(lambda: quantize(model, rules, inputs=inputs), kind, text, model)


@pytest.mark.heavy
@pytest.mark.parametrize("rules", [RELUS, OdmlQat()], ids=["rules", "odml"])
def test_a_call_that_fails_says_where_and_with_what(rules):
    model = Net()
    error = refused(lambda: quantize(model, rules, inputs=WIDE), TypeError, r"\(9,\) and \(8,\)", model)
    assert "raised in the module at a\n" in notes(error)
    assert "while Net was traced, to find its operations, with float32[4, 9]" in notes(error)
    error = refused(lambda: quantize(model, rules, inputs=(X, X)), TypeError, r"positional arguments", model)
    assert "while Net was traced" in notes(error)
    outer = Outer()
    error = refused(lambda: quantize(outer, rules, inputs=X), AttributeError, r"'missing'", outer)
    assert "raised in the module at inner\n" in notes(error)
    quantized = quantize(model, rules, inputs=np.asarray(X))
    assert quantized(X).shape == (4, 2)
    with pytest.raises(TypeError, match=r"\(9,\) and \(8,\)"):
        quantized(WIDE)


@pytest.mark.parametrize("first", [[W8A8], RELUS, OdmlQat()], ids=["layers", "operations", "odml"])
@pytest.mark.parametrize("second", [W8A8, OdmlQat()], ids=["layers", "odml"])
def test_a_model_is_quantized_once(first, second):
    model = quantize(Net(), first, inputs=X)
    refused(
        lambda: quantize(model, second, inputs=X),
        ValueError,
        r"already(.|\n)*cure: quantize the float",
        model,
    )
    frozen = jqinject.freeze(model, allow_uncalibrated=True)
    refused(
        lambda: quantize(frozen, second, inputs=X),
        ValueError,
        r"already(.|\n)*cure: quantize the float",
        frozen,
    )


def test_layers_first_and_operations_later_are_well():
    model = quantize(quantize(Net(), W8A8), RELUS[:1], inputs=X)
    at_once = quantize(Net(), RELUS, inputs=X)
    np.testing.assert_array_equal(model(X), at_once(X))
    refused(
        lambda: quantize(model, RELUS[:1], inputs=X), ValueError, r"quantized already: .* op_quant", model
    )


def test_batches_that_are_none():
    model = quantize(Net(), W8A8)
    nan = X.at[2, 3].set(jnp.nan)
    for batches, kind, text in (
        ([], ValueError, r"got no batch"),
        (iter(()), ValueError, r"got no batch"),
        (None, TypeError, r"iterable of batches, got NoneType"),
        (X, TypeError, r"iterable of batches, got ArrayImpl.\n  cure: \[x\]"),
        ({"x": X}, TypeError, r"iterable of batches, got dict.\n  cure: \[x\]"),
        ([X, nan], ValueError, r"batch 1 has nan or inf in \[0\], of shape \(4, 8\)"),
        ([{"x": np.full((4, 8), np.inf, np.float32)}], ValueError, r"batch 0 has nan or inf in \['x'\]"),
    ):
        refused(lambda given=batches: calibrate(model, given, progress=False), kind, text, model)


def test_batches_that_the_model_does_not_take():
    model = quantize(Net(), W8A8)
    for batch, text in ((WIDE, r"\(9,\) and \(8,\)"), ({"y": X}, r"unexpected keyword argument 'y'")):
        action = lambda given=batch: calibrate(model, [X, given], progress=False)  # noqa: E731
        error = refused(action, TypeError, text, model)
        assert "called with batch 1; nothing was changed" in notes(error)
    outer = quantize(Outer(), W8A8)
    refused(lambda: calibrate(outer, [X], progress=False), AttributeError, r"'missing'", outer)


def test_models_that_have_nothing_to_calibrate():
    off = quantize(Net(), W8A8)
    off.a.input_quant.disable_quant = off.b.input_quant.disable_quant = True
    for model in (Net(), quantize(Net(), Rule(weight_quant=W)), off):
        action = lambda given=model: calibrate(given, [X], progress=False)  # noqa: E731
        refused(action, ValueError, r"Net has no activation quantizer .*nothing to calibrate", model)
    abstract = quantize(nnx.eval_shape(Net), W8A8)
    with pytest.raises(ValueError, match=r"calibrate runs the model, and Net is abstract"):
        calibrate(abstract, [X], progress=False)


@pytest.mark.heavy
def test_models_that_can_not_be_converted():
    model = quantize(Net(), OdmlQat(), inputs=X)
    convert = OdmlConversion().quantize
    refused(
        lambda: convert(model, X),
        ValueError,
        r"a.dot_general0_lhs: .* never collected(.|\n)*calibrate",
        model,
    )
    refused(lambda: convert(model), ValueError, r"needs inputs", model)
    for other in (Net(), quantize(Net(), W8A8), quantize(Net(), RELUS, inputs=X)):
        refused(lambda given=other: convert(given, X), ValueError, r"was not quantized by OdmlQat", other)
    calibrate(model, [X], progress=False)
    converted: Any = convert(model, X)
    refused(lambda: convert(converted, X), ValueError, r"was not quantized by OdmlQat", converted)
    refused(lambda: quantize(converted, OdmlQat(), inputs=X), ValueError, r"has some already", converted)


class Deep(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Dict(up=nnx.Linear(2, 2, rngs=rngs), down=nnx.Linear(2, 2, rngs=rngs))])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("up", r"'up' only matches a part of 'layers.0.up'; write '.*up'"),
        ("layers", r"'layers' only matches a part of 'layers.0.down'; write 'layers.*'"),
        ("0", r"'0' only matches a part of 'layers.0.down'; write '.*0.*'"),
        ("layers/0/uq", r"'layers/0/uq' matches none; did you mean 'layers/0/up'?"),
    ],
)
def test_a_rule_that_matches_a_part_of_a_path_is_told_the_pattern_of_the_whole(path, said):
    with pytest.raises(ValueError, match="its path must match the whole of a layer's path") as error:
        quantize(Deep(), Rule(path, weight_quant=W))
    assert said in str(error.value)
    if "write " in said:
        pattern = said.split("write ")[1].strip("'")
        assert Rule(pattern, weight_quant=W).matches("layers.0.up")


def test_groups_that_do_not_fill_an_axis_are_refused_with_the_parameters_path() -> None:
    model = Bare()
    text = (
        r"^w: groups of 3 do not fill axis 0 of \(8, 2\), 8 numbers\.\n  cure: before this rule, "
        r"Rule\('w', weight_quant=Int4WeightPerGroupAbsMax\.let\(group_size=1\)\); or group_padding = True"
    )
    rule = Rule(weight_quant=q.Int4WeightPerGroupAbsMax.let(group_size=3))
    refused(lambda: quantize(model, rule, inputs=X), ValueError, text, model)
    padded = Rule(weight_quant=q.Int4WeightPerGroupAbsMax.let(group_size=3, group_padding=True))
    assert quantize(model, padded, inputs=X)(X).shape == (4, 2)


class Unreached(nnx.Module):
    """A weight that is read in a way that no quantizer of weights follows."""

    def __init__(self, how):
        self.w, self.how = nnx.Param(jnp.ones((8, 4))), how

    def __call__(self, x):
        w = self.w.get_value()
        if self.how == "mul":
            return (x[..., None] * w).sum(-2)
        if self.how == "callback":
            return jax.pure_callback(jnp.matmul, jax.ShapeDtypeStruct((2, 4), x.dtype), x, w)
        return jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y + x @ w, x @ jnp.zeros_like(w))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("mul", "no call contracts it .* multiplied by elements"),
        ("callback", r"contracted inside a function outside of the program \(pure_callback\)"),
        ("while", r"contracted inside a loop of unknown length \(while\)"),
    ],
)
def test_a_rule_that_takes_nothing_says_why_its_weights_are_not_reached(how, why):
    model = Unreached(how)
    refused(
        lambda: quantize(model, Rule(weight_quant=W), inputs=jnp.ones((2, 8))),
        ValueError,
        rf"layers and weights here: none\n.*not reached:\n    w: .*{why}",
        model,
    )


class Twice(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.arange(12.0).reshape(3, 4) / 8)

    def __call__(self, x):
        return x @ self.w.get_value() @ self.w.get_value().T


def test_a_weight_that_is_summed_over_every_axis_names_its_cures():
    model, x = Twice(), jnp.ones((2, 3))
    cures = (
        r"Rule\('w', weight_quant=Int8WeightPerTensorFloat\)[\s\S]*Rule\('w'\)\n.* a copy for one of the uses"
    )
    refused(lambda: quantize(model, Rule(weight_quant=W), inputs=x), ValueError, cures, model)
    found = quantize(model, Rule("w", weight_quant=q.Int8WeightPerTensorFloat), inputs=x)
    np.testing.assert_allclose(found(x), model(x), atol=0.05)
    assert found.op_quant["w"](model.w.get_value()).scale.size == 1  # pyright: ignore
