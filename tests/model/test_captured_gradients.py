"""Gradient quantizers that a loss reaches past its arguments are named by the backward pass."""

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


WAYS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "closure": lambda model: lambda x: loss(model, x),
    "default": lambda given: lambda x, m=given: loss(m, x),
    "partial": lambda model: functools.partial(loss, model),
    "method": lambda model: Block(model).__call__,
    "compiled": lambda model: jax.jit(lambda x: loss(model, x)),
    "rematerialised": lambda model: nnx.remat(lambda x: loss(model, x)),
    "attribute": lambda model: Plain(model).loss,
}


@pytest.mark.heavy
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_is_captured_is_warned_of(way: str) -> None:
    model = identity()
    with pytest.warns(jqinject.LostStateWarning, match=r"cure: pass the whole model"):
        found = jqinject.grad(WAYS[way](model))(X)
    np.testing.assert_allclose(found, 2 * X, rtol=0.15)  # and the gradient is as ever
    assert newest(model) == 0
    model.eval()  # nothing is lost
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jqinject.grad(WAYS[way](model))(X).shape == X.shape


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
