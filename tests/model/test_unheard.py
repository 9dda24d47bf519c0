"""Gradient quantizers that a loss reaches past its arguments: refused before anything runs, or told."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqinject
from jqinject.nn import QuantIdentity
from jqinject.quant import Fp8e5m2GradPerTensorCurrent

X = jnp.arange(1.0, 4.0)


def identity() -> QuantIdentity:
    return QuantIdentity(None, grad_quant=Fp8e5m2GradPerTensorCurrent)


def loss(model: Any, x: Any) -> Any:
    return jnp.sum(model(x) ** 2)


def newest(model: QuantIdentity) -> float:
    return float(model.grad_quant.amax_history.newest)


def in_a_file(model: Any, text: str) -> Callable[..., Any]:
    """The function `f` of a file that has the model in a global variable."""
    file = {"model": model, "loss": loss}
    exec(text, file)
    return file["f"]


class Plain:
    """An object that Python alone knows the attributes of."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def loss(self, x: Any) -> Any:
        return loss(self.model, x)


class Block(nnx.Module):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, x: Any) -> Any:
        return loss(self.inner, x)


WAYS: dict[str, tuple[Callable[[Any], Callable[..., Any]], str]] = {
    "closure": (lambda model: lambda x: loss(model, x), "model.grad_quant.* the closure variable model"),
    "list": (lambda held: (lambda all: lambda x: loss(all[0], x))([held]), r"all\.0\.grad_quant"),
    "inner function": (lambda model: lambda x: (lambda: loss(model, x))(), "the closure variable model"),
    "default": (lambda given: lambda x, m=given: loss(m, x), r"m\.grad_quant.* the default value of m"),
    "partial": (lambda model: functools.partial(loss, model), r"args\[0\]\.grad_quant"),
    "method": (lambda model: Block(model).__call__, r"self\.inner\.grad_quant.* the bound method's self"),
    "module": (Block, r"self\.inner\.grad_quant.* the called module's own self"),
    "compiled": (lambda model: jax.jit(lambda x: loss(model, x)), "the closure variable model"),
    "rematerialised": (lambda model: nnx.remat(lambda x: loss(model, x)), "the closure variable model"),
    "global": (lambda model: in_a_file(model, "f = lambda x: loss(model, x)"), "the global variable model"),
    "global of a helper": (
        lambda model: in_a_file(model, "def helper(x): return loss(model, x)\ndef f(x): return helper(x)"),
        r"f reaches it through the global variable model\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_python_knows_of_is_refused(way: str) -> None:
    reach, text = WAYS[way]
    model = identity()
    for differentiate in (jqinject.grad, jqinject.value_and_grad):
        with pytest.raises(ValueError, match=rf"{text}(.|\n)*\n  cure: pass the whole model"):
            differentiate(reach(model))(X)
    assert newest(model) == 0
    model.eval()  # nothing is lost
    if way != "module":  # nnx.grad itself takes no modules for functions
        assert jqinject.grad(reach(model))(X).shape == X.shape


def test_nothing_runs_before_the_refusal() -> None:
    ran = []
    model = identity()
    with pytest.raises(ValueError, match="would be lost"):
        jqinject.grad(lambda x: ran.append(x) or loss(model, x))(X)
    assert ran == []


def test_what_is_not_lost_is_not_refused() -> None:
    model, other = identity(), identity()
    blocks = {"a": Block(model), "b": Block(other)}
    jqinject.grad(lambda given, x: given["a"](x) if blocks else None, argnums=1)(blocks, X)  # an argument
    assert newest(model) == 6 and newest(other) == 0
    # An attribute that is named like a global variable.
    named = in_a_file(identity(), "class Names: model = 2\ndef f(m, x): return loss(m, x) * Names.model")
    jqinject.grad(named, argnums=1)(model, X)
    assert newest(model) == 12
    other.grad_quant.disable_quant = True
    jqinject.grad(lambda m, x: loss(m, x) + loss(other, x), argnums=1)(model, X)


@pytest.mark.parametrize("jit", [False, True])
def test_what_python_does_not_know_of_is_told(jit: bool) -> None:
    model = identity()
    for reach in (Plain(model).loss, lambda x: loss(model, x)):
        plain = reach.__name__ == "loss"
        step = jqinject.grad(reach) if plain else jax.grad(reach)
        step = nnx.jit(step) if jit else step
        with pytest.warns(jqinject.LostStateWarning, match=r"Fp8e5m2GradPerTensorCurrent quantizes .* lost"):
            found = step(X)
        np.testing.assert_allclose(found, 2 * X, rtol=0.15)  # and the gradient is as ever
        with warnings.catch_warnings():
            if not jit:
                warnings.simplefilter("ignore")
            step(X)  # compiled code tells when it is traced
    assert newest(model) == 0


def test_a_closure_instead_of_the_argument_is_told() -> None:
    model = identity()
    with pytest.warns(jqinject.LostStateWarning):
        jqinject.grad(lambda given, x: loss(model, x), argnums=1)(model, X)


def test_evaluation_and_steps_by_hand_are_silent() -> None:
    model = identity()
    jqinject.begin_step(model)
    value, pull_back = nnx.vjp(loss, model, X, graph=False)
    jqinject.end_step(model, gradients=pull_back(jnp.ones_like(value))[0])
    assert newest(model) == 6
    model.eval()
    nnx.grad(loss, argnums=1)(model, X)
    jax.grad(lambda x: loss(model, x))(X)
